"""What a sharded model will communicate, unit by unit, as text."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from hp_fsdp.bucket import Bucket
from hp_fsdp.cut import SharedCut
from hp_fsdp.errors import UsageError
from hp_fsdp.root import unit_of
from hp_fsdp.unit import Unit


def explain(module: nn.Module) -> str:
    """The schedule of every unit of `module`: one line for every collective of the shard axis.

    Shows what travels alone and what together, why, how many bytes an all-gather moves, and how
    the parameters are placed. Sends nothing.

    Raises:
        UsageError: no part of `module` is under `fully_shard`.
    """
    lines: list[str] = []
    seen: set[Unit] = set()
    for path, child in module.named_modules():
        unit = unit_of(child)
        if unit is not None and unit not in seen:
            seen.add(unit)
            lines.extend(_unit_lines(path or "root", unit))
    if not lines:
        raise UsageError(f"{type(module).__name__} has no module under fully_shard to explain")
    return "\n".join(lines)


def _unit_lines(path: str, unit: Unit) -> Iterator[str]:
    data, shard = unit.data, unit.data.shard
    replicas = (
        f", one all-reduce over {data.replicate.name} ({data.replicate.size})"
        if data.has_replicas and data.replicate
        else ""
    )
    calls = len(unit.buckets)
    yield (
        f"{path}: {_count(len(unit.parameters), 'parameter')}, {_count(calls, 'all-gather')} and "
        f"{'reduce-scatter' if calls == 1 else 'reduce-scatters'} over {shard.name} "
        f"({_count(shard.size, 'rank')}, {shard.tier.value}){replicas}; "
        f"{unit.comm.describe(unit.link)}"
    )
    for bucket in unit.buckets:
        yield from _bucket_lines(bucket)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _bucket_lines(bucket: Bucket) -> Iterator[str]:
    size = bucket.gathered_numel * bucket.compute_dtype.itemsize
    dtype = str(bucket.compute_dtype).removeprefix("torch.")
    if len(bucket.parameters) > 1:
        yield f"  together {size:>14,} bytes {dtype}"
    for parameter in bucket.parameters:
        shape, placement = tuple(parameter.cut.shape), parameter.cut.placement
        if isinstance(parameter.cut, SharedCut):
            own = parameter.cut.numel * bucket.compute_dtype.itemsize
            yield f"    {own:>18,} bytes  {parameter.name} {shape} {placement!r}"
        else:
            yield f"  alone    {size:>14,} bytes {dtype}  {parameter.name} {shape} {placement!r}"
