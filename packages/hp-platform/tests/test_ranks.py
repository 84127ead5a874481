"""The rank runner: results, failures, deadlines, and what the children must not do."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hp_platform import MeshAxis, Origin, PeerError, RankFailure, all_reduce, barrier
from hp_platform.handle import Handle
from hp_platform.store import default_store
from hp_platform.testing import ranks, run_ranks

pytestmark = pytest.mark.ranks


def all_have_started():
    """Returns once no rank connects any more: one that is gone would fail the others' start."""
    default_store().set(f"started {dist.get_rank()}", "")
    default_store().wait([f"started {rank}" for rank in range(dist.get_world_size())])


def hears_of(monkeypatch, rank, first=None):
    """Makes the runner listen until that rank has told what the first failure did to it.

    Args:
        first: file that is made when the first failure is known.
    """

    def listen(selector):
        if first is not None:
            first.touch()
        while any(key.data.rank == rank for key in selector.get_map().values()):
            for key, _ in selector.select():
                ranks._read(key.data)
                if key.data.settled:
                    selector.unregister(key.fileobj)

    monkeypatch.setattr(ranks, "_collect_grace", listen)


def test_results_come_back_in_rank_order_and_the_body_may_be_a_closure():
    factor = 10
    assert run_ranks(lambda rank: rank * factor, 3) == [0, 10, 20]


def test_a_body_without_parameters_finds_its_rank_in_the_group_and_environment():
    def body():
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        return dist.get_rank(), torch.get_num_threads(), [os.environ[name] for name in names]

    expected = [(rank, 1, [str(rank), str(rank), "2", "2"]) for rank in range(2)]
    assert run_ranks(body, 2) == expected


def test_one_rank_has_a_group_of_its_own():
    assert run_ranks(lambda: dist.get_world_size(), 1) == [1]


def test_meshes_of_several_axes_can_be_made():
    def body(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        tensor = torch.tensor([float(rank)])
        return all_reduce(tensor, MeshAxis.of_mesh(mesh, "dp")).wait().item()

    assert run_ranks(body, 4) == [2.0, 4.0, 2.0, 4.0]


def test_results_larger_than_a_pipe_arrive():
    results = run_ranks(lambda rank: torch.full((1 << 20,), rank), 3)
    assert [bool((found == rank).all()) for rank, found in enumerate(results)] == [True] * 3


def test_it_works_after_the_parent_has_computed_with_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        weight = torch.randn(600, 600, requires_grad=True)
        (weight @ weight).sum().backward()
        torch.randn(1 << 20).sort()

        def body():
            inner = torch.randn(600, 600, requires_grad=True)
            (inner @ inner).sum().backward()
            torch.randn(1 << 20).sort()
            return bool(torch.isfinite(inner.grad).all())

        assert run_ranks(body, 2) == [True, True]
    finally:
        torch.set_num_threads(before)


def test_an_exception_stops_the_others_and_shows_every_traceback(monkeypatch):
    hears_of(monkeypatch, 0)

    def body(rank):
        all_have_started()
        if rank == 1:
            default_store().wait(["asleep"])
            raise KeyError("the planted fault")
        if rank == 2:
            default_store().set("asleep", "")
            time.sleep(1000)
        barrier(MeshAxis.of_group())

    with pytest.raises(RankFailure) as caught:
        run_ranks(body, 3, timeout=200)
    failure = caught.value
    assert failure.failed[0] == 1
    assert isinstance(failure.__cause__, KeyError)
    assert "KeyError: 'the planted fault'" in failure.reports[1]
    assert "lost its peers while waiting in barrier" in failure.reports[0]
    assert "was still running" in failure.reports[2]
    assert "time.sleep" not in failure.reports[2]
    assert "in body" in failure.reports[2]
    for peer in (0, 2):
        assert (
            "stopped because rank 1 failed: KeyError: 'the planted fault'" in failure.reports[peer]
        )
    assert all(f"--- rank {rank} ---" in str(failure) for rank in range(3))


def test_an_exception_that_cannot_be_pickled_is_still_shown():
    class LocalError(Exception):
        pass

    def body():
        raise LocalError("only here")

    with pytest.raises(RankFailure, match=r"LocalError: only here") as caught:
        run_ranks(body, 1)
    assert caught.value.__cause__ is None


def test_a_result_that_cannot_be_pickled_is_a_failure():
    with pytest.raises(RankFailure, match="pickle"):
        run_ranks(lambda: lambda: None, 1)


def test_a_killed_rank_is_named_with_its_signal():
    def body(rank):
        all_have_started()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        barrier(MeshAxis.of_group())

    with pytest.raises(RankFailure, match=r"^rank 1 of 2 failed") as caught:
        run_ranks(body, 2)
    assert "was killed by signal SIGKILL" in caught.value.reports[1]


def test_a_rank_that_ends_its_process_is_a_failure():
    with pytest.raises(RankFailure, match="ended with exit code 3 without reporting"):
        run_ranks(lambda: os._exit(3), 1)
    with pytest.raises(RankFailure, match="SystemExit"):
        run_ranks(lambda: sys.exit(0), 1)


def test_a_deadline_names_the_ranks_and_shows_where_they_were_stuck(monkeypatch):
    class Work:
        def wait(self):
            default_store().set("stuck 0", "")
            time.sleep(1000)

    def waits_for_ever(rank):
        if rank == 0:
            origin = Origin("hp_fsdp", "layers.3", "backward")
            axis = MeshAxis.of_group(name="dp")
            Handle(None, [Work()], "all_reduce", axis, origin).wait()
        if rank == 1:
            default_store().set("stuck 1", "")
            time.sleep(1000)
        default_store().wait(["stuck 0", "stuck 1"])  # until then the third has not finished

    def collect(started, deadline, collect=ranks._collect):
        # The time is up when both are where they get stuck, however long that takes here.
        while not started[2].settled:
            ranks._read(started[2])
            time.sleep(0.02)
        return collect(started, time.monotonic() + 0.2)

    monkeypatch.setattr(ranks, "_collect", collect)
    with pytest.raises(RankFailure, match=r"rank 0, 1 of 3 did not finish within 90 s") as caught:
        run_ranks(waits_for_ever, 3, timeout=90)
    stuck, asleep = caught.value.reports[0], caught.value.reports[1]
    assert "in wait" in stuck
    shown = "waiting in all_reduce on axis dp (ranks [0, 1, 2]), asked by hp_fsdp layers.3 backward"
    assert shown in stuck
    assert "in waits_for_ever" in asleep
    assert "test_ranks.py" in asleep


def test_a_rank_is_missed_at_once_though_a_process_of_its_own_holds_its_pipe(tmp_path):
    over = tmp_path / "over"

    def body(rank):
        all_have_started()
        if rank == 1:
            if os.fork() == 0:
                while not over.exists():
                    time.sleep(0.1)
                os._exit(0)
            os._exit(3)
        time.sleep(1000)

    with pytest.raises(RankFailure, match="ended with exit code 3 without reporting") as caught:
        run_ranks(body, 2, timeout=90)
    over.touch()
    assert caught.value.failed == (1,)  # both, had it been missed at the deadline only


def test_a_peer_that_is_heard_of_first_is_not_taken_for_the_rank_that_failed(monkeypatch, tmp_path):
    heard = tmp_path / "heard"
    hears_of(monkeypatch, 1, heard)

    def body(rank):
        all_have_started()
        if rank == 0:
            raise PeerError("lost rank 1")
        while not heard.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankFailure, match=r"^rank 1 of 2 failed") as caught:
        run_ranks(body, 2)
    assert caught.value.failed == (1,)
    assert "stopped because rank 1 failed: was killed by signal SIGKILL" in caught.value.reports[0]


def test_a_signal_without_a_name_is_given_by_number():
    with pytest.raises(RankFailure, match="was killed by signal 35"):
        run_ranks(lambda: os.kill(os.getpid(), 35), 1)


def test_a_body_that_takes_standard_output_away_does_not_return_into_the_parents_program():
    def body():
        sys.stdout = None

    assert run_ranks(body, 1) == [None]


def test_a_rank_cannot_fork_ranks_of_its_own():
    with pytest.raises(RankFailure, match="this process is already in a process group"):
        run_ranks(lambda: run_ranks(lambda: None, 1), 1)


def test_no_child_is_left_over_after_a_failure():
    pids = Path("/proc/self/task") / str(threading.get_native_id()) / "children"
    before = pids.read_text()

    def body(rank):
        if rank == 0:
            raise ValueError
        time.sleep(100)

    with pytest.raises(RankFailure):
        run_ranks(body, 3)
    assert pids.read_text() == before


def test_children_run_no_exit_handlers(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        """
import atexit, os
from hp_platform.testing import run_ranks
atexit.register(lambda: print("exit handler", flush=True))
print("before")
run_ranks(lambda rank: os.write(1, f"rank {rank}\\n".encode()), 2)
"""
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=240
    )
    lines = done.stdout.splitlines()
    assert sorted(lines) == ["before", "exit handler", "rank 0", "rank 1"]
    assert lines[-1] == "exit handler"
    assert done.stderr == ""


def test_a_body_may_destroy_its_group_itself():
    def body():
        # A rank that leaves while its peer still connects looks like a dead one.
        barrier(MeshAxis.of_group())
        dist.destroy_process_group()

    assert run_ranks(body, 2) == [None, None]


def test_many_groups_in_a_row_end_cleanly():
    for _ in range(10):
        assert run_ranks(lambda: barrier(MeshAxis.of_group()), 2) == [None, None]


def test_a_world_of_no_ranks_is_refused():
    with pytest.raises(ValueError, match="at least one rank, got world_size=0"):
        run_ranks(lambda: None, 0)
