"""Collectives on gloo ranks: refusals, handles and what the ledger says of them."""

import gc
import logging
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import torch

from hp_platform import (
    CollectiveError,
    MeshAxis,
    Origin,
    PeerError,
    Tier,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather_objects,
    ledger,
    reduce,
    reduce_scatter,
)
from hp_platform.repeatable import repeatable_all_gather, repeatable_reduce_scatter
from hp_platform.testing import run_ranks

ORIGIN = Origin("hp_fsdp", "layers.3", "backward")
ALONE = MeshAxis("tp", 1, 0, (0,), Tier.LOCAL, torch.device("cpu"))


class Wrapper(torch.Tensor):
    """Stands for a distributed tensor."""

    def to_local(self):
        return self.as_subclass(torch.Tensor)


def refusals(rank, calls):
    """The messages with which `rank` of two refuses each call; nothing may be sent."""

    def run():
        axis = MeshAxis.of_group(name="dp_shard")
        found = []
        with ledger() as log:
            for call in calls:
                with pytest.raises(CollectiveError) as caught:
                    call(axis)
                found.append(str(caught.value))
        barrier(axis)
        return found, log.records

    results = run_ranks(run, 2)
    assert all(records == [] for _, records in results)
    return results[rank][0]


@pytest.mark.ranks
def test_bad_arguments_are_refused_before_anything_is_sent():
    square = torch.ones(4, 4)
    cases = [
        (lambda axis: all_reduce(square.t(), axis, origin=ORIGIN), "not contiguous"),
        (lambda axis: broadcast(square[:, :2], axis, source=0), "not contiguous"),
        (
            lambda axis: all_gather(
                torch.ones(2), axis, output=torch._neg_view(torch.ones(2 * axis.size))
            ),
            "output is a negated or conjugated view",
        ),
        (lambda axis: all_reduce(torch.ones(2, device="meta"), axis), "is on meta"),
        (
            lambda axis: all_reduce(torch.ones(2, dtype=torch.complex64), axis),
            "gloo cannot reduce torch.complex64; reduce torch.view_as_real(tensor)",
        ),
        (
            lambda axis: all_reduce(torch.ones(2).bool(), axis),
            "torch.bool; reduce .to(torch.uint8)",
        ),
        (
            lambda axis: all_reduce(torch.ones(2).to(torch.float8_e4m3fn), axis),
            "cannot reduce torch.float8_e4m3fn; convert to one of bfloat16, float16, float32",
        ),
        (
            lambda axis: broadcast(torch.ones(2, dtype=torch.complex64).conj(), axis, source=0),
            "call .resolve_neg() or .resolve_conj()",
        ),
        (
            # The imaginary part of a conjugate is a view with the sign kept aside.
            lambda axis: all_gather(torch.ones(1, dtype=torch.complex64).conj().imag, axis),
            "a negated or conjugated view",
        ),
        (lambda axis: all_reduce(square.clone().requires_grad_(), axis), "torch.no_grad()"),
        (
            lambda axis: all_reduce(square.clone().requires_grad_() * 2, axis),
            "the tensor requires grad and would be overwritten outside of autograd",
        ),
        (
            lambda axis: all_gather(square, axis, output=torch.ones(8, 4).requires_grad_()),
            "output requires grad",
        ),
        (lambda axis: all_gather(square[1:3], axis, output=square), "output shares memory"),
        (lambda axis: all_to_all(square, axis, output=square), "output shares memory"),
        (lambda axis: reduce_scatter(square, axis, output=square[1:3]), "at another place"),
        (lambda axis: all_gather(square, axis, output=[1]), "output must be a tensor, got list"),
        (lambda axis: all_reduce(square.to_sparse(), axis), "cannot be sent"),
        (lambda axis: all_reduce(Wrapper(square), axis), "a Wrapper cannot be sent"),
        (lambda axis: all_reduce([1.0], axis), "expected a tensor, got list"),
        (lambda axis: all_reduce(square, axis, op="mean"), "op 'mean' is unknown"),
        (lambda axis: all_reduce(torch.ones(2).int(), axis, op="avg"), "average of torch.int32"),
        (lambda axis: all_reduce(square, axis, op="avg", divisor=2), "a divisor is of sums only"),
        (lambda axis: all_reduce(torch.ones(2).int(), axis, divisor=2), "average of torch.int32"),
        (lambda axis: reduce_scatter(square, axis, op="max"), "op 'max' is unknown"),
        (lambda axis: reduce_scatter(torch.ones(3, 2), axis), "3 rows do not divide"),
        (lambda axis: reduce_scatter(square, axis, sizes=[1, 2]), "add up to 3"),
        (lambda axis: all_gather(torch.ones(()), axis), "0-dimensional"),
        (lambda axis: all_gather(square, axis, sizes=[3, 3]), "sizes says 3 rows"),
        (lambda axis: all_gather(square, axis, sizes=[4]), "must be 2 non-negative"),
        (lambda axis: all_gather(square, axis, sizes=[4, -1]), "must be 2 non-negative"),
        (lambda axis: all_gather(square, axis, output=torch.ones(4, 8)), "output has shape"),
        (lambda axis: all_gather(square, axis, output=torch.ones(8, 4).half()), "must agree"),
        (lambda axis: all_gather(square, axis, output=torch.ones(4, 8).t()), "output of shape"),
        (lambda axis: broadcast(square, axis, source=2), "source=2 is not a coordinate"),
        (lambda axis: reduce(square, axis, destination=-1), "destination=-1 is not"),
        (lambda axis: all_to_all(square, axis, input_sizes=[2, 2]), "give both"),
        (
            lambda axis: all_to_all(
                square, axis, input_sizes=[3 - axis.rank, 1 + axis.rank], output_sizes=[0, 0]
            ),
            "sends itself",
        ),
    ]
    found = refusals(1, [call for call, _ in cases])
    for message, (_, expected) in zip(found, cases, strict=True):
        assert expected in message
    assert found[0].startswith(
        "all_reduce on mesh axis 'dp_shard' (rank 1, coordinate 1 of 2), "
        "asked by hp_fsdp layers.3 backward: "
    )


def test_an_axis_of_one_rank_copies_locally_and_is_not_entered_in_the_ledger():
    tensor = torch.arange(6.0).view(3, 2)
    output = torch.zeros(3, 2)
    with ledger() as log:
        assert torch.equal(all_gather(tensor, ALONE, output=output).wait(), tensor)
        assert torch.equal(output, tensor)
        scattered = reduce_scatter(tensor, ALONE, op="avg").wait()
        assert torch.equal(scattered, tensor)
        assert scattered.data_ptr() != tensor.data_ptr()
        assert all_reduce(tensor, ALONE).wait() is tensor
        assert all_reduce(torch.ones(1), ALONE, divisor=2).wait().item() == 0.5
        assert broadcast(tensor, ALONE, source=0).wait() is tensor
        assert reduce(tensor, ALONE, destination=0).wait() is tensor
        assert torch.equal(all_to_all(tensor, ALONE).wait(), tensor)
        assert gather_objects({"a": 1}, ALONE) == [{"a": 1}]
        barrier(ALONE)
    assert log.records == []


def test_bad_arguments_are_refused_on_an_axis_of_one_rank_too():
    with pytest.raises(CollectiveError, match="not contiguous"):
        all_reduce(torch.ones(4, 4).t(), ALONE)
    with pytest.raises(CollectiveError, match="must be 1 non-negative"):
        all_gather(torch.ones(4), ALONE, sizes=[2, 2])


@pytest.mark.ranks
def test_types_the_backend_lacks_are_moved_as_bytes():
    types = [torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn]

    def run(rank):
        axis = MeshAxis.of_group()
        for dtype in types:
            mine = torch.full((rank + 1, 3), rank).to(dtype)
            everything = torch.cat([torch.full((1, 3), 0), torch.full((2, 3), 1)]).to(dtype)
            gathered = all_gather(mine, axis, sizes=[1, 2]).wait()
            assert gathered.dtype == dtype
            assert torch.equal(gathered.float(), everything.float())
            even = torch.full((2, 3), rank).to(dtype)
            swapped = all_to_all(even, axis).wait()
            assert torch.equal(swapped[:, 0].float(), torch.tensor([0, 1]).to(dtype).float())
            assert torch.equal(
                broadcast(even, axis, source=1).wait().float(),
                torch.full((2, 3), 1).to(dtype).float(),
            )
        return True

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert run_ranks(run, 2) == [True, True]


@pytest.mark.ranks
def test_parameters_can_be_sent_and_no_graph_is_recorded():
    def run(rank):
        axis = MeshAxis.of_group()
        parameter = torch.nn.Parameter(torch.full((2, 2), float(rank)))
        gathered = all_gather(parameter, axis).wait()
        with torch.no_grad():
            reduced = all_reduce(parameter, axis).wait()
        return gathered.requires_grad, reduced is parameter, parameter.tolist()

    ones = [[1.0, 1.0], [1.0, 1.0]]
    assert run_ranks(run, 2) == [(False, True, ones)] * 2


@pytest.mark.ranks
def test_a_shard_may_lie_at_its_place_in_the_output():
    def run(rank):
        axis = MeshAxis.of_group()
        for shares in ([2, 2], [1, 3]):
            whole = torch.zeros(4, 2)
            mine = whole[sum(shares[:rank]) :][: shares[rank]]
            mine.fill_(rank + 1)
            all_gather(mine, axis, output=whole, sizes=shares).wait()
            assert whole[:, 0].tolist() == [1.0] * shares[0] + [2.0] * shares[1]
        return True

    assert run_ranks(run, 2) == [True, True]


@pytest.mark.ranks
def test_a_prepared_all_gather_gives_what_its_tensors_hold_at_every_call():
    def run(rank):
        sent = []
        for direct in (True, False):
            axis = MeshAxis.of_group(name="dp")
            vars(axis)["capabilities"] = replace(axis.capabilities, direct=direct)
            for dtype in (torch.float32, torch.int16):
                whole = torch.zeros(6, 2, dtype=dtype)
                apart = torch.zeros(2, 2, dtype=dtype)
                for mine in (apart, whole[2 * rank :][:2]):
                    gather = repeatable_all_gather(mine, axis, output=whole)
                    for call in range(3):
                        mine.fill_(10 * call + rank)
                        with ledger() as log:
                            result = gather(Origin("model", "b", f"{call}")).wait()
                        assert result is whole
                        wanted = [10 * call + r for r in (0, 0, 1, 1, 2, 2)]
                        assert whole[:, 0].tolist() == whole[:, 1].tolist() == wanted
                        (record,) = log.records
                        sent.append((record.operation, record.bytes, record.origin.phase))
        with pytest.raises(CollectiveError, match="output"):
            repeatable_all_gather(torch.ones(2), axis, output=torch.ones(5))
        alone = torch.ones(2)
        copied = repeatable_all_gather(alone, ALONE, output=torch.zeros(2))
        alone.fill_(3)
        assert copied(ORIGIN).wait().tolist() == [3, 3]
        return sent

    calls = [("all_gather", 12 * size, f"{call}") for size in (4, 2) for call in (0, 1, 2) * 2]
    assert run_ranks(run, 3) == [calls * 2] * 3


@pytest.mark.ranks
def test_a_prepared_reduce_scatter_sums_what_its_tensor_holds_at_every_call():
    def run(rank):
        sent = []
        for direct in (True, False):
            axis = MeshAxis.of_group(name="dp")
            vars(axis)["capabilities"] = replace(axis.capabilities, direct=direct)
            whole = torch.zeros(6)
            for scratch in (None, torch.empty(4)):
                scatter = repeatable_reduce_scatter(whole, axis, scratch=scratch)
                for call in range(2):
                    whole.copy_(torch.arange(6.0) * 10**call + rank)
                    mine = torch.empty(2)
                    with ledger() as log:
                        result = scatter(mine, Origin("model", "b", f"{call}")).wait()
                    assert result is mine
                    wanted = [3 * i * 10**call + 3 for i in (2 * rank, 2 * rank + 1)]
                    assert mine.tolist() == wanted
                    (record,) = log.records
                    sent.append((record.operation, record.bytes, record.origin.phase))
            for wrong in (torch.empty(3), torch.empty(2, dtype=torch.int32), whole[:2]):
                with pytest.raises(CollectiveError, match="output"):
                    scatter(wrong, ORIGIN)
        for tensor, scratch in ((torch.ones(5), None), (torch.ones(3, 2), None)):
            with pytest.raises(CollectiveError, match="a flat tensor that divides"):
                repeatable_reduce_scatter(tensor, axis, scratch=scratch)
        with pytest.raises(CollectiveError, match="scratch"):
            repeatable_reduce_scatter(whole, axis, scratch=torch.empty(3))
        alone = torch.ones(2)
        copied = repeatable_reduce_scatter(alone, ALONE)
        alone.fill_(3)
        assert copied(torch.zeros(2), ORIGIN).wait().tolist() == [3, 3]
        return sent

    calls = [("reduce_scatter", 24, f"{call}") for call in (0, 1) * 4]
    assert run_ranks(run, 3) == [calls] * 3


@pytest.mark.ranks
def test_wait_is_idempotent_and_an_average_is_divided_once():
    def run():
        axis = MeshAxis.of_group()
        handle = all_reduce(torch.full((3,), 4.0), axis, op="avg")
        assert not handle.done
        first = handle.wait()
        assert handle.done
        # Longer than what is divided at a time.
        numbers = torch.arange(70_001.0)
        quotient = all_reduce(numbers.clone(), axis, divisor=5).wait()
        assert torch.equal(quotient, numbers * axis.size / 5)
        return first.tolist(), handle.wait() is first, first.tolist()

    for world in (2, 3):
        assert run_ranks(run, world) == [([4.0] * 3, True, [4.0] * 3)] * world


@pytest.mark.ranks
def test_a_handle_keeps_input_and_output_alive():
    def run(rank):
        axis = MeshAxis.of_group()
        tensor = torch.full((1 << 16,), float(rank + 1))
        handle = reduce_scatter(tensor, axis)
        del tensor
        gc.collect()
        scribble = [torch.full((1 << 16,), 9.0) for _ in range(8)]
        result = handle.wait()
        return bool((result == 3.0).all()), len(scribble)

    assert run_ranks(run, 2) == [(True, 8)] * 2


@pytest.mark.ranks
def test_a_dropped_handle_warns_with_its_origin_and_still_completes():
    def run(rank):
        axis = MeshAxis.of_group(name="dp_shard")
        output = torch.zeros(2)
        lines = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())
        logging.getLogger("hp_platform").addHandler(handler)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            reduce_scatter(torch.ones(4), axis, output=output, origin=ORIGIN)
            gc.collect()
        return output.tolist(), [(w.category, str(w.message)) for w in caught], lines

    for output, caught, lines in run_ranks(run, 2):
        assert output == [2.0, 2.0]
        assert [category for category, _ in caught] == [ResourceWarning]
        assert "reduce_scatter on mesh axis 'dp_shard'" in caught[0][1]
        assert "asked by hp_fsdp layers.3 backward was dropped" in caught[0][1]
        assert lines == [caught[0][1]]


def test_a_handle_that_is_left_at_exit_is_named_and_does_not_hang_the_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        """
import time, torch
from hp_platform import MeshAxis, Tier
from hp_platform.handle import Handle
class Work:
    def wait(self):
        time.sleep(1000)
axis = MeshAxis("dp", 2, 0, (0, 1), Tier.FAST, torch.device("cpu"), object(), "gloo")
handle = Handle(None, [Work()], operation="all_reduce", axis=axis)
raise ValueError("the planted fault")
"""
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 1
    assert (
        "ValueError: the planted fault\nthe handle of all_reduce on mesh axis 'dp'" in done.stderr
    )
    assert done.stderr.endswith("was dropped at exit without wait(); its result is lost\n")


@pytest.mark.ranks
def test_a_lost_peer_is_reported_with_operation_axis_and_origin():
    def run(rank):
        axis = MeshAxis.of_group(name="dp_shard")
        if rank == 0:
            torch.distributed.destroy_process_group()
            return "gone"
        # Sent directly, it may be noticed when the call is made.
        with pytest.raises(PeerError, match="lost its peers while waiting in all_reduce"):
            all_reduce(torch.ones(3), axis, origin=ORIGIN).wait()
        handle = all_reduce(torch.ones(3), axis, op="max", origin=ORIGIN)
        with pytest.raises(PeerError) as caught:
            handle.wait()
        with pytest.raises(PeerError):
            handle.wait()
        return str(caught.value)

    assert run_ranks(run, 2)[1].startswith(
        "rank 1: lost its peers while waiting in all_reduce on axis dp_shard (ranks [0, 1]), "
        "asked by hp_fsdp layers.3 backward; the backend says: "
    )


@pytest.mark.ranks
def test_gathered_objects_keep_coordinate_order_and_any_size():
    def run(rank):
        axis = MeshAxis.of_group()
        return gather_objects({"rank": rank, "text": "x" * (1000 * rank)}, axis)

    expected = [{"rank": rank, "text": "x" * (1000 * rank)} for rank in range(3)]
    assert run_ranks(run, 3) == [expected] * 3


@pytest.mark.ranks
def test_ledger_bytes_are_those_computed_by_hand():
    def run(rank):
        axis = MeshAxis.of_group(name="dp")
        shares = [1, 0, 4]
        with ledger() as log:
            all_gather(torch.ones(2, 5), axis).wait()  # 6 x 5 x 4
            all_gather(torch.ones(shares[rank], 5).bfloat16(), axis, sizes=shares).wait()  # 5x5x2
            reduce_scatter(torch.ones(6, 5), axis).wait()  # 6 x 5 x 4
            reduce_scatter(torch.ones(5, 5).double(), axis, sizes=shares).wait()  # 5 x 5 x 8
            all_reduce(torch.ones(7), axis).wait()  # 7 x 4
            broadcast(torch.ones(7).long(), axis, source=2).wait()  # 7 x 8
            reduce(torch.ones(7), axis, destination=1).wait()  # 7 x 4
            all_to_all(torch.ones(3, 2), axis).wait()  # 3 x 2 x 4
            all_reduce(torch.ones(0), axis).wait()  # nothing to send
            all_gather(torch.ones(0, 4), axis).wait()
        return [(r.operation, r.bytes, r.axis, r.axis_size, r.tier) for r in log.records]

    sizes = [120, 50, 120, 200, 28, 56, 28, 24]
    names = ["all_gather"] * 2 + ["reduce_scatter"] * 2
    names += ["all_reduce", "broadcast", "reduce", "all_to_all"]
    expected = [(name, size, "dp", 3, Tier.FAST) for name, size in zip(names, sizes)]
    assert run_ranks(run, 3) == [expected] * 3


@pytest.mark.ranks
def test_a_graph_that_has_saved_an_overwritten_tensor_notices():
    def run(rank):
        axis = MeshAxis.of_group()
        calls = (
            lambda tensor: all_reduce(tensor, axis),
            lambda tensor: broadcast(tensor, axis, source=0),
            lambda tensor: reduce(tensor, axis, destination=0),
        )
        for call in calls:
            weight = torch.nn.Parameter(torch.full((3,), rank + 1.0))
            scale = torch.full((3,), rank + 1.0)
            saved = (weight * scale).sum()
            with torch.no_grad():
                call(scale).wait()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                saved.backward()
        with torch.inference_mode():  # such tensors count no versions
            assert all_reduce(torch.ones(2), axis).wait().tolist() == [2.0, 2.0]

    run_ranks(run, 2)


@pytest.mark.ranks
def test_averages_of_half_precision_are_a_sum_and_a_division():
    def run(rank):
        axis = MeshAxis.of_group()
        found = []
        for dtype in (torch.bfloat16, torch.float16):
            ones = torch.full((4,), rank + 1.0, dtype=dtype)
            found.append(all_reduce(ones.clone(), axis, op="avg").wait().tolist())
            found.append(reduce_scatter(ones, axis, op="avg").wait().tolist())
            if rank == 0:
                destination = reduce(ones, axis, destination=0, op="avg").wait()
                found.append(destination.tolist())
            else:
                reduce(ones, axis, destination=0, op="avg").wait()
        return found

    assert run_ranks(run, 2)[0] == [[1.5] * 4, [1.5] * 2, [1.5] * 4] * 2
