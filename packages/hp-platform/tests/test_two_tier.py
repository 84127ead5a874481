"""Hosts made of network namespaces: what ranks see there, and that nothing is left behind."""

import os
import signal
import subprocess
import sys
import time
import unittest
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from hp_platform import HPError, MeshAxis, RankFailure, Tier, Topology, all_reduce, barrier
from hp_platform.testing import two_tier
from hp_platform.testing.two_tier import TwoTierUnavailable, unavailable


def network_of(process):
    """The network namespace of a process, or None when it has ended meanwhile."""
    try:
        return os.readlink(f"/proc/{process}/ns/net")
    except OSError:
        return None


def processes_in(networks):
    """The processes that run in one of `networks`."""
    numbers = [entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [number for number in numbers if network_of(number) in networks]


def wait_until_empty(networks, seconds=60):
    end = time.monotonic() + seconds
    while processes_in(networks) and time.monotonic() < end:
        time.sleep(0.05)
    return processes_in(networks)


@pytest.mark.ranks
def test_ranks_find_their_hosts_and_reach_one_another_over_both_tiers():
    def body(rank):
        topology = Topology.discover()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        replicate = MeshAxis.of_mesh(mesh, "replicate", topology)
        shard = MeshAxis.of_mesh(mesh, "shard", topology)
        tensor = torch.tensor([10.0**rank])
        inside = all_reduce(tensor.clone(), shard).wait().item()
        across = all_reduce(tensor.clone(), replicate).wait().item()
        names = ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        place = tuple(int(os.environ[name]) for name in names)
        return replicate.tier, shard.tier, inside, across, place, network_of("self")

    before = network_of("self")
    with two_tier(hosts=2, ranks_per_host=2, slow="1gbit") as net:
        assert net.world_size == 4
        found = net.run(body)
    assert [result[:2] for result in found] == [(Tier.SLOW, Tier.FAST)] * 4
    assert [result[2] for result in found] == [11.0, 11.0, 1100.0, 1100.0]
    assert [result[3] for result in found] == [101.0, 1010.0, 101.0, 1010.0]
    assert [result[4] for result in found] == [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]
    networks = [result[5] for result in found]
    assert networks[0] == networks[1] != networks[2] == networks[3]
    assert network_of("self") == before not in networks
    assert processes_in(networks) == []


def test_the_links_between_hosts_are_limited_in_both_directions_and_no_other_is():
    with two_tier(hosts=3, ranks_per_host=1, slow="500mbit") as net:
        for host in range(3):
            shown = subprocess.run(
                [*net.prefix(host), "tc", "qdisc", "show"], capture_output=True, text=True
            ).stdout
            assert shown.count("tbf") == 1, shown
            assert "dev uplink root" in shown
            assert "rate 500Mbit" in shown
            reached = subprocess.run(
                [*net.prefix(host), *sending_to(net.address((host + 1) % 3))], timeout=200
            )
            assert reached.returncode == 0


def sending_to(address):
    """A program that succeeds when the host answers: a closed port refuses at once."""
    return [
        sys.executable,
        "-c",
        "import socket, sys\n"
        "try:\n"
        f"    socket.create_connection(({address!r}, 9), timeout=100)\n"
        "except ConnectionRefusedError:\n"
        "    sys.exit(0)\n"
        "sys.exit(1)\n",
    ]


@pytest.mark.ranks
def test_nothing_is_left_when_a_body_fails():
    descriptors = len(os.listdir("/proc/self/fd"))
    seen = []

    def body(rank):
        if rank == 1:
            raise KeyError("planted")
        barrier(MeshAxis.of_group())

    with (  # noqa: PT012
        pytest.raises(RankFailure, match="planted"),
        two_tier(ranks_per_host=1) as net,
    ):
        seen += [f"net:[{os.fstat(network).st_ino}]" for network in net.networks]
        net.run(body)
    assert len(seen) == 2
    assert processes_in(seen) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors


SLEEPERS = """
import os, time
from hp_platform.testing import two_tier
def body():
    os.write(1, (os.readlink("/proc/self/ns/net") + "\\n").encode())
    time.sleep(100)
with two_tier(ranks_per_host=1) as net:
    net.run(body)
"""


@pytest.mark.ranks
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_parent_is_killed(number):
    reason = unavailable()
    if reason:
        pytest.skip(reason)
    links = os.listdir("/sys/class/net")
    with subprocess.Popen([sys.executable, "-c", SLEEPERS], stdout=subprocess.PIPE) as parent:
        networks = [parent.stdout.readline().decode().strip() for _ in range(2)]
        assert len(set(networks)) == 2
        assert len(processes_in(networks)) == 2
        parent.send_signal(number)
        assert parent.wait(timeout=60) == -number
        assert wait_until_empty(networks) == []
    assert os.listdir("/sys/class/net") == links
    named = Path("/run/netns")
    assert not named.exists() or os.listdir(named) == []


def test_without_root_it_says_so_and_a_test_is_skipped(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(unittest.SkipTest, match="needs root"), two_tier():
        pass
    assert issubclass(TwoTierUnavailable, HPError)


def test_missing_programs_are_named(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(TwoTierUnavailable, match="ip, tc, nsenter not found"), two_tier():
        pass


def test_a_command_that_the_kernel_refuses_is_shown_and_skips():
    with two_tier(ranks_per_host=1) as net:
        from hp_platform.testing.two_tier import _on

        with pytest.raises(TwoTierUnavailable, match=r"`tc qdisc .*nosuchkind.*` says: .*unknown"):
            _on(net.networks[0], "tc", "qdisc", "add", "dev", "lo", "root", "nosuchkind")
        with pytest.raises(HPError, match="no host 2"):
            net.prefix(2)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"hosts": 1}, "2 to 250 hosts, got hosts=1"),
        ({"ranks_per_host": 0}, "ranks_per_host=0"),
        ({"slow": "fast"}, "got 'fast'"),
        ({"slow": "0bit"}, "got '0bit'"),
        ({"slow": "0.0mbit"}, "got '0.0mbit'"),
        ({"slow": 5}, "got 5"),
        ({"hosts": 2.0}, "got hosts=2.0"),
        ({"ranks_per_host": "2"}, "got ranks_per_host=2"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments, named):
    with pytest.raises(HPError, match=named) as caught, two_tier(**arguments):
        pass
    assert not isinstance(caught.value, TwoTierUnavailable)


def test_a_network_is_refused_after_its_block():
    with two_tier(ranks_per_host=1) as net:
        pass
    for use in (lambda: net.run(lambda: None), lambda: net.prefix(0), lambda: net.environment(0)):
        with pytest.raises(HPError, match="this network is gone"):
            use()


@pytest.mark.slow
@pytest.mark.ranks
def test_a_slow_link_costs_what_its_rate_says():
    """A measurement: 8 MB at 200 Mbit/s take a third of a second, inside a host far less."""

    def body():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        times = {}
        for name in ("replicate", "shard"):
            axis = MeshAxis.of_mesh(mesh, name)
            samples = []
            for _ in range(5):
                barrier(axis)
                start = time.perf_counter()
                all_reduce(torch.ones(2 << 20), axis).wait()
                samples.append(time.perf_counter() - start)
            times[name] = sorted(samples)[2]
        return times

    with two_tier(slow="200mbit") as net:
        found = net.run(body)
    # Two pairs share the link between the hosts: each rank sends and receives 8 MiB.
    expected = 2 * (8 << 20) * 8 / 200e6
    for times in found:
        assert 0.7 * expected < times["replicate"] < 2 * expected, times
        assert times["replicate"] > 3 * times["shard"], times
