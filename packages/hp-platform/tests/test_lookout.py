"""Ranks that issue different collectives are told so, whether they would hang or mix data up."""

import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hp_platform import (
    AgreementError,
    MeshAxis,
    Origin,
    all_gather,
    all_reduce,
    lookout,
    reduce_scatter,
)
from hp_platform.handle import issue
from hp_platform.lookout import _compare, _publish
from hp_platform.notices import BEGUN
from hp_platform.testing import run_ranks
from hp_platform.trail import Trail, key_of, trails

B = Origin("model", "b", "forward", "parameters 'b.weight'", "leave out nothing")
C = Origin("model", "c", "forward", "parameters 'c.weight'", "leave out nothing")


def told(body):
    """What the error says that `body` raises."""
    lookout._GATHERING = 100.0  # all ranks come so far, however long it takes here
    with pytest.raises(AgreementError) as raised:
        body()
    return str(raised.value)


def gathers_and_reductions(rank, axis):
    """Rank 0 uses b and then c, the others c only; all shares are equal."""
    for origin in (B, C)[rank > 0 :]:
        all_gather(torch.ones(128), axis, origin=origin).wait()
    reduce_scatter(torch.ones(128 * axis.size), axis, origin=C).wait()
    all_gather(torch.ones(128), axis, origin=C).wait()


def swapped_for_ever(rank, axis):
    """Rank 1 reduces in the other order, which no backend notices."""
    while True:
        for origin in (B, C)[:: -1 if rank == 1 else 1]:
            all_reduce(torch.ones(128), axis, origin=origin).wait()
        time.sleep(0.01)


@pytest.mark.ranks
@pytest.mark.parametrize("body", [gathers_and_reductions, swapped_for_ever])
def test_ranks_that_issue_different_collectives_all_fail_and_name_them(body):
    found = run_ranks(lambda rank: told(lambda: body(rank, MeshAxis.of_group())), 3, timeout=200)
    usual = "rank 0" if body is gathers_and_reductions else "rank 1"
    operation = "all_gather" if body is gathers_and_reductions else "all_reduce"
    others = "1, 2" if usual == "rank 0" else "0, 2"
    one, many = ("b", "c") if usual == "rank 0" else ("c", "b")
    for message in found:
        assert "mesh axis 'world'" in message
        assert f"ranks {others}: {operation} asked by model {many} forward" in message
        assert f"{usual}: {operation} asked by model {one} forward" in message
        assert f"(parameters '{one}.weight')" in message
        assert message.endswith("leave out nothing")


@pytest.mark.ranks
def test_a_rank_that_comes_late_is_not_blamed():
    def body(rank):
        axis = MeshAxis.of_group()
        # What only some ranks take part in, as sends, does not count a group as used.
        issue("send", axis, B, tuple, None, 0, (), alike=False).wait()
        assert trails() == []
        time.sleep(1.5 * rank)
        for origin in (B, C):
            all_gather(torch.ones(128), axis, origin=origin).wait()
        verdict = axis.trail.verdict
        assert trails() == [axis.trail]
        threads = [threading.Thread(target=lookout.keep_lookout) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = [t for t in threading.enumerate() if isinstance(t, lookout._Lookout)]
        assert len(found) == 1
        # Another group may meet in another store, under the same name.
        group = weakref.ref(axis.process_group)
        dist.destroy_process_group()
        assert trails() == []
        del axis
        assert group() is None
        return verdict

    assert run_ranks(body, 2) == [None, None]


class Group:
    group_name = "dp"


EARLIER = f"{BEGUN - 1} "
"""How a notice begins that an earlier attempt of the run has left in the store."""


def trails_of_two_ranks(made=1):
    common = {"size": 2, "ranks": (4, 6), "name": "dp", "process_group": Group(), "device": None}
    return [Trail(SimpleNamespace(rank=r, **common), made) for r in range(2)]


def compared(first, second):
    store = dist.HashStore()
    for trail in (first, second):
        _publish(store, trail)
    return _compare(store, first, [1])


def test_a_rank_that_is_ahead_agrees_as_far_as_the_other_has_come():
    first, second = trails_of_two_ranks()
    for origin in (B, C, B):
        first.add("all_gather", origin)
    second.add("all_gather", B)
    assert compared(first, second) is None
    second.add("all_gather", C)
    second.add("reduce_scatter", B)
    message = compared(first, second)
    assert "Number 2 on it is on rank 4: all_gather" in message
    assert "rank 6: reduce_scatter" in message


def test_what_a_group_of_the_same_name_left_behind_is_not_compared():
    first, second = trails_of_two_ranks()
    store = dist.HashStore()
    first.add("all_gather", B)
    second.add("all_gather", C)
    _publish(store, second)
    again, _ = trails_of_two_ranks(made=2)
    _publish(store, first)
    again.add("all_gather", B)
    _publish(store, again)
    assert _compare(store, again, [1]) is None
    assert _compare(store, first, [1]) is not None


def test_what_an_earlier_attempt_left_in_the_store_is_not_heard():
    first, second = trails_of_two_ranks()
    store = dist.HashStore()
    first.add("all_gather", B)
    second.add("all_gather", C)
    _publish(store, second)
    key = lookout._key(second, 1)
    store.set(key, EARLIER + store.get(key).decode().partition(" ")[2])
    store.set(lookout._VERDICT.key, EARLIER + "ranks differed")
    assert _compare(store, first, [1]) is None
    assert lookout._verdict(store) is None
    second.published = -1
    _publish(store, second)
    assert "rank 6: all_gather asked by model c forward" in _compare(store, first, [1])


def test_a_verdict_does_not_end_what_is_made_after_its_groups(monkeypatch):
    store = dist.HashStore()
    lookout._VERDICT.leave(store, "ranks differ")
    assert lookout._verdict(store) == "ranks differ"
    monkeypatch.setattr(lookout._Current, "last_verdict", time.time())
    assert lookout._verdict(store) is None
    lookout._VERDICT.leave(store, "again", lookout._since())
    assert lookout._verdict(store) == "again"


def test_groups_of_one_name_and_other_ranks_are_not_compared():
    keys = {
        key_of(SimpleNamespace(ranks=ranks, process_group=Group()))
        for ranks in ((0, 1), (0, 2), (1, 2))
    }
    assert len(keys) == 3


def test_a_peer_that_has_issued_more_than_is_published_is_compared_where_both_are_known():
    first, second = trails_of_two_ranks()
    for trail in (first, second):
        for number in range(3 * lookout._PUBLISHED):
            trail.add("all_gather", (B, C)[number % 2])
    assert compared(first, second) is None
    second.add("all_gather", B)
    for _ in range(2 * lookout._PUBLISHED):
        second.add("broadcast", B)
    assert compared(first, second) is None  # what differs, if anything does, is long past


def test_no_collective_follows_a_verdict():
    trail, _ = trails_of_two_ranks()
    trail.verdict = "ranks differ"
    with pytest.raises(AgreementError, match="ranks differ"):
        trail.add("all_gather", B)
