"""Compares, beside the work, what the ranks of a group have issued, and ends what cannot agree.

Ranks that run different modules issue different collectives: they wait for one another until the
backend gives up, or exchange the wrong data where the sizes happen to be equal. A thread of every
rank publishes the end of its trails in the store, compares it with the next rank's, and where
they differ names unit, parameters and ranks. The working thread only notes what it issues.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hp_platform.direct import break_off
from hp_platform.store import default_store
from hp_platform.trail import Step, Trail, trails
from hp_platform.watch import FIRST_FAILURE, RANKS_A_SECOND

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # documented, not in __all__

    from hp_platform.axis import MeshAxis

_logger = logging.getLogger("hp_platform")

_VERDICT = "hp_platform/ranks_differ"
"""Where the first rank that finds a difference leaves its account."""
_FIRST, _LONGEST = 0.5, 2.0
"""Seconds between two looks: short at first, so that short runs are looked at too."""
_GATHERING = 1.5
"""Seconds for all ranks of a group to publish how far they are, once two are known to differ."""
_ANSWER = 0.5
"""Seconds for others to publish, once a collective has failed."""
_ASKED = 64
"""How many of them are asked then."""
_PUBLISHED = 256
_SHOWN = 400

Published = dict[str, Any]
"""`first`: number of the first step; `texts`: what was issued; `order`: indexes of `texts`."""


class _Lookout(threading.Thread):
    """This process's thread."""

    def __init__(self) -> None:
        super().__init__(name="hp_platform lookout", daemon=True)
        self.owner = os.getpid()
        self._over = threading.Event()
        self._origin: Store | None = None
        self._store: Store | None = None

    def close(self) -> None:
        """Stops it and waits until it has ended."""
        self._over.set()
        # A thread that still runs while the interpreter ends may abort it.
        self.join(timeout=10)

    def run(self) -> None:
        pause = _FIRST
        while not self._over.wait(pause):
            ranks = dist.get_world_size() if dist.is_initialized() else 1
            pause = max(min(2 * pause, _LONGEST), ranks / RANKS_A_SECOND)
            # The store, or a group, may end before this process does.
            with contextlib.suppress(RuntimeError, ValueError):
                if dist.is_initialized():
                    self._look(self._own_store())

    def _own_store(self) -> Store:
        """A connection of our own: another thread may be blocked in the default store's."""
        origin = default_store()
        if origin is not self._origin or self._store is None:
            self._store, self._origin = origin.clone(), origin
        return self._store

    def _look(self, store: Store) -> None:
        known = trails()
        verdict = _verdict(store)
        for trail in known:
            if verdict is None:
                _publish(store, trail)
                verdict = _compare(store, trail, [(trail.rank + 1) % trail.size])
        if verdict is None:
            return
        for trail in known:
            if trail.verdict is None:
                trail.verdict = verdict
                _interrupt(store, trail)


class _Current:
    """The thread of this process, made when its first group is used."""

    thread: _Lookout | None = None


def keep_lookout() -> None:
    """Starts this process's thread, unless it runs."""
    current = _Current.thread
    if current is not None and current.owner == os.getpid() and current.is_alive():
        return
    _Current.thread = started = _Lookout()
    started.start()
    atexit.register(started.close)


def difference_behind(axis: MeshAxis) -> str | None:
    """Whether a collective that failed on `axis` did so because ranks issue different ones.

    Takes up to half a second where they do not: the others may be about to publish their trails.
    """
    trail = axis.trail
    if trail is None or trail.group is None:
        return None
    end = time.monotonic() + _ANSWER
    others = [coordinate for coordinate in range(axis.size) if coordinate != axis.rank]
    # Nothing that goes wrong here may hide the failure itself.
    with contextlib.suppress(RuntimeError, ValueError):
        store = default_store()
        while trail.verdict is None:
            trail.verdict = _verdict(store)
            if trail.verdict is None:
                _publish(store, trail)
                trail.verdict = _compare(store, trail, others[:_ASKED])
            if time.monotonic() > end:
                break
            time.sleep(0.02)
    return trail.verdict


def _publish(store: Store, trail: Trail) -> None:
    with trail.lock:
        count = trail.count
        if trail.published == count:
            return
        steps = trail.steps(_PUBLISHED)
        texts: dict[str, int] = {}
        order = [texts.setdefault(_text(*step[1:]), len(texts)) for step in steps]
        first = steps[0][0] if steps else count
        # `made`: a group may be destroyed and another one made under its name.
        content = {"made": trail.made, "first": first, "texts": list(texts), "order": order}
        store.set(_key(trail, trail.rank), json.dumps(content))
        trail.published = count


def _compare(store: Store, trail: Trail, coordinates: Sequence[int]) -> str | None:
    """The verdict, if one of these has issued something else than this rank."""
    own: dict[int, Step] | None = None
    for coordinate in coordinates:
        theirs = _fetch(store, trail, coordinate)
        if theirs is None:
            continue
        if own is None:
            own = {step[0]: step for step in trail.steps()}
        for number, index in enumerate(theirs["order"], theirs["first"]):
            step = own.get(number)
            if step is not None and _text(*step[1:]) != theirs["texts"][index]:
                store.compare_set(_VERDICT, "", _account(store, trail, step))
                return _verdict(store)
    return None


def _fetch(store: Store, trail: Trail, coordinate: int) -> Published | None:
    key = _key(trail, coordinate)
    if not store.check([key]):
        return None
    found: Published = json.loads(store.get(key))
    return found if found["made"] == trail.made else None


def _account(store: Store, trail: Trail, own: Step) -> str:
    """Who issues what instead of `own`."""
    end = time.monotonic() + _GATHERING
    number, operation, origin = own
    issued = {trail.rank: _text(operation, origin)}
    while len(issued) < trail.size and time.monotonic() < end:
        for coordinate in set(range(trail.size)) - issued.keys():
            found = _fetch(store, trail, coordinate)
            place = -1 if found is None else number - found["first"]
            if found is not None and 0 <= place < len(found["order"]):
                issued[coordinate] = found["texts"][found["order"][place]]
        time.sleep(0.02)
    return _message(trail, number, issued, origin.advice)


def _key(trail: Trail, coordinate: int) -> str:
    ranks = trail.ranks
    return f"hp_platform/trail/{trail.group_name}/{ranks[0]}/{ranks[coordinate]}"


def _text(operation: str, origin: Any) -> str:
    detail = f" ({origin.detail})" if origin.detail else ""
    return f"{operation} asked by {origin}{detail}"[:_SHOWN]


def _verdict(store: Store) -> str | None:
    return store.get(_VERDICT).decode() if store.check([_VERDICT]) else None


def _message(trail: Trail, number: int, issued: dict[int, str], advice: str) -> str:
    alike: dict[str, list[int]] = {}
    for coordinate in range(trail.size):
        what = issued.get(coordinate, "nothing that this rank can see")
        alike.setdefault(what, []).append(trail.ranks[coordinate])
    # Most ranks first; among equals the lowest rank.
    listed = sorted(alike.items(), key=lambda item: (-len(item[1]), item[1]))
    found = "; ".join(f"{_ranks(ranks)}: {what}" for what, ranks in listed)
    return (
        f"ranks on mesh axis {trail.name!r} issue different collectives. Number {number} on it is "
        f"on {found}. Every rank must run the same modules, in the same "
        f"order{advice and '; '}{advice}"
    )


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _interrupt(store: Store, trail: Trail) -> None:
    """Makes every wait on the group raise, or, where the backend has no means to, the process end.

    `watch` ends it.
    """
    group, verdict = trail.group, str(trail.verdict)
    if trail.device.type != "cpu":
        _logger.error(verdict)
        store.compare_set(FIRST_FAILURE, "", verdict)
        return
    if group is not None:
        break_off(group, [peer for peer in range(trail.size) if peer != trail.rank])
