"""What a failing rank tells, and what its peers tell of it."""

import os
import signal
import time

import pytest
import torch

from hp_platform import (
    MeshAxis,
    Origin,
    RankFailure,
    all_reduce,
    reported_failures,
    reported_stop,
)
from hp_platform.testing import ranks, run_ranks


def reports(tmp_path, body, world_size=2):
    """What every rank writes to standard error under `reported_failures`."""

    def run(rank):
        with open(tmp_path / f"rank{rank}", "wb") as file:
            os.dup2(file.fileno(), 2)
        with reported_failures("training") as activity:
            body(rank, activity)

    # On a crowded machine a peer's report may take longer than the runner usually waits.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "_GRACE", 20.0)
        with pytest.raises(RankFailure) as caught:
            run_ranks(run, world_size, timeout=30)
    assert all("exit code" in text or "killed" in text for text in caught.value.reports.values())
    return [(tmp_path / f"rank{rank}").read_text() for rank in range(world_size)], caught.value


@pytest.mark.ranks
def test_the_report_names_rank_activity_and_error(tmp_path):
    def body(rank, activity):
        activity.phase = "step 3, backward"
        raise ValueError("the planted fault")

    (text,), failure = reports(tmp_path, body, world_size=1)
    assert "rank 0 on " in text
    assert "failed in training, step 3, backward: ValueError: the planted fault" in text
    assert "Traceback (most recent call last)" in text
    assert "exit code 1" in failure.reports[0]


@pytest.mark.ranks
def test_a_peer_says_what_it_waited_for_and_who_failed_first(tmp_path):
    def body(rank, activity):
        if rank == 1:
            raise ValueError("the planted fault")
        axis = MeshAxis.of_group(name="dp_shard")
        all_reduce(torch.ones(3), axis, origin=Origin("hp_fsdp", "layers.3", "backward")).wait()

    (peer, failed), _ = reports(tmp_path, body)
    assert "failed in training: ValueError: the planted fault" in failed
    assert "lost its peers while waiting in all_reduce on axis dp_shard" in peer
    assert "asked by hp_fsdp layers.3 backward" in peer
    assert "the first failure was: rank 1 on " in peer
    assert "the planted fault" in peer
    assert "Traceback" not in peer


@pytest.mark.ranks
def test_a_peers_failure_is_recognised_behind_another_error(tmp_path):
    def body(rank, activity):
        if rank == 1:
            raise ValueError("the planted fault")
        try:
            all_reduce(torch.ones(3), MeshAxis.of_group()).wait()
        except RuntimeError as error:
            raise KeyError("wrapped") from error

    (peer, _), _ = reports(tmp_path, body)
    assert "rank 0 on " in peer
    assert "lost its peers while waiting in all_reduce" in peer


@pytest.mark.ranks
def test_a_lost_peer_is_recognised_in_collectives_that_pytorch_makes_itself(tmp_path):
    def body(rank, activity):
        if rank == 1:
            raise ValueError("the planted fault")
        torch.distributed.all_gather_object([None, None], rank)

    (peer, _), _ = reports(tmp_path, body)
    assert "rank 0 on " in peer
    assert "stopped in training" in peer
    assert "the first failure was: rank 1 on " in peer


@pytest.mark.ranks
def test_a_rank_that_its_launcher_stops_says_where_it_was(tmp_path):
    def body(rank, activity):
        activity.phase = "step 7"
        with reported_stop(activity):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)

    (text,), failure = reports(tmp_path, body, world_size=1)
    assert "stopped by its launcher (SIGTERM) in training, step 7" in text
    assert "exit code 143" in failure.reports[0]


def test_the_handler_of_stops_is_gone_afterwards_and_leaves_others_alone():
    with reported_failures("training") as activity:
        with reported_stop(activity):
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            with reported_stop(activity):
                assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_success_and_a_chosen_exit_pass_through():
    with reported_failures("training") as activity:
        assert str(activity) == "training"
    with pytest.raises(SystemExit) as caught, reported_failures("training"):
        raise SystemExit(4)
    assert caught.value.code == 4
