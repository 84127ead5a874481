"""Two-tier fully sharded data parallelism with copy-free per-parameter collectives."""

from torch.distributed.fsdp import DataParallelMeshDims

from hp_fsdp.api import fully_shard
from hp_fsdp.errors import NotAvailableError, ShardingError, UsageError
from hp_fsdp.explain import explain
from hp_fsdp.memory import MemoryUse, memory_use
from hp_fsdp.policies import CommPolicy, CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from hp_fsdp.sharded_module import (
    FSDPModule,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from hp_fsdp.state_dict import full_state_dict, load_full_state_dict

__all__ = [
    "CPUOffloadPolicy",
    "CommPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MemoryUse",
    "MixedPrecisionPolicy",
    "NotAvailableError",
    "OffloadPolicy",
    "ShardingError",
    "UnshardHandle",
    "UsageError",
    "explain",
    "full_state_dict",
    "fully_shard",
    "load_full_state_dict",
    "memory_use",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
