"""Summands of replicated parameters' gradients become whole, fused per axis."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from hp_dtensor.layout import Layout
from hp_dtensor.settlement import needs_settlement, settle_gradients
from hp_platform.ledger import ledger
from hp_platform.testing import run_ranks


def summed(mesh: DeviceMesh, shape: tuple[int, ...], *gradients: Placement) -> Layout:
    return Layout(mesh, [Replicate()] * mesh.ndim, shape, gradients)


def settle_three(rank: int) -> tuple[list[list[float]], list[tuple[str, int, bool]]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    layouts = [
        summed(mesh, (3,), Partial()),
        summed(mesh, (2,), Replicate()),
        Layout(mesh, [Shard(0)], (4,)),
        summed(mesh, (1,), Partial()),
    ]
    gradients = [torch.full(layout.local_shape(), rank + 1.0) for layout in layouts]
    # A gradient that is not contiguous must be settled in place too.
    gradients[0] = torch.full((3, 2), rank + 1.0)[:, 0]
    with ledger() as log:
        settle_gradients(gradients, layouts)
    records = [(r.operation, r.bytes, bool(r.aligned)) for r in log.records]
    return [gradient.tolist() for gradient in gradients], records


@pytest.mark.ranks
def test_only_summands_are_reduced_and_in_one_collective() -> None:
    for rank, (gradients, records) in enumerate(run_ranks(settle_three, 2)):
        own = rank + 1.0
        assert gradients == [[3.0] * 3, [own] * 2, [own] * 2, [3.0]]
        assert records == [("all_reduce", 1024, True)]


def settle_case_nine(rank: int) -> tuple[list[float], list[list[float]], list[int]]:
    """A replicated key projection inside sharded heads: [3, 6] and [5, 10] must become [8, 16]."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = torch.tensor([1.0, 2.0])
    queries = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, 0.0]])[
        2 * rank : 2 * rank + 2
    ]
    key = torch.tensor([[1.0, 1.0]], requires_grad=True)
    ((x @ queries.T) * (x @ key.T)).sum().backward()
    assert key.grad is not None
    memory, layout = key.grad.data_ptr(), summed(mesh, (1, 2), Partial())
    # One gradient in its own dtype is reduced where it lies; another needs the buffer.
    alone = key.grad.clone()
    strided = torch.full((1, 4), rank + 1.0)[:, ::2]
    with ledger() as log:
        settle_gradients([key.grad], [layout])
        settle_gradients([strided], [layout])
        settle_gradients([alone], [layout], dtype=torch.float64)
    assert key.grad.data_ptr() == memory
    assert torch.equal(alone, key.grad)
    sizes = [record.bytes for record in log.records]
    return key.grad.flatten().tolist(), strided.tolist(), sizes


@pytest.mark.ranks
def test_a_replicated_weight_inside_sharded_heads_gets_its_whole_gradient() -> None:
    for gradient, strided, sizes in run_ranks(settle_case_nine, 2):
        assert gradient == [8.0, 16.0]
        assert strided == [[3.0, 3.0]]
        assert sizes == [8, 512, 512]


def settle_over_two_axes(rank: int) -> tuple[list[float], list[str], str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    layout = summed(mesh, (2,), Partial("avg"), Partial())
    gradient = torch.full((2,), float(rank), dtype=torch.bfloat16)
    with ledger() as log:
        settle_gradients([gradient], [layout], dtype=torch.float32)
    return gradient.tolist(), [r.axis for r in log.records], str(log.records[0].dtype)


@pytest.mark.ranks
def test_axes_follow_one_another_in_the_dtype_asked_for() -> None:
    for gradient, axes, dtype in run_ranks(settle_over_two_axes, 4):
        assert gradient == [3.0, 3.0]  # the average over cp of the sums over tp
        assert axes == ["cp", "tp"]
        assert "float32" in dtype


def test_what_cannot_be_settled_is_refused_first() -> None:
    abstract = Layout({"tp": 2}, (Replicate(),), (2,), (Partial(),))
    assert needs_settlement(abstract)
    assert not needs_settlement(Layout({"tp": 1}, (Replicate(),), (2,), (Partial(),)))
    with pytest.raises(ValueError, match="abstract mesh"):
        settle_gradients([torch.zeros(2)], [abstract])
    with pytest.raises(ValueError, match="1 gradients but 2 layouts"):
        settle_gradients([torch.zeros(2)], [abstract, abstract])
