"""What backward communicates, when it waits, and what it accumulates: asserted from the ledger."""

import itertools
from collections import Counter
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from hp_fsdp import MixedPrecisionPolicy, fully_shard
from hp_fsdp.backward import SETTLEMENT_BEGINS, SETTLEMENT_ENDS
from hp_fsdp.root import BACKWARD_BEGINS, current_backward_pass
from hp_fsdp.testing import whole
from hp_fsdp.unit import Unit
from hp_platform import Tier, Topology, ledger
from hp_platform.buffers import pad_to_alignment
from hp_platform.testing import run_ranks

WIDTH = 128  # every shard of every parameter is a multiple of 512 bytes


class Block(nn.Module):
    def __init__(self, frozen=False, checkpointed=False):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.norm = nn.LayerNorm(2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.up.requires_grad_(not frozen)

    def forward(self, x):
        return x + self.down(torch.relu(self.norm(self.up(x))))


class Net(nn.Module):
    def __init__(self, how="plain", depth=3):
        super().__init__()
        self.embed = nn.Embedding(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(frozen=how == "frozen") for _ in range(depth))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.how = how

    def forward(self, ids):
        x = self.embed(ids)
        if self.how == "inputs without gradient":  # the first block's
            x = x.detach()
        for block in self.blocks:
            if self.how == "checkpointed":
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
            if self.how == "called twice":
                x = block(x)
        return self.head(x)


def sharded(how, mesh, **kwargs):
    torch.manual_seed(0)
    model = Net(how)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **kwargs)
    return fully_shard(model, mesh=mesh, **kwargs)


def step(model, rank):
    ids = torch.arange(6).view(2, 3) + rank
    model(ids).square().mean().backward()


def hsdp():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))


def flat(world):
    return init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))


def trainable_parameters(model):
    return [p for p in model.parameters() if p.requires_grad]


@pytest.mark.ranks
def test_one_gather_and_reduce_scatter_a_parameter_and_one_all_reduce_a_unit():
    def body(rank):
        model = sharded("plain", hsdp())
        for block in model.blocks:  # None would keep the last one between forward and backward
            block.set_reshard_after_forward(True, recurse=False)
        step(model, rank)  # the first step records the gather order
        with ledger() as log:
            step(model, rank)
        count = Counter((r.operation, r.axis, r.origin.name, r.origin.phase) for r in log.records)
        expected = Counter()
        for i in range(3):
            unit = f"blocks.{i}"
            expected["all_gather", "dp_shard", unit, "forward"] = 3
            expected["all_gather", "dp_shard", unit, "backward"] = 3
            expected["reduce_scatter", "dp_shard", unit, "backward"] = 3
            expected["all_reduce", "dp_replicate", unit, "backward"] = 1
        # The root stays gathered between forward and backward.
        expected["all_gather", "dp_shard", "root", "forward"] = 2
        expected["reduce_scatter", "dp_shard", "root", "backward"] = 2
        expected["all_reduce", "dp_replicate", "root", "backward"] = 1
        assert count == expected, count
        assert {r.origin.package for r in log.records} == {"hp_fsdp"}

        block = 4 * (2 * 2 * WIDTH * WIDTH + 2 * WIDTH)
        root = 4 * 2 * WIDTH * WIDTH
        for operation, expected_bytes in {
            "all_gather": 2 * 3 * block + root,
            "reduce_scatter": 3 * block + root,
            "all_reduce": (3 * block + root) // 2,
        }.items():
            found = sum(r.bytes for r in log.records if r.operation == operation)
            assert found == expected_bytes, operation
        assert all(record.aligned for record in log.records)
        return log.table()

    run_ranks(body, 4)


@pytest.mark.ranks
def test_padding_counts_in_the_all_reduce_and_stays_zero():
    def body(rank):
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(5, 3), mesh=hsdp())
        with ledger() as log:
            model(torch.ones(1, 5)).sum().backward()
        (record,) = [r for r in log.records if r.operation == "all_reduce"]
        padded = pad_to_alignment(2 * 5, torch.float32) + pad_to_alignment(2, torch.float32)
        assert record.bytes == 4 * padded
        assert record.aligned

    run_ranks(body, 4)


@pytest.mark.ranks
def test_backward_never_waits_for_the_slow_tier_before_the_settlement():
    def body(rank):
        topology = Topology.from_hosts(["a", "a", "b", "b"])
        ways = ("plain", "checkpointed", "called twice", "frozen", "inputs without gradient")
        policies, mesh = ("per_parameter", "shared_buffer"), hsdp()
        for how, policy in itertools.product(ways, policies):
            model = sharded(how, mesh, comm_policy=policy)
            for _ in range(2):
                with ledger() as log:
                    step(model, rank)
                begins = log.events.index(("mark", BACKWARD_BEGINS))
                settles = log.events.index(("mark", SETTLEMENT_BEGINS))
                assert log.events.index(("mark", SETTLEMENT_ENDS)) > settles > begins
                slow = [r for r in log.records if r.operation == "all_reduce"]
                assert len(slow) == 4, (how, len(slow))
                assert topology.tier((0, 2)) is Tier.SLOW
                assert all(r.wait_order > settles for r in slow), how
                # All but the last unit's are issued behind the computation of a later one.
                assert sum(begins < r.issue_order < settles for r in slow) >= 3, how
                scatters = [r for r in log.records if r.operation == "reduce_scatter"]
                last = 3 if policy == "per_parameter" else 1
                assert sum(r.wait_order < settles for r in scatters) >= len(scatters) - last, how

    run_ranks(body, 4)


@pytest.mark.ranks
def test_the_four_steps_come_in_order():
    def body(rank):
        # On accelerators, where a wait holds the computation, and on the CPU, where it does not.
        for on_host in (False, True):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Unit, "waits_on_host", on_host)
                model = sharded("plain", hsdp())
                step(model, rank)
                with ledger() as log:
                    step(model, rank)
            by_unit = {}
            for record in log.records:
                key = (record.origin.name, record.operation)
                if record.origin.phase == "backward":
                    by_unit.setdefault(key, []).append(record)
            order = ["blocks.2", "blocks.1", "blocks.0", "root"]
            for previous, unit in pairwise(order):
                waited = max(r.wait_order for r in by_unit[previous, "reduce_scatter"])
                scattered = [r.issue_order for r in by_unit[unit, "reduce_scatter"]]
                (reduced,) = by_unit[previous, "all_reduce"]
                assert waited < min(scattered)
                if on_host:
                    assert waited < reduced.issue_order < min(scattered)
                else:
                    assert max(scattered) < reduced.issue_order

    run_ranks(body, 4)


@pytest.mark.ranks
def test_a_flat_mesh_uses_no_slow_tier():
    def body(rank):
        model = sharded("plain", flat(2))
        with ledger() as log:
            step(model, rank)
        assert {r.operation for r in log.records} == {"all_gather", "reduce_scatter"}

    run_ranks(body, 2)


@pytest.mark.ranks
def test_checkpointed_units_gather_once_more_only():
    def body(rank):
        model = sharded("checkpointed", flat(2))
        for expected in (6, 3):  # the second step keeps the last block, where backward begins
            with ledger() as log:
                step(model, rank)
            gathers = Counter(r.origin.name for r in log.records if r.operation == "all_gather")
            gathers.pop("models", None)  # what is compared before the first step
            assert gathers == {"blocks.0": 6, "blocks.1": 6, "blocks.2": expected, "root": 2}

    run_ranks(body, 2)


@pytest.mark.ranks
def test_frozen_parameters_are_gathered_and_never_reduced():
    def body(rank):
        model = sharded("frozen", flat(2))
        with ledger() as log:
            step(model, rank)
        scatters = [r for r in log.records if r.operation == "reduce_scatter"]
        assert len(scatters) == len(trainable_parameters(model)) == 8
        assert all(block.up.weight.grad is None for block in model.blocks)

    run_ranks(body, 2)


@pytest.mark.ranks
def test_modules_of_one_unit_are_reduced_together_although_backward_reaches_them_apart():
    def body(rank):
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
        fully_shard([model[0], model[2]], mesh=flat(2))
        fully_shard(model, mesh=flat(2))
        for _ in range(2):
            with ledger() as log:
                model(torch.randn(2, 8, requires_grad=True)).sum().backward()
            scatters = Counter(r.origin.name for r in log.records if r.operation[:2] == "re")
            assert scatters == {"0+2": 2, "root": 1}

    run_ranks(body, 2)


# -- accumulation ----------------------------------------------------------------------


def accumulate(mode, micro_steps, rank):
    """Weight gradient of a Linear(4, 4) whose inputs are (rank + 1) * 10 ** i, and the ledger."""
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 4, bias=False), mesh=hsdp())
    with ledger() as log:
        for i in range(micro_steps):
            last = i == micro_steps - 1
            if mode == "nothing until the last":
                model.set_requires_gradient_sync(last)
            elif mode == "fast tier until the last":
                model.set_requires_all_reduce(last)
            else:
                model.set_requires_all_reduce(False)
                model.set_requires_gradient_sync(True)  # both tiers
            model(torch.full((1, 4), (rank + 1) * 10.0**i)).sum().backward()
    return whole(model.weight.grad), Counter(r.operation for r in log.records)


@pytest.mark.ranks
def test_accumulation_gives_one_value_with_as_little_communication_as_asked():
    def body(rank):
        for mode, scatters, reductions in (
            ("every time", 3, 3),
            ("fast tier until the last", 3, 1),
            ("nothing until the last", 1, 1),
        ):
            gradient, count = accumulate(mode, 3, rank)
            assert torch.equal(gradient, torch.full((4, 4), 277.5)), (mode, gradient)
            assert count["reduce_scatter"] == scatters, mode
            assert count["all_reduce"] == reductions, mode

    run_ranks(body, 4)


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)
        self.b = nn.Linear(4, 4, bias=False)

    def forward(self, x, both):
        y = self.a(x)
        return y.sum() + self.b(x).sum() if both else y.sum()


@pytest.mark.ranks
def test_a_parameter_first_or_only_used_in_one_micro_step_accumulates_in_the_reduction_type():
    def body(rank):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for order in ((False, True), (True, False)):
            model = fully_shard(TwoLayers(), mesh=flat(2), mp_policy=policy)
            for i, both in enumerate(order):
                model.set_requires_gradient_sync(i == 1)
                model(torch.ones(2, 4), both).backward()
            for name, value in (("a", 4.0), ("b", 2.0)):
                gradient = whole(getattr(model, name).weight.grad)
                assert gradient.dtype == torch.float32
                assert torch.equal(gradient, torch.full((4, 4), value)), (order, name)

    run_ranks(body, 2)


@pytest.mark.ranks
def test_micro_steps_add_to_gradients_that_are_there():
    def body(rank):
        model = fully_shard(nn.Linear(4, 4, bias=False), mesh=flat(2))
        for _ in range(3):
            model(torch.full((1, 4), rank + 1.0)).sum().backward()
        assert torch.equal(whole(model.weight.grad), torch.full((4, 4), 4.5))

    run_ranks(body, 2)


@pytest.mark.ranks
def test_is_last_backward_false_leaves_the_slow_tier_in_flight():
    def body(rank):
        model = fully_shard(nn.Linear(4, 4, bias=False), mesh=hsdp())
        model.set_is_last_backward(False)
        with ledger() as log:
            model(torch.full((1, 4), rank + 1.0)).sum().backward()
            assert model.weight.grad is None
            model.set_is_last_backward(True)
            model(torch.full((1, 4), rank + 1.0)).sum().backward()
        assert all(r.wait_order is not None for r in log.records)
        assert torch.equal(whole(model.weight.grad), torch.full((4, 4), 5.0))

    run_ranks(body, 4)


# -- division, unused and failed ----------------------------------------------------------------


@pytest.mark.ranks
def test_gradients_are_summed_and_divided_once():
    def body(rank):
        for mesh in (flat(4), hsdp()):
            model = fully_shard(nn.Linear(1, 4, bias=False), mesh=mesh)
            model(torch.full((1, 1), rank + 1.0)).sum().backward()
            assert torch.equal(whole(model.weight.grad), torch.full((4, 1), 2.5))
            model.zero_grad()
            model.set_gradient_divide_factor(8)
            model(torch.full((1, 1), rank + 1.0)).sum().backward()
            assert torch.equal(whole(model.weight.grad), torch.full((4, 1), 1.25))

    run_ranks(body, 4)


@pytest.mark.ranks
def test_unused_parameters_count_as_zero_where_their_unit_is_used_and_not_otherwise():
    def body(rank):
        model = nn.ModuleDict({"one": TwoLayers(), "other": nn.Linear(4, 4)})
        fully_shard(model["one"], mesh=flat(2))
        fully_shard(model["other"], mesh=flat(2))
        x = torch.ones(1, 4, requires_grad=True)
        # The ranks use different parameters of the unit.
        model["one"](x, both=rank == 0).backward()
        assert torch.equal(whole(model["one"].a.weight.grad), torch.ones(4, 4))
        assert torch.equal(whole(model["one"].b.weight.grad), torch.full((4, 4), 0.5))
        assert model["other"].weight.grad is None

    run_ranks(body, 2)


@pytest.mark.ranks
def test_a_backward_that_raised_leaves_nothing_behind():
    def body(rank):
        model = sharded("plain", hsdp())
        reference = sharded("plain", hsdp())

        def fail(_):
            raise ValueError("planted")

        def fails(model, module):
            hook = module.register_forward_hook(lambda m, a, out: out.register_hook(fail) and None)
            with pytest.raises(ValueError, match="planted"):
                step(model, rank)
            hook.remove()

        fails(model, model.embed)
        step(model, rank)
        step(reference, rank)
        for mine, theirs in zip(model.parameters(), reference.parameters()):
            assert torch.equal(mine.grad.to_local(), theirs.grad.to_local())
        # Without replicas gradients are the program's as soon as they have come.
        model, reference = sharded("plain", flat(4)), sharded("plain", flat(4))
        fails(model, model.blocks[1].norm)
        step(reference, rank)
        with torch.no_grad():
            model(torch.zeros(1, dtype=torch.long))
        handed = [
            torch.equal(mine.grad.to_local(), theirs.grad.to_local())
            for mine, theirs in zip(model.parameters(), reference.parameters())
            if mine.grad is not None
        ]
        assert handed == [True] * 3

    run_ranks(body, 4)


def test_every_backward_pass_has_a_number_of_its_own_also_inside_another():
    """What `_current_graph_task_id`, a private function of PyTorch, is relied upon for."""
    seen = []

    def note(_):
        seen.append(current_backward_pass())

    def inner(gradient):
        note(gradient)
        y = torch.ones(1, requires_grad=True)
        y.register_hook(note)
        with torch.enable_grad():
            y.sum().backward()
        note(gradient)

    x = torch.ones(1, requires_grad=True)
    x.register_hook(inner)
    x.sum().backward()
    assert current_backward_pass() == -1
    outer, nested, again = seen
    assert outer == again
    assert len({-1, outer, nested}) == 3
    x.sum().backward()
    assert len({-1, *seen}) == 5
