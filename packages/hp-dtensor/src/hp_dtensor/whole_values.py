"""Plain tensors that are known to be the same on every rank.

Model code makes some of its tensors itself: positions, masks, slopes, states that begin at zero. In
production they are plain and so is everything else. In validate mode they may stand beside DTensors
only where it is known that every rank holds the same, for then they are replicated. Known are

- what functions without tensor arguments make of sizes and numbers (`arange`, `zeros`, `eye`, ...);
- buffers and other tensors that the module itself holds, which `parallelize` takes to be equal;
- the arguments of the module's forward that no contract declares, if no contract cuts a plain one;
- what is computed of known tensors alone, by functions that draw no random numbers.

Everything else stays unknown: what came out of a DTensor (`to_local`, `full_tensor`), what was
drawn, what something unknown was written to. Beside DTensors that is an error, as before.

Tensors stay plain, so code that branches on values, converts to numpy or maps over plain tensors
runs as it does without a plan. The record of what is known holds no tensor alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from numbers import Number
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hp_dtensor.made_in_parts import made_in_parts
from hp_dtensor.recomputation import follow_checkpoint, saving_hooks
from hp_dtensor.rules.creation import RANDOM
from hp_dtensor.rules.recipe import words

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from hp_dtensor.mesh import AbstractMesh

__all__ = ["WholeValues", "current_values", "following", "mark_whole", "unfollowed"]

_MAKERS = frozenset(
    words(
        """
        arange range linspace logspace zeros ones full empty eye tril_indices triu_indices
        scalar_tensor tensor as_tensor asarray empty_strided
        bartlett_window blackman_window hamming_window hann_window kaiser_window
        """
    )
)
_OF_DATA = frozenset({"tensor", "as_tensor", "asarray"})
_DRAWING = frozenset(RANDOM) | frozenset(
    words(
        """
        dropout dropout_ dropout1d dropout2d dropout3d alpha_dropout alpha_dropout_
        feature_dropout feature_dropout_ feature_alpha_dropout_ rrelu_ scaled_dot_product_attention
        multi_head_attention_forward lstm gru rnn_tanh rnn_relu lobpcg _standard_gamma
        _sample_dirichlet
        """
    )
)
_PLAIN = frozenset({Tensor})
_GETTERS = frozenset({"T", "mT", "H", "mH", "real", "imag", "data"})


class WholeValues:
    """Which plain tensors are known; one object for a module in validate mode.

    A tensor is known in the version in which it was marked: a write by anything else than a known
    computation makes it unknown, also through a view.
    """

    def __init__(self, mesh: DeviceMesh | AbstractMesh | None = None, valued: bool = True) -> None:
        """`mesh`: of the module's model axes; `valued`: DTensors have values."""
        self.mesh, self.valued = mesh, valued
        self._known: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def following(self) -> AbstractContextManager[None]:
        """`following` of this object."""
        return following(self)

    def mark(self, tensor: Tensor) -> None:
        key = id(tensor)
        known = self._known
        gone = lambda _: known.pop(key, None)  # noqa: E731
        known[key] = (weakref.ref(tensor, gone), tensor._version)

    def forget(self, tensor: Tensor) -> None:
        self._known.pop(id(tensor), None)

    def holds(self, tensor: Tensor) -> bool:
        found = self._known.get(id(tensor))
        return found is not None and found[0]() is tensor and found[1] == tensor._version

    def mark_all(self, value: Any) -> None:
        """Marks a plain tensor, or those in a tuple, list or mapping."""
        if isinstance(value, Tensor):
            if not hasattr(value, "to_local"):
                self.mark(value)
        elif isinstance(value, tuple | list):
            for each in value:
                self.mark_all(each)
        elif isinstance(value, Mapping):
            self.mark_all(list(value.values()))


_current: ContextVar[WholeValues | None] = ContextVar("hp_dtensor_whole_values", default=None)

current_values: Callable[[], WholeValues | None] = _current.get
"""What is known here; None outside a forward in validate mode."""


def mark_whole(tensor: Tensor) -> None:
    """Marks a tensor, where anything is followed."""
    values = _current.get()
    if values is not None:
        values.mark(tensor)


@contextmanager
def following(values: WholeValues) -> Iterator[None]:
    """Within the context, what is made of sizes, numbers and known tensors becomes known."""
    token = _current.set(values)
    try:
        with _Following():
            yield
    finally:
        _current.reset(token)


@contextmanager
def unfollowed() -> Iterator[None]:
    """For this package's own work on local tensors, of which nothing becomes known."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)


class _Following(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        values = _current.get()
        if values is not None and saving_hooks(True) is not None:
            follow_checkpoint(values.following)
        if values is None or not _PLAIN.issuperset(types):
            # Of DTensors and plain tensors together, `dispatch` asks what is known.
            return func(*args, **kwargs)
        tensors = [*_tensors(args), *_tensors(kwargs)]
        if not tensors:
            parts = made_in_parts(func, args, kwargs, values.mesh, values.valued)
            if parts is not None:
                return parts
        known = _is_known(func, args, kwargs, tensors, values)
        written = tensors[0]._base if known and tensors else None
        whole = written is not None and values.holds(written)
        result = func(*args, **kwargs)
        if known:
            if whole and written is not None:  # a view, and what it is a view of
                values.mark(written)
            values.mark_all(result)
            if result is None and tensors:  # item assignment
                values.mark(tensors[0])
        return result


def _is_known(
    func: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    tensors: Sequence[Tensor],
    values: WholeValues,
) -> bool:
    """Whether the function gives the same on every rank; asked before it runs, for it may write."""
    name = getattr(func, "__name__", "")
    if not tensors:
        of_data = name in _OF_DATA
        return name in _MAKERS and (not of_data or _is_numbers([*args, *kwargs.values()]))
    if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return False  # may be a collective
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") in _GETTERS and values.holds(tensors[0])
    return name not in _DRAWING and all(values.holds(tensor) for tensor in tensors)


def _is_numbers(value: Any) -> bool:
    """Whether data is numbers, and no array that may have been a rank's own tensor."""
    if isinstance(value, tuple | list):
        return all(_is_numbers(each) for each in value)
    return not hasattr(value, "__array__") or isinstance(value, Number)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
