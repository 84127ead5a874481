"""Two-tier fully sharded data parallelism with copy-free per-parameter collectives."""

from hp_fsdp.api import FSDPModule, UnshardHandle, fully_shard, register_fsdp_forward_method
from hp_fsdp.errors import NotAvailableError, ShardingError, UsageError
from hp_fsdp.explain import explain
from hp_fsdp.policies import CommPolicy, CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from hp_fsdp.state_dict import full_state_dict, load_full_state_dict

__all__ = [
    "CPUOffloadPolicy",
    "CommPolicy",
    "FSDPModule",
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
    "register_fsdp_forward_method",
]
