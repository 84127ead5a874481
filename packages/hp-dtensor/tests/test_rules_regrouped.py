"""Operators along cut dims that need them whole, and elements that a mask selects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dtensor_checks import integers

from hp_dtensor.dtensor import DTensor
from hp_dtensor.implicit import implicit
from hp_dtensor.layout import Layout
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.placements import (
    Partial,
    Placement,
    RaggedShard,
    Replicate,
    SectionedShard,
    Shard,
    StridedShard,
)
from hp_dtensor.rules.engine import OperatorError
from hp_dtensor.testing.dense_comparison import DenseCall
from hp_dtensor.testing.lockstep import run_lockstep
from hp_dtensor.testing.simulated_check import compare_simulated
from hp_platform import ledger
from hp_platform.testing import run_ranks

X = torch.arange(30, dtype=torch.float64).view(5, 6).sin() * 9
MASK = X > 1.5
KINDS: tuple[Placement, ...] = (
    Shard(0),
    Shard(1),
    StridedShard(1, 2),
    SectionedShard(0, (1, 4)),
    RaggedShard((1,), (0, 1, 5)),
)

ALONG: tuple[Callable[[Any], Any], ...] = (
    lambda x: x.sort(1),
    lambda x: x.argsort(0, descending=True),
    lambda x: x.flip(1),
    lambda x: x.flip((0, 1)),
    lambda x: x.roll((1, 2), (0, 1)),
    lambda x: x.roll(4),
    lambda x: x.rot90(),
    lambda x: x.median(1),
    lambda x: x.median(),
    lambda x: x.kthvalue(2, 1),
    lambda x: x.quantile(0.3, 1),
    lambda x: x.cumprod(1),
    lambda x: x.cummax(0),
    lambda x: x.diff(dim=1),
    lambda x: x.unfold(1, 3, 2),
    lambda x: x.diagonal(),
    lambda x: F.pad(x[None], (1, 2), mode="reflect"),
    lambda x: x.softmax(1),
    lambda x: torch.cat((-x[:, 3:], x[:, :3]), 1),  # rotary halves
    lambda x: torch.cat((x[:, 2:], x[:, :2]), 1),
    lambda x: x.nonzero(),
    lambda x: F.interpolate(x[None], scale_factor=2, mode="linear"),
    lambda x: torch.stack([each.to(x.dtype) for each in torch.adaptive_max_pool1d(x[None], 2)]),
)


TIED = (X / 9).round()  # -1, 0 and 1
TIES: tuple[Callable[[Any], Any], ...] = (
    lambda x: x.max(1),
    lambda x: x.min(0),
    lambda x: (x.argmax(1), x.argmin(0, keepdim=True), x.argmax(), x.argmin()),
    lambda x: x.sort(stable=True, dim=1, descending=True),
    lambda x: x.argsort(stable=True, dim=0),
    # Where torch does not say which of equal elements, they are distinct ones.
    lambda x: (x.detach().topk(3, 1).values, x.detach().sort(1).values),
    lambda x: x.topk(6, 1).indices.sort(1).values,
)


def on(placement: Placement, shape: tuple[int, ...] = (5, 6), ways: int = 3) -> Layout:
    return Layout(AbstractMesh.of({"tp": ways}), [placement], shape)


def test_dims_that_are_cut_are_brought_together_and_the_result_back() -> None:
    for function in ALONG:
        call = DenseCall.of(function, [X])
        layouts = [[on(kind)] for kind in KINDS[1:]]
        assert compare_simulated(call, {"tp": 3}, layouts) == [None] * len(layouts)


def test_of_equal_elements_the_first_of_the_whole_is_taken() -> None:
    for function in TIES:
        call = DenseCall.of(function, [TIED])
        layouts = [[on(kind)] for kind in KINDS]
        assert compare_simulated(call, {"tp": 3}, layouts) == [None] * len(layouts)


def test_two_axes_on_the_dims_are_both_undone() -> None:
    mesh = {"dp": 2, "tp": 2}
    pairs = ((Shard(1), Shard(1)), (Shard(0), Shard(1)), (Partial(), Shard(1)))
    layouts = [[Layout(AbstractMesh.of(mesh), pair, (5, 6))] for pair in pairs]
    for function in ALONG[:4]:
        assert compare_simulated(DenseCall.of(function, [X]), mesh, layouts) == [None] * 3


def test_each_way_is_one_all_to_all_of_the_ranks_own_part() -> None:
    def body(mesh: Any) -> list[str]:
        x = DTensor.of_layout(torch.rand(4, 3), Layout(mesh, [Shard(1)], (4, 6)))
        assert x.flip(1).placements == (Shard(1),)
        with implicit(reductions=False, adjoints=False), pytest.raises(OperatorError):
            x.flip(1)
        written = x.sort(1).values
        written[:, :2] = 0.0
        with pytest.raises(OperatorError, match="write would be lost"):
            x.unfold(1, 3, 2).zero_()
        return []

    run_lockstep(body, {"tp": 2})

    def real() -> list[tuple[str, int]]:
        """The lengths of the two dims are 4 and 6, of float32."""
        mesh = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = DTensor.of_layout(torch.rand(4, 3), Layout(mesh, [Shard(1)], (4, 6)))
        kernel = DTensor.of_layout(torch.rand(4, 1, 3), Layout(mesh, [Replicate()], (4, 1, 3)))
        with ledger() as log:
            x.flip(1)
            F.conv1d(x, kernel, padding=1, groups=4)
        return [(record.operation, record.bytes) for record in log.records]

    assert run_ranks(real, 2)[0] == [("all_to_all", 48)] * 2 + [("all_gather", 32)] * 2


def written(x: Any, mask: Any, values: Any) -> Any:
    x[mask] = values
    return x


SELECTIONS: tuple[Callable[[Any, Any], Any], ...] = (
    lambda x, m: x[m],
    lambda x, m: x.masked_select(m),
    lambda x, m: (x[m] * 2).sum(),
    lambda x, m: torch.where(m, x, 0.0),
    lambda x, m: x.masked_fill(m, -1.0),
    lambda x, m: (x * 1).masked_fill_(m, -1.0),
    lambda x, m: x.masked_scatter(m, x * 2),
    lambda x, m: written(x * 1, m, x[m] * 2),
)


def test_a_mask_may_be_cut_otherwise_than_what_it_selects_from() -> None:
    tried = (*KINDS[::2], Replicate())
    turned = [tried[i:] + tried[:i] for i in (0, 2)]
    pairs = [[on(kind), on(other)] for others in turned for kind, other in zip(tried, others)]
    for function in SELECTIONS:
        call = DenseCall.of(function, [X, MASK])
        assert compare_simulated(call, {"tp": 3}, pairs) == [None] * len(pairs)


def test_a_mask_of_rows_or_of_nothing_selects_rows() -> None:
    for mask in (X[:, 0] > 0, torch.zeros(5, dtype=torch.bool)):
        pairs = [[on(kind), on(Shard(0), (5,))] for kind in (*KINDS, Replicate())]
        for function in (lambda x, m: x[m], lambda x, m: written(x * 1, m, x[0] * 2)):
            call = DenseCall.of(function, [X, mask])
            assert compare_simulated(call, {"tp": 3}, pairs) == [None] * len(pairs)


def test_rows_that_a_mask_selects_stay_where_they_are() -> None:
    def body(mesh: Any) -> None:
        local = torch.arange(2.0) + 2 * mesh.own_rank
        x = DTensor.of_layout(local, Layout(mesh, [Shard(0)], (6,)))
        assert x[x > 0.5].placements == (RaggedShard((0,), (1, 2, 2)),)
        refusal = pytest.raises(OperatorError, match=r"depends on values.*Remedy: use torch.where")
        with implicit(reductions=False, adjoints=False), refusal:
            x[x > 0.5]

    run_lockstep(body, {"tp": 3})


def test_attention_takes_masks_cut_in_any_way() -> None:
    q, k = integers((2, 4, 3, 2)) / 4, integers((2, 4, 5, 2), 1) / 4
    mask = torch.arange(120).view(2, 4, 3, 5) % 7 > 2
    call = DenseCall.of(
        lambda q, k, m: F.scaled_dot_product_attention(q, k, k, attn_mask=m), [q, k, mask]
    )
    tried = [
        [on(Shard(1), q.shape, 2), on(Shard(1), k.shape, 2), on(each, mask.shape, 2)]
        for each in (Shard(0), Shard(1), Shard(2), Shard(3), Replicate())
    ]
    assert compare_simulated(call, {"tp": 2}, tried) == [None] * 5


def test_a_rank_without_elements_takes_part_in_the_gradient_of_a_largest_element() -> None:
    empty = [on(RaggedShard((0,), (0, 2, 3)))]
    for order, dim in ((float("inf"), None), (float("-inf"), None), (0, None), (0, 0)):
        call = DenseCall.of(lambda x, p=order, d=dim: torch.linalg.vector_norm(x, p, d), [X])
        assert compare_simulated(call, {"tp": 3}, [empty]) == [None]


def test_convolutions_along_a_cut_length_get_what_lies_beside() -> None:
    """Causal ones keep the cut, with padding in the convolution or before it."""
    image, filters = integers((2, 2, 13)), integers((2, 1, 4), 1)
    for function in (
        lambda x, w: F.conv1d(x, w, padding=3, groups=2)[..., :13] * x,
        lambda x, w: F.conv1d(F.pad(x, (3, 0)), w, groups=2) * x,
        lambda x, w: F.conv1d(x, w, stride=2, padding=2, groups=2),
        lambda x, w: F.conv_transpose1d(x, w),
    ):
        call = DenseCall.of(function, [image, filters])
        kinds = (Shard(2), RaggedShard((2,), (1, 12, 0)), StridedShard(2, 2))
        layouts = [[on(kind, (2, 2, 13)), on(Replicate(), (2, 1, 4))] for kind in kinds]
        assert compare_simulated(call, {"tp": 3}, layouts)[:2] == [None, None]
    call = DenseCall.of(lambda x, w: F.conv_transpose1d(x, w, groups=2), [
        integers((1, 4, 5)), integers((4, 3, 2), 1),
    ])  # fmt: skip
    half = [SectionedShard(dim, (2, 2)) for dim in (1, 0)]  # of the channels of every group
    mesh = AbstractMesh.of({"tp": 2})
    each = [Layout(mesh, [p], shape) for p, shape in zip(half, ((1, 4, 5), (4, 3, 2)))]
    assert compare_simulated(call, {"tp": 2}, [each]) == [None]


def test_a_rank_without_channels_adds_the_bias_once() -> None:
    image, filters, bias = integers((2, 2, 6)), integers((4, 2, 3), 1), integers((4,), 2)
    call = DenseCall.of(F.conv1d, [image, filters, bias])
    ranks = RaggedShard((1,), (0, 1, 1))
    layouts = [[on(ranks, (2, 2, 6)), on(other, (4, 2, 3)), on(Replicate(), (4,))] for other in
               (ranks, Replicate())]  # fmt: skip
    assert compare_simulated(call, {"tp": 3}, layouts) == [None, None]
    call = DenseCall.of(lambda x, w: F.conv_transpose1d(x, w, groups=4), [
        integers((1, 4, 5)), integers((4, 1, 2), 1),
    ])  # fmt: skip
    for ways in (2, 3):  # fewer groups on a rank than filters or, of three ranks, none
        mesh, cut = {"tp": ways}, RaggedShard((2,), [1] + [0] * (ways - 1))
        layouts = [[on(each, (1, 4, 5), ways), on(Replicate(), (4, 1, 2), ways)]
                   for each in (Shard(1), cut)]  # fmt: skip
        assert compare_simulated(call, mesh, layouts) == [None, None]


def test_a_rank_without_a_factor_of_a_bilinear_form_adds_the_bias_once() -> None:
    pair = integers((4, 2)), integers((4, 3), 1)
    filters, bias = integers((5, 2, 3), 2), integers((5,), 3)
    call = DenseCall.of(lambda x, y, w, b: F.bilinear(x, y, w, bias=b), [*pair, filters, bias])
    shapes = [each.shape for each in (*pair, filters, bias)]
    whole = Replicate()
    for ranks in (
        (Shard(1), whole, Shard(1), whole),
        (whole, RaggedShard((1,), (1, 2, 0)), RaggedShard((2,), (1, 2, 0)), whole),
        (RaggedShard((0,), (0, 1, 1)), whole, whole, whole),
        (whole, whole, RaggedShard((0,), (0, 5, 0)), whole),
    ):
        layouts = [on(each, tuple(shape)) for each, shape in zip(ranks, shapes)]
        assert compare_simulated(call, {"tp": 3}, [layouts]) == [None]


def test_values_written_at_positions_get_their_share_of_a_whole_gradient() -> None:
    """The target's gradient is whole, the value's declared a summand."""
    at = torch.tensor([0, 3])

    def write(x: Any, i: Any, v: Any) -> Any:
        target = x * 1
        target[i] = v
        return target

    call = DenseCall.of(write, [X, at, integers((2, 6))])
    mesh = AbstractMesh.of({"tp": 3})
    summand = Layout(mesh, [Replicate()], (2, 6), [Partial()])
    for value in (summand, on(Shard(1), (2, 6)), on(Partial(), (2, 6))):
        tried = [on(Replicate()), on(Replicate(), (2,)), value]
        assert compare_simulated(call, {"tp": 3}, [tried]) == [None]


TWICE: tuple[Callable[[Any, Any], Any], ...] = (
    lambda x, y: x.flip(1) * y * x,
    lambda x, y: x.sort(1).values.cumprod(1) + y,
    lambda x, y: x.softmax(1) * y,
    lambda x, y: F.linear(x, y) ** 2,
    lambda x, y: (x * y)[[0, 3]] ** 3,
    lambda x, y: (x**3).amax(1, keepdim=True) * y + (x**3).topk(2, 1).values[:, :1],
)


def test_second_derivatives_pass_the_redistributions() -> None:
    """The gradient of a gradient's square, where one operand is whole and the other cut."""
    y = X.cos()

    def squares(x: Any, y: Any, function: Callable[[Any, Any], Any]) -> Any:
        (gradient,) = torch.autograd.grad((function(x, y) ** 2).sum(), x, create_graph=True)
        return (gradient**2).sum()

    for function in TWICE:
        dense = (X.clone().div(9).requires_grad_(), y.clone().requires_grad_())
        squares(*dense, function).backward()

        def body(mesh: Any, function: Any = function, dense: Any = dense) -> None:
            layouts = Layout(mesh, [Shard(1)], (5, 6)), Layout(mesh, [Replicate()], (5, 6))
            placed = [
                DTensor.of_layout(
                    value.detach().reshape(-1)[each.owned_indices()].reshape(each.local_shape()),
                    each,
                ).requires_grad_()
                for value, each in zip(dense, layouts)
            ]
            squares(*placed, function).backward()
            for found, expected in zip(placed, dense):
                torch.testing.assert_close(found.grad.full_tensor(), expected.grad)

        run_lockstep(body, {"tp": 3})
