"""Faults that are planted in a backend and must be noticed by the laws of conformance."""

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist
from test_conformance import PADDED, STAGED, USUAL, broken_laws

from hp_platform import MeshAxis, barrier, collectives, handle, uneven
from hp_platform.testing import conformance, run_ranks


def around(module, name, change):
    """Puts `change(original, *args, **kwargs)` in the place of a function."""
    original = getattr(module, name)
    setattr(module, name, lambda *args, **kwargs: change(original, *args, **kwargs))


def after(module, name, change):
    """Lets `change(*args, **kwargs)` run when the work that a backend's call started is done."""

    def changed(original, *args, **kwargs):
        work = original(*args, **kwargs)
        work.wait()
        change(*args, **kwargs)
        return work

    around(module, name, changed)


DROPPED = []


class NoWork:
    """A work whose wait is dropped, until the next fault's turn."""

    def __init__(self, work):
        # A work that goes before it is done takes its message with it.
        DROPPED.append(work)

    def wait(self):
        pass


def dropped_wait(name):
    """The backend's work is started and never waited for."""

    def plant():
        around(dist, name, lambda original, *args, **kwargs: NoWork(original(*args, **kwargs)))

    return plant


def dropped_wait_of_messages():
    """No message of an exchange is waited for."""
    around(
        dist,
        "batch_isend_irecv",
        lambda original, batch: [NoWork(work) for work in original(batch)],
    )


def swapped_ranks():
    """An all-gather that puts the last two ranks' shares in each other's place."""

    def change(target, source, **kwargs):
        n = source.numel()
        flat = target.view(-1)
        flat[-2 * n :] = flat[-2 * n :].roll(n)

    after(collectives, "all_gather_even", change)


def swapped_chunks():
    """An all-reduce whose large messages come back with two chunks exchanged."""

    def change(tensor, **kwargs):
        if tensor.numel() > 4096:
            flat = tensor.view(-1)
            flat[:2048] = flat[:2048].roll(1024)

    after(dist, "all_reduce", change)


def wrong_divisor():
    """An average that divides by one rank too few."""
    around(
        collectives,
        "_then_average",
        lambda original, op, target, size, *before: original(op, target, size - 1, *before),
    )


def divided_at_every_wait():
    """A second wait() divides an average again."""
    original = handle.Handle.wait

    def wait(self):
        finish = self._finish
        result = original(self)
        if finish is not None:
            self._finish, self.done = finish, False
        return result

    handle.Handle.wait = wait


def strided_write():
    """A broadcast that writes one element beyond its tensor."""

    def change(tensor, **kwargs):
        beyond = tensor.storage_offset() + tensor.numel()
        tensor.as_strided((1,), (1,), beyond).fill_(0)

    after(dist, "broadcast", change)


def write_before():
    """An all-to-all that writes one element before its output."""

    def change(output, *args, **kwargs):
        if output.numel():
            output.as_strided((1,), (1,), output.storage_offset() - 1).fill_(0)

    after(dist, "all_to_all_single", change)


def scribbled_input():
    """An all-gather that clears its caller's tensor."""
    after(collectives, "all_gather_even", lambda target, source, **kwargs: source.zero_())


def lost_tail():
    """Padded uneven shares are cut to the shortest one's length."""
    original = uneven._gather_padded

    def gather(source, parts, group):
        shortest = min(part.numel() for part in parts)
        return original(source[:shortest], [part[:shortest] for part in parts], group)

    uneven._gather_padded = gather


def lost_last_row_of_a_scatter():
    """A reduce-scatter that does not fill the end of an uneven share."""
    around(
        uneven,
        "_fill",
        lambda original, target, values: original(
            target[: len(target) // 2], values[: len(target) // 2]
        ),
    )


def wrong_source():
    """A broadcast from the next rank."""
    around(
        dist,
        "broadcast",
        lambda original, tensor, group_src, group, async_op: original(
            tensor, group_src=(group_src + 1) % group.size(), group=group, async_op=async_op
        ),
    )


def wrong_destination():
    """A reduce that always ends on rank 0."""
    around(
        dist,
        "reduce",
        lambda original, tensor, group_dst, **kwargs: original(tensor, group_dst=0, **kwargs),
    )


def wrong_reduction(found, used):
    """One reduction in place of another."""

    def plant():
        collectives._OPS[found] = collectives._OPS[used]

    return plant


def skipped_rank():
    """An all-reduce that leaves the last rank with what it had."""

    def changed(original, tensor, *, group, **kwargs):
        before = tensor.clone()
        work = original(tensor, group=group, **kwargs)
        work.wait()
        if group.rank() == group.size() - 1:
            tensor.copy_(before)
        return work

    around(dist, "all_reduce", changed)


def result_elsewhere():
    """An all-gather whose result is right, but not in the caller's output."""

    def change(original, name, axis, origin, start, result, *args, **kwargs):
        found = original(name, axis, origin, start, result, *args, **kwargs)
        if name != "all_gather":
            return found
        elsewhere = found.wait().clone()
        result.zero_()
        return handle.Handle(elsewhere)

    around(collectives, "issue", change)


def saturated():
    """Sums that end at a largest number."""
    after(dist, "all_reduce", lambda tensor, **kwargs: tensor.clamp_(max=15))


def messages_in_another_order():
    """Of two messages of one length to one rank, the second is sent first."""

    def change(original, batch):
        sent = {}
        for message in batch:
            if message.op is dist.isend:
                sent.setdefault((message.group_peer, message.tensor.numel()), []).append(message)
        for pair in sent.values():
            if len(pair) == 2:
                pair[0].tensor, pair[1].tensor = pair[1].tensor, pair[0].tensor
        return original(batch)

    around(dist, "batch_isend_irecv", change)


def mixed_up_in_flight():
    """Of several all-reduces in flight at once, the last two get each other's results."""
    flying = []

    def changed(original, tensor, **kwargs):
        work = original(tensor, **kwargs)

        class Mixing:
            def wait(self):
                work.wait()
                mine = [t for t in flying if t.shape == tensor.shape and t is not tensor]
                if mine:
                    other = mine[-1].clone()
                    mine[-1].copy_(tensor)
                    tensor.copy_(other)
                flying[:] = [t for t in flying if t is not tensor]

        flying.append(tensor)
        return Mixing()

    around(dist, "all_reduce", changed)


FAULTS = [
    (dropped_wait("all_reduce"), "all_reduce", USUAL),
    (dropped_wait("all_to_all_single"), "all_to_all", USUAL),
    (dropped_wait("broadcast"), "broadcast", USUAL),
    (dropped_wait("reduce"), "reduce", USUAL),
    (dropped_wait_of_messages, "exchange", USUAL),
    (swapped_ranks, "all_gather", STAGED),
    (swapped_chunks, "all_reduce", USUAL),
    (wrong_divisor, "op='avg'", USUAL),
    (divided_at_every_wait, "the result of a second wait()", USUAL),
    (strided_write, "memory beside the tensor", USUAL),
    (write_before, "memory beside the tensor", USUAL),
    (scribbled_input, "the input afterwards", STAGED),
    (lost_tail, "all_gather", PADDED),
    (lost_last_row_of_a_scatter, "reduce_scatter", PADDED),
    (wrong_source, "broadcast", USUAL),
    (wrong_destination, "reduce", USUAL),
    (wrong_reduction("max", "min"), "op='max'", USUAL),
    (wrong_reduction("avg", "max"), "op='avg'", USUAL),
    (skipped_rank, "all_reduce", USUAL),
    (result_elsewhere, "all_gather", USUAL),
    (saturated, "all_reduce", USUAL),
    (messages_in_another_order, "exchange", USUAL),
    (mixed_up_in_flight, "all_reduce", USUAL),
]


@contextlib.contextmanager
def planted(fault):
    """The fault's changes, which are undone afterwards."""
    places = [dist, collectives, uneven, handle.Handle]
    before = [dict(vars(place)) for place in places]
    operations = dict(collectives._OPS)
    fault()
    try:
        yield
    finally:
        for place, values in zip(places, before, strict=True):
            for name, value in vars(place).copy().items():
                if value is not values.get(name):
                    setattr(place, name, values[name])
        collectives._OPS.update(operations)


@pytest.fixture(scope="module")
def found_by_fault():
    """What every fault breaks, by its place in `FAULTS`: all in one group, one after another."""

    def run():
        found = []
        for fault, named, form in FAULTS:
            form.choose()
            axis = MeshAxis.of_group()
            wanted = (named,) if named in form.operations else form.operations
            with planted(fault):
                found.append(broken_laws(axis, (torch.float32,), wanted))
            while DROPPED:
                DROPPED.pop().wait()
            barrier(axis)
        # What was planted is gone.
        return [*found, broken_laws(axis, (torch.float32,), conformance.OPERATIONS)]

    ranks = run_ranks(run, 3, timeout=280)
    return [list(itertools.chain(*found)) for found in zip(*ranks, strict=True)]


@pytest.mark.ranks
@pytest.mark.parametrize("number", range(len(FAULTS)))
def test_a_planted_fault_breaks_a_law(number, found_by_fault):
    _, named, _ = FAULTS[number]
    assert any(named in violation for violation in found_by_fault[number])


@pytest.mark.ranks
def test_planted_faults_leave_nothing_behind(found_by_fault):
    assert found_by_fault[-1] == []
