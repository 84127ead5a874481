"""Runs a function on several local ranks, made by fork.

Forking costs a tenth of a second where starting fresh interpreters costs the import of torch
for each, so tests can afford many groups. The body may be a closure. What fork cannot do:
use CUDA or NPUs that the parent has already initialised.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hp_platform.errors import HPError, RankFailure
from hp_platform.testing.rank_process import (
    DOING_SUFFIX,
    DUMP_SIGNAL,
    HEADER,
    Place,
    RankSetting,
    run_rank,
)

_GRACE = 0.5
"""Seconds that ranks get to report what the first failure did to them."""
_DUMP_TIME = 3.0
"""Seconds that stuck ranks get to answer what they are doing, which takes a few milliseconds."""
_TEARDOWN_TIME = 15.0


@dataclass
class _Rank:
    """The parent's view of one rank."""

    rank: int
    pid: int
    report: int
    release: int
    ask: int
    stack_file: Path
    received: bytearray = field(default_factory=bytearray)
    closed: bool = False
    status: int | None = None

    def message(self) -> dict[str, Any] | None:
        """The rank's message once it is complete."""
        if len(self.received) < HEADER.size:
            return None
        (length,) = HEADER.unpack_from(self.received)
        if len(self.received) < HEADER.size + length:
            return None
        return pickle.loads(memoryview(self.received)[HEADER.size :])

    @property
    def settled(self) -> bool:
        """Nothing more will be heard of this rank."""
        if self.closed:
            return True
        if len(self.received) < HEADER.size:
            return False
        return len(self.received) >= HEADER.size + HEADER.unpack_from(self.received)[0]


def run_ranks(
    body: Callable[..., Any],
    world_size: int,
    *,
    timeout: float = 120,
    backend: str = "gloo",
) -> list[Any]:
    """Runs `body(rank)`, or `body()`, on `world_size` ranks and returns their results.

    Every rank computes with one thread, belongs to an initialised process group, and has the
    environment variables that torchrun would set. Results must be picklable.

    Args:
        body: any callable, closures included.
        timeout: seconds for everything together.
        backend: what the process group is made with.

    Raises:
        RankFailure: a rank raised, died or did not finish in time. The others are stopped
            within a second, or three where one does not answer; the message holds every
            rank's traceback, exit status or stack. A failing rank's exception is the cause
            where it can be pickled. Ranks that only lost a peer do not count as failed.
        HPError: this process is itself a rank, or has initialised the accelerator.
    """
    if world_size < 1:
        raise ValueError(f"run_ranks needs at least one rank, got world_size={world_size}")
    places = [Place(0, rank, world_size) for rank in range(world_size)]
    return run_placed_ranks(body, places, timeout=timeout, backend=backend)


def run_placed_ranks(
    body: Callable[..., Any],
    places: Sequence[Place],
    *,
    timeout: float = 120,
    backend: str = "gloo",
) -> list[Any]:
    """`run_ranks` with one rank at each of `places`, which may be different hosts."""
    world_size = len(places)
    if dist.is_initialized():
        raise HPError(
            "run_ranks forks, and this process is already in a process group: call it from a "
            "process that is not a rank, or destroy the group first"
        )
    if backend != "gloo" and torch.cuda.is_initialized():
        raise HPError(
            f"run_ranks(backend={backend!r}) forks, and this process has already initialised "
            "CUDA; use torchrun, or keep CUDA out of the parent"
        )
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory(prefix="run_ranks-") as folder, _close_at_end() as close:
        ranks: list[_Rank] = []
        try:
            for rank, place in enumerate(places):
                setting = RankSetting(
                    rank=rank,
                    world_size=world_size,
                    backend=backend,
                    place=place,
                    timeout=timeout,
                    store_file=Path(folder) / "store",
                    stack_file=Path(folder) / f"rank{rank}.stacks",
                    parent=os.getpid(),
                )
                ranks.append(_fork(setting, body, close))
            failed = _collect(ranks, deadline)
            if failed or not all(rank.settled for rank in ranks):
                raise _failure(ranks, failed, timeout)
            messages = [rank.message() or {} for rank in ranks]
            _release(ranks)
        finally:
            _kill(ranks)
    return [pickle.loads(message["result"]) for message in messages]


@contextlib.contextmanager
def _close_at_end() -> Iterator[list[int]]:
    descriptors: list[int] = []
    try:
        yield descriptors
    finally:
        for descriptor in descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _fork(setting: RankSetting, body: Callable[..., Any], close: list[int]) -> _Rank:
    report_read, report_write = os.pipe()
    release_read, release_write = os.pipe()
    ask_read, ask_write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        # The child must not hold the parent's ends, or nobody would see them close.
        for descriptor in (*close, report_read, release_write, ask_write):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        run_rank(setting, body, report_write, release_read, ask_read)
    for descriptor in (report_write, release_read, ask_read):
        os.close(descriptor)
    os.set_blocking(report_read, False)
    close += [report_read, release_write, ask_write]
    return _Rank(setting.rank, pid, report_read, release_write, ask_write, setting.stack_file)


def _collect(ranks: list[_Rank], deadline: float) -> tuple[int, ...]:
    """Reads until all have reported, one has failed, or time is up; returns who failed first."""
    failed: list[int] = []
    # Reading while ranks still run is what keeps large results from blocking in a full pipe.
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.report, selectors.EVENT_READ, rank)
        while selector.get_map() and time.monotonic() < deadline:
            ready = selector.select(min(0.2, max(0.0, deadline - time.monotonic())))
            for rank in [key.data for key, _ in ready] or _ended(selector):
                _read(rank)
                if rank.settled:
                    selector.unregister(rank.report)
                    message = rank.message()
                    if message is None or "result" not in message:
                        failed.append(rank.rank)
            if failed:
                _collect_grace(selector)
                break
    return tuple(failed)


def _ended(selector: selectors.BaseSelector) -> list[_Rank]:
    """The ranks whose processes are gone; a process that they left may hold the pipe open."""
    gone = [key.data for key in selector.get_map().values() if _reaped(key.data)]
    for rank in gone:
        _read(rank)
        rank.closed = True
    return gone


def _collect_grace(selector: selectors.BaseSelector) -> None:
    """Lets the peers of a failed rank say what they saw, for a moment."""
    end = time.monotonic() + _GRACE
    while selector.get_map() and time.monotonic() < end:
        for key, _ in selector.select(max(0.0, end - time.monotonic())):
            _read(key.data)
            if key.data.settled:
                selector.unregister(key.fileobj)


def _read(rank: _Rank) -> None:
    try:
        while chunk := os.read(rank.report, 1 << 20):
            rank.received += chunk
        rank.closed = True
    except BlockingIOError:
        pass


def _failure(ranks: list[_Rank], failed: tuple[int, ...], timeout: float) -> RankFailure:
    stuck = [rank for rank in ranks if not rank.settled]
    failed = _culprits(ranks, failed)
    for rank in stuck:
        with contextlib.suppress(ProcessLookupError, BrokenPipeError):
            os.write(rank.ask, b"?")
            os.kill(rank.pid, DUMP_SIGNAL)
    _await_answers(stuck)
    _kill(ranks)
    reports, cause = {}, None
    for rank in ranks:
        message = rank.message()
        if message is None:
            reports[rank.rank] = _silence(rank, stuck=rank in stuck)
        elif "traceback" in message:
            reports[rank.rank] = message["traceback"]
            if cause is None and message["error"] is not None and rank.rank in failed:
                cause = pickle.loads(message["error"])
    for rank in ranks:
        if failed and rank.rank in reports and rank.rank not in failed:
            account = reports[failed[0]].rstrip().splitlines()[-1]
            because = f"stopped because rank {failed[0]} failed: {account}"
            reports[rank.rank] = f"{because}\n{reports[rank.rank]}"
    names = ", ".join(map(str, failed or [rank.rank for rank in stuck]))
    if failed:
        summary = f"rank {names} of {len(ranks)} failed; the others were stopped"
    else:
        summary = f"rank {names} of {len(ranks)} did not finish within {timeout:g} s"
    failure = RankFailure(summary, reports, failed or tuple(rank.rank for rank in stuck))
    failure.__cause__ = cause
    return failure


def _await_answers(stuck: list[_Rank]) -> None:
    end = time.monotonic() + _DUMP_TIME
    while time.monotonic() < end and not all(_has_answered(rank) for rank in stuck):
        time.sleep(0.02)
    sizes = None
    # Until the last lines are there: what writes them does not say when it is done.
    while time.monotonic() < end and sizes != (sizes := [_size(rank) for rank in stuck]):
        time.sleep(0.1)


def _culprits(ranks: list[_Rank], first: tuple[int, ...]) -> tuple[int, ...]:
    """Who failed of itself; `first`, who were heard of first, where nobody did.

    A peer's account of a killed rank may arrive before it is known that that one was killed.
    """
    late = [r.rank for r in ranks if first and r.rank not in first and _has_failed(r)]
    found = [rank for rank in (*first, *late) if not _lost_a_peer(ranks[rank])]
    return tuple(found) or first


def _has_failed(rank: _Rank) -> bool:
    return rank.settled and "result" not in (rank.message() or {})


def _lost_a_peer(rank: _Rank) -> bool:
    return bool((rank.message() or {}).get("lost_a_peer"))


def _has_answered(rank: _Rank) -> bool:
    files = (rank.stack_file, rank.stack_file.with_suffix(DOING_SUFFIX))
    return _reaped(rank) or all(file.exists() and file.stat().st_size for file in files)


def _size(rank: _Rank) -> int:
    return rank.stack_file.stat().st_size if rank.stack_file.exists() else 0


def _silence(rank: _Rank, *, stuck: bool) -> str:
    """What is known of a rank that sent nothing."""
    stacks = rank.stack_file.read_text() if rank.stack_file.exists() else ""
    if stuck:
        answer = rank.stack_file.with_suffix(DOING_SUFFIX)
        doing = answer.read_text() if answer.exists() else "without an answer to what it does"
        shown = stacks or "(unknown)"
        return f"was still running when it was stopped, {doing}; its stacks were\n{shown}"
    assert rank.status is not None
    if os.WIFSIGNALED(rank.status):
        number = os.WTERMSIG(rank.status)
        names = {known.value: known.name for known in signal.Signals}  # not of all there are
        return f"was killed by signal {names.get(number, number)}\n{stacks}"
    code = os.waitstatus_to_exitcode(rank.status)
    return f"ended with exit code {code} without reporting\n{stacks}"


def _release(ranks: list[_Rank]) -> None:
    """Lets all ranks tear their groups down, and waits for them to end."""
    _tell_all(ranks, b"x")
    end = time.monotonic() + _TEARDOWN_TIME
    while time.monotonic() < end:
        if all(_reaped(rank) for rank in ranks):
            break
        time.sleep(0.002)
    bad = {
        rank.rank: "did not end after its group was to be destroyed"
        if rank.status is None
        else f"ended with status {os.waitstatus_to_exitcode(rank.status)} during tear-down"
        for rank in ranks
        if rank.status != 0
    }
    if bad:
        raise RankFailure("tearing the process group down failed", bad, tuple(bad))


def _tell_all(ranks: list[_Rank], message: bytes) -> None:
    for rank in ranks:
        # A rank that is already gone is noticed by its silence.
        with contextlib.suppress(BrokenPipeError):
            os.write(rank.release, message)


def _reaped(rank: _Rank) -> bool:
    if rank.status is None:
        pid, status = os.waitpid(rank.pid, os.WNOHANG)
        if pid:
            rank.status = status
    return rank.status is not None


def _kill(ranks: list[_Rank]) -> None:
    for rank in ranks:
        if rank.status is None and not _reaped(rank):
            os.kill(rank.pid, signal.SIGKILL)
    for rank in ranks:
        if rank.status is None:
            rank.status = os.waitpid(rank.pid, 0)[1]
