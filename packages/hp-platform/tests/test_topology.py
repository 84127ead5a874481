"""Hosts, tiers and replica subgroups."""

import os

import pytest
import torch.distributed as dist

from hp_platform import MeshAxis, Tier, Topology, TopologyError
from hp_platform.testing import run_ranks
from hp_platform.topology import HOST_VARIABLE

TWO_BY_FOUR = Topology.from_hosts(["a"] * 4 + ["b"] * 4)


@pytest.mark.parametrize(
    ("ranks", "tier"),
    [([5], Tier.LOCAL), ([0, 3], Tier.FAST), ([3, 4], Tier.SLOW), (range(8), Tier.SLOW)],
)
def test_the_tier_follows_from_the_hosts(ranks, tier):
    assert TWO_BY_FOUR.tier(ranks) is tier


def test_a_topology_knows_its_size_and_hosts():
    assert (TWO_BY_FOUR.world_size, TWO_BY_FOUR.devices_per_host) == (8, 4)
    assert TWO_BY_FOUR.host_of(4) == "b"
    with pytest.raises(TopologyError, match="rank 8 is outside this topology of 8 ranks"):
        TWO_BY_FOUR.host_of(8)
    with pytest.raises(TopologyError, match="at least one rank"):
        Topology.from_hosts([])


@pytest.mark.parametrize(
    ("ranks", "limit", "expected"),
    [
        (range(8), None, ((0, 1, 2, 3), (4, 5, 6, 7))),
        (range(8), 8, ((0, 1, 2, 3), (4, 5, 6, 7))),
        (range(8), 3, ((0, 1), (2, 3), (4, 5), (6, 7))),
        ([7, 1, 5, 3], None, ((1, 3), (5, 7))),
        ([0, 4], None, ((0,), (4,))),
        (range(4), None, ((0, 1, 2, 3),)),
        ([], None, ()),
    ],
)
def test_subgroups_are_equal_blocks_that_stay_on_a_host(ranks, limit, expected):
    assert TWO_BY_FOUR.subgroups(ranks, limit) == expected


def test_the_subgroup_size_is_the_largest_divisor_within_the_limit():
    one_host = Topology.from_hosts(["a"] * 12)
    sizes = {limit: len(one_host.subgroups(range(12), limit)[0]) for limit in (1, 4, 5, 7, 11, 12)}
    assert sizes == {1: 1, 4: 4, 5: 4, 7: 6, 11: 6, 12: 12}
    with pytest.raises(TopologyError, match="limit=0"):
        one_host.subgroups(range(12), 0)


def test_interleaved_ranks_are_refused_with_ranks_and_hosts_named():
    interleaved = Topology.from_hosts(["a", "b"] * 2)
    with pytest.raises(TopologyError, match=r"interleaved.*a: \[0, 2\], b: \[1, 3\]"):
        interleaved.subgroups(range(4))


def test_hosts_with_different_numbers_of_ranks_are_refused():
    with pytest.raises(TopologyError, match=r"different numbers.*a: \[2, 3\], b: \[4\]"):
        TWO_BY_FOUR.subgroups([2, 3, 4])


def test_without_a_group_there_is_one_rank_on_this_host(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(HOST_VARIABLE, "here")
    assert Topology.discover() == Topology(("here",))


@pytest.mark.ranks
def test_ranks_of_one_machine_share_a_host():
    topologies = run_ranks(lambda: Topology.discover(), 3)
    assert topologies[0].tier(range(3)) is Tier.FAST
    assert topologies == [topologies[0]] * 3


@pytest.mark.ranks
def test_the_exchange_takes_every_ranks_own_word():
    def body(rank):
        os.environ[HOST_VARIABLE] = "ab"[rank % 2]
        group = dist.new_group([0, 2])
        tier = None if rank == 1 else MeshAxis.of_group(group, "even").tier
        return Topology.discover().hosts, tier, MeshAxis.of_group().tier

    hosts = ("a", "b", "a")
    assert run_ranks(body, 3) == [
        (hosts, Tier.FAST, Tier.SLOW),
        (hosts, None, Tier.SLOW),
        (hosts, Tier.FAST, Tier.SLOW),
    ]


@pytest.mark.ranks
def test_two_agents_on_one_machine_stand_for_two_hosts():
    def body(rank):
        os.environ.update(LOCAL_RANK=str(rank % 2), GROUP_RANK=str(rank // 2), LOCAL_WORLD_SIZE="2")
        return Topology.discover()

    topology = run_ranks(body, 4)[0]
    assert topology.tier([0, 1]) is Tier.FAST
    assert topology.tier([1, 2]) is Tier.SLOW
    assert len(set(topology.hosts)) == 2


def test_one_string_is_no_list_of_hosts():
    with pytest.raises(TopologyError, match="one host name per rank"):
        Topology.from_hosts("ab")
