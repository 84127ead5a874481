"""Ranks on one host that read one another's memory: shares travel by one copy, without a socket.

A rank posts where a call's tensor lies; its peers read from there, with Linux's
`process_vm_readv`, when they wait for the call, and say so when they have. What is posted and what
has been read are numbers in memory that all of them map. A rank that waits for one call reads what
has been posted for its others meanwhile: so no rank waits for readers that wait for it.

Debuggers use the same system call, and the system may refuse it to them: what every rank of a group
finds out is exchanged, and all of them use it or none does. They order what they write only by the
order of their instructions, which x86-64 keeps.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from hp_platform.records import Origin

if TYPE_CHECKING:
    from hp_platform.axis import MeshAxis

_RING = 64
"""Calls of a group that may be in use at one time; more wait for their readers."""
_FIELDS = 4
"""Of a posted call: its number, counted from 1 and written last; its tag; address and bytes."""
_YIELDS = 3
"""How often this rank lets others run before it sleeps between two looks."""
_PAUSE = 50e-6
"""Seconds between two looks at a number that has not come."""
_LOOK = 0.25
"""Seconds between two looks at whether the peer is alive."""
_LATE, _LONGEST_PAUSE = 1 / 64, 0.02
"""What part of a wait a pause may be, and seconds."""
_HELPS = 16
"""Looks between two at whether anything else can be read meanwhile."""
BLOCK = 1 << 18
"""Bytes that are read and added at a time: they stay in a core's own cache in between."""


class _Vector(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class UnequalLengthsError(RuntimeError):
    """Ranks lend tensors of different lengths to one call."""


def board_length(size: int) -> int:
    """Bytes of the memory that the ranks of a group of `size` map."""
    return 8 * size * _RING * (_FIELDS + size)


class PeerMemory:
    """What the ranks of one group have posted to one another.

    Attributes:
        rank, size: this rank's coordinate and how many there are.
        broken: why nothing more will come; None while all is well. May be set from any thread.
    """

    def __init__(
        self, rank: int, processes: Sequence[int], board: mmap.mmap, timeout: float
    ) -> None:
        self.rank, self.size = rank, len(processes)
        self.broken: str | None = None
        self._processes = processes
        # One after another: what has been opened is closed where the next one is refused.
        self._alive: list[int] = []
        for peer, process in enumerate(processes):
            self._alive.append(-1 if peer == rank else os.pidfd_open(process))
        self._timeout = timeout
        numbers = memoryview(board).cast("Q")
        posts = self.size * _RING * _FIELDS
        self._posts, self._reads = numbers[:posts], numbers[posts:]
        self._count = 0
        # What peers may still read, which must not be freed, whoever has dropped it.
        self._lent: list[tuple[int, object] | None] = [None] * _RING
        self._unread: dict[int, Unread] = {}

    def __del__(self) -> None:
        for descriptor in getattr(self, "_alive", ()):
            if descriptor >= 0:
                os.close(descriptor)

    def post(self, tag: int, address: int, nbytes: int, lent: object) -> int:
        """Tells all peers where this rank's part of the next call lies; returns its number.

        Args:
            tag: what the peers' parts of this call have, too.
            nbytes: the size of the call, the same on all ranks.
            lent: what must live until all peers have read it.
        """
        number = self._count
        if self._lent[number % _RING] is not None:
            self.wait_for_readers(number - _RING)
        self._count = number + 1
        self._lent[number % _RING] = (number, lent)
        place = (self.rank * _RING + number % _RING) * _FIELDS
        self._posts[place + 1], self._posts[place + 2] = tag, address
        self._posts[place + 3] = nbytes
        self._posts[place] = number + 1
        return number

    def expect(self, number: int, tag: int, read: Callable[[], None]) -> None:
        """`read`, which reads the peers' tensors of a call, is due in `finish` at the latest."""
        self._unread[number] = Unread(tag, read)

    def finish(self, number: int) -> None:
        """Reads the peers' tensors of a call, unless that has been done."""
        unread = self._unread.get(number)
        if unread is not None:
            with unread.lock:
                self._read(number, unread)
            unread.make_calls()

    def _read(self, number: int, unread: Unread) -> None:
        if number in self._unread:
            unread.reader = threading.get_ident()
            try:
                unread.read()
            finally:
                unread.reader = 0
            # Not before: whoever waits for this call must not take it for read.
            del self._unread[number]

    def after_reading(self, number: int, call: Callable[[], object]) -> bool:
        """Makes `call` when this thread has read a call that it is reading at this moment.

        So may be what the garbage collector interrupts: it must not wait for that to end.

        Returns:
            Whether this thread is reading it.
        """
        unread = self._unread.get(number)
        if unread is None or unread.reader != threading.get_ident():
            return False
        unread.afterwards.append(call)
        return True

    def read_what_has_come(self) -> None:
        """Reads for all calls that peers have posted and this rank has not waited for yet.

        What cannot be read is left to whoever waits for the call.
        """
        # A copy is made in one piece: the garbage collector may end calls meanwhile.
        for number, unread in self._unread.copy().items():
            posted = (
                self._is_posted(number, peer, unread.tag)
                for peer in range(self.size)
                if peer != self.rank
            )
            # The call that this thread waits for, or another one reads, is locked.
            if all(posted) and unread.lock.acquire(blocking=False):
                try:
                    with contextlib.suppress(RuntimeError):
                        self._read(number, unread)
                finally:
                    unread.lock.release()
                unread.make_calls()

    def _is_posted(self, number: int, peer: int, tag: int) -> bool:
        place = (peer * _RING + number % _RING) * _FIELDS
        return self._posts[place] >= number + 1 and self._posts[place + 1] == tag

    def address(self, number: int, peer: int, tag: int, length: int) -> int:
        """Where the tensor of `peer`, of `length` bytes, lies, as soon as it has been posted.

        Where the peer makes another call than this rank there is none: `lookout` finds out.

        Raises:
            RuntimeError: the peer is gone, or too late, or its tensor has another length.
        """
        place = (peer * _RING + number % _RING) * _FIELDS
        self._wait(self._posts, place, number + 1, peer, tag)
        found = self._posts[place + 3]
        if found != length:
            raise UnequalLengthsError(
                f"the tensor of coordinate {peer} has {found} bytes, this rank's has {length}; "
                "sizes, dtypes and policies must be the same on all ranks"
            )
        return self._posts[place + 2]

    def read(self, peer: int, address: int, target: int, length: int) -> None:
        """Copies `length` bytes at `address` of `peer` to this process's `target`.

        Raises:
            RuntimeError: the peer is gone.
        """
        call, process = _process_vm_readv(), self._processes[peer]
        done = 0
        while done < length:  # one call copies no more than 2 GiB
            here, there = (_Vector(start + done, length - done) for start in (target, address))
            found = call(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
            if found <= 0:
                raise RuntimeError(
                    f"Connection closed by peer: the memory of coordinate {peer} (process "
                    f"{process}) cannot be read: {os.strerror(ctypes.get_errno())}"
                )
            done += found

    def has_read(self, number: int, peer: int) -> None:
        """Tells `peer` that this rank needs its tensor of a call no more."""
        self._reads[(self.rank * self.size + peer) * _RING + number % _RING] = number + 1

    def wait_for_readers(self, number: int) -> None:
        """Returns when all peers have read this rank's tensor of a call. May be called again.

        Raises:
            RuntimeError: a peer is gone, or too late.
        """
        for peer in range(self.size):
            if peer != self.rank:
                place = (peer * self.size + self.rank) * _RING + number % _RING
                # It may have read a later call's already, after this one's.
                self._wait(self._reads, place, number + 1, peer)
        lent = self._lent[number % _RING]
        if lent is not None and lent[0] == number:
            self._lent[number % _RING] = None

    def _wait(
        self, numbers: memoryview, place: int, number: int, peer: int, tag: int | None = None
    ) -> None:
        looks, begun, looked = 0, 0.0, 0.0
        while numbers[place] < number or (tag is not None and numbers[place + 1] != tag):
            looks += 1
            if looks <= _YIELDS:
                os.sched_yield()
                continue
            if self.broken is not None:
                raise RuntimeError(self.broken)
            now = time.monotonic()
            begun = begun or now
            waited = now - begun
            if waited - looked > _LOOK:
                looked = waited
                self._check(peer, waited)
            if looks % _HELPS == 0 or waited > _LOOK:
                self.read_what_has_come()
            # Late by a small part of the wait at most, and a long one costs no computing time.
            time.sleep(min(max(_PAUSE, waited * _LATE), _LONGEST_PAUSE))

    def _check(self, peer: int, waited: float) -> None:
        poll = select.poll()
        poll.register(self._alive[peer], select.POLLIN)
        process = self._processes[peer]
        if poll.poll(0):
            raise RuntimeError(
                f"Connection closed by peer: coordinate {peer} (process {process}) has ended"
            )
        if waited > self._timeout:
            raise RuntimeError(
                f"timed out after {self._timeout:.0f} s waiting for coordinate {peer} (process "
                f"{process})"
            )


@dataclass
class Unread:
    """A call of which the peers' tensors have not been read.

    Attributes:
        lock: held by the thread that reads them.
        reader: that thread; 0 while there is none.
        afterwards: to be called by it, without the lock.
    """

    tag: int
    read: Callable[[], None]
    lock: threading.Lock = field(default_factory=threading.Lock)
    reader: int = 0
    afterwards: list[Callable[[], object]] = field(default_factory=list)

    def make_calls(self) -> None:
        """Makes the calls that are due; whoever waits otherwise is told what went wrong."""
        while self.afterwards:
            self.afterwards.pop()()


@dataclass(frozen=True)
class Lent:
    """A call in flight, to a handle what a backend's work is."""

    memory: PeerMemory
    number: int

    def wait(self) -> None:
        """Reads the peers' tensors."""
        self.memory.finish(self.number)

    def after_reading(self, call: Callable[[], object]) -> bool:
        """As `PeerMemory.after_reading`."""
        return self.memory.after_reading(self.number, call)

    def wait_for_readers(self) -> None:
        """Returns when no peer reads this rank's tensor any more."""
        self.memory.wait_for_readers(self.number)


def prepare_lent_all_gather(
    memory: PeerMemory, source: Tensor, target: Tensor
) -> Callable[[Origin], Lent]:
    """Fills flat `target` with every coordinate's flat `source`, one after another.

    Returns:
        What starts it, as often as one likes.
    """
    rank, length = memory.rank, source.nbytes
    peers = [(rank + step) % memory.size for step in range(1, memory.size)]
    own = target[rank * source.numel() :][: source.numel()]

    def start(origin: Origin) -> Lent:
        tag = origin.tag << 1
        number = memory.post(tag, source.data_ptr(), source.nbytes, source)
        if own.data_ptr() != source.data_ptr():
            own.copy_(source)

        def read() -> None:
            begin = target.data_ptr()
            for peer in peers:
                address = memory.address(number, peer, tag, length)
                memory.read(peer, address, begin + peer * length, length)
                memory.has_read(number, peer)

        memory.expect(number, tag, read)
        return Lent(memory, number)

    return start


def prepare_lent_reduce_scatter(
    memory: PeerMemory, source: Tensor, scratch: Tensor | None
) -> Callable[[Tensor, Origin], Lent]:
    """Fills a flat target with this coordinate's share of the sum of all flat `source`s.

    Its own share comes first and the others follow in coordinate order, as elsewhere.

    Args:
        scratch: of any length above zero; made when None.

    Returns:
        What starts it into a given target, as often as one likes.
    """
    rank, length, size = memory.rank, source.numel() // memory.size, source.element_size()
    own = source[rank * length :][:length]
    peers = [peer for peer in range(memory.size) if peer != rank]
    block = min(BLOCK // size, length) if scratch is None else min(BLOCK // size, scratch.numel())
    place = source.new_empty(block) if scratch is None else scratch[:block]
    blocks = [(first, min(block, length - first)) for first in range(0, length, block)]

    def start(target: Tensor, origin: Origin) -> Lent:
        tag, inference = origin.tag << 1 | 1, torch.is_inference_mode_enabled()
        number = memory.post(tag, source.data_ptr(), source.nbytes, source)

        def read() -> None:
            offset = rank * length * size
            whole = source.nbytes
            shares = [(peer, memory.address(number, peer, tag, whole) + offset) for peer in peers]
            # Tensors made in inference mode are written in it only.
            with torch.inference_mode() if inference else nullcontext():
                for first, count in blocks:
                    received, result = place[:count], target[first : first + count]
                    summed = own[first : first + count]
                    for peer, address in shares:
                        memory.read(peer, address + first * size, received.data_ptr(), count * size)
                        torch.add(summed, received, out=result)
                        summed = result
            for peer in peers:
                memory.has_read(number, peer)

        memory.expect(number, tag, read)
        return Lent(memory, number)

    return start


# -- which groups have it -------------------------------------------------------------------------

# Groups belong to the process, and so does this record, which keeps none of them alive.
_known: WeakKeyDictionary[dist.ProcessGroup, PeerMemory | None] = WeakKeyDictionary()


def peer_memory(axis: MeshAxis) -> PeerMemory | None:
    """That of the axis's group, if `share_memory` has been called for it and has found a way."""
    group = axis.process_group
    return memory_of_group(group) if isinstance(group, dist.ProcessGroup) else None


def read_for_peers() -> None:
    """Reads, on any thread, what peers of any group may be waiting for this rank to read.

    This rank may itself wait for them, in a way that is not known here: in a call of the program's
    own.
    """
    # References are listed in one piece: another thread may make a group meanwhile.
    for reference in _known.keyrefs():
        group = reference()
        memory = None if group is None else _known.get(group)
        if memory is not None:
            memory.read_what_has_come()


def memory_of_group(group: dist.ProcessGroup) -> PeerMemory | None:
    """As `peer_memory`."""
    return _known.get(group)


def is_known(group: dist.ProcessGroup) -> bool:
    """Whether the ranks of a group have been asked what they can read."""
    return group in _known


def enter_group(group: dist.ProcessGroup, memory: PeerMemory | None) -> None:
    """What they have answered: from now on lent tensors of its calls are read, or are not."""
    _known[group] = memory


@functools.cache
def _process_vm_readv() -> Any:
    call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    vectors = (ctypes.c_void_p, ctypes.c_ulong)
    call.argtypes = (ctypes.c_int, *vectors, *vectors, ctypes.c_ulong)
    call.restype = ctypes.c_ssize_t
    return call
