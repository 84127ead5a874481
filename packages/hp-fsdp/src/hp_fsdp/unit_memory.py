"""Memory of one unit's buckets: what they take and give back at the same times."""

from __future__ import annotations

import torch
from attrs import frozen

from hp_fsdp.full_buffer import Arena, ArenaPart, FullBuffer

Memory = FullBuffer | ArenaPart


@frozen(eq=False)
class UnitMemory:
    """Memory that a unit's buckets take and give back at the same times, each kind as a whole."""

    gathered: Arena
    gradients: Arena
    scratch: Arena

    @classmethod
    def on(cls, device: torch.device) -> UnitMemory:
        return cls(Arena(device), Arena(device), Arena(device))
