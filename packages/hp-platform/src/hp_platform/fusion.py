"""Several tensors reduced by one message."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hp_platform.arguments import check_tensor
from hp_platform.axis import MeshAxis
from hp_platform.buffers import BufferLayout
from hp_platform.collectives import all_reduce
from hp_platform.handle import NOBODY, Handle, refuse
from hp_platform.ledger import Origin
from hp_platform.staging import overwritten


def all_reduce_fused(
    tensors: Sequence[Tensor], axis: MeshAxis, *, op: str = "sum", origin: Origin = NOBODY
) -> Handle[list[Tensor]]:
    """Reduces tensors of one dtype, in place on every rank, by one message.

    Views that follow one another in one buffer without a gap are reduced where they lie. Others
    are packed into an aligned buffer, and `wait()` copies the results back; to spare that where
    the views leave gaps, as those of a `BufferLayout` do, pass the buffer itself to `all_reduce`.

    Args:
        tensors: each contiguous, any shapes, on the axis's device or in host memory.
        op: "sum", "avg", "max" or "min".

    Raises:
        CollectiveError: an argument cannot be used, or the dtypes differ; nothing has been sent.
    """
    name = "all_reduce_fused"
    for tensor in tensors:
        check_tensor(name, tensor, axis, origin, True, False, True)
    if not tensors:
        return Handle([])
    dtypes = sorted({str(tensor.dtype) for tensor in tensors})
    if len(dtypes) > 1:
        problem = f"the tensors have dtypes {', '.join(dtypes)}; make one call for each dtype"
        refuse(name, axis, origin, problem)
    written = [overwritten(tensor) for tensor in tensors]
    span = _span(written)
    if span is not None:
        inside: Handle[list[Tensor]] = all_reduce(span, axis, op=op, origin=origin)  # type: ignore[assignment]
        return inside.delivering(list(tensors), lambda: None)
    layout = BufferLayout.of([tensor.numel() for tensor in written], written[0].dtype)
    buffer = layout.allocate(written[0].device)
    parts = layout.views(buffer, [tensor.shape for tensor in written])
    _copy_all(parts, written)
    handle: Handle[list[Tensor]] = all_reduce(buffer, axis, op=op, origin=origin)  # type: ignore[assignment]
    return handle.delivering(list(tensors), lambda: _copy_all(written, parts))


def _span(tensors: Sequence[Tensor]) -> Tensor | None:
    """One flat view over all of `tensors`, if they follow one another without a gap."""
    first = tensors[0]
    end = first.storage_offset()
    storage = first.untyped_storage().data_ptr()
    if not storage:  # on the meta device all have this address
        return None
    for tensor in tensors:
        if tensor.untyped_storage().data_ptr() != storage or tensor.storage_offset() != end:
            return None
        end += tensor.numel()
    start = first.storage_offset()
    return first.as_strided((end - start,), (1,), start)


def _copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources):
        target.copy_(source)
