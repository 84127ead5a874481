"""A checkpoint written from any layout is read into any other, through PyTorch's own planner."""

from __future__ import annotations

import tempfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import example, given, settings
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

from hp_dtensor.checkpoint import boxes, create_write_items, get_tensor_shard
from hp_dtensor.dtensor import DTensor
from hp_dtensor.layout import Layout, attach_layout
from hp_dtensor.placements import RaggedShard, SectionedShard, StridedShard
from hp_dtensor.testing import layouts, spread
from hp_dtensor.torch_kind import torch_placements
from hp_platform.testing import run_ranks

SHAPE = (8, 3)
DENSE = torch.arange(24.0).reshape(SHAPE)

# Placements of one tensor of SHAPE on meshes of one axis (of any size) and of two.
FLAT: dict[str, Placement] = {
    "rows": Shard(0),
    "columns": Shard(1),
    "strided": StridedShard(0, 2),
    "sections": SectionedShard(0, (5, 3)),
    "replicated": Replicate(),
}
PAIRS: dict[str, tuple[Placement, Placement]] = {
    "fsdp over tp": (StridedShard(0, 2), Shard(0)),
    "fsdp over fused tp": (StridedShard(0, 2), SectionedShard(0, (5, 3))),
    "replicas": (Replicate(), Shard(1)),
    "owner": (RaggedShard((0,), (0, 1)), Replicate()),
    "share of a buffer": (RaggedShard((0, 1), (7, 17)), Replicate()),
}


@settings(max_examples=200, deadline=None)
@given(layouts(reductions=()))
@example(Layout({"dp": 2, "tp": 3}, [StridedShard(0, 3), Shard(0)], (12, 2)))
@example(Layout({"a": 2, "b": 2, "c": 2}, [StridedShard(0, 4), StridedShard(0, 2), Shard(0)], (8,)))
@example(Layout({"a": 2, "b": 2, "c": 2}, [Shard(0), StridedShard(0, 2), Shard(0)], (16,)))
def test_boxes_tile_what_a_rank_holds_and_are_pytorchs_where_placements_are(layout: Layout) -> None:
    sizes, theirs = layout.abstract_mesh.sizes, torch_placements(layout)
    dense = torch.arange(float(layout.numel)).reshape(layout.shape)
    for coord, local in zip(layout.abstract_mesh.coordinates(), spread(dense, layout)):
        seen: list[int] = []
        held = boxes(layout, coord)
        for box in held:
            block = dense
            for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes)):
                block = block.narrow(dim, offset, size)
            view = box.of(local)
            assert torch.equal(view, block)
            assert view.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
            seen += block.flatten().long().tolist()
        assert sorted(seen) == layout.owned_indices(coord).tolist()
        assert len({box.offsets for box in held}) == len(held), "offsets identify boxes"
        if theirs is not None and local.numel():
            # What PyTorch's state functions cut for a tensor that says it is one of its own.
            found = _compute_local_shape_and_global_offset(layout.shape, sizes, coord, theirs)
            assert [(box.sizes, box.offsets) for box in held] == [found]


def test_a_contiguous_part_is_one_box() -> None:
    layout = Layout({"dp": 2, "tp": 2}, (StridedShard(0, 2), Shard(0)), (8, 3))
    assert [box.offsets for box in boxes(layout, (1, 0))] == [(2, 0)]
    fused = Layout({"tp": 2}, (SectionedShard(0, (4, 2, 2)),), (8, 3))
    assert [box.offsets[0] for box in boxes(fused, (1,))] == [2, 5, 7]


def test_a_share_of_several_flattened_dims_is_cut_along_rows() -> None:
    layout = Layout({"x": 2}, (RaggedShard((0, 1), (5, 1)),), (2, 3, 4))
    assert [(box.offsets, box.sizes) for box in boxes(layout, (0,))] == [
        ((0, 0, 0), (1, 3, 4)),
        ((1, 0, 0), (1, 2, 4)),
    ]


def test_a_partial_value_is_not_saved() -> None:
    tensor = attach_layout(torch.zeros(2), Layout({"tp": 2}, (Partial(),), (2,)))
    with pytest.raises(ValueError, match="Partial value is on no rank"):
        create_write_items(tensor, "weight")


def state(world: int) -> dict[str, Tensor]:
    """The same dense tensor in every layout the world size allows."""
    made: dict[str, Tensor] = {}
    line = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    for name, placement in FLAT.items():
        made[name] = of_dense(Layout(line, (placement,), SHAPE), DENSE)
    if world % 2 == 0:
        plane = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
        for name, pair in PAIRS.items():
            made[name] = of_dense(Layout(plane, pair, SHAPE), DENSE)
    else:
        for name in PAIRS:
            made[name] = of_dense(Layout(line, (Shard(0),), SHAPE), DENSE)
    made["scalar"] = of_dense(Layout(line, (Replicate(),), ()), torch.tensor(7.0))
    made["empty"] = of_dense(Layout(line, (Shard(0),), (0, 3)), torch.zeros(0, 3))
    made["short"] = of_dense(Layout(line, (Shard(0),), (1,)), torch.tensor([3.0]))
    return made


def of_dense(layout: Layout, dense: Tensor) -> DTensor:
    local = dense.reshape(-1)[layout.owned_indices()].reshape(layout.local_shape()).clone()
    return DTensor.from_local(local, layout.mesh, layout.placements, shape=layout.shape)


def save(rank: int, world: int, folder: str) -> None:
    dcp.save(state(world), checkpoint_id=folder)


def load(rank: int, world: int, folder: str) -> dict[str, bool]:
    wanted, found = state(world), state(world)
    for tensor in found.values():
        tensor.to_local().fill_(-1)
    dcp.load(found, checkpoint_id=folder)
    return {name: torch.equal(found[name].to_local(), wanted[name].to_local()) for name in wanted}


def load_into_pytorch(rank: int, world: int, folder: str) -> dict[str, bool]:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    found: dict[str, Tensor] = {
        name: torch_distribute_tensor(torch.full(SHAPE, -1.0), mesh, [Shard(0)])
        for name in (*FLAT, *PAIRS)
    }
    dcp.load(found, checkpoint_id=folder)
    result = {}
    for name, tensor in found.items():
        assert isinstance(tensor, TorchDTensor)
        result[name] = torch.equal(tensor.full_tensor(), DENSE)
    return result


@pytest.mark.ranks
@pytest.mark.parametrize(("saved_on", "loaded_on"), [(2, 3), (3, 4), (4, 1), (2, 4)])
def test_a_checkpoint_moves_between_meshes(saved_on: int, loaded_on: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(lambda rank: save(rank, saved_on, folder), saved_on)
        for result in run_ranks(lambda rank: load(rank, loaded_on, folder), loaded_on):
            assert all(result.values()), result


@pytest.mark.ranks
def test_pytorchs_dtensor_reads_a_checkpoint_of_ours() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(lambda rank: save(rank, 4, folder), 4)
        for result in run_ranks(lambda rank: load_into_pytorch(rank, 2, folder), 2):
            assert all(result.values()), result


def save_from_pytorch(rank: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    names = [*FLAT, *PAIRS]
    dcp.save(
        {n: torch_distribute_tensor(DENSE, mesh, [Shard(0)]) for n in names}, checkpoint_id=folder
    )


def load_from_pytorch(rank: int, folder: str) -> bool:
    found = {name: tensor for name, tensor in state(4).items() if name in FLAT or name in PAIRS}
    wanted = {name: tensor.to_local().clone() for name, tensor in found.items()}
    for tensor in found.values():
        tensor.to_local().fill_(-1)
    dcp.load(found, checkpoint_id=folder)
    return all(torch.equal(found[name].to_local(), wanted[name]) for name in found)


@pytest.mark.ranks
def test_a_checkpoint_of_pytorchs_dtensor_is_read() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(lambda rank: save_from_pytorch(rank, folder), 2)
        assert all(run_ranks(lambda rank: load_from_pytorch(rank, folder), 4))


def look_up(rank: int) -> str:
    tensor = state(2)["sections"]
    with pytest.raises(ValueError, match="offset is needed"):
        get_tensor_shard(tensor, MetadataIndex("w"))
    with pytest.raises(ValueError, match="holds no box") as error:
        get_tensor_shard(tensor, MetadataIndex("w", (6, 1)))
    return str(error.value)


@pytest.mark.ranks
def test_a_box_that_is_not_held_is_named() -> None:
    for message in run_ranks(look_up, 2):
        assert "'w'" in message
        assert "(6, 1)" in message
