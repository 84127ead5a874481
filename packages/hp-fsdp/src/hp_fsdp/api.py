"""`fully_shard` and the methods it adds to a module: the interface of PyTorch's FSDP2."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, cast, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from hp_fsdp import hooks, optimizers, state_dict
from hp_fsdp.bucket import make_buckets
from hp_fsdp.data_mesh import DataMesh
from hp_fsdp.errors import NotAvailableError, ShardingError, UsageError
from hp_fsdp.param import SHARDED_MARK
from hp_fsdp.policies import AUTO, PER_PARAMETER, CommPolicy, MixedPrecisionPolicy, OffloadPolicy
from hp_fsdp.root import UNIT_ATTRIBUTE, Root, unit_of
from hp_fsdp.schedule import Candidate, Journey, Owner, schedule
from hp_fsdp.unit import Unit
from hp_platform.links import Link

ShardPlacementFn = Callable[[nn.Parameter], Shard | None]

optimizers.install()


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: ShardPlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    comm_policy: CommPolicy | str = ...,
) -> FSDPModule: ...


@overload
def fully_shard(
    module: list[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: ShardPlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    comm_policy: CommPolicy | str = ...,
) -> list[FSDPModule]: ...


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  a frozen value
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008  a frozen value
    ignored_params: set[nn.Parameter] | None = None,
    comm_policy: CommPolicy | str = PER_PARAMETER,
) -> FSDPModule | list[FSDPModule]:
    """Shards the parameters of `module`, in place, and returns it.

    Parameters that an earlier call on a submodule took stay there, so call it bottom-up. The rest
    become one unit, gathered together before `forward` and before backward, and reduced together.
    Registered parameters are `hp_dtensor.DTensor` outside forward and backward and plain full
    tensors inside; build optimizers after this call. Every rank must hold the same values.

    Args:
        module: one module, or a list whose parameters form one unit.
        mesh: one axis (shard), or two (replicate, shard): sharded over the last, usually one
            machine, and repeated over the first. May be a slice of a larger mesh. None: all ranks.
        reshard_after_forward: release the gathered parameters after forward and gather them again
            in backward. None means True, except for the root.
        shard_placement_fn: dim to cut for each parameter, as `Shard(dim)`; None means `Shard(0)`.
            Only leading dims travel without copies.
        mp_policy: types of computation, reduction and outputs.
        offload_policy: only the base policy is available.
        ignored_params: parameters to leave alone.
        comm_policy: which parameters have collectives of their own and which share one; not an
            argument of FSDP2. "per_parameter", "shared_buffer", "auto" or a `CommPolicy`. Values
            do not depend on it; layouts do: what shares a buffer is placed `RaggedShard`. A
            parameter for which `shard_placement_fn` names a dim travels alone.

    Gradients are summed over all data-parallel ranks and divided by their number. In a unit of
    which backward has used some parameter, the others have gradient zero; a unit that backward
    has not used keeps `grad` None. Which units are used must be the same on all ranks.

    Raises:
        ShardingError: the module, mesh or a parameter cannot be sharded; the message names it.
        NotAvailableError: an argument asks for what this version does not have.
    """
    modules = list(module) if isinstance(module, list) else [module]
    _check_modules(modules)
    reshard = _checked_reshard(reshard_after_forward)
    _check_arguments(mesh, mp_policy, ignored_params)
    if type(offload_policy) is not OffloadPolicy:
        raise NotAvailableError(
            f"offload_policy must be OffloadPolicy() in this version, found {offload_policy!r}"
        )
    data = DataMesh.of(mesh)
    found = _owned_parameters(modules, set(ignored_params or ()))
    _move_buffers(modules, data.shard.device)
    candidates = [
        Candidate.of(parameter, name, owners, _placement(shard_placement_fn, parameter, name), data)
        for parameter, (name, owners) in found.items()
    ]
    comm = CommPolicy.of(comm_policy)
    link = data.link() if comm.needs_link and data.shard.size > 1 else None
    journeys = _journeys(candidates, data, mp_policy, comm, link)
    buckets = make_buckets(journeys, data, mp_policy)
    taken = {
        id(candidate): parameter
        for journey, bucket in zip(journeys, buckets)
        for candidate, parameter in zip(journey.candidates, bucket.parameters)
    }
    parameters = [taken[id(candidate)] for candidate in candidates]
    unit = Unit(modules, buckets, parameters, data, mp_policy, reshard, comm, link)
    for each in modules:
        each.__dict__[UNIT_ATTRIBUTE] = unit
        each.__class__ = _sharded_class(type(each))  # type: ignore[arg-type]
    hooks.install(unit)
    state_dict.install(unit)
    sharded = cast("list[FSDPModule]", modules)
    return sharded if isinstance(module, list) else sharded[0]


# -- what is being sharded ----------------------------------------------------------------------


def _check_modules(modules: Sequence[nn.Module]) -> None:
    if not modules:
        raise ShardingError("fully_shard was given an empty list of modules")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise ShardingError(f"fully_shard takes modules, found {type(module).__name__}")
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            raise ShardingError(
                f"fully_shard cannot take a {type(module).__name__}, whose forward never runs; "
                "pass list(module), or each of its modules"
            )
        if unit_of(module) is not None:
            raise ShardingError(
                f"{_described(module)} is already sharded by an earlier fully_shard call"
            )
    for outer in modules:
        inner = {id(m) for m in outer.modules()} - {id(outer)}
        for other in modules:
            if id(other) in inner:
                raise ShardingError(
                    f"fully_shard was given {_described(other)} together with a module that "
                    "contains it; list each module once"
                )


def _check_arguments(mesh: object, mp_policy: object, ignored_params: object) -> None:
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise ShardingError(
            f"mesh must be a torch.distributed.device_mesh.DeviceMesh or None, found {mesh!r}"
        )
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        kind = type(mp_policy)
        raise ShardingError(
            "mp_policy must be a hp_fsdp.MixedPrecisionPolicy, found "
            f"{kind.__module__}.{kind.__name__}; import MixedPrecisionPolicy from hp_fsdp, where "
            "it takes the same arguments as PyTorch's"
        )
    given = ignored_params
    if given is not None and not (
        isinstance(given, set | frozenset | list | tuple)
        and all(isinstance(each, nn.Parameter) for each in given)
    ):
        raise ShardingError(
            f"ignored_params must be a set of nn.Parameter or None, found {type(given).__name__}; "
            "pass {module.weight}, the objects themselves, not names"
        )


def _checked_reshard(value: bool | int | None) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    raise NotAvailableError(
        f"reshard_after_forward={value!r}: resharding to a smaller group is not available; pass "
        "True, False or None"
    )


def _owned_parameters(
    modules: Sequence[nn.Module], ignored: set[nn.Parameter]
) -> dict[nn.Parameter, tuple[str, tuple[Owner, ...]]]:
    """Parameters for the new unit with a name and every place that holds them.

    Submodules of an existing unit are left out, with all of theirs.

    Raises:
        ShardingError: a parameter belongs to a unit that is inside, around or beside this one.
    """
    found: dict[nn.Parameter, tuple[str, list[Owner]]] = {}
    for root in modules:
        for path, module in _unsharded_submodules(root):
            for name, parameter in module._parameters.items():
                if parameter is None or parameter in ignored:
                    continue
                full = f"{path}.{name}" if path else name
                if getattr(parameter, SHARDED_MARK, False):
                    raise ShardingError(
                        f"parameter {full!r} of {_described(root)} already belongs to another "
                        "unit. Shard submodules before the modules that contain them, and shard "
                        "modules that share a parameter together: fully_shard([first, second])"
                    )
                found.setdefault(parameter, (full, []))[1].append(Owner(module, name))
    return {p: (name, tuple(owners)) for p, (name, owners) in found.items()}


def _unsharded_submodules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """`named_modules`, shared ones once, without entering modules that are sharded already."""
    seen: set[nn.Module] = set()
    stack = [("", root)]
    while stack:
        path, module = stack.pop()
        if module in seen:
            continue
        seen.add(module)
        yield path, module
        children = [
            (f"{path}.{name}" if path else name, child)
            for name, child in module._modules.items()
            if child is not None and unit_of(child) is None
        ]
        stack.extend(reversed(children))


def _journeys(
    candidates: Sequence[Candidate],
    data: DataMesh,
    precision: MixedPrecisionPolicy,
    policy: CommPolicy,
    link: Link | None,
) -> list[Journey]:
    """Decides which candidates travel together, on all ranks alike."""
    journeys = schedule(candidates, data, precision, policy, link)
    if policy.choice == AUTO:
        together = [tuple(c.name for c in journey.candidates) for journey in journeys]
        data.agree("which parameters travel together", together)
    return journeys


def _move_buffers(modules: Sequence[nn.Module], device: torch.device) -> None:
    for module in modules:
        for _, child in _unsharded_submodules(module):
            for name, buffer in child._buffers.items():
                if buffer is not None and not buffer.is_meta and buffer.device != device:
                    child._buffers[name] = buffer.to(device)


def _placement(
    function: ShardPlacementFn | None, parameter: nn.Parameter, name: str
) -> Shard | None:
    placement = None if function is None else function(parameter)
    if placement is not None and not isinstance(placement, Shard):
        raise ShardingError(
            f"shard_placement_fn returned {placement!r} for parameter {name!r}; expected "
            "torch.distributed.tensor.Shard(dim) or None"
        )
    return placement


def _described(module: nn.Module) -> str:
    return f"module {type(module).__name__}"


# -- the sharded module ---------------------------------------------------------------------------


@functools.cache
def _sharded_class(original: type[nn.Module]) -> type[nn.Module]:
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

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise UsageError(
            f"{_described(cast(nn.Module, self))} is sharded and cannot be deep-copied; copy it "
            "before fully_shard, or copy its state_dict()"
        )

    # -- gathering ---------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers the module's own unit, not those of its submodules."""
        unit = _own_unit(self)
        Root.of(unit)
        unit.drop_if_stale()
        unit.gather("unshard")
        if async_op:
            return UnshardHandle(unit)
        unit.wait()
        return None

    def reshard(self) -> None:
        """Releases the module's own unit, not those of its submodules."""
        _own_unit(self).release()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether forward releases the gathered parameters."""
        value = _checked_reshard(reshard_after_forward)
        for unit in _units(self, recurse):
            unit.reshard_after_forward = value

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Whether backward does; False saves gathers between micro-steps."""
        for unit in _units(self, recurse):
            unit.reshard_after_backward = reshard_after_backward

    # -- prefetching ---------------------------------------------------------------------------

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Units to gather when this one's forward begins, instead of the recorded order."""
        _own_unit(self).forward_prefetch = [_own_unit(module) for module in modules]

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Units to gather when this one's backward begins, instead of the recorded order."""
        _own_unit(self).backward_prefetch = [_own_unit(module) for module in modules]

    def set_prefetch_depth(self, forward: int = 1, backward: int = 1) -> None:
        """How many units the recorded order gathers ahead; at most depth + 1 are gathered.

        Call it on the root module. Not part of FSDP2's interface.
        """
        if not all(isinstance(depth, int) and depth >= 0 for depth in (forward, backward)):
            raise ShardingError(
                f"prefetch depths must be integers >= 0, found {forward!r} and {backward!r}"
            )
        root = Root.of(_own_unit(self))
        root.forward_order.depth = forward
        root.backward_order.depth = backward

    # -- gradients -----------------------------------------------------------------------------

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """False: backward accumulates full gradients on every rank and communicates nothing."""
        for unit in _units(self, recurse):
            unit.requires_gradient_sync = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """False: backward reduces over the shard axis only and accumulates on the shards."""
        for unit in _units(self, recurse):
            unit.requires_all_reduce = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """False: the end of backward does not wait for reductions in flight; a later one does."""
        Root.of(_own_unit(self)).is_last_backward = is_last_backward

    def reset_iter_state(self) -> None:
        """Forgets a forward or backward that raised, with the gradients it left unreduced.

        The next forward of the root does the same by itself after a failed backward.
        """
        Root.of(_own_unit(self)).reset()

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divides summed gradients by `factor` instead of by the number of data-parallel ranks."""
        if not (isinstance(factor, int | float) and 0 < factor < math.inf):
            raise ShardingError(
                f"the gradient divide factor must be a positive number, found {factor!r}"
            )
        _own_unit(self).divisor = factor

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accepted; reductions are always sums, followed by one division."""

    # -- not in this version ---------------------------------------------------------------------

    def set_reduce_scatter_divide_factor(self, factor: float) -> NoReturn:
        _refuse("set_reduce_scatter_divide_factor", "use set_gradient_divide_factor")

    def set_custom_all_gather(self, comm: Any) -> NoReturn:
        _refuse("set_custom_all_gather", "collectives go through hp_platform")

    def set_custom_reduce_scatter(self, comm: Any) -> NoReturn:
        _refuse("set_custom_reduce_scatter", "collectives go through hp_platform")

    def set_all_reduce_hook(self, hook: Any, *, stream: Any = None) -> NoReturn:
        _refuse("set_all_reduce_hook", "change the shards' gradients after backward")

    def set_post_optim_event(self, event: Any) -> NoReturn:
        _refuse("set_post_optim_event", "gathers already follow the current stream")

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> NoReturn:
        _refuse("set_unshard_in_backward", "freeze the parameters instead")

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> NoReturn:
        _refuse("set_allocate_memory_from_process_group_for_comm", "leave it out")

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> NoReturn:
        _refuse("set_symm_mem_for_comm", "leave it out")

    def set_separate_reduce_scatter_group(self, enable: bool = True) -> NoReturn:
        _refuse("set_separate_reduce_scatter_group", "leave it out")

    def set_reduce_scatter_max_input_buffers(self, count: int) -> NoReturn:
        _refuse("set_reduce_scatter_max_input_buffers", "one unit's gradients are in flight")

    def set_reduce_scatter_unused_params(self, enable: bool) -> NoReturn:
        _refuse("set_reduce_scatter_unused_params", "unused parameters of a used unit count as 0")

    # -- nn.Module -------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `nn.Module.zero_grad`; between forward and backward too it means the shards."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        for unit in _units(self, recurse=True):
            for parameter in unit.parameters:
                parameter.zero_gradient(set_to_none)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        # `.to`, `.half`, `to_empty` and the like must meet the shards.
        for unit in _units(self, recurse=True):
            unit.release()
        applied = super()._apply(*args, **kwargs)  # type: ignore[misc]
        for unit in _units(self, recurse=True):
            for parameter in unit.parameters:
                parameter.tie()
        return applied


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes `module.method_name(...)` gather and release parameters as `module(...)` does.

    Does nothing for a module that is not under `fully_shard`.

    Raises:
        UsageError: the module has no such method.
    """
    unit = unit_of(module)
    if unit is None:
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise UsageError(f"{_described(module)} has no method {method_name!r} to register")
    owner = unit

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = hooks.before_forward(owner, module, args, kwargs)
        return hooks.after_forward(owner, module, method(*args, **kwargs))

    setattr(module, method_name, wrapped)


def _own_unit(module: object) -> Unit:
    unit = unit_of(module) if isinstance(module, nn.Module) else None
    if unit is None:
        raise UsageError(f"{type(module).__name__} is not under fully_shard")
    return unit


def _units(module: object, recurse: bool) -> list[Unit]:
    own = _own_unit(module)
    if not recurse:
        return [own]
    children = (unit_of(child) for child in cast(nn.Module, module).modules())
    return list(dict.fromkeys([own, *(unit for unit in children if unit is not None)]))


def _refuse(method: str, remedy: str) -> NoReturn:
    raise NotAvailableError(f"FSDPModule.{method} is not available in this version: {remedy}")
