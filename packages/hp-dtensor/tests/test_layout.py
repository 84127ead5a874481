"""Which global indices a rank holds: the algebra's ground truth."""

import copy
from collections.abc import Callable
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

from hp_dtensor.layout import Layout, attach_layout, layout_of
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.placements import (
    RaggedShard,
    SectionedShard,
    StridedShard,
    to_torch_placement,
)
from hp_dtensor.testing import layouts, meshes, shapes


def held(layout: Layout) -> list[list[int]]:
    return [layout.owned_indices(coord).tolist() for coord in layout.abstract_mesh.coordinates()]


def parts(layout: Layout) -> list[object]:
    """All that follows from a layout, asked for in an order that fills what it remembers."""
    coordinates = list(layout.abstract_mesh.coordinates())
    return [
        (hash(layout), repr(layout), layout.cuts, layout.flat_dims, layout.largest_numel),
        [layout.local_shape(coord) for coord in coordinates],
        [layout.view_runs(layout.ndim, coord) for coord in coordinates],
        held(layout),
    ]


def made_or_refused(make: Callable[[], Layout]) -> Layout | str:
    try:
        return make()
    except ValueError as error:
        return str(error)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_what_is_made_without_validation_is_what_validation_makes(data: st.DataObject) -> None:
    """A dual, and a mixture of two layouts' placements, refused exactly where it must be."""
    mesh, shape = data.draw(meshes()), data.draw(shapes())
    drawn = layouts(mesh, shape, reductions=("sum", "avg", "max"), gradients=True)
    one, other = data.draw(drawn), data.draw(drawn)
    mixed = tuple(
        data.draw(st.sampled_from(each)) for each in zip(one.placements, other.placements)
    )
    made = made_or_refused(lambda: one._of_same_tensor(mixed))
    assert made == made_or_refused(lambda: Layout(mesh, mixed, shape))
    if isinstance(made, Layout):
        assert parts(made) == parts(Layout(mesh, mixed, shape))
    if not any(p == Partial("max") for p in one.placements):
        checked = Layout(mesh, one.grad_placements, shape, one.placements)
        first = parts(one)  # the dual shares what this has filled
        assert one.of_dual == checked
        assert parts(one.of_dual) == parts(checked)
        assert parts(one) == first
        assert one.of_dual.of_dual == one


def test_a_maximum_over_ranks_has_no_dual() -> None:
    with pytest.raises(ValueError, match="cannot have a gradient"):
        _ = Layout({"tp": 2}, (Partial("max"),), (2,)).of_dual


@settings(max_examples=200, deadline=None)
@given(layouts(reductions=("sum", "avg", "max")))
def test_the_ranks_partition_the_tensor(layout: Layout) -> None:
    """Coordinates that differ on cutting axes hold disjoint parts whose union is everything."""
    mesh = layout.abstract_mesh
    cutting = [axis for axis in range(mesh.ndim) if axis not in layout.replicating_axes()]
    cutting = [axis for axis in cutting if axis not in layout.partial_axes()]
    by_replica: dict[tuple[int, ...], list[int]] = {}
    by_part: dict[tuple[int, ...], list[int]] = {}
    for coord in mesh.coordinates():
        own = layout.owned_indices(coord).tolist()
        assert own == sorted(set(own))
        replica = tuple(c for axis, c in enumerate(coord) if axis not in cutting)
        by_replica.setdefault(replica, []).extend(own)
        part = tuple(coord[axis] for axis in cutting)
        assert by_part.setdefault(part, own) == own, "replicas must hold equal parts"
    for indices in by_replica.values():
        assert sorted(indices) == list(range(layout.numel))


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_local_shapes_and_dim_indices_agree_with_owned_indices(layout: Layout) -> None:
    for coord in layout.abstract_mesh.coordinates():
        own = layout.owned_indices(coord)
        assert own.dtype == torch.int64
        local_shape = layout.local_shape(coord)
        assert own.numel() == layout.local_numel(coord) == torch.Size(local_shape).numel()
        if layout.flat_dims <= 1:
            grid = torch.arange(layout.numel).reshape(layout.shape)
            for dim in range(layout.ndim):
                grid = grid.index_select(dim, layout.dim_indices(dim, coord))
            assert grid.shape == local_shape
            assert torch.equal(grid.reshape(-1), own)
    shapes = {layout.local_shape(coord) for coord in layout.abstract_mesh.coordinates()}
    assert layout.is_even == (len(shapes) == 1)
    sizes = [torch.Size(shape).numel() for shape in shapes]
    assert layout.numel_bounds == (min(sizes), max(sizes))
    assert layout.largest_numel == max(sizes)


def known_to_pytorch(shape: tuple[int, ...], factor: int) -> list[Placement]:
    kinds: list[Placement] = [Replicate(), Partial()]
    for dim in range(len(shape)):
        kinds += [Shard(dim), StridedShard(dim, factor)]
    return kinds


@pytest.mark.parametrize("sizes", [(2, 2), (3, 2), (2, 3), (2, 2, 2)])
@pytest.mark.parametrize("shape", [(12,), (5, 4), (7, 6), (1, 3)])
def test_layouts_agree_with_pytorchs_own_function(
    sizes: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    """Local shape and offset, wherever strided shards mean the same (see the next test)."""
    compared = 0
    mesh = AbstractMesh(("a", "b", "c")[: len(sizes)], sizes)
    for chosen in product(known_to_pytorch(shape, sizes[-1]), repeat=len(sizes)):
        layout = Layout(mesh, chosen, shape)
        if not same_meaning(layout):
            continue
        theirs = [to_torch_placement(placement) for placement in chosen]
        for coord in mesh.coordinates():
            expected, offset = _compute_local_shape_and_global_offset(
                shape, sizes, list(coord), theirs
            )
            assert layout.local_shape(coord) == expected, (layout, coord)
            if layout.local_numel(coord):
                first = [int(layout.dim_indices(d, coord)[0]) for d in range(len(shape))]
                assert tuple(first) == offset, (layout, coord)
            compared += 1
    assert compared > 50


def same_meaning(layout: Layout) -> bool:
    """A strided shard that comes after others here is applied first, over chunks, by PyTorch.

    The two agree when every dim so cut divides evenly; a strided shard that waits for another
    strided one has no counterpart there.
    """
    for dim, placements in enumerate(
        [[p for p in layout.placements if getattr(p, "dim", None) == d] for d in range(layout.ndim)]
    ):
        strided = [p for p in placements if isinstance(p, StridedShard)]
        if not strided or len(placements) == 1:
            continue
        total = 1
        for size, placement in zip(layout.abstract_mesh.sizes, layout.placements):
            total *= size if getattr(placement, "dim", None) == dim else 1
        total *= max(p.split_factor for p in strided)
        if len(strided) > 1 or layout.shape[dim] % total:
            return False
    return True


@pytest.mark.parametrize("size", [5, 7, 8, 11])
@pytest.mark.parametrize("sizes", [(2, 2), (3, 2), (2, 4)])
def test_fsdp_over_tensor_parallelism_chunks_the_tensor_parallel_part(
    size: int, sizes: tuple[int, int]
) -> None:
    """Exact for uneven sizes too, where cutting into `split_factor` chunks first is not."""
    data, tensor = sizes
    layout = Layout({"dp": data, "tp": tensor}, (StridedShard(0, tensor), Shard(0)), (size,))
    for d, t in layout.abstract_mesh.coordinates():
        part = chunk(torch.arange(size), tensor, t)
        assert torch.equal(layout.owned_indices((d, t)), chunk(part, data, d))


def test_pytorchs_strided_shard_divides_some_uneven_sizes_otherwise() -> None:
    """Size 17 over dp=4, tp=2: the parts of tp have 9 and 8 rows. The last dp rank gets none of
    the 9 and two of the 8; PyTorch lets tp divide these two again."""
    layout = Layout({"dp": 4, "tp": 2}, (StridedShard(0, 2), Shard(0)), (17,))
    assert [layout.owned_indices((3, t)).tolist() for t in range(2)] == [[], [15, 16]]
    theirs = [to_torch_placement(placement) for placement in layout.placements]
    sizes = [
        _compute_local_shape_and_global_offset((17,), (4, 2), [3, t], theirs)[0] for t in range(2)
    ]
    assert sizes == [(1,), (1,)]


def chunk(tensor: torch.Tensor, count: int, index: int) -> torch.Tensor:
    pieces = torch.chunk(tensor, count)
    return pieces[index] if index < len(pieces) else tensor[:0]


def test_fsdp_over_tensor_parallelism_of_a_fused_weight() -> None:
    """Rows q0 q1 q2 q3 k0 k1 v0 v1 over tp=2, each part then cut over dp=2."""
    mesh = {"dp": 2, "tp": 2}
    layout = Layout(mesh, (StridedShard(0, 2), SectionedShard(0, (4, 2, 2))), (8,))
    assert held(layout) == [[0, 1], [2, 3], [4, 6], [5, 7]]


def test_strided_shards_wait_for_one_another() -> None:
    mesh = {"a": 2, "b": 2, "c": 2}
    waiting = Layout(mesh, (StridedShard(0, 4), StridedShard(0, 2), Shard(0)), (16,))
    plain = Layout({"c": 2, "b": 2, "a": 2}, (Shard(0),) * 3, (16,))
    for a, b, c in waiting.abstract_mesh.coordinates():
        assert torch.equal(waiting.owned_indices((a, b, c)), plain.owned_indices((c, b, a)))


def test_a_strided_shard_alone_takes_a_chunk_of_each_chunk() -> None:
    assert held(Layout({"tp": 2}, (StridedShard(0, 2),), (5,))) == [[0, 1, 3], [2, 4]]


def test_sections_are_cut_each_by_itself() -> None:
    layout = Layout({"tp": 2}, (SectionedShard(0, (4, 2, 2)),), (8,))
    assert held(layout) == [[0, 1, 4, 6], [2, 3, 5, 7]]
    uneven = Layout({"tp": 2}, (SectionedShard(0, (3, 1)),), (4,))
    assert held(uneven) == [[0, 1, 3], [2]]


def test_equal_sections_are_a_strided_shard() -> None:
    sections = Layout({"tp": 3}, (SectionedShard(0, (6, 6)),), (12,))
    assert held(sections) == held(Layout({"tp": 3}, (StridedShard(0, 2),), (12,)))


def test_ragged_shares_follow_the_units() -> None:
    layout = Layout({"x": 3}, (RaggedShard((0,), (3, 0, 1)),), (8, 2))
    assert [layout.local_shape((i,)) for i in range(3)] == [(6, 2), (0, 2), (2, 2)]
    flat = Layout({"x": 3}, (RaggedShard((0, 1), (3, 0, 1)),), (2, 2, 3))
    assert held(flat) == [list(range(9)), [], [9, 10, 11]]
    assert flat.local_shape((0,)) == (3, 3)


def test_a_ragged_shard_cuts_what_the_other_axes_leave() -> None:
    layout = Layout({"x": 2, "tp": 2}, (RaggedShard((0,), (0, 1)), Shard(0)), (4,))
    assert held(layout) == [[], [], [0, 1], [2, 3]]


def test_two_axes_on_one_dim_cut_left_to_right() -> None:
    layout = Layout({"a": 2, "b": 2}, (Shard(0), Shard(0)), (5,))
    assert held(layout) == [[0, 1], [2], [3], [4]]


def test_a_zero_dimensional_tensor_has_one_element_everywhere() -> None:
    layout = Layout({"a": 2}, (Partial(),), ())
    assert held(layout) == [[0], [0]]
    assert layout.local_shape((1,)) == ()


@pytest.mark.parametrize(
    ("placements", "shape", "message"),
    [
        ((Shard(0),), (4,), "one of placements is needed per mesh axis"),
        ((Shard(1), Replicate()), (4,), r"mesh axis 'dp': .* names dim 1"),
        ((Replicate(), Shard(0)), (), r"mesh axis 'tp': .* 0-dimensional"),
        ((Replicate(), SectionedShard(0, (4, 2))), (8,), r"'tp': sections .* sum to 6"),
        ((Replicate(), RaggedShard((0,), (1, 1, 1))), (6,), "shares to 3 coordinates"),
        ((Replicate(), RaggedShard((0,), (1, 2))), (4,), "needs whole units"),
        ((Shard(0), RaggedShard((0,), (1, 2))), (9,), "needs whole units"),
        ((Partial("sum"), Partial("max")), (4,), "do not commute"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    placements: tuple[Placement, ...], shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Layout({"dp": 2, "tp": 2}, placements, shape)


def test_gradient_placements_follow_the_values_unless_given() -> None:
    layout = Layout({"dp": 2, "tp": 2}, (Partial(), Shard(0)), (4,))
    assert layout.grad_placements == (Replicate(), Shard(0))
    summand = Layout({"tp": 2}, (Replicate(),), (4,), (Partial(),))
    assert summand.grad_placements == (Partial(),)
    assert "gradient (P(sum))" in repr(summand)


@pytest.mark.parametrize(
    ("value", "gradient"),
    [(Shard(0), Partial()), (Shard(0), Shard(1)), (Partial(), Partial()), (Replicate(), Shard(0))],
)
def test_impossible_gradient_placements_are_refused(value: Placement, gradient: Placement) -> None:
    with pytest.raises(ValueError, match="cannot have a gradient placed"):
        Layout({"tp": 2}, (value,), (4, 4), (gradient,))


def test_layouts_are_values() -> None:
    layout = Layout({"dp": 2, "tp": 2}, (Shard(-1), Replicate()), (4, 4))
    same = Layout(AbstractMesh(("dp", "tp"), (2, 2)), [Shard(1), Replicate()], [4, 4])
    assert layout == same
    assert hash(layout) == hash(same)
    assert copy.deepcopy(layout) is layout
    assert layout != layout.with_placements((Shard(0), Replicate()))
    assert layout != Layout(layout.mesh, layout.placements, layout.shape, (Shard(1), Partial()))


def test_axes_are_sorted_by_what_they_do() -> None:
    layout = Layout(
        {"a": 2, "b": 1, "c": 2, "d": 2}, (Shard(1), Shard(0), Replicate(), Partial()), (4, 4)
    )
    assert layout.sharding_axes() == {0: (1,)}
    assert layout.replicating_axes() == (2,)
    assert layout.partial_axes() == (3,)
    assert not layout.is_replicated
    assert layout.with_placements([Replicate(), Shard(0), Replicate(), Replicate()]).is_replicated


def test_an_abstract_layout_needs_a_coordinate() -> None:
    with pytest.raises(ValueError, match="pass a coordinate"):
        Layout({"tp": 2}, (Shard(0),), (4,)).local_shape()


def test_dims_that_are_flattened_have_no_indices_of_their_own() -> None:
    layout = Layout({"x": 2}, (RaggedShard((0, 1), (1, 1)),), (2, 2))
    with pytest.raises(ValueError, match="use owned_indices"):
        layout.dim_indices(0, (0,))


def test_a_plain_tensor_remembers_its_layout() -> None:
    layout = Layout({"tp": 2}, (Shard(0),), (4,))
    tensor = torch.zeros(2)
    assert layout_of(tensor) is None
    assert layout_of(attach_layout(tensor, layout)) is layout


def test_a_large_layout_costs_nothing_per_element() -> None:
    layout = Layout({"dp": 32, "tp": 4}, (StridedShard(0, 4), Shard(0)), (150_000, 8192))
    assert layout.local_shape((31, 3)) == (1172 - (32 * 1172 - 37500), 8192)
    assert layout.dim_runs(0, (1, 1)) == ((37500 + 1172, 37500 + 2 * 1172),)
