"""DTensor: a tensor that knows how it is laid out (decisions D3, D5, D9).

`DTensor` is a `torch.Tensor` whose shape is the global one. It has no storage of its own: it holds
the plain tensor of this rank and a `Layout`. Torch functions are intercepted above autograd, so
autograd and kernels work on plain local tensors; a DTensor that reaches a kernel is an error.
"""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate

from hp_dtensor.dispatch import any_requires_grad, dispatch, move
from hp_dtensor.layout import Layout
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.placements import describe
from hp_dtensor.rules.engine import OperatorError
from hp_dtensor.shape_exchange import exchanged_shape
from hp_dtensor.transition import Transition
from hp_platform.collectives import Origin

_ORIGIN = Origin("hp_dtensor", "redistribute")
_make_wrapper = torch.Tensor._make_wrapper_subclass


class DTensor(torch.Tensor):
    """A distributed tensor: global shape, this rank's local tensor, and a layout.

    Made by `DTensor.from_local`, `distribute_tensor` or `DTensor.of_layout`, never directly.
    As an `nn.Parameter` its local tensor is a leaf and holds the gradient; `.grad` reads and
    writes it as a DTensor laid out by the layout's gradient placements.
    """

    _local: Tensor
    _layout: Layout
    _gradient: DTensor | None = None

    @staticmethod
    def __new__(cls, *args: Any, **kwargs: Any) -> DTensor:
        raise TypeError(
            "DTensor is not made directly; use DTensor.from_local(local, mesh, placements, "
            "shape=...) or distribute_tensor(tensor, mesh, placements)"
        )

    @classmethod
    def _of(cls, local: Tensor, layout: Layout) -> DTensor:
        """Wraps without a check. The local tensor keeps its autograd history."""
        # The wrapper's own flag follows the local one, so that an autograd.Function applied to a
        # DTensor leaves a trace that the next operator refuses (see dispatch).
        made: DTensor = _make_wrapper(
            cls,
            layout.shape,
            dtype=local.dtype,
            device=local.device,
            requires_grad=local.requires_grad,
        )
        made._local = local
        made._layout = layout
        return made

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

    def full_tensor(self) -> Tensor:
        """The global value as a plain tensor, on every rank. Every rank of the mesh calls it."""
        everywhere = [Replicate()] * len(self._layout.placements)
        return self._to(self._layout.with_placements(everywhere))._local

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        grad_placements: Sequence[Placement] | None = None,
    ) -> DTensor:
        """The same tensor laid out otherwise, differentiably.

        Args:
            device_mesh: None, or this DTensor's own mesh.
            placements: the wanted placements; None keeps them (to change gradients only).
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

    def _to(self, layout: Layout) -> DTensor:
        if layout == self._layout:
            return self
        transition = Transition.compile(self._layout, layout)
        return DTensor._of(move(transition, self._checked_local(), _ORIGIN), layout)

    def _checked_local(self) -> Tensor:
        if not self._local.requires_grad and any_requires_grad(self):
            raise OperatorError(
                "this DTensor came out of torch.autograd.Function.apply, which computed on a "
                "DTensor without its gradient; call to_local() before the function and "
                "DTensor.from_local() after it"
            )
        return self._local

    def _follow_local(self) -> None:
        """After an operator in place: the wrapper's flag follows the local tensor's."""
        if self._local.requires_grad != any_requires_grad(self):
            with torch._C.DisableTorchFunctionSubclass():
                torch.Tensor.requires_grad_(self, self._local.requires_grad)

    # -- what it is --------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:  # type: ignore[override]
        """Mesh, placements, global shape and gradient placements."""
        return self._layout

    @property
    def device_mesh(self) -> DeviceMesh | AbstractMesh:
        return self._layout.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        return self._layout.placements

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The global shape."""
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

    def size(self, dim: int | None = None) -> Any:
        return torch.Size(self._layout.shape) if dim is None else self._layout.shape[dim]

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

    # -- autograd, which runs on the local tensor ----------------------------------------------

    @property
    def requires_grad(self) -> bool:
        return self._local.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> DTensor:
        self._local.requires_grad_(requires_grad)
        self._follow_local()
        return self

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        return self._local.is_leaf

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        return self._local.grad_fn

    @property
    def retains_grad(self) -> bool:  # type: ignore[override]
        return self._local.retains_grad

    @property
    def output_nr(self) -> int:  # type: ignore[override]
        return self._local.output_nr

    @property
    def _version(self) -> int:  # type: ignore[override]
        return self._local._version

    def retain_grad(self) -> None:
        self._local.retain_grad()

    @property
    def grad_layout(self) -> Layout:
        """Layout of the gradient: the gradient placements as placements of a value."""
        return self._layout.of_gradient

    @property  # type: ignore[override]
    def grad(self) -> DTensor | None:
        """The gradient as a DTensor, over the local tensor's own gradient."""
        local = self._local.grad
        if local is None:
            self._gradient = None
            return None
        held = self._gradient
        if held is None or held._local is not local:
            layout = self.grad_layout if held is None else held._layout
            self._gradient = held = DTensor._of(local, layout)
        return held

    @grad.setter
    def grad(self, value: DTensor | None) -> None:
        if value is None:
            self._local.grad = None
            self._gradient = None
            return
        if not isinstance(value, DTensor):
            raise TypeError(
                f"the gradient of a DTensor must be a DTensor or None, found "
                f"{type(value).__name__}; wrap it with DTensor.from_local"
            )
        settled = [
            Replicate() if isinstance(grad, Partial) else grad
            for grad in self._layout.grad_placements
        ]
        if value._layout.mesh != self._layout.mesh or value._layout.placements not in (
            self._layout.grad_placements,
            tuple(settled),
        ):
            raise ValueError(
                f"the gradient of {self._layout} must be placed "
                f"{describe(self._layout.grad_placements)}, or {describe(settled)} once it is "
                f"summed; found {value._layout}"
            )
        self._local.grad = value._local
        self._gradient = DTensor._of(value._local, value._layout)

    @grad.deleter
    def grad(self) -> None:
        self._local.grad = None
        self._gradient = None

    @property  # type: ignore[override]
    def data(self) -> DTensor:
        return DTensor._of(self._local.data, self._layout)

    @data.setter
    def data(self, value: DTensor) -> None:
        if not isinstance(value, DTensor) or not self._is_laid_out_like(value):
            found = value._layout if isinstance(value, DTensor) else type(value).__name__
            raise ValueError(f"the data of a DTensor laid out {self._layout} was set to {found}")
        if value.dtype != self.dtype or value.device != self.device:
            raise ValueError(
                f"data of {self.dtype} on {self.device} cannot become {value.dtype} on "
                f"{value.device}; make a new parameter"
            )
        self._local.data = value._local

    def _is_laid_out_like(self, other: DTensor) -> bool:
        """Whether local tensors may be exchanged; what is declared of gradients may differ."""
        mine, theirs = self._layout, other._layout
        same = mine.placements == theirs.placements and mine.shape == theirs.shape
        return same and mine.mesh == theirs.mesh

    def backward(
        self,
        gradient: DTensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Runs the local backward pass on every rank.

        Raises:
            ValueError: `gradient` is not a DTensor, or it is missing and this is not a scalar.
        """
        output = self._with_plain_gradient()
        local_inputs = inputs
        if inputs is not None:
            given = inputs if isinstance(inputs, tuple | list) else [inputs]
            local_inputs = [getattr(each, "_local", each) for each in given]
        seed = output._seed(gradient)
        output._checked_local().backward(seed, retain_graph, create_graph, inputs=local_inputs)

    def _with_plain_gradient(self) -> DTensor:
        """Where each rank would have to seed a summand, let every rank seed the whole."""
        if self._layout.of_gradient.partial_axes():
            return self.redistribute()
        return self

    def _seed(self, gradient: Tensor | None) -> Tensor | None:
        if gradient is None:
            if self.numel() != 1:
                raise ValueError(
                    f"backward() needs a gradient for an output of shape {tuple(self.shape)}"
                )
            # A sharded output of one element has an empty part on all ranks but one.
            return None if self._local.numel() == 1 else torch.ones_like(self._local)
        if not isinstance(gradient, DTensor):
            raise ValueError(
                f"the gradient must be a DTensor laid out like {self.grad_layout}, found "
                f"{type(gradient).__name__}"
            )
        return gradient._to(self.grad_layout)._local

    def register_hook(self, hook: Callable[[DTensor], DTensor | None]) -> Any:
        """`hook` gets the gradient as a DTensor and may return another one."""
        layout = self.grad_layout

        def on_local(gradient: Tensor) -> Tensor | None:
            answer = hook(DTensor._of(gradient, layout))
            return None if answer is None else answer._to(layout)._local

        return self._local.register_hook(on_local)

    def register_post_accumulate_grad_hook(self, hook: Callable[[DTensor], None]) -> Any:
        return self._local.register_post_accumulate_grad_hook(lambda _: hook(self))

    def detach(self) -> DTensor:
        """Shares this rank's memory; outside the graph."""
        return DTensor._of(self._local.detach(), self._layout)

    def detach_(self) -> DTensor:
        self._local.detach_()
        self._follow_local()
        return self

    # -- values ------------------------------------------------------------------------------

    def item(self) -> Any:
        """The global value; where it is a pending sum or a shard, every rank must call this."""
        if self.numel() != 1:
            raise RuntimeError(
                f"a DTensor with {self.numel()} elements cannot be converted to a scalar"
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
        local = self._local.detach().clone().requires_grad_(self._local.requires_grad)
        made = DTensor._of(local, self._layout)
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
        raise OperatorError(
            f"{func}: a DTensor reached a kernel without passing __torch_function__ (inside "
            "torch.autograd.Function, a C++ extension, or with torch functions disabled). "
            "Remedy: call to_local() before it and DTensor.from_local() after it, or declare the "
            "module an opaque region."
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
    made = DTensor._of(local.requires_grad_(requires_grad), layout)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def _global_strides(shape: Sequence[int], local: Tensor) -> tuple[int, ...]:
    order = sorted(range(len(shape)), key=lambda dim: (local.stride(dim), -dim))
    strides, step = [0] * len(shape), 1
    for dim in order:
        if local.stride(dim) == 0 and shape[dim] > 1:
            continue
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


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
    return DTensor._of(local.contiguous().requires_grad_(tensor.requires_grad), layout)


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
