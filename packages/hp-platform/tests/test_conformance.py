"""The same laws on the simulator, gloo and LocalTensorMode, and faults that must be noticed."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from hp_platform import MeshAxis, capabilities, collectives, handle, uneven
from hp_platform.capabilities import GLOO, Uneven
from hp_platform.testing import Simulator, conformance, local_tensor, run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8)
MOVED_ONLY = (torch.bool, torch.float8_e4m3fn)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_the_simulator_obeys_every_law(world_size):
    for case in every_case(world_size, DTYPES):
        results = conformance.simulate(case)
        if results is not None:
            assert conformance.wrong_results(case, results) == []


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("how", [Uneven.ROOTED, Uneven.PADDED])
def test_gloo_obeys_every_law(world_size, how):
    assert run_conformance(world_size, DTYPES, how=how) == []


@pytest.mark.ranks
def test_gloo_obeys_every_law_on_eight_ranks():
    assert run_conformance(8, DTYPES) == []


@pytest.mark.ranks
def test_gloo_obeys_every_law_in_its_other_forms():
    assert run_conformance(3, DTYPES, scatter=Uneven.LIST) == []
    assert run_conformance(3, DTYPES, direct=not GLOO.direct) == []


@pytest.mark.parametrize(
    ("world_size", "dtypes"),
    [(2, DTYPES), (3, (torch.bfloat16,)), (4, (torch.float32,)), (8, (torch.int64,))],
)
def test_local_tensor_mode_agrees_where_it_can(world_size, dtypes):
    """Guards the private module, too: a change of its meaning shows here."""
    dist.init_process_group("fake", rank=0, world_size=world_size)
    run, reasons = 0, set()
    try:
        for case in conformance.cases(world_size, dtypes):
            try:
                results = local_tensor.run(case)
            except local_tensor.Unsupported as error:
                reasons.add(str(error))
                continue
            assert conformance.wrong_results(case, results) == []
            run += 1
    finally:
        dist.destroy_process_group()
    if not run:
        pytest.skip("; ".join(sorted(reasons)))
    # Even gathers, all-to-alls and reductions, and broadcasts from every root that is tried.
    roots = len({0, world_size // 2, world_size - 1})
    reductions = [6 if dtype.is_floating_point else 4 for dtype in dtypes]
    assert run == len(dtypes) * (2 + roots) + sum(reductions)
    assert "LocalTensorMode has no reduce" in reasons


def every_case(world_size, dtypes):
    yield from conformance.cases(world_size, dtypes)
    yield from conformance.large_cases(world_size, dtypes[0])
    yield from conformance.moving_cases(world_size, MOVED_ONLY)


def run_conformance(
    world_size, dtypes, *, how=Uneven.ROOTED, scatter=None, direct=GLOO.direct, fault=None
):
    """Every violation that any rank sees, with `fault` planted in each rank first."""

    def run():
        capabilities.TABLE["gloo"] = dataclasses.replace(
            GLOO,
            uneven_all_gather=how,
            uneven_reduce_scatter=scatter or how,
            direct=direct,
        )
        if fault is not None:
            fault()
        axis = MeshAxis.of_group()
        found = []
        for case in every_case(world_size, dtypes):
            found += conformance.violations(case, axis)
        flight = [c for c in conformance.cases(world_size, dtypes[:1]) if c.root == 0]
        return found + conformance.overlapping_violations(flight, axis)

    return [violation for found in run_ranks(run, world_size, timeout=200) for violation in found]


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


class NoWork:
    """A work whose wait is dropped."""

    def __init__(self, work, kept):
        # A work that goes before it is done takes its message with it.
        kept.append(work)

    def wait(self):
        pass


def dropped_wait(name):
    """The backend's work is started and never waited for."""

    def plant():
        kept = []
        around(
            dist, name, lambda original, *args, **kwargs: NoWork(original(*args, **kwargs), kept)
        )

    return plant


def dropped_wait_of_messages():
    """No message of an exchange is waited for."""
    kept = []
    around(
        dist,
        "batch_isend_irecv",
        lambda original, batch: [NoWork(work, kept) for work in original(batch)],
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
    (dropped_wait("all_reduce"), "all_reduce", {}),
    (dropped_wait("all_to_all_single"), "all_to_all", {}),
    (dropped_wait("broadcast"), "broadcast", {}),
    (dropped_wait("reduce"), "reduce", {}),
    (dropped_wait_of_messages, "exchange", {}),
    (swapped_ranks, "all_gather", {"direct": False}),
    (swapped_chunks, "all_reduce", {}),
    (wrong_divisor, "op='avg'", {}),
    (divided_at_every_wait, "the result of a second wait()", {}),
    (strided_write, "memory beside the tensor", {}),
    (write_before, "memory beside the tensor", {}),
    (scribbled_input, "the input afterwards", {"direct": False}),
    (lost_tail, "all_gather", {"how": Uneven.PADDED}),
    (lost_last_row_of_a_scatter, "reduce_scatter", {"how": Uneven.PADDED}),
    (wrong_source, "broadcast", {}),
    (wrong_destination, "reduce", {}),
    (wrong_reduction("max", "min"), "op='max'", {}),
    (wrong_reduction("avg", "max"), "op='avg'", {}),
    (skipped_rank, "all_reduce", {}),
    (result_elsewhere, "all_gather", {}),
    (saturated, "all_reduce", {}),
    (messages_in_another_order, "exchange", {}),
    (mixed_up_in_flight, "all_reduce", {}),
]


@pytest.mark.ranks
@pytest.mark.parametrize(("fault", "named", "form"), FAULTS)
def test_a_planted_fault_breaks_a_law(fault, named, form):
    found = run_conformance(3, (torch.float32,), fault=fault, **form)
    assert found
    assert any(named in violation for violation in found)


class Faulty(Simulator):
    """A simulator with one fault."""

    def __init__(self, mesh_shape, fault):
        super().__init__(mesh_shape)
        self.fault = fault

    def all_gather(self, tensors, axis, sizes=None):
        results = super().all_gather(tensors, axis, sizes)
        if self.fault == "swapped ranks":
            return [torch.cat(list(reversed(tensors))) for _ in results]
        if self.fault == "lost tail":
            return [result[:-1] for result in results]
        return results

    def reduce_scatter(self, tensors, axis, sizes=None, op="sum"):
        return super().reduce_scatter(tensors, axis, sizes, self._op(op))

    def all_reduce(self, tensors, axis, op="sum"):
        return super().all_reduce(tensors, axis, self._op(op))

    def reduce(self, tensors, axis, destination, op="sum"):
        wrong = self.fault == "wrong destination"
        return super().reduce(tensors, axis, 0 if wrong else destination, op)

    def broadcast(self, tensors, axis, source):
        return super().broadcast(tensors, axis, 0 if self.fault == "wrong source" else source)

    def all_to_all(self, tensors, axis, input_sizes=None, output_sizes=None):
        results = super().all_to_all(tensors, axis, input_sizes, output_sizes)
        return list(tensors) if self.fault == "nothing sent" else results

    def _op(self, op):
        return "sum" if self.fault == "no division" else op


@pytest.mark.parametrize(
    "fault",
    [
        "swapped ranks",
        "lost tail",
        "wrong destination",
        "wrong source",
        "nothing sent",
        "no division",
    ],
)
def test_a_fault_in_the_simulator_breaks_a_law(fault):
    found = []
    for case in conformance.cases(3, (torch.float32,)):
        results = conformance.simulate(case, Faulty((3,), fault))
        found += conformance.wrong_results(case, results) if results is not None else []
    assert found


def test_a_result_of_another_type_or_shape_is_wrong():
    case = conformance.Case("all_reduce", 2, torch.float32, (3, 3))
    right = [case.expected(rank) for rank in range(2)]
    assert conformance.wrong_results(case, right) == []
    (found,) = conformance.wrong_results(case, [right[0], right[1].double()])
    assert "on rank 1: the result is torch.float64 of shape (3, 3), expected torch.float32" in found
    assert len(conformance.wrong_results(case, [right[0][:2], right[1]])) == 1
