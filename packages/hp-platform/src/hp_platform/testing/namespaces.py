"""Linux network namespaces without names: each is held by a file descriptor and by nothing else.

A namespace made by `ip netns add` outlives the process that made it. One that only descriptors
refer to is removed by the kernel, with its interfaces, when the last process that has it open or
runs in it ends, however it ends.
"""

from __future__ import annotations

import ctypes
import os
import threading

from hp_platform.errors import HPError

_CLONE_NEWNET = 0x40000000


def new_network() -> int:
    """The descriptor of a new network namespace, which this process does not enter.

    Raises:
        OSError: the system refuses, for want of rights or of support.
    """
    found: list[int | OSError] = []

    def make() -> None:
        # A namespace belongs to a thread; this one ends, the descriptor stays.
        try:
            _call("unshare", _CLONE_NEWNET)
            found.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=make, name="new network namespace")
    thread.start()
    thread.join()
    if not found:
        raise HPError("the thread that was to make a network namespace ended without an answer")
    if isinstance(found[0], OSError):
        raise found[0]
    return found[0]


def enter_network(descriptor: int) -> None:
    """Moves the calling thread into the network namespace; its later children start there."""
    _call("setns", descriptor, _CLONE_NEWNET)


def _call(name: str, *arguments: int) -> None:
    # Python 3.12 has these in `os`; 3.11 does not.
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
