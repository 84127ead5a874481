"""Several hosts on one Linux machine: fast inside a host, a limited link between hosts.

Each host is a network namespace. A veth pair leads from every host to a switch (a bridge in a
namespace of its own), and both ends of the pair pass on no more than the given rate. Ranks on
one host reach one another through that host's loopback, which nothing limits.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading
import unittest
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hp_platform.errors import HPError
from hp_platform.testing.namespaces import new_network
from hp_platform.testing.rank_process import Place
from hp_platform.testing.ranks import run_placed_ranks

_INTERFACE = "uplink"
_RATE = re.compile(r"\d+(\.\d+)?[kmgt]?bit")
_MOST_HOSTS = 250
# As much as may pass at once, and how long a packet may wait before it is dropped: large enough
# for the 64 KiB segments of a veth pair, small against the messages worth measuring.
_BURST, _QUEUE = "1mb", "100ms"


class TwoTierUnavailable(HPError, unittest.SkipTest):  # noqa: N818  (it is no error of the caller)
    """This machine cannot make the network, and why; unittest and pytest skip the test."""


@dataclass(frozen=True)
class TwoTierNetwork:
    """A network made by `two_tier`; it exists until the `with` block ends.

    Attributes:
        hosts: number of hosts.
        ranks_per_host: ranks that `run` puts on each; rank r is on host r // ranks_per_host.
        slow: rate of every host's link in each direction, as `tc` writes it.
        networks: descriptor of every host's network namespace.
    """

    hosts: int
    ranks_per_host: int
    slow: str
    networks: tuple[int, ...]
    _closed: threading.Event = field(default_factory=threading.Event, repr=False, compare=False)

    @property
    def world_size(self) -> int:
        """Number of ranks on all hosts."""
        return self.hosts * self.ranks_per_host

    def run(self, body: Callable[..., Any], *, timeout: float = 120) -> list[Any]:
        """What `run_ranks` does, with the ranks on their hosts: `GROUP_RANK` is the host.

        Raises:
            RankFailure: a rank raised, died or did not finish in time.
            HPError: the `with` block has ended.
        """
        self._require_open()
        places = [
            Place(host, local, self.ranks_per_host, _INTERFACE, network)
            for host, network in enumerate(self.networks)
            for local in range(self.ranks_per_host)
        ]
        return run_placed_ranks(body, places, timeout=timeout)

    def prefix(self, host: int) -> tuple[str, ...]:
        """What to put before a command line to start it on `host`.

        A process that is started so and lives on keeps its host alive, but not the others.
        """
        return ("nsenter", f"--net=/proc/{os.getpid()}/fd/{self.networks[self._known(host)]}")

    def environment(self, host: int) -> dict[str, str]:
        """Variables for a process on `host`: gloo must be told its interface."""
        self._known(host)
        return {"GLOO_SOCKET_IFNAME": _INTERFACE}

    def address(self, host: int) -> str:
        """The IPv4 address under which the others reach `host`."""
        return f"10.211.7.{self._known(host) + 1}"

    def _require_open(self) -> None:
        if self._closed.is_set():
            raise HPError("this network is gone with its `with two_tier(...)` block; run inside it")

    def _known(self, host: int) -> int:
        self._require_open()
        if not 0 <= host < self.hosts:
            raise HPError(f"there is no host {host}, hosts are 0 to {self.hosts - 1}")
        return host


@contextlib.contextmanager
def two_tier(
    *, hosts: int = 2, ranks_per_host: int = 2, slow: str = "1gbit"
) -> Iterator[TwoTierNetwork]:
    """Makes a network of several hosts on this machine for the duration of the `with` block.

    It leaves nothing behind, even when this process is killed: namespaces without names end with
    the last process that has them open.

    Args:
        hosts: number of hosts, 2 or more.
        ranks_per_host: ranks on each.
        slow: rate of the links between hosts in bits a second, such as "500mbit" or "2gbit".

    Raises:
        TwoTierUnavailable: not Linux, not root, no `ip`, `tc` or `nsenter`, or a kernel
            that lacks a part; a test that does not catch it counts as skipped, with the reason.
        HPError: an argument makes no sense.
    """
    _check(hosts, ranks_per_host, slow)
    reason = unavailable()
    if reason is not None:
        raise TwoTierUnavailable(f"no two-tier network: {reason}")
    with contextlib.ExitStack() as stack:
        switch = _namespace(stack)
        networks = tuple(_namespace(stack) for _ in range(hosts))
        net = TwoTierNetwork(hosts, ranks_per_host, slow, networks)
        _on(switch, "ip", "link", "add", "switch", "type", "bridge")
        _on(switch, "ip", "link", "set", "switch", "up")
        for host in range(hosts):
            _connect(net, host, switch)
        stack.callback(net._closed.set)
        yield net


def unavailable() -> str | None:
    """Why `two_tier` cannot work here, as far as that can be told without trying."""
    if sys.platform != "linux":
        return f"network namespaces are a Linux feature, this is {sys.platform}"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    missing = [name for name in ("ip", "tc", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found on PATH (packages iproute2 and util-linux)"
    return None


def _check(hosts: int, ranks_per_host: int, slow: str) -> None:
    if not isinstance(hosts, int) or not 2 <= hosts <= _MOST_HOSTS:
        raise HPError(f"two_tier needs 2 to {_MOST_HOSTS} hosts, got hosts={hosts}")
    if not isinstance(ranks_per_host, int) or ranks_per_host < 1:
        raise HPError(f"a host needs at least one rank, got ranks_per_host={ranks_per_host}")
    if not isinstance(slow, str) or not _RATE.fullmatch(slow) or not slow.strip("0.kmgtbi"):
        raise HPError(f"slow is a rate such as '500mbit' or '2gbit', got {slow!r}")


def _namespace(stack: contextlib.ExitStack) -> int:
    try:
        network = new_network()
    except OSError as error:
        raise TwoTierUnavailable(f"no two-tier network: {error}") from error
    stack.callback(os.close, network)
    _on(network, "ip", "link", "set", "lo", "up")
    return network


def _connect(net: TwoTierNetwork, host: int, switch: int) -> None:
    """Joins a host to the switch and limits both directions."""
    network, port = net.networks[host], f"port{host}"
    _on(
        switch,
        *("ip", "link", "add", port, "type", "veth", "peer", "name", _INTERFACE),
        *("netns", f"/proc/{os.getpid()}/fd/{network}"),
    )
    _on(switch, "ip", "link", "set", port, "master", "switch", "up")
    _on(network, "ip", "addr", "add", f"{net.address(host)}/24", "dev", _INTERFACE)
    _on(network, "ip", "link", "set", _INTERFACE, "up")
    for where, interface in ((switch, port), (network, _INTERFACE)):
        _on(
            where,
            *("tc", "qdisc", "add", "dev", interface, "root", "tbf"),
            *("rate", net.slow, "burst", _BURST, "latency", _QUEUE),
        )


def _on(network: int, *command: str) -> None:
    """Runs a command in a namespace."""
    done = subprocess.run(
        ("nsenter", f"--net=/proc/{os.getpid()}/fd/{network}", *command),
        check=False,
        capture_output=True,
        text=True,
        timeout=20,
    )
    if done.returncode != 0:
        raise TwoTierUnavailable(
            f"no two-tier network: `{' '.join(command)}` says: {done.stderr.strip()}"
        )
