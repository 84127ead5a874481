"""What the tests of DTensor and of its rules share: layouts by name, dense comparison."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hp_dtensor.dtensor import DTensor
from hp_dtensor.layout import Layout
from hp_dtensor.placements import Partial, Replicate, Shard


def mesh_of(*sizes: int) -> DeviceMesh:
    names = ("dp", "tp") if len(sizes) == 2 else ("tp",)
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def integers(shape: Sequence[int], seed: int = 0) -> Tensor:
    """Small whole numbers in float64, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, tuple(shape), generator=generator).double()


def spread(value: Tensor, layout: Layout) -> DTensor:
    """The part of a dense value that this rank holds; a pending sum is split unevenly."""
    local = value.reshape(-1)[layout.owned_indices()].reshape(layout.local_shape()).clone()
    sizes, coordinate = layout.abstract_mesh.sizes, layout.coordinate()
    summand, count = 0, 1
    for axis in layout.partial_axes():
        summand, count = summand * sizes[axis] + coordinate[axis], count * sizes[axis]
    if summand:
        local = torch.full_like(local, summand)
    else:
        local -= sum(range(1, count))
    return DTensor.of_layout(local, layout)


def leaf(value: Tensor, layout: Layout) -> DTensor:
    """As `spread`, requiring a gradient."""
    return spread(value, layout).requires_grad_()


def axis_choices(shape: Sequence[int]) -> list[tuple[Any, Any]]:
    """Value and gradient placement on one axis: everything D3 allows for this shape."""
    replicated = [(Replicate(), Replicate()), (Replicate(), Partial())]
    return [
        *replicated,
        (Partial(), Replicate()),
        *((Shard(d), Shard(d)) for d in range(len(shape))),
    ]


def layout_choices(shape: Sequence[int], mesh: DeviceMesh) -> list[Layout]:
    """Every layout of a shape without strides, sections or ragged shares."""
    return [
        Layout(mesh, [value for value, _ in axes], shape, [grad for _, grad in axes])
        for axes in itertools.product(axis_choices(shape), repeat=mesh.ndim)
    ]


def agrees(
    function: Callable[..., Any], dense: Sequence[Tensor], placed: Sequence[DTensor]
) -> None:
    """Values and gradients of `function` on DTensors are those on dense tensors."""
    sources = [value.clone().requires_grad_(value.is_floating_point()) for value in dense]
    expected = function(*sources)
    found = function(*placed)
    compare(found, expected)
    outputs = [expected] if isinstance(expected, Tensor) else list(expected)
    answers = [found] if isinstance(found, Tensor) else list(found)
    weights = [integers(output.shape, 7 + i) for i, output in enumerate(outputs)]
    pairs = [
        (output, answer, weight)
        for output, answer, weight in zip(outputs, answers, weights)
        if output.requires_grad
    ]
    if not pairs:
        return
    torch.autograd.backward([p[0] for p in pairs], [p[2] for p in pairs])
    for _, answer, weight in pairs:
        seed = spread(weight, answer.grad_layout)
        answer.backward(seed, retain_graph=True)
    for source, operand in zip(sources, placed):
        if source.grad is None or not isinstance(operand, DTensor):
            continue
        assert operand.grad is not None, f"no gradient for {operand.layout}"
        compare(operand.grad, source.grad)


def compare(found: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        assert isinstance(found, DTensor), type(found)
        assert tuple(found.shape) == tuple(expected.shape), (found.shape, expected.shape)
        assert tuple(found.to_local().shape) == found.layout.local_shape(), found.layout
        torch.testing.assert_close(found.detach().full_tensor(), expected.detach())
        return
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        compare(one, other)
