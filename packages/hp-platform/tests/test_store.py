"""What `_get_default_store`, a private function of PyTorch, is relied upon for; notices in it."""

import pytest
import torch.distributed as dist

from hp_platform.notices import FirstNotice
from hp_platform.store import OwnConnection, default_store
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


def test_only_the_first_notice_is_heard_and_replaces_one_of_an_earlier_attempt():
    store, notice = dist.HashStore(), FirstNotice("first")
    assert notice.find(store) is None
    store.set("first", "0.5 of an earlier attempt")
    assert notice.find(store) is None
    for text in ("rank 1 failed", "rank 2 failed"):
        notice.leave(store, text)
    assert notice.find(store) == "rank 1 failed"


@pytest.mark.ranks
def test_a_connection_follows_the_default_group_and_is_not_made_again_once_it_is_lost():
    def body():
        connection = OwnConnection()
        first = connection.store()
        assert first is connection.store()
        first.set("seen", "")
        assert default_store().check(["seen"])
        connection.give_up(RuntimeError("nobody listens"))
        with pytest.raises(RuntimeError, match="nobody listens"):
            connection.store()
        dist.destroy_process_group()
        assert connection.store() is None
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
        assert not connection.store().check(["seen"])

    run_ranks(body, 1)
