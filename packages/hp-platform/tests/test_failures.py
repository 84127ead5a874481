"""What a failing rank tells, and what its peers tell of it."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from hp_platform import (
    AgreementError,
    MeshAxis,
    Origin,
    RankFailure,
    all_reduce,
    failures,
    reported_failures,
    reported_stop,
    watch,
)
from hp_platform.handle import issue
from hp_platform.store import default_store
from hp_platform.testing import ranks, run_ranks

LAYER = Origin("hp_fsdp", "layers.3", "backward")


class NeverDone:
    """A backend's work that ends by no failure of anybody's."""

    def wait(self):
        default_store().set("waiting", "")
        time.sleep(100)


def reports(tmp_path, body, world_size=2, grace=100.0):
    """What every rank writes to standard error under `reported_failures`.

    Args:
        grace: seconds that the watch leaves the working thread, which tells more; by default
            more than that can take.
    """

    def run(rank):
        with open(tmp_path / f"rank{rank}", "wb") as file:
            os.dup2(file.fileno(), 2)
        watch._GRACE = grace
        # A rank that ends while another one still connects would fail that one's start.
        default_store().set(f"started {rank}", "")
        default_store().wait([f"started {other}" for other in range(world_size)])
        with reported_failures("training") as activity:
            body(rank, activity)

    # On a crowded machine a peer's report may take longer than the runner usually waits.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "_GRACE", 20.0)
        with pytest.raises(RankFailure) as caught:
            run_ranks(run, world_size, timeout=90)
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
            with failures._ending:  # in the middle of a report, which is to be finished
                os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            with reported_stop(activity):
                assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_ranks_that_disagree_have_not_lost_a_peer():
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    errors = ValueError("wrapped"), AgreementError("ranks issue different collectives")
    for error in errors:
        error.__cause__ = lost
    assert [failures.peer_error_behind(error) for error in (lost, *errors)] == [lost, lost, None]


def test_success_and_a_chosen_exit_pass_through():
    with reported_failures("training") as activity:
        assert str(activity) == "training"
    with pytest.raises(SystemExit) as caught, reported_failures("training"):
        raise SystemExit(4)
    assert caught.value.code == 4


@pytest.mark.ranks
def test_a_rank_is_stopped_whose_backend_does_not_notice_that_a_peer_failed(tmp_path):
    """Neither rank's connection tells anything: only the store does."""

    def body(rank, activity):
        axis = MeshAxis.of_group(name="dp_shard")
        activity.phase = "step 3"
        if rank == 1:
            default_store().wait(["waiting"])
            raise ValueError("the planted fault")
        tensor = torch.ones(3)
        issue("all_reduce", axis, LAYER, lambda: [NeverDone()], tensor, 12, (tensor,)).wait()

    (peer, failed), _ = reports(tmp_path, body, grace=0.1)
    assert "failed in training, step 3: ValueError: the planted fault" in failed
    assert "stopped in training, step 3, waiting in all_reduce on axis dp_shard" in peer
    assert "(ranks [0, 1]), asked by hp_fsdp layers.3 backward" in peer
    assert "the first failure was: rank 1 on " in peer
    assert "ValueError: the planted fault" in peer
    assert peer.count("=" * 72) == 2


@pytest.mark.ranks
def test_a_rank_that_only_computes_is_stopped_and_says_where_it_was(tmp_path):
    def body(rank, activity):
        if rank == 1:
            default_store().wait(["computing"])
            raise ValueError("the planted fault")
        computes_for_long()

    (peer, _), _ = reports(tmp_path, body, grace=0.1)
    assert "in computes_for_long" in peer
    assert "test_failures.py:" in peer
    assert "the first failure was: rank 1 on " in peer


def computes_for_long():
    default_store().set("computing", "")
    end = time.monotonic() + 100
    while time.monotonic() < end:
        time.sleep(0.01)


@pytest.mark.ranks
def test_a_rank_that_its_launcher_stops_names_the_first_failure_and_its_wait(tmp_path):
    def body(rank, activity):
        axis = MeshAxis.of_group(name="dp")
        if rank == 1:
            raise ValueError("the planted fault")
        default_store().wait([watch.FIRST_FAILURE.key])
        with reported_stop(activity):
            work, tensor = NeverDone(), torch.ones(3)
            work.wait = lambda: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(100))
            issue("all_gather", axis, LAYER, lambda: [work], tensor, 12, (tensor,)).wait()

    (peer, _), failure = reports(tmp_path, body)
    assert "(SIGTERM) in training, waiting in all_gather on axis dp (ranks [0, 1])" in peer
    assert "the first failure was: rank 1 on " in peer
    assert "exit code 143" in failure.reports[0]


def watches():
    return [thread for thread in threading.enumerate() if isinstance(thread, watch.Watch)]


def test_the_watch_ends_with_the_block():
    with reported_failures("training"):
        assert len(watches()) == 1
    assert watches() == []
    with pytest.raises(SystemExit), reported_failures("training"):
        raise SystemExit(4)
    assert watches() == []


def orphan(environment, log):
    """A rank whose parent has been killed: its process id."""
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        rank = os.fork()
        if rank == 0:
            become_rank(environment, log)
        os.write(write, b"%d" % rank)
        time.sleep(200)
    rank = int(os.read(read, 100))
    os.close(read)
    os.close(write)
    while not log.exists():
        time.sleep(0.01)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    return rank


def become_rank(environment, log):
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC")]:
        del os.environ[name]
    os.environ.update(environment)
    with reported_failures("training"):
        with open(log, "wb") as file:
            os.dup2(file.fileno(), 2)
        time.sleep(200)
    os._exit(0)


def gone(process, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not Path(f"/proc/{process}").exists():
            return True
        time.sleep(0.05)
    return False


def test_a_rank_ends_when_torchruns_agent_was_killed(tmp_path):
    rank = orphan({"TORCHELASTIC_RUN_ID": "none"}, tmp_path / "log")
    assert gone(rank, 60)
    text = (tmp_path / "log").read_text()
    assert "stopped in training, at " in text
    assert "in become_rank" in text
    assert "its launcher (torchrun) has ended without stopping it" in text


def test_a_program_that_no_torchrun_started_outlives_its_shell(tmp_path):
    rank = orphan({}, tmp_path / "log")
    try:
        assert not gone(rank, 2.5)
    finally:
        os.kill(rank, signal.SIGKILL)


PROGRAM = """
import os, sys, time
import torch, torch.distributed as dist
from hp_platform import MeshAxis, all_gather, all_reduce, reported_failures, reported_stop
with reported_failures("training") as activity:
    dist.init_process_group("gloo")
    with reported_stop(activity):
        axis = MeshAxis.of_group(name="dp")
        for step in range(3):
            activity.phase = f"step {step}"
            all_reduce(torch.ones(1000), axis).wait()
            all_gather(torch.ones(10), axis).wait()
        if "wait" in sys.argv:
            os.write(1, b"waiting %d\\n" % os.getpid())
            while True:
                time.sleep(0.1)
    dist.destroy_process_group()
"""


def torchrun(script, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.Popen(
        [*command, str(script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_end_when_the_real_torchrun_is_killed(script):
    with torchrun(script, "wait") as agent:
        processes = []
        while len(processes) < 2:
            line = agent.stdout.readline()
            assert line
            if line.startswith(b"waiting"):
                processes.append(int(line.split()[1]))
        agent.kill()
        assert all(gone(process, 60) for process in processes)
        said = agent.stdout.read().decode()
    assert said.count("stopped in training, step 2") == 2
    assert "torchrun" in said


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(7200)
def test_fifty_of_fifty_good_runs_end_with_status_0_and_in_silence(script):
    good = 0
    for _ in range(50):
        with torchrun(script) as agent:
            said = agent.communicate(timeout=600)[0].decode()
        silent = "terminate called" not in said and "Traceback" not in said
        assert agent.returncode == 0 and silent, f"{good} of 50 ended well, then:\n{said}"  # noqa: PT018
        good += 1
    assert good == 50
