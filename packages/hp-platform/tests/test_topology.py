"""Hosts, tiers and replica subgroups."""

import os
import tempfile

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hp_platform import MeshAxis, Tier, Topology, TopologyError
from hp_platform.places import SUPER_NODE_VARIABLE
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


FOUR_BY_TWO = Topology.regular(4, 2, hosts_per_super_node=2)


def test_a_regular_topology_has_consecutive_ranks_on_consecutive_hosts():
    assert Topology.regular(2, 3).hosts == ("host0",) * 3 + ("host1",) * 3
    assert FOUR_BY_TWO.hosts[2:5] == ("host1", "host1", "host2")
    assert FOUR_BY_TWO.super_nodes == ("super-node0",) * 4 + ("super-node1",) * 4


@pytest.mark.parametrize(
    ("arguments", "named"),
    [((0, 2), "got 0 and 2"), ((3, 2, 2), "3 hosts do not divide into super-nodes of 2")],
)
def test_a_regular_topology_of_odd_numbers_is_refused(arguments, named):
    with pytest.raises(TopologyError, match=named):
        Topology.regular(*arguments)


@pytest.mark.parametrize(
    ("ranks", "tier"),
    [([1], Tier.LOCAL), ([0, 1], Tier.FAST), ([0, 3], Tier.FAST), ([3, 4], Tier.SLOW)],
)
def test_inside_a_super_node_hosts_reach_one_another_fast(ranks, tier):
    assert FOUR_BY_TWO.tier(ranks) is tier
    assert Topology(FOUR_BY_TWO.hosts).tier([0, 3]) is Tier.SLOW


def test_replica_subgroups_stay_in_a_super_node_and_may_leave_a_host():
    assert FOUR_BY_TWO.subgroups(range(8)) == ((0, 1, 2, 3), (4, 5, 6, 7))
    with pytest.raises(TopologyError, match=r"super-nodes hold.*super-node0: \[0, 1, 2\]"):
        FOUR_BY_TWO.subgroups([0, 1, 2, 4])


def test_a_host_in_two_super_nodes_is_refused():
    with pytest.raises(TopologyError, match=r"a host is in one super-node.*a: \['x', 'y'\]"):
        Topology.from_hosts(["a", "a"], ["x", "y"])
    with pytest.raises(TopologyError, match="super-node of each, got 1"):
        Topology.from_hosts(["a", "a"], ["x"])


def test_unequal_and_interleaved_hosts_are_refused_with_ranks_and_hosts_listed():
    Topology.regular(3, 2).require_regular()
    with pytest.raises(TopologyError, match=r"different numbers.*a: \[0, 1\], b: \[2\]"):
        Topology.from_hosts(["a", "a", "b"]).require_regular()
    with pytest.raises(TopologyError, match=r"interleaved.*a: \[0, 2\], b: \[1, 3\]"):
        Topology.from_hosts(["a", "b"] * 2).require_regular()


def test_groups_that_must_be_fast_are_named_when_they_cross():
    FOUR_BY_TWO.require_fast([[0, 2], [5, 7]], "mesh axis 'tp'")
    with pytest.raises(TopologyError) as caught:
        FOUR_BY_TWO.require_fast([[0, 2], [3, 4]], "mesh axis 'tp'")
    text = str(caught.value)
    assert "mesh axis 'tp' must be fast but crosses super-nodes: ranks [3, 4]" in text
    assert "host1 in super-node0: [3], host2 in super-node1: [4]" in text
    assert "[0, 2]" not in text


@pytest.mark.ranks
def test_an_axis_that_must_be_fast_is_refused_on_every_rank_together():
    """Only ranks 2 and 3 are on different hosts; ranks 0 and 1 must not go on alone."""

    def body(rank):
        os.environ[HOST_VARIABLE] = "aaab"[rank]
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        topology = Topology.discover()
        found = []
        for call in (
            lambda: MeshAxis.of_mesh(mesh, "tp", topology, fast=True),
            lambda: MeshAxis.of_mesh(mesh, "tp", fast=True),
            topology.require_regular,
        ):
            with pytest.raises(TopologyError) as caught:
                call()
            found.append(str(caught.value))
        return found

    results = run_ranks(body, 4)
    assert results == [results[0]] * 4
    axis, again, whole = results[0]
    assert axis == again
    assert "mesh axis 'tp' must be fast but crosses hosts: ranks [2, 3] (a: [2], b: [3])" in axis
    assert "different numbers of ranks (a: [0, 1, 2], b: [3])" in whole


@pytest.mark.ranks
def test_what_is_declared_holds_for_every_axis_and_ends_with_the_group():
    def body(rank):
        declared = Topology.regular(4, 1, hosts_per_super_node=2)
        declared.declare()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        tiers = MeshAxis.of_mesh(mesh, "dp").tier, MeshAxis.of_mesh(mesh, "tp").tier
        domains = MeshAxis.of_mesh(mesh, "dp").domains
        return Topology.discover() == declared, tiers, domains, HOST_VARIABLE in os.environ

    expected = (True, (Tier.SLOW, Tier.FAST), ("super-node0", "super-node1"), False)
    assert run_ranks(body, 4) == [expected] * 4


@pytest.mark.ranks
def test_ranks_that_declare_different_topologies_are_named_on_all():
    def body(rank):
        hosts = ["a", "b", "b"] if rank == 2 else ["a", "b", "c"]
        with pytest.raises(TopologyError) as caught:
            Topology.from_hosts(hosts).declare()
        with pytest.raises(TopologyError, match="has 2 ranks, this run has 3"):
            Topology.from_hosts(["a", "b"]).declare()
        return str(caught.value)

    found = run_ranks(body, 3)
    assert found == [found[0]] * 3
    assert "ranks [2] declare another topology than rank 0" in found[0]


@pytest.mark.ranks
def test_a_topology_is_declared_once_and_holds_for_axes_made_afterwards():
    def body(rank):
        os.environ[HOST_VARIABLE] = "h"
        before = MeshAxis.of_group()
        for _ in range(2):
            Topology.from_hosts(["a", "b"]).declare()
        with pytest.raises(TopologyError, match=f"rank {rank}: another topology has been declared"):
            Topology.from_hosts(["a", "a"]).declare()
        return before.tier, MeshAxis.of_group().tier

    assert run_ranks(body, 2) == [(Tier.FAST, Tier.SLOW)] * 2


@pytest.mark.ranks
def test_super_nodes_named_by_the_environment_are_exchanged_and_must_be_complete():
    def body(rank):
        os.environ[HOST_VARIABLE] = f"h{rank}"
        os.environ[SUPER_NODE_VARIABLE] = "xxy"[rank]
        return Topology.discover(dist.PrefixStore("one", dist.FileStore(path, 3)))

    def partly(rank):
        os.environ[HOST_VARIABLE] = f"h{rank}"
        if rank:
            os.environ[SUPER_NODE_VARIABLE] = "x"
        with pytest.raises(TopologyError) as caught:
            Topology.discover()
        return str(caught.value)

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/store"
        found = run_ranks(body, 3)
    assert found == [Topology(("h0", "h1", "h2"), ("x", "x", "y"))] * 3
    messages = run_ranks(partly, 3)
    assert messages == [messages[0]] * 3
    assert "ranks [0] name no super-node and the others do (1: x, 2: x)" in messages[0]


@pytest.mark.ranks
def test_agents_on_one_machine_are_told_apart_in_groups_whose_local_ranks_differ():
    def body(rank):
        os.environ.update(LOCAL_RANK=str(rank % 2), GROUP_RANK=str(rank // 2), LOCAL_WORLD_SIZE="2")
        group = dist.new_group([0, 3])
        return MeshAxis.of_group(group).tier if rank in (0, 3) else None

    assert run_ranks(body, 4) == [Tier.SLOW, None, None, Tier.SLOW]


@pytest.mark.parametrize(
    ("hosts", "super_nodes", "named"),
    [
        (("a", None), (), "rank 1 has the host None"),
        (("", "b"), (), "rank 0 has the host ''"),
        (("a\nb",), (), "expected a name of one line"),
        # Two hosts without a super-node would share the one called "".
        (("a", "b", "c"), ("s", "", ""), "rank 1 has the super-node '', .* or of none"),
    ],
)
def test_names_that_would_be_mistaken_are_refused(hosts, super_nodes, named):
    with pytest.raises(TopologyError, match=named):
        Topology.from_hosts(hosts, super_nodes)


@pytest.mark.parametrize("numbers", [(2.0, 2), ("2", 2), (2, 1.5), (4, 1, 2.0)])
def test_numbers_of_hosts_are_integers(numbers):
    with pytest.raises(TopologyError):
        Topology.regular(*numbers)
