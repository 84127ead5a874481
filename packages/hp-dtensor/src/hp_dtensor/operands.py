"""The tensors that an operator is called with, and what is refused among them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.tensor import Replicate

from hp_dtensor.implicit import allowed
from hp_dtensor.layout import Layout
from hp_dtensor.rules.engine import OperatorError, operator_error
from hp_dtensor.rules.recipe import Operand
from hp_dtensor.torch_kind import is_torch_dtensor
from hp_dtensor.whole_values import current_values

__all__ = ["is_known_whole", "operands_of"]


def operands_of(name: str, found: Sequence[Tensor]) -> tuple[Operand, ...]:
    """The tensors with their layouts; refuses what has none."""
    layouts = [getattr(tensor, "_layout", None) for tensor in found]
    first = next(layout for layout in layouts if layout is not None)
    if any(layout is None for layout in layouts):
        layouts = [_taken_whole(t, each, first) for t, each in zip(found, layouts)]
    operands = []
    for index, (tensor, layout) in enumerate(zip(found, layouts)):
        if layout is None:
            placed = [each for each in layouts if each is not None]
            _check_plain(name, tensor, placed, advice_of(found))
            everywhere = [Replicate()] * len(first.placements)
            operands.append(
                Operand(index, Layout(first.mesh, everywhere, ()), tensor.dtype, plain=True)
            )
        else:
            operands.append(Operand(index, layout, tensor.dtype))
    return tuple(operands)


def is_known_whole(tensor: Tensor) -> bool:
    """Whether a plain tensor is known to be the same on every rank."""
    values = current_values()
    return values is not None and values.holds(tensor)


def _taken_whole(tensor: Tensor, layout: Layout | None, beside: Layout) -> Layout | None:
    """The layout of a plain tensor beside DTensors: replicated if it is known to be, or if there
    is one rank."""
    if layout is not None or is_torch_dtensor(tensor):
        return layout
    alone = allowed().plain and beside.abstract_mesh.world_size == 1
    if not alone and not is_known_whole(tensor):
        return None
    return Layout(beside.mesh, [Replicate()] * len(beside.placements), tuple(tensor.shape))


def advice_of(found: Sequence[Tensor]) -> str | None:
    """What the owner of a DTensor wants said where it is mixed with plain tensors, or reaches a
    kernel. `hp_fsdp` sets `_hp_advice` on its parameters, which are whole only inside forward."""
    return next((advice for t in found if (advice := getattr(t, "_hp_advice", None))), None)


def _check_plain(name: str, tensor: Tensor, placed: Sequence[Layout], advice: str | None) -> None:
    if is_torch_dtensor(tensor):
        raise OperatorError(
            f"{name}: a DTensor of torch.distributed.tensor is mixed with one of hp_dtensor. "
            "Remedy: convert it with DTensor.from_local(t.to_local(), t.device_mesh, "
            "t.placements, shape=t.shape)."
        )
    if tensor.ndim > 0:
        raise operator_error(
            name,
            f"a plain tensor of shape {tuple(tensor.shape)} is mixed with DTensors, so which part "
            "of the global tensor it holds is unknown",
            placed,
            remedy=advice
            or "wrap it with DTensor.from_local(tensor, mesh, placements, shape=...), "
            "Replicate() if every rank holds all of it; or take full_tensor() of the DTensor",
        )
    if tensor.requires_grad:
        raise operator_error(
            name,
            "a plain 0-dimensional tensor that requires a gradient is mixed with DTensors; its "
            "gradient would be this rank's summand",
            placed,
            remedy="wrap it with DTensor.from_local(tensor, mesh, [Replicate(), ...])",
        )
