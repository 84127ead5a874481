"""Compares, beside the work, what the ranks of a group have issued, and ends what cannot agree.

Ranks that run different modules issue different collectives: they wait for one another until the
backend gives up, or exchange the wrong data where the sizes happen to be equal. A thread of every
rank publishes the end of its trails in the store, compares it with the next rank's, and where
they differ names unit, parameters and ranks. The working thread only notes what it issues.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hp_platform.direct import break_off
from hp_platform.notices import BEGUN, FirstNotice, find, leave
from hp_platform.peer_memory import memory_of_group, read_for_peers
from hp_platform.store import OwnConnection, default_store
from hp_platform.trail import Step, Trail, trails
from hp_platform.watch import FIRST_FAILURE, pause

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # documented, not in __all__

    from hp_platform.axis import MeshAxis

_logger = logging.getLogger("hp_platform")

_VERDICT = FirstNotice("hp_platform/ranks_differ")
"""Where the first rank that finds a difference leaves its account."""
_FIRST, _LONGEST = 0.5, 2.0
"""Seconds between two looks: short at first, so that short runs are looked at too."""
_GATHERING = 2.0
"""Pauses between two looks for all ranks of a group to publish how far they are, once two are known
to differ."""
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
        self._connection = OwnConnection()

    def close(self) -> None:
        """Stops it and waits until it has ended."""
        self._over.set()
        # A thread that still runs while the interpreter ends may abort it.
        self.join(timeout=10)

    def run(self) -> None:
        length = _FIRST
        while not self._over.wait(pause(length)):
            length = min(2 * length, _LONGEST)
            read_for_peers()
            # The store, or a group, may end before this process does.
            try:
                store = self._connection.store()
                if store is not None:
                    _look(store)
            except RuntimeError as error:
                self._connection.give_up(error)
                _logger.debug("what ranks issue is no longer compared: %s", error)
            except ValueError as error:
                _logger.debug("what ranks issue was not compared: %s", error)


class _Current:
    """What this process has: its thread, made when its first group is used."""

    lock = threading.RLock()
    thread: _Lookout | None = None
    last_verdict: float = BEGUN
    """When it heard of one, in seconds since the epoch."""


def keep_lookout() -> None:
    """Starts this process's thread, unless it runs."""
    with _Current.lock:
        current = _Current.thread
        if current is not None and current.owner == os.getpid() and current.is_alive():
            return
        _Current.thread = started = _Lookout()
        started.start()
    atexit.register(started.close)


def _look(store: Store) -> None:
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
            _adopt(trail, verdict)
            _interrupt(store, trail)


def difference_behind(axis: MeshAxis) -> str | None:
    """Whether a collective that failed on `axis` did so because ranks issue different ones.

    Takes up to half a second where they do not: the others may be about to publish their trails.
    """
    trail = axis.trail
    if trail is None or trail.group is None:
        return None
    end = time.monotonic() + _ANSWER
    others = [coordinate for coordinate in range(axis.size) if coordinate != axis.rank]
    try:
        store = default_store()
        while trail.verdict is None:
            verdict = _verdict(store)
            if verdict is None:
                _publish(store, trail)
                verdict = _compare(store, trail, others[:_ASKED])
            if verdict is not None:
                _adopt(trail, verdict)
            elif time.monotonic() > end:
                break
            else:
                time.sleep(0.02)
    except (RuntimeError, ValueError) as error:
        # Nothing that goes wrong here may hide the failure itself.
        _logger.debug("what ranks issued was not compared: %s", error)
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
        leave(store, _key(trail, trail.rank), json.dumps(content))
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
                _VERDICT.leave(store, _account(store, trail, step), _since())
                return _verdict(store)
    return None


def _fetch(store: Store, trail: Trail, coordinate: int) -> Published | None:
    content = find(store, _key(trail, coordinate))
    if content is None:
        return None
    found: Published = json.loads(content)
    return found if found["made"] == trail.made else None


def _account(store: Store, trail: Trail, own: Step) -> str:
    """Who issues what instead of `own`."""
    end = time.monotonic() + _GATHERING * pause(_LONGEST)
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
    return f"hp_platform/trail/{trail.key}/{coordinate}"


def _text(operation: str, origin: Any) -> str:
    detail = f" ({origin.detail})" if origin.detail else ""
    return f"{operation} asked by {origin}{detail}"[:_SHOWN]


def _verdict(store: Store) -> str | None:
    return _VERDICT.find(store, _since())


def _since() -> float:
    """Since when a verdict is about groups that there are.

    One that ended groups which the program has destroyed does not end those that it makes then,
    be it in the same store.
    """
    present = any(trail.verdict is not None for trail in trails())
    return BEGUN if present else _Current.last_verdict


def _adopt(trail: Trail, verdict: str) -> None:
    _Current.last_verdict = time.time()
    trail.verdict = verdict


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
        FIRST_FAILURE.leave(store, verdict)
        return
    if group is not None:
        memory = memory_of_group(group)
        if memory is not None:
            memory.broken = verdict
        break_off(group, [peer for peer in range(trail.size) if peer != trail.rank])
