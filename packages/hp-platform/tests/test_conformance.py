"""The same laws on the simulator and on gloo, and faults that the laws must notice."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from hp_platform import MeshAxis, capabilities, collectives, uneven
from hp_platform.capabilities import GLOO, Uneven
from hp_platform.testing import conformance, run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_the_simulator_obeys_every_law(world_size):
    for case in conformance.cases(world_size, DTYPES):
        for rank, result in enumerate(conformance.simulate(case)):
            expected = case.expected(rank)
            if expected is not None:
                assert result.dtype == expected.dtype
                assert torch.equal(result, expected), case


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("how", [Uneven.ROOTED, Uneven.PADDED])
def test_gloo_obeys_every_law(world_size, how):
    found = run_conformance(world_size, DTYPES, how=how)
    assert found == []


@pytest.mark.ranks
def test_gloo_obeys_every_law_on_eight_ranks_and_in_its_list_form():
    assert run_conformance(8, (torch.float32,)) == []
    assert run_conformance(3, DTYPES, scatter=Uneven.LIST) == []


def run_conformance(world_size, dtypes, *, how=Uneven.ROOTED, scatter=None, fault=None):
    """Every violation that any rank sees, with `fault` planted in each rank first."""

    def run():
        capabilities.TABLE["gloo"] = dataclasses.replace(
            GLOO, uneven_all_gather=how, uneven_reduce_scatter=scatter or how
        )
        if fault is not None:
            fault()
        axis = MeshAxis.of_group()
        return [
            violation
            for case in conformance.cases(world_size, dtypes)
            for violation in conformance.violations(case, axis)
        ]

    return [violation for found in run_ranks(run, world_size) for violation in found]


def dropped_wait():
    """Reading a reduce-scatter's output without waiting for the backend."""
    original = collectives.issue

    def issue(operation, axis, origin, start, result, *args, **kwargs):
        handle = original(operation, axis, origin, start, result, *args, **kwargs)
        early = result.clone()
        handle.wait()
        return collectives.Handle(early)

    collectives.issue = issue


def swapped_ranks():
    """An all-gather that puts the last two ranks' shares in each other's place."""
    original = collectives.prepare_direct_all_gather

    def prepare(source, target, rank, group):
        prepared = original(source, target, rank, group)
        n = source.numel()

        def finish():
            target[-2 * n :] = target[-2 * n :].roll(n)

        return uneven.Prepared(prepared.start, finish)

    collectives.prepare_direct_all_gather = prepare


def wrong_divisor():
    """An average that divides by one rank too few."""
    original = collectives._then_average
    collectives._then_average = lambda op, target, size, *before: original(
        op, target, size - 1, *before
    )


def strided_write():
    """A broadcast that writes one element beyond its tensor."""
    original = dist.broadcast

    def broadcast(tensor, **kwargs):
        work = original(tensor, **kwargs)
        work.wait()
        tensor.as_strided((1,), (1,), tensor.storage_offset() + tensor.numel()).fill_(0)
        return work

    dist.broadcast = broadcast


def scribbled_input():
    """A reduce-scatter that reduces in its caller's tensor."""
    original = uneven._scatter_by_reduces

    def scatter(parts, target, rank, group):
        prepared = original(parts, target, rank, group)
        for part in parts:
            part.zero_()
        return prepared

    uneven._scatter_by_reduces = scatter


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (dropped_wait, "reduce_scatter"),
        (swapped_ranks, "all_gather"),
        (wrong_divisor, "op='avg'"),
        (strided_write, "memory beside the tensor"),
        (scribbled_input, "the input afterwards"),
    ],
)
def test_a_planted_fault_breaks_a_law(fault, named):
    found = run_conformance(3, (torch.float32,), fault=fault)
    assert any(named in violation for violation in found)
