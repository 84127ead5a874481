"""Ends a rank's process loudly and without hanging when it fails.

A rank that raises usually leaves its peers inside a collective. Tearing the process group
down in an orderly way would wait for them, so the process prints what happened and ends at
once. Which rank failed first is written to the store, where a thread of every other rank finds it
and ends that one too, whatever its backend has noticed; with gloo, the closed connections fail
the peers' collectives even sooner. Every report says which rank failed, and in what, and what its
own rank was waiting for.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

import torch.distributed as dist

from hp_platform.errors import AgreementError, PeerError
from hp_platform.store import default_store
from hp_platform.waiting import doing, doing_in
from hp_platform.watch import FIRST_FAILURE, Watch

_UNEXPLAINED = "no rank gave a reason; one that is killed cannot"
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
# Held by the thread that ends the process, so that a rank makes one report only.
_ending = threading.Lock()


@dataclass
class Activity:
    """What the process is doing, for the report; assign `phase` as the work goes on."""

    what: str
    phase: str = ""

    def __str__(self) -> str:
        return f"{self.what}, {self.phase}" if self.phase else self.what


@contextlib.contextmanager
def reported_failures(what: str) -> Iterator[Activity]:
    """Reports an exception that leaves the block on standard error and ends the process.

    The report names rank, host, activity and error. A rank that failed because a peer did, or
    that is stopped within about two seconds after a peer has failed, says which peer failed in
    what, if that one could tell, and what it was itself waiting for. A rank is stopped, too, when
    torchrun's agent was killed. The exit code is 1, or 130 after an interrupt. `SystemExit`
    passes through. Wrap the whole main function of a program in it, once.

    Args:
        what: the activity's name, such as "training".
    """
    activity = Activity(what)
    thread = threading.get_ident()

    def stop(reason: str) -> None:
        _end(f"{_who()} stopped in {activity}, {doing(thread)}:\n{reason}", 1)

    watch = Watch(stop)
    watch.start()
    try:
        yield activity
    except SystemExit:
        raise
    except KeyboardInterrupt:
        _end(f"{_who()}: interrupted in {activity}", 130)
    except BaseException as error:
        peer = peer_error_behind(error)
        if peer is not None:
            first = _first_failure() or _UNEXPLAINED
            _end(f"{_who()} stopped in {activity}:\n{peer}\n{first}", 1)
        account = f"{_who()} failed in {activity}: {type(error).__name__}: {error}"
        _publish(account)
        _end(f"{account}\n{''.join(traceback.format_exception(error)).rstrip()}", 1)
    finally:
        watch.close()


@contextlib.contextmanager
def reported_stop(activity: Activity) -> Iterator[None]:
    """Says what this rank was doing when its launcher ends it with SIGTERM.

    A launcher stops the ranks that are left when one was killed; they then tell how far the run
    had come, for the killed one cannot. Enter it once the process group exists: Python acts on a
    signal only between two of its own instructions, and a rank that still waits for others to
    start would not come to that. Outside the main thread, or where the program has a handler of
    its own, it does nothing.

    Args:
        activity: what `reported_failures` gave.
    """
    free = threading.current_thread() is threading.main_thread()
    if not free or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    owner = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a forked helper has inherited the handler, not the report
            os._exit(128 + number)
        if _ending.locked():  # this thread may be the one that has begun to report
            return
        where = f", {doing_in(frame)}" if frame is not None else ""
        report = f"{_who()}: stopped by its launcher (SIGTERM) in {activity}{where}"
        _end(f"{report}\n{_first_failure()}".rstrip(), 128 + number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _who() -> str:
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    return f"rank {rank} on {socket.gethostname()}"


def peer_error_behind(error: BaseException | None) -> BaseException | None:
    """The peer's failure that `error` is or was caused by.

    Collectives that PyTorch makes by itself, such as those of distributed checkpoints, raise the
    backend's plain RuntimeError; gloo has no type for it, only these words. Ranks that do not
    agree close their connections, but then it is not the peer that failed.
    """
    while error is not None and not _lost_a_peer(error):
        error = None if isinstance(error, AgreementError) else error.__cause__
    return error


def _lost_a_peer(error: BaseException) -> bool:
    if isinstance(error, PeerError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and "gloo" in text and any(w in text for w in _LOST)


def _publish(account: str) -> None:
    """Writes the account where peers find it; the first failure stays the first."""
    if not dist.is_initialized():
        return
    # Whatever goes wrong here must not hide the failure that is being reported.
    with contextlib.suppress(Exception):
        FIRST_FAILURE.leave(default_store(), account)


def _first_failure() -> str:
    """Which rank failed first, in its own words; empty if it was killed before it could tell.

    There is nothing to wait for: an account is written before the connections close.
    """
    if dist.is_initialized():
        with contextlib.suppress(Exception):
            account = FIRST_FAILURE.find(default_store())
            if account is not None:
                return f"the first failure was: {account}"
    return ""


def _end(report: str, code: int) -> None:
    _ending.acquire()
    bar = "=" * 72
    with contextlib.suppress(Exception):  # the program may have put anything in their place
        sys.stdout.flush()
        sys.stderr.flush()
    # One write, so that the reports of several ranks do not mix line by line.
    os.write(2, f"{bar}\n{report}\n{bar}\n".encode())
    os._exit(code)
