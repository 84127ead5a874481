"""Embedding lookup in production when the rows of the table are sharded.

The module's code looks up global ids in a table of which this rank has a range of rows. A pre-hook
hands it local ids, with ids of other ranks' rows pointing at row 0; a hook then clears what was
looked up for those. The sum over ranks is the output contract's (`Partial` inside).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from hp_dtensor.contracts import Argument
from hp_dtensor.layout import Layout

__all__ = ["VocabularyRange", "is_vocabulary_sharded", "shard_vocabulary", "vocabulary_findings"]


@frozen
class VocabularyRange:
    """The rows `start` to `stop` of `size` that this rank holds."""

    argument: Argument
    start: int
    stop: int
    size: int

    def enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Global ids to local ones. Ids that no rank has stay out of range and fail in the
        lookup, on every rank."""
        ids: Tensor = self.argument.read(args, kwargs)
        foreign = ((ids >= 0) & (ids < self.start)) | ((ids >= self.stop) & (ids < self.size))
        local = torch.where(foreign, 0, ids - self.start)
        # The mask travels with the ids: the module may be called again before it returns.
        local._hp_foreign = foreign  # type: ignore[attr-defined]
        return self.argument.write(args, kwargs, local)

    def leave(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor:
        foreign: Tensor = self.argument.read(args, kwargs)._hp_foreign
        return output.masked_fill(foreign.unsqueeze(-1), 0)


def is_vocabulary_sharded(module: nn.Module, layout: Layout) -> bool:
    """Whether `layout` is that of an embedding's table and cuts its rows."""
    return isinstance(module, nn.Embedding) and any(
        0 in dims for dims in layout.sharding_axes().values()
    )


def vocabulary_findings(module: nn.Embedding, layout: Layout) -> Iterator[str]:
    """Why the table cannot be sharded like this; the same on every rank."""
    per_rank = [layout.dim_runs(0, coord) for coord in layout.abstract_mesh.coordinates()]
    if any(len(runs) > 1 for runs in per_rank):
        yield "a rank's rows are not one range; use Shard(0)"
    elif any(sum(stop - start for start, stop in runs) == 0 for runs in per_rank):
        yield "a rank would have no rows; replicate the table"
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        yield "max_norm, scale_grad_by_freq and sparse need the whole table; replicate it"


def shard_vocabulary(
    module: nn.Embedding, layout: Layout, coordinate: tuple[int, ...]
) -> VocabularyRange:
    """Makes `module` look up local ids in this rank's rows; the caller installs the hooks."""
    ((start, stop),) = layout.dim_runs(0, coordinate)
    argument = Argument.of(module, next(iter(inspect.signature(module.forward).parameters)))
    assert argument is not None
    padding = module.padding_idx
    if padding is not None:
        module.padding_idx = padding - start if start <= padding < stop else None
    module.num_embeddings = stop - start
    return VocabularyRange(argument, start, stop, layout.shape[0])
