"""What ranks leave for one another in the store, told apart from what an earlier attempt left.

torchrun gives the ranks of a new attempt the store of the one that failed, with all that is in it.
Their processes are new ones, though, so what was written before a process began is not for it.
Hosts' clocks need to agree to about a second, which a restart takes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # documented, not in __all__

BEGUN = time.time()
"""When this process began, as far as its peers can know: it has not met them yet."""


def leave(store: Store, key: str, text: str) -> None:
    """Writes a notice."""
    store.set(key, _dated(text))


def find(store: Store, key: str, since: float = BEGUN) -> str | None:
    """The notice under a key; None where there is none that was written `since` then."""
    found = _raw(store, key)
    return _text(found) if found and _time(found) >= since else None


@dataclass(frozen=True)
class FirstNotice:
    """A key under which the first rank that has something to say is heard, and no other."""

    key: str

    def leave(self, store: Store, text: str, since: float = BEGUN) -> None:
        """Writes it, unless another rank has written one `since` then."""
        present = _raw(store, self.key)
        if not present or _time(present) < since:
            # Nothing is written where another rank has been quicker.
            store.compare_set(self.key, present, _dated(text))

    def find(self, store: Store, since: float = BEGUN) -> str | None:
        """What was written `since` then."""
        return find(store, self.key, since)


def _dated(text: str) -> str:
    return f"{time.time():.6f} {text}"


def _raw(store: Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def _time(raw: str) -> float:
    return float(raw.partition(" ")[0])


def _text(raw: str) -> str:
    return raw.partition(" ")[2]
