"""Shards, gradients and optimizer state in host memory."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hp_fsdp import CPUOffloadPolicy, fully_shard
from hp_fsdp.offload import Offload
from hp_fsdp.testing import assert_trains_like_dense
from hp_platform.testing import run_ranks


class Stream:
    """A stream that only writes down what it is asked."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append((self.name, "waits for", other.name))

    def wait_event(self, event):
        self.log.append((self.name, "waits for", event))

    def synchronize(self):
        self.log.append((self.name, "synchronized"))


class Event:
    def __init__(self, log):
        self.log = log

    def record(self, stream=None):
        self.log.append(("event", "recorded on", stream.name))

    def synchronize(self):
        self.log.append(("event", "synchronized"))


class RecordingDevice:
    """Stands for an accelerator whose memory is the host's, so that values can be checked."""

    def __init__(self):
        self.log = []
        self._current = Stream("compute", self.log)

    def current(self):
        return torch.device("cpu")

    def stream(self):
        return Stream("copies", self.log)

    def current_stream(self):
        return self._current

    @contextlib.contextmanager
    def use_stream(self, stream):
        held, self._current = self._current, stream
        self.log.append(("enter", stream.name))
        yield
        self._current = held
        self.log.append(("leave", stream.name))

    def event(self):
        return Event(self.log)


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def batches(world):
    return [
        [
            torch.randn(2, 5, generator=torch.Generator().manual_seed(10 * s + r))
            for r in range(world)
        ]
        for s in range(3)
    ]


def check(rank, mesh, world):
    def shard(model):
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy())

    assert_trains_like_dense(
        made,
        shard,
        batches(world),
        rank,
        lambda model, x: model(x).square().mean(),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    )


def two_axes():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))


@pytest.mark.ranks
def test_on_the_cpu_offloading_changes_nothing():
    run_ranks(lambda rank: check(rank, two_axes(), 4), 4)


@pytest.mark.ranks
def test_gathers_and_gradients_cross_on_a_stream_of_their_own(monkeypatch):
    device = RecordingDevice()
    monkeypatch.setattr(Offload, "of", lambda policy, where: Offload(device, pin=False))

    def body(rank):
        for mesh in (two_axes(), init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))):
            device.log.clear()
            check(rank, mesh, 4)
            log = device.log
            # Copies begin after what was issued before them, and never make computation wait.
            entered = [i for i, entry in enumerate(log) if entry == ("enter", "copies")]
            assert entered
            assert all(log[i - 1] == ("copies", "waits for", "compute") for i in entered)
            assert ("compute", "waits for", "copies") not in log
            # Every gradient buffer is recorded once, and waited for before it is handed out.
            recorded = [i for i, e in enumerate(log) if e == ("event", "recorded on", "copies")]
            assert len(recorded) == 3 * 2  # steps, units with parameters
            waits = [i for i, entry in enumerate(log) if entry == ("event", "synchronized")]
            for step in range(3):
                last = recorded[2 * step + 1]
                # No wait before the last unit's copy has been issued.
                assert not [i for i in waits if recorded[2 * step] < i < last]

    run_ranks(body, 4)


@pytest.mark.ranks
@pytest.mark.slow
def test_shards_on_the_host_are_clipped_and_scaled_over_a_mesh_of_devices():
    """On fake NPUs, whose collectives refuse tensors of other devices."""
    session = Path(__file__).with_name("offloaded_session.py")
    fakes = session.parents[2] / "hp-platform" / "tests" / "fake_npu"
    done = subprocess.run(
        [sys.executable, str(session)],
        env=os.environ | {"PYTHONPATH": str(fakes)},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
