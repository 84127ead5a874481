"""What happens inside one rank that `run_ranks` has forked."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import inspect
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # documented, not in __all__

from hp_platform.failures import peer_error_behind
from hp_platform.testing.namespaces import enter_network
from hp_platform.waiting import doing

DUMP_SIGNAL = signal.SIGUSR1
HEADER = struct.Struct("!Q")
"""Length of the pickled message that follows it in a rank's pipe."""

DOING_SUFFIX = ".doing"
"""Suffix of the file with the answer to what a rank is doing."""

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Place:
    """Where a rank runs.

    Attributes:
        host: what torchrun calls the node's rank.
        local_rank: number of the rank on its host; local_world_size: ranks on that host.
        interface: network interface for gloo; "" for the loopback.
        network: descriptor of the host's network namespace; None for that of the parent.
    """

    host: int
    local_rank: int
    local_world_size: int
    interface: str = ""
    network: int | None = None


@dataclass(frozen=True)
class RankSetting:
    """Everything a rank needs to know; written by the parent before the fork.

    Attributes:
        rank, world_size, backend: as in `torch.distributed`.
        place: the rank's host.
        timeout: seconds after which the backend gives up a collective.
        store_file: the file through which the ranks find one another: no port can be
            taken by somebody else, and no server is needed.
        stack_file: where this rank writes its stacks when told to.
        parent: process id of the parent.
    """

    rank: int
    world_size: int
    backend: str
    place: Place
    timeout: float
    store_file: Path
    stack_file: Path
    parent: int


def run_rank(
    setting: RankSetting, body: Callable[..., Any], report: int, release: int, ask: int
) -> NoReturn:
    """Runs `body` as one rank, reports, and ends the process without any exit handler.

    Args:
        report: file descriptor for the one message of this rank.
        release: file descriptor that becomes readable once every rank has reported.
        ask: file descriptor that becomes readable when the parent asks what the rank is doing.
    """
    code = 1
    try:
        stacks = setting.stack_file.open("w")
        _prepare_process(setting, stacks)
        _answer_when_asked(ask, setting.stack_file.with_suffix(DOING_SUFFIX))
        dist.init_process_group(
            setting.backend,
            store=FileStore(str(setting.store_file), setting.world_size),
            rank=setting.rank,
            world_size=setting.world_size,
            timeout=timedelta(seconds=setting.timeout),
        )
        result = body(setting.rank) if _takes_rank(body) else body()
        _send(report, {"result": pickle.dumps(result)})
        # Groups are torn down only when nobody communicates any more: a rank that closes
        # its connections early would look like a dead peer to the others.
        os.read(release, 1)
        if dist.is_initialized():
            dist.destroy_process_group()
        code = 0
    except BaseException as error:
        _send(report, _failure(error))
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the body may have put anything in their place
                stream.flush()
        # Never return into the parent's interpreter: its pytest and atexit handlers would run.
        os._exit(code)


def _prepare_process(setting: RankSetting, stacks: Any) -> None:
    _die_with_parent(setting.parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    faulthandler.enable(stacks)
    faulthandler.register(DUMP_SIGNAL, file=stacks, all_threads=True)
    # A forked process has none of its parent's OpenMP threads and would wait for them for
    # ever in the first parallel region; with one thread there is no such region.
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(setting.rank),
        LOCAL_RANK=str(setting.place.local_rank),
        GROUP_RANK=str(setting.place.host),
        WORLD_SIZE=str(setting.world_size),
        LOCAL_WORLD_SIZE=str(setting.place.local_world_size),
        OMP_NUM_THREADS="1",
    )
    if setting.place.network is not None:
        enter_network(setting.place.network)
    # gloo otherwise looks up the host's name, which may lead to an unreachable address.
    if setting.place.interface:
        os.environ["GLOO_SOCKET_IFNAME"] = setting.place.interface
    elif "GLOO_SOCKET_IFNAME" not in os.environ:
        interfaces = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
        if interfaces:
            os.environ["GLOO_SOCKET_IFNAME"] = interfaces[0]


def _answer_when_asked(ask: int, answer: Path) -> None:
    """Lets a thread of its own tell, for the working one may be stuck in a collective."""
    worker = threading.get_ident()

    def tell() -> None:
        if os.read(ask, 1):
            partial = answer.with_suffix(".partial")
            partial.write_text(doing(worker))
            partial.rename(answer)

    threading.Thread(target=tell, name="tells what the rank does", daemon=True).start()


def _die_with_parent(parent: int) -> None:
    """Linux only: a rank must not outlive a parent that was killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _takes_rank(body: Callable[..., Any]) -> bool:
    """Whether `body` has a positional parameter to give the rank to."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(body).parameters.values()
    return any(p.kind in kinds and p.default is inspect.Parameter.empty for p in parameters)


def _failure(error: BaseException) -> Mapping[str, Any]:
    text = "".join(traceback.format_exception(error))
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:
        pickled = None
    lost_a_peer = peer_error_behind(error) is not None
    return {"traceback": text, "error": pickled, "lost_a_peer": lost_a_peer}


def _send(descriptor: int, message: Mapping[str, Any]) -> None:
    payload = pickle.dumps(dict(message))
    view = memoryview(HEADER.pack(len(payload)) + payload)
    while view:
        view = view[os.write(descriptor, view) :]
