"""The key-value store through which the ranks of the default process group met."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # documented, not in __all__


def default_store() -> Store:
    """The default group's store; it lives as long as the group and needs no collective.

    Private to PyTorch, which has no public way to ask for it; making another store would need an
    address that all ranks know. `test_store` fails if its meaning changes.
    """
    return dist.distributed_c10d._get_default_store()


class OwnConnection:
    """One thread's connection to the default store: another may be blocked in the store's own."""

    def __init__(self) -> None:
        self._origin: Store | None = None
        self._store: Store | None = None
        self._lost: RuntimeError | None = None

    def store(self) -> Store | None:
        """The store of the present default group; None while there is no group.

        Raises:
            RuntimeError: it has been given up.
        """
        try:
            origin = default_store() if dist.is_initialized() else None
        except ValueError:  # destroyed meanwhile
            origin = None
        if origin is not self._origin:
            self._store = self._lost = None
            self._origin = origin
        if self._lost is not None:
            raise self._lost
        if self._store is None and origin is not None:
            self._store = origin.clone()  # type: ignore[attr-defined]  # untyped
        return self._store

    def give_up(self, error: RuntimeError) -> None:
        """Does not connect again: that takes the store's whole timeout where nobody listens."""
        self._store, self._lost = None, error
