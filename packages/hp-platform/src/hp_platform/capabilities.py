"""What each communication backend can do, as data; `collectives` decides by this table only.

Two things are the same for every backend and therefore not in the table. An average is
always a SUM followed by a division of the result: native averages are missing for some
types and differ in rounding. PREMUL_SUM is never used, because one backend scales the
caller's input in place.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch


class Uneven(enum.Enum):
    """How a collective with shares of different lengths is made out of what a backend has."""

    LIST = "list"
    """The backend's list form takes tensors of different lengths."""
    ROOTED = "rooted"
    """One broadcast or one reduce for every non-empty share, straight between the views."""
    PADDED = "padded"
    """Every share is padded to the longest; costs a copy on both sides."""


_FLOATS = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
_INTEGERS = frozenset({torch.int8, torch.uint8, torch.int32, torch.int64})


@dataclass(frozen=True)
class Capabilities:
    """One backend's row of the table.

    Attributes:
        backend: name as in `torch.distributed`.
        reduces: element types that it computes with; collectives that compute refuse others.
        moves: element types that it transports; collectives that only move data send others as
            bytes.
        uneven_all_gather: how an all-gather of unequal shares is made.
        uneven_reduce_scatter: how a reduce-scatter into unequal shares is made.
        direct: all-gathers and reduce-scatters of equal shares, and sums of two ranks, are made
            of one send and one receive for every pair of ranks, straight between the callers'
            tensors, instead of the backend's own calls.
    """

    backend: str
    reduces: frozenset[torch.dtype]
    moves: frozenset[torch.dtype]
    uneven_all_gather: Uneven
    uneven_reduce_scatter: Uneven
    direct: bool = False


_ALL = _FLOATS | _INTEGERS

# gloo: ROOTED was the fastest of the three in most cases measured at 2 and 4 ranks, and by
# 8 to 13 times where one rank holds everything; its list all-gather wants equal lengths. Its own
# all-gather receives into scratch memory that it copies out, and its reduce-scatter is an
# all-reduce of a copy of the input: from 1 to 64 MB at 2 and 4 ranks, sending directly took 40 to
# 70% of their CPU time.
GLOO = Capabilities("gloo", _ALL, _ALL, Uneven.ROOTED, Uneven.ROOTED, direct=True)
NCCL = Capabilities("nccl", _ALL, _ALL, Uneven.LIST, Uneven.LIST)
# HCCL's separate functions for uneven shares are documented for one machine only. Its public
# documentation of HcclAllReduce lists neither double precision nor unsigned bytes.
HCCL = Capabilities(
    "hccl",
    (_ALL | {torch.int16}) - {torch.float64, torch.uint8},
    _ALL | {torch.int16},
    Uneven.PADDED,
    Uneven.PADDED,
)
# PyTorch's fake backend moves nothing; it serves dry runs that count calls and bytes.
FAKE = Capabilities("fake", _ALL, _ALL, Uneven.LIST, Uneven.LIST)
# PyTorch's tests run ranks as threads of one process with this one, which has no list forms of
# different lengths, no rooted reduction, and no sends.
THREADED = Capabilities("threaded", _ALL, _ALL, Uneven.PADDED, Uneven.PADDED)

TABLE = {row.backend: row for row in (GLOO, NCCL, HCCL, FAKE, THREADED)}


def capabilities_of(backend: str, device_type: str) -> Capabilities | None:
    """The row for a group, None when the backend is unknown.

    `backend` is `torch.distributed.get_backend`'s answer, which for a mixed group has the
    form "cpu:gloo,cuda:nccl".
    """
    if backend in TABLE:
        return TABLE[backend]
    by_device = dict(part.split(":", 1) for part in backend.split(",") if ":" in part)
    return TABLE.get(by_device.get(device_type, ""))
