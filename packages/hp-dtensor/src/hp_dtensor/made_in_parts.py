"""Tensors that a module fills in the size of a cut dim: `torch.zeros(x.shape[1], 4)`.

In production the size is a part's, and so is the tensor. All of its elements are alike, so each
rank's is its part of the global one, which is what validate mode makes here. What depends on the
position, as `torch.arange(x.shape[1])` does, is not alike: it stays whole, and beside a part it is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from hp_dtensor.cut_size import CutSize
from hp_dtensor.layout import Layout
from hp_dtensor.unvalued import without_values

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

    from hp_dtensor.mesh import AbstractMesh

__all__ = ["made_in_parts"]

_FILLED = frozenset({"zeros", "ones", "empty", "full"})


def made_in_parts(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    mesh: DeviceMesh | AbstractMesh | None,
    valued: bool,
) -> Tensor | None:
    """What the function makes, cut as its sizes are; None where none of them is of a cut dim.

    Args:
        mesh: whose axes the sizes are cut over.
        valued: whether the tensors beside it have values.
    """
    name = getattr(func, "__name__", "")
    if name not in _FILLED or mesh is None or kwargs.get("requires_grad"):
        return None
    sizes, rest = _sizes(name, args, kwargs)
    if not any(type(size) is CutSize for size in sizes):
        return None
    placements: list[Placement] = [Replicate()] * mesh.ndim
    own = []
    for dim, size in enumerate(sizes):
        own.append(int(size))
        if type(size) is CutSize:
            if any(axis >= mesh.ndim or placements[axis] != Replicate() for axis in size.cut):
                return None
            own[dim] = size // size.ways
            for axis in size.cut:
                placements[axis] = Shard(dim)
    others = {key: value for key, value in kwargs.items() if key != "size"}
    local = func(tuple(map(int, own)), *rest, **others)
    if not valued:
        local = without_values(local)
    from hp_dtensor.dtensor import DTensor

    return DTensor.of_layout(local, Layout(mesh, placements, tuple(map(int, sizes))))


def _sizes(
    name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], tuple[Any, ...]]:
    """The sizes given, and the arguments after them."""
    if "size" in kwargs:
        return tuple(kwargs["size"]), args
    if args and isinstance(args[0], Sequence):
        return tuple(args[0]), args[1:]
    return ((), args) if name == "full" else (args, ())
