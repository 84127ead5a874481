"""What a module under `fully_shard` also is: the methods of PyTorch's `FSDPModule`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn, cast

from torch import Tensor, nn

from hp_fsdp import hooks
from hp_fsdp.errors import (
    CopyError,
    NotAvailableError,
    NotShardedError,
    ShardingError,
    UsageError,
)
from hp_fsdp.model_agreement import types_of
from hp_fsdp.regrouping import checked_reshard, regroup
from hp_fsdp.root import Root, unit_of
from hp_fsdp.uninitialized import note_uninitialized_buffers
from hp_fsdp.unit import Unit


@functools.cache
def sharded_class(original: type[nn.Module]) -> type[nn.Module]:
    """The class a sharded module gets: `original` with `FSDPModule` before it."""

    namespace = {"__module__": original.__module__}
    return type(f"FSDP{original.__name__}", (FSDPModule, original), namespace)


class UnshardHandle:
    """What `unshard(async_op=True)` returns."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Makes the gathered parameters valid and registers them on the module."""
        self._unit.wait()


class FSDPModule:
    """What a module under `fully_shard` also is. Methods have FSDP2's names and meaning."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """An object of the original class: containers make their slices by `type(self)(...)`,
        and a slice is in no unit."""
        if cls is FSDPModule:
            return super().__new__(cls)
        original = cls.__mro__[2]
        return original(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise CopyError(
            f"FSDP does not support deepcopy: {type(self).__name__} is sharded; copy it before "
            "fully_shard and shard both, as for torch.optim.swa_utils.AveragedModel, or copy its "
            "state_dict(), as an average of weights may be kept"
        )

    # -- gathering ---------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers the module's own unit, not those of its submodules."""
        unit = own_unit(self)
        Root.of(unit)
        unit.drop_if_stale()
        unit.gather("unshard")
        if async_op:
            return UnshardHandle(unit)
        unit.wait()
        return None

    def reshard(self) -> None:
        """Releases the module's own unit, not those of its submodules."""
        own_unit(self).release()

    def set_reshard_after_forward(
        self, reshard_after_forward: bool | int, recurse: bool = True
    ) -> None:
        """Whether forward releases the gathered parameters, or keeps a part of them.

        An integer makes process groups, so all ranks must make the call.
        """
        for unit in units_of(self, recurse):
            value = checked_reshard(reshard_after_forward, unit.data)
            unit.reshard_after_forward = bool(value) if value is not None else None
            regroup(unit, value)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Whether backward does; False saves gathers between micro-steps."""
        for unit in units_of(self, recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """False: backward does not gather this unit, whose values its gradients do not need.

        Right for embeddings. Any other gradient would be computed from memory that holds nothing.
        """
        own_unit(self).unshard_in_backward = unshard_in_backward

    def set_post_optim_event(self, event: Any) -> None:
        """An event recorded after the optimizer's step; the next forward waits for it, once.

        Gathers follow the current stream, so it is needed only where the step ran on another.
        """
        Root.of(own_unit(self)).post_optim_event = event

    # -- prefetching ---------------------------------------------------------------------------

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Units to gather when this one's forward begins, instead of the recorded order."""
        own_unit(self).forward_prefetch = _units_to_prefetch(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Units to gather when this one's backward begins, instead of the recorded order."""
        own_unit(self).backward_prefetch = _units_to_prefetch(modules)

    def set_prefetch_depth(self, forward: int = 1, backward: int = 1) -> None:
        """How many units the recorded order gathers ahead; at most depth + 1 are gathered.

        Call it on the root module. Not part of FSDP2's interface.
        """
        if not all(isinstance(depth, int) and depth >= 0 for depth in (forward, backward)):
            raise ShardingError(
                f"prefetch depths must be integers >= 0, found {forward!r} and {backward!r}"
            )
        root = Root.of(own_unit(self))
        root.forward_order.depth = forward
        root.backward_order.depth = backward

    # -- gradients -----------------------------------------------------------------------------

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """False: backward accumulates full gradients on every rank and communicates nothing.

        As in FSDP2 it sets both tiers: True also undoes `set_requires_all_reduce(False)`.
        """
        for unit in units_of(self, recurse):
            unit.requires_gradient_sync = requires_gradient_sync
            unit.requires_all_reduce = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """False: backward reduces over the shard axis only and accumulates on the shards."""
        for unit in units_of(self, recurse):
            unit.requires_all_reduce = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """False: the end of backward does not wait for reductions in flight; a later one does."""
        Root.of(own_unit(self)).is_last_backward = is_last_backward

    def reset_iter_state(self) -> None:
        """Forgets a forward or backward that raised, with the gradients it left unreduced.

        The next forward of the root does the same by itself after a failed backward.

        Raises:
            UsageError: this is not the root, which alone knows what the pass has begun.
        """
        unit = own_unit(self)
        root = Root.of(unit)
        if root.unit is not unit:
            raise UsageError(
                f"reset_iter_state was called on unit {unit.path!r}; call it on the root module, "
                f"{type(root.unit.modules[0]).__name__}, whose forward begins the pass"
            )
        root.reset()

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divides summed gradients by `factor` instead of by the number of data-parallel ranks."""
        if not (isinstance(factor, int | float) and 0 < factor < math.inf):
            raise ShardingError(
                f"the gradient divide factor must be a positive number, found {factor!r}"
            )
        own_unit(self).divisor = factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The older name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accepted; reductions are always sums, followed by one division."""

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Checked and accepted: reduce-scatters read gradients where they are, so that there is
        no input buffer, and every bound from 1 is kept.

        Raises:
            TypeError: it is not an int.
            ValueError: it is below 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(
                f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}"
            )
        if max_input_buffers < 1:
            raise ShardingError(
                f"max_input_buffers must be a positive int, got {max_input_buffers}"
            )

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Private in FSDP2, where pipelines and its tests call it: gathers are always issued
        ahead of their wait here."""

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """True: ranks may differ in whether they use the unit at all; unused counts as zero.

        Every rank then gathers the unit when the root's forward begins and keeps it until
        backward has ended, where all reduce it, in the order of the modules: what one rank alone
        knows, such as that an expert got no token, changes no collective. It costs the memory of
        the gathered unit for the whole step, and its reduction overlaps with nothing. Every rank's
        loss must reach at least one unit of the model.
        """
        for unit in units_of(self, recurse):
            unit.reduces_unused = reduce_scatter_unused_params

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: Any = None) -> None:
        """Calls `hook(summed)` with the unit's flat, summed shards before they are divided.

        Args:
            hook: changes the tensor in place, and by a linear function only, such as an
                all-reduce over another group.
            stream: not available: the hook runs on the current stream.
        """
        if stream is not None:
            _refuse("set_all_reduce_hook(stream=...)", "switch streams inside the hook")
        if not callable(hook):
            raise ShardingError(f"set_all_reduce_hook needs a function, found {hook!r}")
        own_unit(self).all_reduce_hook = hook

    # -- not in this version ---------------------------------------------------------------------

    def set_custom_all_gather(self, comm: Any) -> NoReturn:
        _refuse("set_custom_all_gather", "collectives go through hp_platform")

    def set_custom_reduce_scatter(self, comm: Any) -> NoReturn:
        _refuse("set_custom_reduce_scatter", "collectives go through hp_platform")

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        if enable:
            _refuse("set_allocate_memory_from_process_group_for_comm", "leave it out")

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> NoReturn:
        _refuse("set_symm_mem_for_comm", "leave it out")

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        if enable:
            _refuse("set_separate_reduce_scatter_group", "leave it out")

    # -- nn.Module -------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `nn.Module.zero_grad`; between forward and backward too it means the shards."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        for unit in units_of(self, recurse=True):
            for parameter in unit.parameters:
                parameter.zero_gradient(set_to_none)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        # `.to`, `.half`, `to_empty` and the like must meet the shards.
        units = units_of(self, recurse=True)
        for unit in units:
            unit.release()
        types = [types_of(unit) for unit in units]
        with note_uninitialized_buffers(cast(nn.Module, self)) as from_meta:
            applied = super()._apply(*args, **kwargs)  # type: ignore[misc]
        if from_meta:
            own_unit(self).has_new_buffers = True
        for unit, before in zip(units, types):
            for parameter in unit.parameters:
                parameter.tie()
            if unit.root is not None and types_of(unit) != before:
                unit.root.models.look_again()
        return applied


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes `module.method_name(...)` gather and release parameters as `module(...)` does.

    Does nothing for a module that is not under `fully_shard`.

    Raises:
        NotShardedError: the module has no such method.
    """
    unit = unit_of(module)
    if unit is None:
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise NotShardedError(
            f"{type(module)} does not have a method {method_name}; register one that computes"
        )
    owner = unit

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = hooks.before_forward(owner, module, args, kwargs)
        return hooks.after_forward(owner, module, method(*args, **kwargs))

    setattr(module, method_name, wrapped)


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Accepted for several root modules, such as pipeline stages; there is nothing to share.

    FSDP2 makes streams for every root. Here collectives run on their process group's own.

    Raises:
        NotShardedError: one of `modules` is not under `fully_shard`.
    """
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise NotShardedError(
                f"Expects list of FSDPModules but got {module}; call fully_shard on it first"
            )


def _units_to_prefetch(modules: Sequence[object]) -> list[Unit]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise NotShardedError(
                f"Expects FSDPModule but got {type(module)}: {module}; call fully_shard on it first"
            )
    return [own_unit(module) for module in modules]


def own_unit(module: object) -> Unit:
    """The unit of a module under `fully_shard`.

    Raises:
        NotShardedError: it is not.
    """
    unit = unit_of(module) if isinstance(module, nn.Module) else None
    if unit is None:
        raise NotShardedError(f"{type(module).__name__} is not under fully_shard")
    return unit


def units_of(module: object, recurse: bool) -> list[Unit]:
    """The module's own unit and, with `recurse`, those below it; each once."""
    own = own_unit(module)
    if not recurse:
        return [own]
    children = (unit_of(child) for child in cast(nn.Module, module).modules())
    return list(dict.fromkeys([own, *(unit for unit in children if unit is not None)]))


def _refuse(method: str, remedy: str) -> NoReturn:
    raise NotAvailableError(f"FSDPModule.{method} is not available in this version: {remedy}")
