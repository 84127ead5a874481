"""`fully_shard` and the methods it adds to a module: the interface of PyTorch's FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import DataParallelMeshDims
from torch.distributed.tensor import Shard

from hp_fsdp import full_states, hooks, optimizers, other_wrappers, state_dict
from hp_fsdp.bucketing import make_buckets
from hp_fsdp.data_mesh import DataMesh
from hp_fsdp.errors import AssertedError, ShardingError
from hp_fsdp.offload import Offload
from hp_fsdp.param import SHARDED_MARK
from hp_fsdp.policies import (
    AUTO,
    PER_PARAMETER,
    CommPolicy,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from hp_fsdp.regrouping import checked_reshard, regroup
from hp_fsdp.root import UNIT_ATTRIBUTE, name_units_below, unit_of
from hp_fsdp.schedule import Candidate, Journey, Owner, schedule
from hp_fsdp.sharded_module import FSDPModule, sharded_class
from hp_fsdp.unit import Unit
from hp_platform.links import Link

ShardPlacementFn = Callable[[nn.Parameter], Shard | None]

optimizers.install()
full_states.install()


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
    dp_mesh_dims: DataParallelMeshDims | None = ...,
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
    dp_mesh_dims: DataParallelMeshDims | None = ...,
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
    dp_mesh_dims: DataParallelMeshDims | None = None,
    comm_policy: CommPolicy | str = PER_PARAMETER,
) -> FSDPModule | list[FSDPModule]:
    """Shards the parameters of `module`, in place, and returns it.

    Parameters that an earlier call on a submodule took stay there, so call it bottom-up. The rest
    become one unit, gathered together before `forward` and before backward, and reduced together.
    Registered parameters are `hp_dtensor.DTensor` outside forward and backward and plain full
    tensors inside; build optimizers after this call. Every rank must hold the same values.
    What PyTorch's `parallelize_module` has cut, on another axis of the same mesh, is PyTorch's
    DTensor inside.

    Args:
        module: one module, or a list whose parameters form one unit.
        mesh: one axis (shard), or two (replicate, shard): sharded over the last, usually one
            machine, and repeated over the first. May be a slice of a larger mesh. None: all ranks.
        reshard_after_forward: release the gathered parameters after forward and gather them again
            in backward. None means True, except for the root and, once it is known, for the unit
            with which forward ends and backward begins. A number, which divides the size of the
            shard axis, is the size of the groups that keep the parameters between them and
            gather them in backward; parameters cut along other than leading dims are gathered
            from all ranks nevertheless.
        shard_placement_fn: dim to cut for each parameter, as `Shard(dim)`; None means `Shard(0)`.
            Only leading dims travel without copies.
        mp_policy: types of computation, reduction and outputs.
        offload_policy: `CPUOffloadPolicy` keeps shards, gradients and optimizer state in host
            memory.
        ignored_params: parameters to leave alone.
        dp_mesh_dims: names of the axes of `mesh` that shard and replicate, where it has others
            beside them, as a slice `mesh['dp_replicate', 'dp_shard']` would; one name each.
        comm_policy: which parameters have collectives of their own and which share one; not an
            argument of FSDP2. "per_parameter", "shared_buffer", "auto" or a `CommPolicy`. Values
            do not depend on it; layouts do: what shares a buffer is placed `RaggedShard`. A
            parameter for which `shard_placement_fn` names a dim travels alone.

    Gradients are summed over all data-parallel ranks and divided by their number. In a unit of
    which backward has used some parameter, the others have gradient zero; a unit that backward
    has not used keeps `grad` None. Which units are used must be the same on all ranks, except for
    those under `set_reduce_scatter_unused_params(True)`.

    Raises:
        ShardingError: the module, mesh or a parameter cannot be sharded; the message names it.
        NotAvailableError: an argument asks for what this version does not have.
    """
    modules = list(module) if isinstance(module, list) else [module]
    _check_modules(modules)
    _check_arguments(mesh, mp_policy, offload_policy, ignored_params, dp_mesh_dims)
    data = DataMesh.of(mesh, dp_mesh_dims)
    reshard = checked_reshard(reshard_after_forward, data)
    offload = Offload.of(offload_policy, data.shard.device)
    found = _owned_parameters(modules, set(ignored_params or ()))
    _move_buffers(modules, data.shard.device)
    candidates = [
        Candidate.of(parameter, name, owners, _placement(shard_placement_fn, parameter, name), data)
        for parameter, (name, owners) in found.items()
    ]
    comm = CommPolicy.of(comm_policy)
    link = data.link() if comm.needs_link and data.shard.size > 1 else None
    journeys = _journeys(candidates, data, mp_policy, comm, link)
    buckets = make_buckets(journeys, data, mp_policy, offload)
    taken = {
        id(candidate): parameter
        for journey, bucket in zip(journeys, buckets)
        for candidate, parameter in zip(journey.candidates, bucket.parameters)
    }
    parameters = [taken[id(candidate)] for candidate in candidates]
    for parameter in parameters:
        parameter.of_unit = parameters
    releases = None if reshard is None else bool(reshard)
    unit = Unit(modules, buckets, parameters, data, mp_policy, releases, comm, link, offload)
    regroup(unit, reshard)
    for each in modules:
        each.__dict__[UNIT_ATTRIBUTE] = unit
        each.__class__ = sharded_class(type(each))  # type: ignore[arg-type]
    name_units_below(unit)
    hooks.install(unit)
    state_dict.install(unit)
    sharded = cast("list[FSDPModule]", modules)
    return sharded if isinstance(module, list) else sharded[0]


def _state(module: nn.Module) -> Unit | None:
    """`fully_shard.state(module)`, as PyTorch's has it: an object per call of `fully_shard`, or
    None for a module that was given to none."""
    return unit_of(module)


fully_shard.state = _state  # type: ignore[attr-defined]


# -- what is being sharded ----------------------------------------------------------------------


def _check_modules(modules: Sequence[nn.Module]) -> None:
    if not modules:
        raise ShardingError("fully_shard was given an empty list of modules")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise ShardingError(f"fully_shard takes modules, found {type(module).__name__}")
        has_forward = type(module).forward is not nn.Module.forward
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and not has_forward:
            raise ShardingError(
                "fully_shard does not support containers that do not implement forward: found "
                f"{type(module).__name__}; pass list(module), or each of its modules"
            )
        if unit_of(module) is not None:
            raise AssertedError(
                "Each distinct composable distributed API can only be applied to a module once: "
                f"{_described(module)} is already sharded by an earlier fully_shard call"
            )
        for path, part in _unsharded_submodules(module):
            other_wrappers.refuse_other_sharding_of(part, path)
    for outer in modules:
        inner = {id(m) for m in outer.modules()} - {id(outer)}
        for other in modules:
            if id(other) in inner:
                raise ShardingError(
                    f"fully_shard was given {_described(other)} together with a module that "
                    "contains it; list each module once"
                )


def _check_arguments(
    mesh: object,
    mp_policy: object,
    offload_policy: object,
    ignored_params: object,
    dp_mesh_dims: object,
) -> None:
    if dp_mesh_dims is not None and not isinstance(dp_mesh_dims, DataParallelMeshDims):
        raise ShardingError(
            f"dp_mesh_dims must be a DataParallelMeshDims or None, found {dp_mesh_dims!r}"
        )
    if type(offload_policy) not in (OffloadPolicy, CPUOffloadPolicy):
        kind = type(offload_policy)
        raise ShardingError(
            "offload_policy must be a hp_fsdp.OffloadPolicy or hp_fsdp.CPUOffloadPolicy, found "
            f"{kind.__module__}.{kind.__name__}; import it from hp_fsdp"
        )
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
        held = given if isinstance(given, set | frozenset | list | tuple) else ()
        wrong = [type(each).__name__ for each in held if not isinstance(each, nn.Parameter)]
        raise ShardingError(
            f"ignored_params must be a set of nn.Parameter or None, found {type(given).__name__}"
            f"{f' with a {wrong[0]}' if wrong else ''}; "
            "pass {module.weight}, the objects themselves, not names"
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
                        f"parameter {full!r} of {_described(root)} is shared with a parameter "
                        "already managed by another FSDP group: it belongs to another unit. "
                        "Shard submodules before the modules that contain them, and shard "
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
