"""What a step costs besides time: memory at its peak, and bytes that it copies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hp_integration.bench.pairs import Step
from hp_platform import ledger

_COPIES = ("copy_", "_to_copy", "clone", "cat", "stack", "chunk_cat", "split_with_sizes_copy")
_PACKS = ("all_gather_copy_in",)


def peak_bytes(make: Callable[[], Step]) -> int | None:
    """Resident memory at the peak of the third step above that before anything was made.

    Of this process, from Linux's counters; None elsewhere. Call it in a process of its own.
    """
    before = _status("VmRSS")
    if before is None:
        return None
    step = make()
    step()
    step()
    Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark to what is resident
    step()
    peak = _status("VmHWM")
    assert peak is not None
    return peak - before


def _status(field: str) -> int | None:
    path = Path("/proc/self/status")
    if not path.exists():
        return None
    for line in path.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) << 10
    return None


class _CopyCounter(TorchDispatchMode):
    """Adds up the bytes written by operators that only copy."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name == "split_with_sizes_copy":
            self.bytes += sum(t.nbytes for t in (kwargs or {}).get("out") or result)
        elif name in _PACKS:
            self.bytes += result[0].nbytes
        elif name in _COPIES:
            written = (kwargs or {}).get("out")
            written = result if written is None else written
            self.bytes += written.nbytes if isinstance(written, torch.Tensor) else 0
        return result


def packed_bytes(step: Step, plain: Step) -> int:
    """Bytes that `step` copies and the unsharded step does not: packing and unpacking.

    A rank's own share, which an all-gather of ours leaves in its output, counts as transfer; that
    of a peer's is copied inside the backend, where it is not seen either.
    """
    counts = []
    for each in (step, plain):
        each()
        with ledger() as log, _CopyCounter() as counter:
            each()
        own = sum(
            r.bytes // r.axis_size
            for r in log.records
            if r.operation == "all_gather" and r.origin.package == "hp_fsdp"
        )
        counts.append(counter.bytes - own)
    return max(counts[0] - counts[1], 0)
