"""PyTorch's checkpointing protocol for any layout (`torch.distributed.checkpoint`).

A checkpoint stores boxes: an offset and a size in the global tensor. What a rank holds is a union
of boxes, one per product of runs; a `RaggedShard` over several dims is cut along row borders.
Boxes depend on global indices only, so a checkpoint written from one layout and mesh is read into
any other, PyTorch's own DTensor included. Replicas write equal boxes, of which the planner keeps
one. The functions here are what a DTensor's `__create_write_items__`, `__create_chunk_list__` and
`__get_tensor_shard__` delegate to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

import torch
from attrs import frozen
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from hp_dtensor.cuts import Run, length
from hp_dtensor.layout import Coordinate, Layout, layout_of


@frozen
class Box:
    """A block of the global tensor that one rank holds.

    Attributes:
        offsets, sizes: in the global tensor.
        where: start and stop of the block along every dim of the local tensor, which has fewer
            dims than the global one under a RaggedShard over several dims.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    where: tuple[Run, ...]

    def of(self, local: Tensor) -> Tensor:
        """A view of the box in the local tensor, in the shape of the global block."""
        for dim, (start, stop) in enumerate(self.where):
            local = local.narrow(dim, start, stop - start)
        return local.view(self.sizes) if local.shape != self.sizes else local


def boxes(layout: Layout, coord: Coordinate | None = None) -> tuple[Box, ...]:
    """The boxes that make up what `coord` holds, by ascending offset within each dim.

    A tensor without elements is one empty box on every rank, so that its key is in the
    checkpoint; a rank that holds nothing of another tensor has none.
    """
    if layout.numel == 0:
        offsets = (0,) * layout.ndim
        return (Box(offsets, layout.shape, tuple((0, n) for n in layout.local_shape(coord))),)
    flat = layout.flat_dims if layout.flat_dims > 1 else 0
    per_dim = [_located(runs) for runs in layout.view_runs(flat, coord)]
    if not flat:
        return tuple(_product_box(part) for part in product(*per_dim))
    leading = [
        (block, where)
        for run, (start, _) in per_dim[0]
        for block, where in _row_blocks(run, layout.shape[:flat], start)
    ]
    return tuple(
        _join(block, where, _product_box(rest))
        for (block, where), rest in product(leading, list(product(*per_dim[1:])))
    )


def create_write_items(tensor: Tensor, fqn: str) -> list[WriteItem]:
    """One item per box that this rank holds.

    Raises:
        ValueError: the tensor has no layout, or is Partial: no rank knows its value.
    """
    layout = _checked_layout(tensor, fqn)
    properties = TensorProperties.create_from_tensor(_local(tensor))
    return [
        WriteItem(
            index=MetadataIndex(fqn, torch.Size(box.offsets)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=_chunk(box), properties=properties, size=torch.Size(layout.shape)
            ),
        )
        for box in boxes(layout)
    ]


def create_chunk_list(tensor: Tensor) -> list[ChunkStorageMetadata]:
    """The boxes to be loaded into this rank's local tensor.

    Raises:
        ValueError: as for `create_write_items`.
    """
    return [_chunk(box) for box in boxes(_checked_layout(tensor, "a tensor"))]


def get_tensor_shard(tensor: Tensor, index: MetadataIndex) -> Tensor:
    """The box at `index.offset` as a view of the local tensor, to be saved from or loaded into.

    Raises:
        ValueError: this rank holds no box there.
    """
    layout = _checked_layout(tensor, index.fqn)
    held = boxes(layout)
    if index.offset is None:
        if len(held) == 1:
            return held[0].of(_local(tensor))
        raise ValueError(
            f"checkpoint: {index.fqn!r} is held in {len(held)} boxes; an offset is needed"
        )
    # While loading, the hint is the place in `create_chunk_list`; while saving it is not.
    hint = index.index if index.index is not None and index.index < len(held) else 0
    candidates = held[hint : hint + 1] + held
    for box in candidates:
        if torch.Size(box.offsets) == index.offset:
            return box.of(_local(tensor))
    raise ValueError(
        f"checkpoint: {index.fqn!r}, {layout}: this rank holds no box at {tuple(index.offset)}; "
        f"it holds {[box.offsets for box in held]}"
    )


def _checked_layout(tensor: Tensor, fqn: str) -> Layout:
    layout = layout_of(tensor)
    if layout is None:
        raise ValueError(f"checkpoint: {fqn!r} carries no layout")
    if layout.partial_axes():
        raise ValueError(
            f"checkpoint: {fqn!r} is {layout}; a Partial value is on no rank. "
            "Redistribute it to Replicate or Shard before saving or loading"
        )
    return layout


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


def _located(runs: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Every run with its place in local storage."""
    placed, position = [], 0
    for run in runs:
        size = length((run,))
        placed.append((run, (position, position + size)))
        position += size
    return placed


def _product_box(part: Sequence[tuple[Run, Run]]) -> Box:
    return Box(
        tuple(start for (start, _), _ in part),
        tuple(stop - start for (start, stop), _ in part),
        tuple(where for _, where in part),
    )


def _join(block: tuple[Run, ...], where: Run, rest: Box) -> Box:
    return Box(
        (*(start for start, _ in block), *rest.offsets),
        (*(stop - start for start, stop in block), *rest.sizes),
        (where, *rest.where),
    )


def _row_blocks(
    run: Run, shape: Sequence[int], position: int
) -> Iterator[tuple[tuple[Run, ...], Run]]:
    """Cuts a run over the row-major flattening of `shape` into boxes, with their places.

    A run is the end of one row, whole rows, and the beginning of another, at every level.
    """
    start, stop = run
    if len(shape) == 1:
        yield (run,), (position, position + stop - start)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows first .. last
    if first > last:  # inside one row
        yield from _within_row(run, shape, row, position)
        return
    if start < first * row:
        yield from _within_row((start, first * row), shape, row, position)
    if first < last:
        begin = position + first * row - start
        whole = tuple((0, size) for size in shape[1:])
        yield ((first, last), *whole), (begin, begin + (last - first) * row)
    if last * row < stop:
        yield from _within_row((last * row, stop), shape, row, position + last * row - start)


def _within_row(
    run: Run, shape: Sequence[int], row: int, position: int
) -> Iterator[tuple[tuple[Run, ...], Run]]:
    index = run[0] // row
    inside = (run[0] - index * row, run[1] - index * row)
    for block, where in _row_blocks(inside, shape[1:], position):
        yield ((index, index + 1), *block), where
