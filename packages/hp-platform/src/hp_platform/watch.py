"""Looks out, beside the work, for a reason why this rank should not go on.

A backend may take its whole timeout to notice that a peer is gone, and a rank that computes does
not notice at all. The store tells within a second, whatever the backend.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import torch.distributed as dist

from hp_platform.notices import FirstNotice
from hp_platform.store import OwnConnection

FIRST_FAILURE = FirstNotice("hp_platform/first_failure")
"""Where the first rank that fails leaves its account."""

_INTERVAL = 0.5
_GRACE = 1.0
"""Seconds for the working thread to notice by itself, for it can tell more."""
_RANKS_A_SECOND = 4000
"""How often the store is asked at most, by all ranks together."""


class Watch(threading.Thread):
    """Calls `end` with a reason when another rank has failed or the launcher is gone.

    The launcher counts as gone when torchrun started this process and is no longer its parent, or
    when it kept the store and that cannot be reached.

    Args:
        end: called at most once, from this thread; is to end the process.
    """

    def __init__(self, end: Callable[[str], None]) -> None:
        super().__init__(name="hp_platform watch", daemon=True)
        self._end = end
        self._over = threading.Event()
        self._parent = os.getppid()
        self._watches_parent = "TORCHELASTIC_RUN_ID" in os.environ
        self._agent_keeps_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._connection = OwnConnection()

    def close(self) -> None:
        """Stops watching and waits until the thread has ended."""
        self._over.set()
        # A thread that still runs while the interpreter ends may abort it.
        self.join(timeout=10)

    def run(self) -> None:
        while not self._over.wait(pause(_INTERVAL)):
            reason = self._reason()
            if reason is None:
                continue
            if not self._over.wait(_GRACE) and (reason := self._reason()) is not None:
                self._end(reason)
            return

    def _reason(self) -> str | None:
        if self._watches_parent and os.getppid() != self._parent:
            return "its launcher (torchrun) has ended without stopping it"
        try:
            store = self._connection.store()
            if store is not None and (account := FIRST_FAILURE.find(store)) is not None:
                return f"the first failure was: {account}"
        except RuntimeError as error:
            self._connection.give_up(error)
            if self._agent_keeps_store and dist.is_initialized():
                return f"the store that torchrun keeps cannot be reached any more: {error}"
        return None


def pause(seconds: float) -> float:
    """At least so long, and longer where many ranks ask the store."""
    try:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
    except ValueError:  # the group has been destroyed meanwhile
        ranks = 1
    return max(seconds, ranks / _RANKS_A_SECOND)
