"""DTensor: a tensor that knows how it is laid out (decisions D3, D5, D9).

`DTensor` is a `torch.Tensor` whose shape is the global one. It has no storage of its own: it holds
the plain tensor of this rank and a `Layout`. Torch functions are intercepted above autograd, so
autograd and kernels work on plain local tensors; a DTensor that reaches a kernel is an error.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate

from hp_dtensor.differentiable import Differentiable
from hp_dtensor.dispatch import dispatch
from hp_dtensor.implicit import allowed
from hp_dtensor.layout import Layout
from hp_dtensor.mesh import AbstractMesh, KeptAxes
from hp_dtensor.operands import advice_of
from hp_dtensor.operator_plan import PlanCache
from hp_dtensor.placements import RaggedShard, SectionedShard, StridedShard
from hp_dtensor.rules.engine import OperatorError, operator_error
from hp_dtensor.shape_exchange import exchanged_shape
from hp_dtensor.transition import Transition
from hp_dtensor.whole_values import current_values


class DTensor(Differentiable):
    """A distributed tensor: global shape, this rank's local tensor, and a layout.

    Made by `DTensor.from_local`, `distribute_tensor` or `DTensor.of_layout`, never directly.
    As an `nn.Parameter` its local tensor is a leaf and holds the gradient; `.grad` reads and
    writes it as a DTensor laid out by the layout's gradient placements.
    """

    @staticmethod
    def __new__(cls, *args: Any, **kwargs: Any) -> DTensor:
        raise TypeError(
            "DTensor is not made directly; use DTensor.from_local(local, mesh, placements, "
            "shape=...) or distribute_tensor(tensor, mesh, placements)"
        )

    # -- making and unmaking ---------------------------------------------------------------

    @classmethod
    def of_layout(cls, local: Tensor, layout: Layout) -> DTensor:
        """Wraps this rank's part of a tensor laid out as `layout` says; no communication.

        Raises:
            TypeError: `local` is not a plain tensor.
            ValueError: its shape is not the one the layout gives this rank.
        """
        if (
            not isinstance(local, Tensor)
            or isinstance(local, DTensor)
            or hasattr(local, "to_local")
        ):
            raise TypeError(
                f"a DTensor wraps a plain torch.Tensor, found {type(local).__name__}; "
                "pass its to_local()"
            )
        if not isinstance(layout.mesh, AbstractMesh) and tuple(local.shape) != layout.local_shape():
            raise ValueError(
                f"the local tensor on coordinate {layout.coordinate()} of {layout.abstract_mesh} "
                f"has shape {tuple(local.shape)}, but {layout} gives it {layout.local_shape()}; "
                "cut it as torch.chunk does, or pass the placements it really has"
            )
        values = current_values()
        if values is not None:  # what `to_local` gives back has lost its layout
            values.forget(local)
        return cls._of(local, layout)

    @classmethod
    def from_local(
        cls,
        local_tensor: Tensor,
        device_mesh: DeviceMesh,
        placements: Sequence[Placement],
        *,
        shape: Sequence[int] | None = None,
        grad_placements: Sequence[Placement] | None = None,
    ) -> DTensor:
        """Wraps this rank's part; the gradient flows back to `local_tensor`.

        Args:
            local_tensor: plain tensor of this rank.
            device_mesh: the mesh; every one of its ranks makes the call.
            placements: one per mesh axis.
            shape: the global shape. Without it, and with a sharded placement, ranks exchange the
                shapes of their parts (one small collective per sharded axis).
            grad_placements: placements of the gradient that arrives at `local_tensor`; None for
                the defaults (`Shard` alike, otherwise `Replicate`).

        Raises:
            ValueError: the parts do not make up a tensor laid out like this.
        """
        if shape is None:
            shape = exchanged_shape(local_tensor, device_mesh, placements)
        layout = Layout(device_mesh, placements, shape, grad_placements)
        return cls.of_layout(local_tensor, layout)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """This rank's plain tensor, without communication forward.

        Args:
            grad_placements: how the gradient of the local tensor will be laid out; None for what
                the layout says. `Partial` for a replicated value sums it backward.
        """
        if grad_placements is None:
            return self._checked_local()
        layout = self._layout.with_placements(self._layout.placements, tuple(grad_placements))
        return self._to(layout)._local

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """The global value as a plain tensor, on every rank. Every rank of the mesh calls it.

        Args:
            grad_placements: as for `to_local`.
        """
        everywhere = [Replicate()] * len(self._layout.placements)
        return self._to(self._layout.with_placements(everywhere, grad_placements))._local

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        grad_placements: Sequence[Placement] | None = None,
    ) -> DTensor:
        """The same tensor laid out otherwise, differentiably.

        Args:
            device_mesh: None, or this DTensor's own mesh.
            placements: the wanted placements; None keeps them (to change gradients only).
            async_op: PyTorch's argument. The values are there in either case.
            grad_placements: the gradient's placements; None for the defaults.

        Raises:
            ValueError: another mesh is asked for.
        """
        if device_mesh is not None and device_mesh != self._layout.mesh:
            raise ValueError(
                f"redistribute: the DTensor is on mesh {self._layout.abstract_mesh}, another was "
                "given; use full_tensor() and distribute_tensor() to change the mesh"
            )
        wanted = self._layout.placements if placements is None else tuple(placements)
        return self._to(self._layout.with_placements(wanted, grad_placements))

    # -- values ------------------------------------------------------------------------------

    def item(self) -> Any:
        """The global value; where it is a pending sum or a shard, every rank must call this.

        Raises:
            RuntimeError: there is more than one element.
            OperatorError: the value is not on every rank, and no communication is allowed here.
        """
        if self.numel() != 1:
            raise RuntimeError(
                f"a DTensor with {self.numel()} elements cannot be converted to a scalar"
            )
        if not self._layout.is_replicated and not allowed().reductions:
            raise operator_error(
                "item",
                "reading the value would communicate; in production each rank would read its own",
                [self._layout],
                remedy="declare the value whole at a boundary, or the code an opaque region",
            )
        with torch.no_grad():
            return self.detach().full_tensor().item()

    def __bool__(self) -> bool:
        return bool(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        value = self.item()
        if not isinstance(value, int):
            raise TypeError("only integer tensors of a single element can be converted to an index")
        return int(value)

    def __complex__(self) -> complex:
        return complex(self.item())

    def __format__(self, format_spec: str) -> str:
        if self.ndim == 0 and format_spec:
            return format(self.item(), format_spec)
        return format(repr(self), format_spec)

    def tolist(self) -> Any:
        return self._whole("tolist").tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self._whole("numpy").numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        return self._whole("__array__").__array__(dtype)

    def _whole(self, what: str) -> Tensor:
        if not self._layout.is_replicated:
            raise OperatorError(
                f"{what}: this rank holds only a part of {self._layout}. "
                "Remedy: call full_tensor() on every rank first."
            )
        return self._local

    # -- copies --------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "only DTensors made by the user (graph leaves) support deepcopy; detach() first"
            )
        made = DTensor._of(self._local.detach().clone(), self._layout)
        made.requires_grad_(self._local.requires_grad)
        memo[id(self)] = made
        gradient = self.grad
        if gradient is not None:
            made.grad = copy.deepcopy(gradient, memo)
        _copy_attributes(self, made, memo)
        return made

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        extra = _attributes(self)
        return _rebuild, (self._local.detach(), self._layout, self.requires_grad, extra)

    # -- torch.distributed.checkpoint -----------------------------------------------------------

    def __create_write_items__(self, fqn: str, value: object) -> Any:
        return _checkpoint().create_write_items(self, fqn)

    def __create_chunk_list__(self) -> Any:
        return _checkpoint().create_chunk_list(self)

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return _checkpoint().get_tensor_shard(self, index)

    # -- interception --------------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        handler = _handler_of(func)
        if handler is None:
            return dispatch(func, args, kwargs or _NO_KEYWORDS)
        return handler(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default and torch._C._current_graph_task_id() >= 0:
            raise OperatorError(
                "torch.utils.checkpoint: a function that is run again in backward was given a "
                "DTensor that an outer such function had computed. Remedy: checkpoint one of the "
                "two, or pass use_reentrant=True to both."
            )
        advice = advice_of([value for value in args if isinstance(value, torch.Tensor)])
        remedy = advice or (
            "call to_local() before it and DTensor.from_local() after it, or declare the module an "
            "opaque region"
        )
        raise OperatorError(
            f"{func}: a DTensor reached a kernel without passing __torch_function__ (inside "
            "torch.autograd.Function, a C++ extension, or with torch functions disabled). "
            f"Remedy: {remedy}."
        )


_NO_KEYWORDS: dict[str, Any] = {}


@lru_cache(maxsize=4096)
def _handler_of(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """How a function is answered without a rule, or None; a memo of a pure function."""
    from hp_dtensor.direct import direct_handler

    return direct_handler(func)


def _checkpoint() -> Any:
    """The module that knows torch.distributed.checkpoint, which is slow to import."""
    return importlib.import_module("hp_dtensor.checkpoint")


_OWN_ATTRIBUTES = frozenset({"_local", "_layout", "_gradient"})


def _attributes(tensor: DTensor) -> dict[str, Any]:
    return {name: value for name, value in vars(tensor).items() if name not in _OWN_ATTRIBUTES}


def _copy_attributes(source: DTensor, target: DTensor, memo: dict[int, Any]) -> None:
    for name, value in _attributes(source).items():
        setattr(target, name, copy.deepcopy(value, memo))


def _rebuild(
    local: Tensor, layout: Layout, requires_grad: bool, attributes: dict[str, Any]
) -> DTensor:
    made = DTensor._of(local, layout).requires_grad_(requires_grad)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def distribute_tensor(
    tensor: Tensor, device_mesh: DeviceMesh, placements: Sequence[Placement]
) -> DTensor:
    """Cuts a plain tensor that every rank holds in full; no communication.

    Every rank must hold the same values: nothing is broadcast, as in D11's layout-independent
    initialisation. The result is a leaf and has the tensor's `requires_grad`.

    Args:
        tensor: the global tensor.
        device_mesh: the mesh.
        placements: one per axis. `Partial` keeps the value on coordinate 0 and zeros elsewhere.

    Raises:
        TypeError: `tensor` is not a plain tensor, or a DTensor to redistribute.
        ValueError: `tensor` is in a graph, which would end here; or the placements do not fit.
    """
    if isinstance(tensor, DTensor):
        return tensor.redistribute(device_mesh, placements)
    if not isinstance(tensor, Tensor) or hasattr(tensor, "to_local"):
        raise TypeError(
            f"distribute_tensor takes a plain torch.Tensor, found {type(tensor).__name__}; "
            "pass the full_tensor() of a DTensor of torch.distributed.tensor"
        )
    if not tensor.is_leaf:
        raise ValueError(
            "distribute_tensor makes a leaf, and this tensor was computed from one that requires a "
            "gradient, which would get none; pass its detach(), or wrap the computed tensor with "
            "DTensor.from_local(tensor, mesh, [Replicate(), ...]) and redistribute"
        )
    everywhere = Layout(device_mesh, [Replicate()] * device_mesh.ndim, tensor.shape)
    layout = everywhere.with_placements(placements)
    with torch.no_grad():
        local = Transition.compile(everywhere, layout).run_forward(tensor.detach())
    if local.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
        local = local.clone()
    return DTensor._of(local.contiguous(), layout).requires_grad_(tensor.requires_grad)


def _register_foreach() -> None:
    """Optimizers and norm clipping use their foreach code for DTensors too.

    The same two lists are extended by torch.distributed.tensor for its own DTensor.
    """
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    for supported in (
        optimizer._foreach_supported_types,
        _foreach_utils._foreach_supported_types,
    ):
        if DTensor not in supported:
            supported.append(DTensor)


_register_foreach()

# `torch.load` makes DTensors by default, as it makes PyTorch's: of tensors, sizes and placements.
torch.serialization.add_safe_globals(
    [_rebuild, Layout, RaggedShard, SectionedShard, StridedShard, KeptAxes, PlanCache]
)
