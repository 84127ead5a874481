"""A tensor with the shape of the global one over the local one of this rank.

Nothing here communicates or computes: what a wrapper says of itself, it reads from its layout, and
dtype, device and strides from the local tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from hp_dtensor.cut_size import sizes_of
from hp_dtensor.implicit import any_requires_grad
from hp_dtensor.layout import Layout
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.torch_kind import class_of, torch_placements
from hp_dtensor.whole_values import current_values

__all__ = ["Wrapper"]

_make_wrapper = torch.Tensor._make_wrapper_subclass


class Wrapper(torch.Tensor):
    """Global shape, this rank's local tensor, and a layout. `DTensor` is what users make."""

    _local: Tensor
    _layout: Layout

    @classmethod
    def _of(cls, local: Tensor, layout: Layout) -> Self:
        """Wraps without a check. The local tensor keeps its autograd history."""
        # The wrapper's own flag follows the local one, so that an autograd.Function applied to a
        # DTensor leaves a trace that the next operator refuses (see dispatch).
        made: Self = _make_wrapper(
            cls,
            layout.shape,
            dtype=local.dtype,
            device=local.device,
            requires_grad=local.requires_grad,
        )
        made._local = local
        made._layout = layout
        return made

    def _follow_local(self) -> None:
        """After an operator in place: the wrapper's flag follows the local tensor's."""
        if self._local.requires_grad != any_requires_grad(self):
            with torch._C.DisableTorchFunctionSubclass():
                torch.Tensor.requires_grad_(self, self._local.requires_grad)

    @property
    def layout(self) -> Layout:  # type: ignore[override]
        """Mesh, placements, global shape and gradient placements."""
        return self._layout

    @property
    def device_mesh(self) -> DeviceMesh | AbstractMesh:
        return self._layout.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One per mesh axis; PyTorch's own where it has them all (decision B42)."""
        return torch_placements(self._layout) or self._layout.placements

    # What PyTorch-side code also asks of its own DTensor. Private names there, and widely used.

    @property
    def __class__(self) -> type:
        return class_of(self)

    @__class__.setter
    def __class__(self, kind: type) -> None:
        """`torch.utils.swap_tensors` exchanges classes; these are the same one."""
        if kind is not class_of(self):
            raise TypeError(f"a DTensor cannot become a {kind.__module__}.{kind.__name__}")

    @property
    def _local_tensor(self) -> Tensor:
        return self._local

    @_local_tensor.setter
    def _local_tensor(self, local: Tensor) -> None:
        self._local = local

    @property
    def _spec(self) -> DTensorSpec:
        """Mesh, placements, global shape, strides and dtype as PyTorch describes them."""
        meta = TensorMeta(torch.Size(self._layout.shape), self.stride(), self.dtype)
        return DTensorSpec(self._layout.mesh, self.placements, tensor_meta=meta)  # type: ignore[arg-type]

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The global shape; in validate mode its numbers know which axes cut them."""
        if current_values() is not None:
            return sizes_of(self._layout)
        return torch.Size(self._layout.shape)

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self._layout.shape)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self._local.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._local.device

    # Optimizers ask at every step.
    @property
    def is_sparse(self) -> bool:  # type: ignore[override]
        return False

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self._layout.shape)

    ndimension = dim

    def numel(self) -> int:
        return math.prod(self._layout.shape)

    nelement = numel

    def __len__(self) -> int:
        if not self._layout.shape:
            raise TypeError("len() of a 0-d tensor")
        return self._layout.shape[0]

    def __hash__(self) -> int:
        return id(self)

    def is_contiguous(self, memory_format: Any = torch.contiguous_format) -> bool:
        return self._local.is_contiguous(memory_format=memory_format)

    def stride(self, dim: int | None = None) -> Any:
        """Strides of the global tensor if it were stored in the local tensor's dim order."""
        strides = _global_strides(self._layout.shape, self._local)
        return strides if dim is None else strides[dim]

    def element_size(self) -> int:
        return self._local.element_size()

    @property
    def T(self) -> Tensor:  # type: ignore[override]  # noqa: N802
        return self.permute(*reversed(range(self.ndim)))

    @property
    def mT(self) -> Tensor:  # type: ignore[override]  # noqa: N802
        return self.transpose(-2, -1)

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *vars(self)})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        value = ""
        if self._layout.is_replicated and not self._local.is_meta:
            value = f"{self._local.detach()!r}, "
        return f"DTensor({value}{self._layout!r}, dtype={self._local.dtype})"


def _global_strides(shape: Sequence[int], local: Tensor) -> tuple[int, ...]:
    order = sorted(range(len(shape)), key=lambda dim: (local.stride(dim), -dim))
    strides, step = [0] * len(shape), 1
    for dim in order:
        if local.stride(dim) == 0 and shape[dim] > 1:
            continue
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)
