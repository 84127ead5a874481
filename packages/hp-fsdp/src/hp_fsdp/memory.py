"""How much memory a sharded model takes on this rank."""

from __future__ import annotations

from attrs import frozen
from torch import nn

from hp_fsdp.errors import UsageError
from hp_fsdp.root import unit_of
from hp_fsdp.unit import Unit


@frozen
class MemoryUse:
    """Bytes on this rank, padding included. Activations and optimizer state are not counted.

    Attributes:
        shards: this rank's parts of the parameters.
        gradients: its parts of the reduced gradients, as they are while `.grad` holds them.
        passing: gathered parameters, full gradients in their buffers and received parts, at the
            moment when there were most of them; zero before the first step. Gradients that
            autograd keeps in memory of its own choice are not in it.
    """

    shards: int
    gradients: int
    passing: int


def memory_use(module: nn.Module) -> MemoryUse:
    """What the units of `module` hold, and have held at most since they were sharded.

    Raises:
        UsageError: `module` is not under `fully_shard`.
    """
    own = unit_of(module)
    if own is None:
        raise UsageError(f"{type(module).__name__} is not under fully_shard")
    units: dict[Unit, None] = {}
    for child in module.modules():
        unit = unit_of(child)
        if unit is not None:
            units[unit] = None
    buckets = [bucket for unit in units for bucket in unit.buckets]
    trainable = [b for b in buckets if any(p.sharded.requires_grad for p in b.parameters)]
    return MemoryUse(
        shards=sum(b.storage.nbytes for b in buckets),
        gradients=sum(b.part * b.reduce_dtype.itemsize for b in trainable),
        passing=0 if own.root is None else own.root.pages.most_in_use,
    )
