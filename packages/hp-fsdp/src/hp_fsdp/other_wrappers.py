"""PyTorch's own data-parallel wrappers, where a model under `fully_shard` meets them.

Each of them replaces parameters, or reduces gradients, that the other one counts on: what follows
is an error of internals, or training that leaves parameters out. PyTorch has no hook for what they
are given, so the constructors are wrapped: they look for our shards first, and keep nothing.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.nn.parallel import DistributedDataParallel

from hp_fsdp.errors import NotAvailableError, ShardingError, UsageError
from hp_fsdp.param import SHARDED_MARK

_LOOKS = "_hp_fsdp_looks_for_shards"
_REPLICAS = (
    "To repeat shards over replicas, give hp_fsdp.fully_shard a mesh of two axes, "
    "init_device_mesh(device, (replicas, shards), mesh_dim_names=('dp_replicate', 'dp_shard'))"
)
_ONE = (
    "a model is sharded by one of the two: use hp_fsdp.fully_shard, which takes the arguments of "
    "PyTorch's, for all of its modules"
)


def install() -> None:
    """Wraps the constructors, once a process.

    Raises:
        NotAvailableError: this PyTorch has another one, where mistakes would go unseen.
    """
    if next(iter(FSDPParam.__init__.__annotations__), None) != "param":
        raise NotAvailableError(
            f"FSDPParam of PyTorch {torch.__version__} does not begin with a parameter; use "
            "PyTorch 2.13, with which this version of hp_fsdp was tested"
        )
    checks: list[tuple[Any, str, Callable[[Any], None]]] = [
        (DistributedDataParallel, "module", _refuse_replicas),
        (FullyShardedDataParallel, "module", _refuse_other_sharding),
        (FSDPParam, "param", _refuse_shard),
    ]
    for wrapper, first, check in checks:
        original = wrapper.__init__
        if not hasattr(original, _LOOKS):
            checked = functools.wraps(original)(_checked(original, first, check))
            setattr(checked, _LOOKS, True)
            wrapper.__init__ = checked


def _checked(
    original: Callable[..., None], first: str, check: Callable[[Any], None]
) -> Callable[..., None]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        check(args[0] if args else kwargs.get(first))
        original(self, *args, **kwargs)

    return init


def _refuse_replicas(module: Any) -> None:
    # PyTorch's own mark of what DistributedDataParallel leaves to others.
    left_out = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    name = _first_shard(module, left_out)
    if name is not None:
        raise ShardingError(
            f"DistributedDataParallel was given a {type(module).__name__} whose parameter {name!r} "
            f"is under fully_shard, which reduces its gradients already. {_REPLICAS}. To replicate "
            "the other parameters, name those under fully_shard in "
            "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model"
        )


def _refuse_other_sharding(module: Any) -> None:
    name = _first_shard(module)
    if name is not None:
        raise ShardingError(
            f"FullyShardedDataParallel was given a {type(module).__name__} whose parameter "
            f"{name!r} is under hp_fsdp.fully_shard; {_ONE}"
        )


def _refuse_shard(parameter: Any) -> None:
    if getattr(parameter, SHARDED_MARK, False):
        raise ShardingError(
            "PyTorch's fully_shard was given a module with a parameter of shape "
            f"{tuple(parameter.shape)} that is under hp_fsdp.fully_shard; {_ONE}"
        )


def _first_shard(module: Any, left_out: Collection[str] = ()) -> str | None:
    if not isinstance(module, nn.Module):
        return None
    for name, parameter in module.named_parameters():
        if getattr(parameter, SHARDED_MARK, False) and name not in left_out:
            return name
    return None


def refuse_other_sharding_of(module: nn.Module, path: str) -> None:
    """Raises ShardingError where PyTorch has sharded `module`, which is at `path` of what
    `fully_shard` is given."""
    kinds = {TorchFSDPModule: "fully_shard", FullyShardedDataParallel: "FullyShardedDataParallel"}
    for kind, name in kinds.items():
        if isinstance(module, kind):
            raise ShardingError(
                f"hp_fsdp.fully_shard was given a module of which PyTorch's {name} has sharded "
                f"{path or 'all'!r}; {_ONE}"
            )


def refuse_to_run_in_replicas(path: str) -> None:
    """Raises UsageError in a forward of DistributedDataParallel: it waits for gradients of what
    the parameters of the unit at `path` were when it was made."""
    code = DistributedDataParallel.forward.__code__
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is code and _has_lost_parameters(frame.f_locals["self"]):
            raise UsageError(
                f"unit {path!r} runs inside a DistributedDataParallel that was made before "
                f"fully_shard, and waits for gradients of parameters that are no more. {_REPLICAS}"
            )
        frame = frame.f_back


def _has_lost_parameters(replicas: DistributedDataParallel) -> bool:
    """Whether it reduces parameters that its module no longer has; others than those may be under
    `fully_shard`, named to it as not its own."""
    present = {id(parameter) for parameter in replicas.module.parameters()}
    return any(id(parameter) not in present for parameter in replicas._module_parameters)
