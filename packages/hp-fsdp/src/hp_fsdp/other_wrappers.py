"""PyTorch's own data-parallel wrappers, where a model under `fully_shard` meets them.

Each of them replaces parameters, or reduces gradients, that the other one counts on. What comes to
`fully_shard` from them is refused here; in what goes from here to them, they fail by themselves at
the first shard that they read, whose error gives the advice that shards carry.
"""

from __future__ import annotations

import sys
from types import FrameType

from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from hp_fsdp.errors import ShardingError, UsageError

_REPLICAS = (
    "To repeat shards over replicas, give hp_fsdp.fully_shard a mesh of two axes, "
    "init_device_mesh(device, (replicas, shards), mesh_dim_names=('dp_replicate', 'dp_shard'))"
)
_ONE = (
    "a model is sharded by one of the two: use hp_fsdp.fully_shard, which takes the arguments of "
    "PyTorch's, for all of its modules"
)


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
    `fully_shard`, named to it as not its own.

    `_module_parameters` is private to PyTorch, which has no public way to ask what is reduced;
    `test_other_wrappers` fails if it changes.
    """
    present = {id(parameter) for parameter in replicas.module.parameters()}
    return any(id(parameter) not in present for parameter in replicas._module_parameters)
