"""A collective in flight, and how it is issued, waited for and reported on."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Generic, NoReturn, TypeVar

import torch
from torch import Tensor

from hp_platform.axis import MeshAxis
from hp_platform.errors import AgreementError, CollectiveError, HPError, PeerError
from hp_platform.ledger import (
    Entries,
    Origin,
    enter_completion,
    enter_issue,
    enter_start,
    enter_wait,
)
from hp_platform.lookout import difference_behind
from hp_platform.peer_memory import Lent, UnequalLengthsError
from hp_platform.process import Process
from hp_platform.traffic import Parts

T = TypeVar("T")

NOBODY = Origin("unknown")
FORKED = (
    "called in a process that was forked from the rank's own, which shares its process groups but "
    "none of their threads and connections; call collectives in the rank's process only, or "
    "spawn the other one and give it a process group of its own"
)

_logger = logging.getLogger("hp_platform")
_AS_IT_IS = nullcontext()


class Handle(Generic[T]):
    """A collective in flight.

    The rules of its life:

    - Nothing is valid before `wait()`: neither may the result be read nor may any tensor of the
      call be written. Backends differ in how much of this they forgive.
    - `wait()` may be called again, from any thread, and returns the same result, or raises the
      same error.
    - The handle keeps every tensor that the call reads or writes alive until `wait()` has
      returned, so callers may drop theirs. One that was lent lives, and must not be written, until
      `wait_for_readers()` has returned.
    - A handle that is dropped without `wait()` warns, naming who asked, and waits: the result
      reaches the caller's `output` if one was given, and no buffer is used again while the
      backend still works on it. One that is left when the interpreter ends is named as well,
      but no longer waited for.
    - A process forked meanwhile, such as a loader's worker, has a copy that it can drop, and
      cannot wait for: the call is its parent's.

    Attributes:
        done: whether `wait()` has nothing left to do.
    """

    __slots__ = (
        "__weakref__",
        "_axis",
        "_entries",
        "_error",
        "_finish",
        "_inference",
        "_keep",
        "_lock",
        "_operation",
        "_origin",
        "_process",
        "_readers",
        "_result",
        "_works",
        "done",
    )

    def __init__(
        self,
        result: T,
        works: Sequence[Any] = (),
        operation: str = "",
        axis: MeshAxis | None = None,
        origin: Origin = NOBODY,
        keep: Sequence[Tensor] = (),
        finish: Callable[[], object] | None = None,
        entries: Entries = (),
    ) -> None:
        self.done = axis is None
        self._result = result
        self._works = works
        self._operation = operation
        self._axis = axis
        self._origin = origin
        self._keep = keep
        self._finish = finish
        self._entries = entries
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._process = Process.identity
        self._inference = torch.is_inference_mode_enabled()
        lends = bool(works) and type(works[0]) is Lent
        self._readers = [work.wait_for_readers for work in works] if lends else []

    def wait(self) -> T:
        """Returns the result once it is valid; further calls return it again.

        On accelerators the result is valid for work queued on the current stream afterwards.

        Raises:
            PeerError: the backend failed, with operation, axis and origin named.
            AgreementError: it failed because ranks issue different collectives.
            CollectiveError: this process was forked after the call.
        """
        if not self.done:
            self._refuse_if_forked()
            # A second thread that waits must neither divide an average again nor return before.
            with self._lock:
                if not self.done:
                    self._complete()
        if self._error is not None:
            raise self._error
        return self._result

    def _refuse_if_forked(self) -> None:
        # Before the lock: a thread that was not forked may hold it.
        if self._axis is not None and self._process is not Process.identity:
            refuse(self._operation, self._axis, self._origin, FORKED)

    def _complete(self) -> None:
        if self._entries:
            enter_wait(self._entries)
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            assert self._axis is not None
            self.done = True
            self._error = peer_error(self._operation, self._axis, self._origin, error)
            raise self._error from error
        finish, self._finish = self._finish, None
        if finish is not None:
            try:
                # Tensors made in inference mode are written in it only.
                with torch.inference_mode() if self._inference else _AS_IT_IS:
                    finish()
            except Exception as error:
                # Waiting for the works again would hang, and leave the result unfinished.
                self.done, self._error = True, error
                raise
        self.done = True
        self._works = self._keep = ()
        if self._entries:
            enter_completion(self._entries)

    @property
    def lends(self) -> bool:
        """Whether peers may still read the call's tensor where it is."""
        return bool(self._readers)

    def wait_for_readers(self) -> None:
        """After `wait()`: returns when no peer reads the call's tensor any more.

        Of use to calls that lend it; of others, nothing is read once `wait()` has returned. All
        ranks must have come as far as `wait()`.

        Raises:
            PeerError, AgreementError: as `wait()`.
        """
        if self._readers:
            self._refuse_if_forked()
        try:
            for wait in self._readers:
                wait()
        except RuntimeError as error:
            assert self._axis is not None
            raise peer_error(self._operation, self._axis, self._origin, error) from error
        # Not before: after an error, and in another thread, nothing may be written yet.
        self._readers = []

    def delivering(self, result: T, deliver: Callable[[], object]) -> Handle[T]:
        """This handle, whose `wait()` now also calls `deliver` and then returns `result`."""
        self._result = result
        before = self._finish
        if self.done:
            deliver()
        elif before is None:
            self._finish = deliver
        else:
            self._finish = lambda: (before(), deliver())
        return self

    def __repr__(self) -> str:
        state = "done" if self.done else "in flight"
        return f"<Handle {self._operation} {state}, asked by {self._origin}>"

    def __del__(self) -> None:
        if self.done or self._axis is None or self._process is not Process.identity:
            return
        dropped = f"the handle of {where(self._operation, self._axis, self._origin)} was dropped"
        if sys.is_finalizing():
            # The peers may be gone, and waiting would turn an end, or an error, into a hang.
            print(f"{dropped} at exit without wait(); its result is lost", file=sys.stderr)
            return
        message = f"{dropped} without wait(); its result is lost. Keep the handle and call wait()"
        # ResourceWarning is hidden by Python's default filters; the log line is not.
        _logger.warning(message)
        try:
            warnings.warn(message, ResourceWarning, stacklevel=2, source=self)
        finally:
            # The garbage collector may have interrupted this thread while it reads this very call.
            if not any(isinstance(w, Lent) and w.after_reading(self.wait) for w in self._works):
                self.wait()


def issue(
    operation: str,
    axis: MeshAxis,
    origin: Origin,
    start: Callable[[], Sequence[Any]],
    result: T,
    size: int,
    tensors: tuple[Tensor, ...],
    dtype: torch.dtype | None = None,
    keep: tuple[Tensor, ...] = (),
    finish: Callable[[], object] | None = None,
    parts: Parts = None,
    alike: bool = True,
) -> Handle[T]:
    """Enters a collective in the ledger, makes it, and wraps what is then in flight.

    Args:
        start: makes the backend's calls and returns their works.
        result: what `Handle.wait()` returns.
        size: bytes of the message, for the ledger.
        tensors: the caller's tensors, whose alignment the ledger shows.
        keep: tensors of ours that must outlive the call.
        finish: runs once in `wait()`, after the backend's.
        parts: how the message divides between the coordinates, for the ledger.
        alike: whether all ranks of the axis make this call.

    Raises:
        AgreementError: ranks are known to issue different collectives; see `lookout`.
    """
    # A group has a trail only if all of its ranks make one: they count groups of a name by them.
    if alike and (trail := axis.trail) is not None:
        if trail.process is not Process.identity:
            refuse(operation, axis, origin, FORKED)
        trail.add(operation, origin)
    entries = enter_issue(operation, axis, size, tensors, dtype, origin, parts)
    try:
        works = start()
    except RuntimeError as error:
        if _tells_of_a_peer(error):
            raise peer_error(operation, axis, origin, error) from error
        raise _refused(operation, axis, origin, error) from error
    except (TypeError, ValueError) as error:  # such as of a group that has been destroyed
        raise _refused(operation, axis, origin, error) from error
    if entries:
        enter_start(entries)
    if keep:
        tensors += keep
    return Handle(result, works, operation, axis, origin, tensors, finish, entries)


def _refused(operation: str, axis: MeshAxis, origin: Origin, error: Exception) -> CollectiveError:
    return CollectiveError(
        f"{where(operation, axis, origin)}: the backend refused the call: {error}"
    )


def _tells_of_a_peer(error: RuntimeError) -> bool:
    text = str(error).lower()
    return any(word in text for word in ("connect", "closed", "reset by", "timed out", "timeout"))


def where(operation: str, axis: MeshAxis, origin: Origin) -> str:
    """Names a collective in a message."""
    place = f"rank {axis.global_rank}, coordinate {axis.rank} of {axis.size}"
    return f"{operation} on mesh axis {axis.name!r} ({place}), asked by {origin}"


def refuse(operation: str, axis: MeshAxis, origin: Origin, problem: str) -> NoReturn:
    """Raises the error of a collective that cannot be made; nothing has been sent."""
    raise CollectiveError(f"{where(operation, axis, origin)}: {problem}")


def peer_error(operation: str, axis: MeshAxis, origin: Origin, error: RuntimeError) -> HPError:
    """The error of a collective that failed underneath."""
    if isinstance(error, UnequalLengthsError):
        return AgreementError(f"{where(operation, axis, origin)}: {error}")
    difference = difference_behind(axis)
    if difference is not None:
        return AgreementError(f"rank {axis.global_rank}: {difference}")
    return PeerError(
        f"rank {axis.global_rank}: lost its peers while waiting in {operation} on axis "
        f"{axis.name} (ranks {list(axis.ranks)}), asked by {origin}; the backend says: {error}"
    )
