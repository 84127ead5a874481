"""What `_get_default_store`, a private function of PyTorch, is relied upon for."""

import pytest

from hp_platform.store import default_store
from hp_platform.testing import run_ranks


@pytest.mark.ranks
def test_ranks_read_what_others_wrote_and_the_first_writer_wins():
    def body(rank):
        store = default_store()
        assert not store.check(["never written"])
        store.set(f"from {rank}", str(rank))
        store.compare_set("first", "", f"rank {rank}")
        store.set(f"claimed {rank}", "")
        other = store.get(f"from {1 - rank}").decode()  # waits for it
        store.get(f"claimed {1 - rank}")
        return other, store.get("first").decode()

    (one, first), (zero, same) = run_ranks(body, 2)
    assert (one, zero) == ("1", "0")
    assert first == same
    assert first in ("rank 0", "rank 1")
