"""Checkpoints of a sharded model.

`module.state_dict()` holds the shards as `DTensor` entries, which torch.distributed.checkpoint
saves and loads across meshes. Loading takes full, plain tensors and PyTorch's own DTensors as
well: every rank keeps its part. The functions here convert to and from full, plain tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hp_dtensor.dtensor import DTensor, distribute_tensor
from hp_fsdp.errors import ShardingError
from hp_fsdp.full_states import like
from hp_fsdp.param import ShardedParameter, advise
from hp_fsdp.unit import Unit


def install(unit: Unit) -> None:
    """Registers hooks so that saving and loading always meet the shards, gathered or not."""

    def release(*_: Any) -> None:
        if not unit.in_backward:
            unit.release()

    owners: dict[nn.Module, list[tuple[str, ShardedParameter]]] = {}
    for parameter in unit.parameters:
        for owner in parameter.owners:
            owners.setdefault(owner.module, []).append((owner.name, parameter))
    for module, names in owners.items():
        module.register_state_dict_pre_hook(release)
        module.register_load_state_dict_pre_hook(release)
        module.register_load_state_dict_pre_hook(_Cutting(tuple(names)))


class _Cutting:
    """A pre-hook that cuts what is about to be loaded as the shards of one module are cut."""

    def __init__(self, names: tuple[tuple[str, ShardedParameter], ...]) -> None:
        self._names = names

    def __call__(
        self,
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        *_: Any,
    ) -> None:
        is_assigned = local_metadata.get("assign_to_params_buffers", False)
        for name, parameter in self._names:
            value, shard = state.get(prefix + name), parameter.sharded
            assert isinstance(shard, DTensor)
            # What has another shape is left to `load_state_dict`, which lists all that do.
            if isinstance(value, Tensor) and value.shape == shard.shape:
                loaded: Tensor = like(value, shard)
                if isinstance(value, nn.Parameter):
                    loaded = nn.Parameter(loaded, requires_grad=value.requires_grad)
                elif is_assigned:
                    loaded = nn.Parameter(loaded, requires_grad=shard.requires_grad)
                if is_assigned:
                    advise(loaded)
                state[prefix + name] = loaded


def full_state_dict(module: nn.Module, *, cpu: bool = True) -> dict[str, Tensor]:
    """The state dict with every sharded tensor gathered. Every rank of the mesh must call it.

    One tensor is gathered at a time; the result holds the whole model, on the CPU by default.
    """
    result = {}
    with torch.no_grad():
        for name, value in module.state_dict().items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value.detach()
            result[name] = whole.cpu() if cpu else whole
    return result


def load_full_state_dict(
    module: nn.Module, state: Mapping[str, Tensor], *, strict: bool = True
) -> None:
    """Loads full, plain tensors, of which each rank keeps its shard. No communication.

    Args:
        module: a module under `fully_shard`.
        state: full tensors by name, the same on every rank.
        strict: whether names must match exactly.

    Raises:
        ShardingError: names or shapes do not match; nothing has been loaded then.
    """
    own = module.state_dict()
    missing, unexpected = own.keys() - state.keys(), state.keys() - own.keys()
    if strict and (missing or unexpected):
        raise ShardingError(
            f"load_full_state_dict: missing {sorted(missing)}, unexpected {sorted(unexpected)}; "
            "pass strict=False to load what matches"
        )
    shared = sorted(own.keys() & state.keys())
    wrong = [
        f"{name!r} has shape {tuple(state[name].shape)}, expected {tuple(own[name].shape)}"
        for name in shared
        if state[name].shape != own[name].shape
    ]
    if wrong:
        raise ShardingError(
            f"load_full_state_dict: {'; '.join(wrong)}; pass the full tensors of this model, of "
            "which every rank keeps its shard"
        )
    with torch.no_grad():
        for name in shared:
            _load(own[name], state[name])


def _load(target: Tensor, value: Tensor) -> None:
    if isinstance(target, DTensor):
        mesh = target.device_mesh
        assert isinstance(mesh, DeviceMesh)
        target.to_local().copy_(
            distribute_tensor(value.detach(), mesh, target.placements).to_local()
        )
    else:
        target.copy_(value)
