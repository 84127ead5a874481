"""Messages between two ranks, and batches of them."""

import pytest
import torch

from hp_platform import (
    CollectiveError,
    MeshAxis,
    Receive,
    Send,
    Tier,
    barrier,
    exchange,
    ledger,
    receive,
    send,
)
from hp_platform.testing import run_ranks

ALONE = MeshAxis("tp", 1, 0, (0,), Tier.LOCAL, torch.device("cpu"))
MEGABYTE = 1 << 18
"""In float32 elements."""


@pytest.mark.ranks
def test_a_tensor_arrives_in_every_type_and_in_order():
    def run(rank):
        axis = MeshAxis.of_group(name="pp")
        found = []
        with ledger() as log:
            for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
                for value in (1, 0):
                    tensor = torch.full((2, 3), value if rank == 0 else 7).to(dtype)
                    if rank == 0:
                        send(tensor, axis, destination=1).wait()
                    else:
                        handle = receive(tensor, axis, source=0)
                        assert handle.wait() is tensor
                        found.append(bool((tensor == torch.full((2, 3), value).to(dtype)).all()))
        return found, {(r.operation, r.axis) for r in log.records}, log.records[0].bytes

    zero, one = run_ranks(run, 2)
    assert zero == ([], {("send", "pp")}, 24)
    assert one == ([True] * 10, {("receive", "pp")}, 24)


@pytest.mark.ranks
def test_a_ring_of_large_messages_cannot_deadlock_in_whatever_order_it_is_listed():
    def run(rank):
        axis = MeshAxis.of_group()
        following, preceding = (rank + 1) % 3, (rank - 1) % 3
        found = []
        for round_ in range(3):
            mine = torch.full((4 * MEGABYTE,), float(rank))
            theirs = torch.empty(4 * MEGABYTE)
            batch = [Send(mine, following), Receive(theirs, preceding)]
            if (rank + round_) % 2:
                batch.reverse()
            with ledger() as log:
                (result,) = exchange(batch, axis).wait()
            assert result is theirs
            found.append(bool((theirs == preceding).all()))
        return found, [(r.operation, r.bytes) for r in log.records]

    assert run_ranks(run, 3) == [([True] * 3, [("exchange", 32 * MEGABYTE)])] * 3


@pytest.mark.ranks
def test_messages_of_one_direction_keep_their_order_and_a_rank_may_send_to_itself():
    def run(rank):
        axis = MeshAxis.of_group()
        received = [torch.zeros(2) for _ in range(3)]
        sent = [torch.full((2,), 10.0 * rank + i) for i in range(3)]
        other = 1 - rank
        batch = [
            Send(sent[0], other),
            Receive(received[2], rank),
            Receive(received[0], other),
            Send(sent[1], other),
            Send(sent[2], rank),
            Receive(received[1], other),
            Send(torch.empty(0), other),
        ]
        results = exchange(batch, axis).wait()
        return [t[0].item() for t in received], [t[0].item() for t in results]

    assert run_ranks(run, 2) == [
        ([10.0, 11.0, 2.0], [2.0, 10.0, 11.0]),
        ([0.0, 1.0, 12.0], [12.0, 0.0, 1.0]),
    ]


def test_a_rank_alone_exchanges_with_itself_only():
    target = torch.zeros(2)
    with ledger() as log:
        handle = exchange([Send(torch.ones(2), 0), Receive(target, 0)], ALONE)
        assert exchange([], ALONE).wait() == []
    assert handle.done
    assert target.tolist() == [1.0, 1.0]
    assert log.records == []


@pytest.mark.ranks
def test_what_cannot_be_sent_is_refused_before_anything_is():
    tensor = torch.ones(4)
    cases = [
        (lambda axis: send(tensor, axis, destination=0), "cannot send to itself alone"),
        (lambda axis: receive(tensor, axis, source=0), "use exchange"),
        (lambda axis: send(tensor, axis, destination=2), "destination=2 is not a coordinate"),
        (lambda axis: send(torch.ones(4, 4).t(), axis, destination=1), "not contiguous"),
        (
            lambda axis: receive(torch.ones(4).requires_grad_(), axis, source=1),
            "requires grad and would be overwritten",
        ),
        (lambda axis: exchange([tensor], axis), "expected Send or Receive, got Tensor"),
        (lambda axis: exchange([Send(tensor, 5)], axis), "destination=5"),
        (
            lambda axis: exchange([Receive(tensor, 1), Send(tensor[1:], 1)], axis),
            "shares memory with another",
        ),
        (lambda axis: exchange([Send(tensor, 0)], axis), "this rank sends itself"),
        (
            lambda axis: exchange([Send(tensor, 0), Receive(torch.ones(3), 0)], axis),
            "they must agree",
        ),
    ]

    def run(rank):
        axis = MeshAxis.of_group(name="pp")
        with ledger() as log:
            if rank == 0:
                for call, expected in cases:
                    with pytest.raises(CollectiveError, match=expected):
                        call(axis)
        barrier(axis)
        return len(log.records)

    assert run_ranks(run, 2) == [0, 0]
