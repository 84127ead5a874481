"""Owners: deterministic, balanced, and never across hosts."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hp_muon import MuonError
from hp_muon.owners import replica_subgroups, share_out, spread
from hp_platform import Topology

COSTS = st.lists(st.floats(0.1, 100), max_size=40)


def test_the_largest_goes_first_and_ties_go_to_the_lower_index():
    assert spread([1, 5, 5, 3], [0, 0]) == (1, 0, 1, 0)
    assert spread([1, 1, 1, 1], [0, 0, 0]) == (0, 1, 2, 0)
    assert spread([1, 1], [2, 0]) == (1, 1)


@given(COSTS, st.integers(1, 8))
def test_no_coordinate_carries_more_than_the_greedy_bound(costs, size):
    loads = [0.0] * size
    for cost, owner in zip(costs, spread(costs, loads)):
        loads[owner] += cost
    bound = sum(costs) / size + (1 - 1 / size) * max(costs, default=0)
    assert max(loads) <= bound + 1e-9


@given(st.integers(0, 50), st.lists(st.floats(0, 20), min_size=1, max_size=8))
def test_runs_of_equal_matrices_hold_as_many_as_the_greedy_gives(count, loads):
    bounds = share_out(count, 1.5, loads)
    owners = spread([1.5] * count, loads)
    assert [b - a for a, b in pairwise(bounds)] == [
        owners.count(coordinate) for coordinate in range(len(loads))
    ]
    assert bounds[-1] == count


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("aaaa", ((0, 1),)),
        ("aabb", ((0,), (1,))),
        ("aaaabbbb", ((0, 1), (2, 3))),
    ],
)
def test_subgroups_follow_the_hosts(hosts, expected):
    ranks = torch.arange(len(hosts)).reshape(-1, 2)
    assert replica_subgroups(ranks, 0, Topology.from_hosts(list(hosts)), "replicate") == expected


@pytest.mark.parametrize(
    ("hosts", "message"),
    [("aabaabbb", "would cross hosts"), ("abaaaabb", "different ways|would cross hosts")],
)
def test_subgroups_that_would_cross_hosts_are_refused(hosts, message):
    with pytest.raises(MuonError, match=f"'replicate'.*({message})"):
        replica_subgroups(
            torch.arange(8).reshape(4, 2), 0, Topology.from_hosts(list(hosts)), "replicate"
        )
