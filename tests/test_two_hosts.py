"""Two torchrun agents as two hosts: in network namespaces where root allows, else on loopback."""

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hp_integration.train import run
from hp_integration.world import World
from hp_platform.testing import run_ranks


@dataclass(frozen=True)
class Hosts:
    """How to start a process on each of two hosts, and where they meet."""

    prefixes: tuple[tuple[str, ...], tuple[str, ...]]
    interfaces: tuple[str, str]
    master: str
    are_namespaces: bool


def execute(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20)


@contextlib.contextmanager
def namespaces() -> Iterator[Hosts]:
    """Two network namespaces joined by a veth pair; removed at the end."""
    tag = f"{os.getpid() % 100000}"
    names = (f"hpa{tag}", f"hpb{tag}")
    links = (f"va{tag}", f"vb{tag}")
    try:
        for name in names:
            execute("ip", "netns", "add", name)
            execute("ip", "-n", name, "link", "set", "lo", "up")
        execute(
            *("ip", "-n", names[0], "link", "add", links[0], "type", "veth"),
            *("peer", "name", links[1], "netns", names[1]),
        )
        for index, (name, link) in enumerate(zip(names, links)):
            execute("ip", "-n", name, "addr", "add", f"10.211.7.{index + 1}/24", "dev", link)
            execute("ip", "-n", name, "link", "set", link, "up")
        yield Hosts(
            (("ip", "netns", "exec", names[0]), ("ip", "netns", "exec", names[1])),
            links,
            "10.211.7.1",
            are_namespaces=True,
        )
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with contextlib.ExitStack() as stack:
        found = None
        if os.geteuid() == 0 and shutil.which("ip"):
            with contextlib.suppress(subprocess.CalledProcessError, subprocess.TimeoutExpired):
                found = stack.enter_context(namespaces())
        yield found or Hosts(((), ()), ("lo", "lo"), "127.0.0.1", are_namespaces=False)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.ranks
def test_two_agents_train_as_two_hosts_with_the_losses_of_one(
    launcher, hosts: Hosts, losses: Callable[[Path], list[float]], tmp_path: Path
) -> None:
    """Replicas on different hosts: what they exchange is on the slow tier, the rest on the fast."""
    one_out, two_out = tmp_path / "one", tmp_path / "two"
    port = free_port()

    def arguments(out: Path) -> list[str]:
        return launcher.arguments(out, "--mesh", "dp_replicate=2,dp_shard=2", "--no-checks")

    agents = [
        launcher.start(
            *arguments(two_out),
            agent=(
                *("--nnodes=2", f"--node-rank={index}"),
                *(f"--master-addr={hosts.master}", f"--master-port={port}"),
            ),
            prefix=hosts.prefixes[index],
            environment={"GLOO_SOCKET_IFNAME": hosts.interfaces[index]},
        )
        for index in range(2)
    ]
    output = agents[0].succeeded()
    agents[1].succeeded()
    assert "4 ranks on 2 hosts" in " ".join(output.split())
    summary = output[output.index("Communication of rank 0") :]
    tiers = {line.split()[0]: line for line in summary.splitlines() if "dp_" in line}
    assert "dp_replicate" in tiers["slow"]
    assert "dp_shard" in tiers["fast"]

    whole = run_ranks(lambda: run(arguments(one_out), World.current()), 4, timeout=120)[0]
    assert losses(two_out) == pytest.approx(whole.losses, rel=1e-5, abs=0)
