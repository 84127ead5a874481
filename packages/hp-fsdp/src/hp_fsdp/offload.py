"""Shards, gradients and optimizer state in host memory (`CPUOffloadPolicy`).

Where the mesh is on an accelerator, shards lie in pinned host memory. A gather copies this rank's
part to the device on a stream of its own, from which the collective is issued too, so that neither
waits for computation nor makes it wait; reduced gradients go back in one copy a unit, which is
waited for once, at the end of backward. Where the mesh is on the CPU, everything is in host memory
as it is, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from attrs import define, field, frozen
from torch import Tensor

from hp_fsdp.policies import CPUOffloadPolicy, OffloadPolicy
from hp_platform.devices import Device, Event, Stream, device

HOST = torch.device("cpu")


@frozen(eq=False)
class HostCopy:
    """Gradients on their way to the host."""

    host: Tensor
    _copied: Event
    _source: Tensor
    """Kept until the copy is done."""

    def wait(self) -> Tensor:
        """The values in host memory."""
        self._copied.synchronize()
        return self.host


@define(eq=False)
class Offload:
    """Memory on the host and the copies between it and one device.

    Attributes:
        device: the accelerator.
        pin: host memory is page-locked, without which copies do not overlap with computation.
    """

    device: Device
    pin: bool
    _copies: Stream | None = field(default=None, init=False)

    @classmethod
    def of(cls, policy: OffloadPolicy, where: torch.device) -> Offload | None:
        """None where shards stay on `where`, or are in host memory anyway."""
        if not isinstance(policy, CPUOffloadPolicy) or where.type == HOST.type:
            return None
        return cls(device(where.type), policy.pin_memory)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Host memory for shards or gradients."""
        return torch.empty(numel, dtype=dtype, device=HOST, pin_memory=self.pin)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """What is issued inside runs beside later computation, after all that was issued before."""
        if self._copies is None:
            self._copies = self.device.stream()
        self._copies.wait_stream(self.device.current_stream())
        with self.device.use_stream(self._copies):
            yield

    def to_device(self, host: Tensor) -> Tensor:
        """A copy on the device; valid on the stream of `copying`, inside which it is called."""
        return host.to(self.device.current(), non_blocking=self.pin)

    def to_host(self, values: Tensor) -> HostCopy:
        """Starts to copy `values`, flat and final on the current stream."""
        host = self.empty(values.numel(), values.dtype)
        with self.copying():
            host.copy_(values, non_blocking=self.pin)
            copied = self.device.event()
            copied.record(self._copies)
        return HostCopy(host, copied, values)
