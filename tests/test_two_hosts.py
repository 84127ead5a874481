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


@dataclass(frozen=True)
class Hosts:
    """How to start a process on each of two hosts, and where they meet."""

    prefixes: tuple[tuple[str, ...], tuple[str, ...]]
    interfaces: tuple[str, str]
    master: str
    are_namespaces: bool


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20)


@contextlib.contextmanager
def namespaces() -> Iterator[Hosts]:
    """Two network namespaces joined by a veth pair; removed at the end."""
    tag = f"{os.getpid() % 100000}"
    names = (f"hpa{tag}", f"hpb{tag}")
    links = (f"va{tag}", f"vb{tag}")
    try:
        for name in names:
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        run(
            *("ip", "-n", names[0], "link", "add", links[0], "type", "veth"),
            *("peer", "name", links[1], "netns", names[1]),
        )
        for index, (name, link) in enumerate(zip(names, links)):
            run("ip", "-n", name, "addr", "add", f"10.211.7.{index + 1}/24", "dev", link)
            run("ip", "-n", name, "link", "set", link, "up")
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
    agents = [
        launcher.start(
            *launcher.arguments(two_out, "--mesh", "dp_replicate=2,dp_shard=2", "--no-checks"),
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

    whole = launcher.start(
        *launcher.arguments(one_out, "--mesh", "dp_replicate=2,dp_shard=2", "--no-checks"), ranks=4
    )
    assert "4 ranks on 1 host," in " ".join(whole.succeeded().split())
    assert losses(two_out) == pytest.approx(losses(one_out), rel=1e-5)
