"""Two torchrun agents as two hosts: in network namespaces where root allows, else on loopback."""

import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hp_integration.train import run
from hp_integration.world import World
from hp_platform.testing import TwoTierUnavailable, run_ranks, two_tier


@dataclass(frozen=True)
class Hosts:
    """How to start a process on each of two hosts, and where they meet."""

    prefixes: tuple[tuple[str, ...], tuple[str, ...]]
    environments: tuple[dict[str, str], dict[str, str]]
    master: str


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    try:
        with two_tier(hosts=2, ranks_per_host=2, slow="1gbit") as net:
            yield Hosts(
                (net.prefix(0), net.prefix(1)),
                (net.environment(0), net.environment(1)),
                net.address(0),
            )
    except TwoTierUnavailable:
        loopback = {"GLOO_SOCKET_IFNAME": "lo"}
        yield Hosts(((), ()), (loopback, loopback), "127.0.0.1")


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
            environment=hosts.environments[index],
        )
        for index in range(2)
    ]
    output, other = (agent.succeeded() for agent in agents)
    # A run that ends well says nothing else and leaves its files.
    assert not re.search("terminate called|Traceback", output + other)
    written = {path.name for path in two_out.iterdir()}
    assert {"latest", "metrics.json", "run.png", "step-000003"} <= written
    assert "4 ranks on 2 hosts" in " ".join(output.split())
    summary = output[output.index("Communication of rank 0") :]
    tiers = {line.split()[0]: line for line in summary.splitlines() if "dp_" in line}
    assert "dp_replicate" in tiers["slow"]
    assert "dp_shard" in tiers["fast"]

    whole = run_ranks(lambda: run(arguments(one_out), World.current()), 4, timeout=240)[0]
    assert losses(two_out) == pytest.approx(whole.losses, rel=1e-5, abs=0)
