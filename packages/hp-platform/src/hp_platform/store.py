"""The key-value store through which the ranks of the default process group met."""

from __future__ import annotations

import torch.distributed as dist


def default_store() -> dist.Store:  # type: ignore[name-defined]  # documented, not in __all__
    """The default group's store; it lives as long as the group and needs no collective.

    Private to PyTorch, which has no public way to ask for it; making another store would need an
    address that all ranks know. `test_store` fails if its meaning changes.
    """
    return dist.distributed_c10d._get_default_store()
