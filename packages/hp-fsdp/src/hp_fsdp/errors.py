"""What can go wrong when a model is sharded or used sharded."""

from __future__ import annotations

from hp_platform import HPError


class ShardingError(HPError, ValueError):
    """`fully_shard` was given a module, mesh or parameter it cannot shard."""


class UsageError(HPError):
    """A sharded module was used in a way that leaves its parameters sharded or stale."""


class NotAvailableError(HPError, NotImplementedError):
    """A feature of FSDP2's interface that this version does not have."""


class AssertedError(ShardingError, AssertionError):
    """What PyTorch refuses with an AssertionError, for programs that expect one."""


class NotShardedError(UsageError, ValueError):
    """A module is not under `fully_shard`, or has not what was asked of it."""


class CopyError(UsageError, AssertionError):
    """A sharded module was asked for a deep copy. PyTorch raises an AssertionError there."""
