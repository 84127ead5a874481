import time

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from hp_fsdp import ShardingError, fully_shard
from hp_fsdp.prefetch import GatherOrder
from hp_fsdp.root import unit_of
from hp_fsdp.unit import UnitState
from hp_platform import ledger
from hp_platform.peer_memory import PeerMemory
from hp_platform.testing import run_ranks


class Recorder:
    """Stands in for a unit."""

    def __init__(self):
        self.gathered = []

    def gather(self, phase):
        self.gathered.append(phase)


def test_nothing_is_gathered_ahead_before_an_order_is_complete():
    order, units = GatherOrder("forward"), [Recorder() for _ in range(3)]
    for unit in units:
        order.enter(unit, None)
    assert not any(unit.gathered for unit in units)
    order.complete()
    order.enter(units[0], None)
    assert [len(unit.gathered) for unit in units] == [0, 1, 0]


def test_depth_says_how_many_units_and_explicit_ones_take_precedence():
    order, units = GatherOrder("backward", depth=2), [Recorder() for _ in range(4)]
    for unit in units:
        order.enter(unit, None)
    order.complete()
    order.enter(units[1], None)
    assert [unit.gathered for unit in units] == [[], [], ["backward"], ["backward"]]
    order.enter(units[1], [units[0]])
    assert units[0].gathered == ["backward"]
    order.enter(units[1], [])
    assert len(units[2].gathered) == 1


def test_an_order_that_was_interrupted_is_recorded_anew():
    order, first, second = GatherOrder("forward"), Recorder(), Recorder()
    order.enter(first, None)
    order.restart()
    order.enter(second, None)
    order.enter(first, None)
    order.complete()
    assert order.recorded == (second, first)
    order.restart()
    assert order.recorded == (second, first)


class Stack(nn.Module):
    def __init__(self, depth=5, checkpointed=None):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.checkpointed = checkpointed

    def forward(self, x):
        if self.checkpointed == "whole":
            return checkpoint(self.segment, x, use_reentrant=False)
        return self.segment(x)

    def segment(self, x):
        for layer in self.layers:
            if self.checkpointed in (None, "whole"):
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.checkpointed == "reentrant")
            x = torch.tanh(x)
        return x

    def shortcut(self, x):
        return self.layers[0](self.layers[4](x))


def watched(depth, checkpointed, reshard=None):
    """A sharded stack, and the largest number of units gathered or in flight at any time."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    model = Stack(checkpointed=checkpointed)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    model.set_prefetch_depth(depth, depth)
    units = [unit_of(layer) for layer in model.layers]
    peak = [0]

    def look(*_):
        held = sum(unit.state is not UnitState.SHARDED for unit in units)
        peak[0] = max(peak[0], held)

    for layer in model.layers:
        layer.register_forward_hook(look)
    return model, units, peak, look


@pytest.mark.ranks
def test_at_most_depth_plus_one_units_are_gathered():
    def body(rank):
        for checkpointed in (None, "reentrant", "saved", "whole"):
            for depth in (0, 1, 2):
                model, units, peak, look = watched(depth, checkpointed)
                for _ in range(3):
                    x = torch.randn(2, 8, requires_grad=True)
                    out = model(x)
                    for unit in units:
                        for shard in unit.parameters:
                            shard.full.register_hook(look)
                    out.sum().backward()
                    assert all(unit.state is UnitState.SHARDED for unit in units)
                    assert not any(b.is_held for unit in units for b in unit.buckets)
                # A segment of several units is recomputed one unit at a time.
                spare = 1 if checkpointed == "whole" else 0
                assert depth + 1 <= peak[0] <= depth + 1 + spare, (checkpointed, depth, peak)

    run_ranks(body, 2)


@pytest.mark.ranks
def test_gathers_are_issued_one_unit_ahead_and_not_in_recomputation():
    def body(rank):
        for checkpointed, reshard in ((None, True), ("saved", True), (None, None), ("saved", None)):
            model, *_ = watched(1, checkpointed, reshard)
            for _ in range(2):
                with ledger() as log:
                    model(torch.randn(2, 8, requires_grad=True)).sum().backward()
            # Unless told otherwise, the last unit stays gathered for the backward it begins.
            first_in_backward = 4 if reshard else 3
            for phase, units in (
                ("forward", [f"layers.{i}" for i in range(5)]),
                ("backward", [f"layers.{i}" for i in range(first_in_backward, -1, -1)]),
            ):
                gathers = [
                    r
                    for r in log.records
                    if r.operation == "all_gather" and r.origin.phase == phase
                ]
                assert list(dict.fromkeys(r.origin.name for r in gathers)) == units
                issued = {r.origin.name: r.issue_order for r in gathers}
                waited = {r.origin.name: r.wait_order for r in gathers}
                for i in range(1, len(units) - 1):
                    # The next unit's gather is in flight before this one's is waited for, and is
                    # not issued before the previous one's has been.
                    assert waited[units[i - 1]] < issued[units[i + 1]] < waited[units[i]]
            assert not [r for r in log.records if r.origin.phase == "recomputation"]

    run_ranks(body, 2)


@pytest.mark.ranks
def test_the_unit_that_ends_forward_and_begins_backward_stays_gathered_and_costs_no_memory(
    monkeypatch,
):
    def fail(*_):
        raise ValueError("planted")

    def zero(unit):
        for parameter in unit.parameters:
            parameter.local.detach().zero_()

    read = PeerMemory.read

    def read_late(*args):
        time.sleep(0.02)
        return read(*args)

    def body(rank):
        if rank == 1:
            monkeypatch.setattr(PeerMemory, "read", read_late)
        peaks = {}
        for reshard in (None, True):
            model, units, *_ = watched(1, None, reshard)
            last, x = units[-1], torch.randn(2, 8)
            held = []
            for _ in range(3):
                loss = model(x).sum()
                held.append(last.state is UnitState.GATHERED)
                # What the program sees between the two does not depend on it.
                assert model.layers[-1].weight is last.parameters[0].sharded
                assert all(unit.state is UnitState.SHARDED for unit in units[:-1])
                loss.backward()
                assert last.state is UnitState.SHARDED
            # The first step has recorded that backward begins with it.
            assert held == [False, reshard is None, reshard is None]
            peaks[reshard] = last.root.pages.most_in_use
            with torch.no_grad():
                model(x)
            assert last.state is UnitState.SHARDED
            # After a forward that leads to no backward, one that takes another way.
            model(x)
            model.segment = model.shortcut
            model(x).sum().backward()
            assert last.state is UnitState.SHARDED
            del model.segment
            model(x).sum().backward()
            # Values that have been changed meanwhile are gathered again: those that a forward
            # which failed has gathered ahead,
            fails = model.layers[2].register_forward_pre_hook(fail)
            with pytest.raises(ValueError, match="planted"):
                model(x)
            fails.remove()
            zero(units[3])
            first, second = model(x)
            assert torch.equal(first, second)
            # and those of a unit that is kept, which may be written as soon as it has run.
            assert (last.state is UnitState.GATHERED) == (reshard is None)
            layer = model.layers[-1].register_forward_hook(lambda *_, kept=last: zero(kept))
            assert torch.equal(model(x), torch.stack([first, second]))
            layer.remove()
            assert torch.equal(model(x), torch.zeros(2, 8))
        assert peaks[None] <= peaks[True]

    run_ranks(body, 2)


@pytest.mark.ranks
def test_the_user_can_set_the_order():
    def body(rank):
        model, *_ = watched(1, None)
        layers = list(model.layers)
        layers[0].set_modules_to_forward_prefetch([layers[1], layers[2]])
        layers[4].set_modules_to_backward_prefetch([layers[3], layers[2]])
        with ledger() as log:
            model(torch.randn(2, 8, requires_grad=True)).sum().backward()
        names = [
            (r.origin.name, r.origin.phase) for r in log.records if r.operation == "all_gather"
        ]
        order = list(dict.fromkeys(names))
        assert order[0] == ("models", "agreement")
        assert order[1:4] == [(f"layers.{i}", "forward") for i in (0, 1, 2)]
        start = order.index(("layers.4", "backward"))
        assert order[start + 1 : start + 3] == [("layers.3", "backward"), ("layers.2", "backward")]
        with pytest.raises(ShardingError, match="depths must be integers >= 0"):
            model.set_prefetch_depth(-1)

    run_ranks(body, 2)
