"""A run that cannot go on ends: non-zero, soon, and with a message that names rank and place."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks
MESH = ("--mesh", "dp_shard=2", "--no-checks")
IN_A_COLLECTIVE = r"(waiting in|issuing) \w+"
"""The backend may hold a rank in either; which one is not ours to say."""


FAILING = """
import os, pathlib, sys, time
from hp_integration import train, trainer
from hp_platform.handle import Handle

whole, wait = trainer.Trainer.train_step, Handle.wait
waits = pathlib.Path(os.environ["WAITS"])

def told_wait(handle):
    waits.touch()
    return wait(handle)

def step(self):
    if self.step == 2 and os.environ["RANK"] == "0":
        Handle.wait = told_wait
    if self.step == 2 and os.environ["RANK"] == "1":
        while not waits.exists():
            time.sleep(0.02)
        raise ValueError("planted in the third step")
    return whole(self)

trainer.Trainer.train_step = step
sys.exit(train.main())
"""
"""`hp-train` whose rank 1 fails once rank 0 waits for it."""


def wait_for_step(run, step: int, timeout: float = 200) -> None:
    deadline = time.monotonic() + timeout
    while f"step {step}/" not in re.sub(r"step +", "step ", run.output):
        assert time.monotonic() < deadline, run.output
        assert run.process.poll() is None, run.output
        time.sleep(0.1)


def rank_process(run, rank: int) -> int:
    """Process id of a rank: torchrun's child that has RANK in its environment."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "stat").read_text()
                environment = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            parent = int(status.rpartition(")")[2].split()[1])
            if parent == run.process.pid and b"RANK=%d" % rank in environment:
                return int(entry.name)
    raise AssertionError(f"no process of rank {rank}")


def wait_until_it_waits(process: int, timeout: float = 200) -> None:
    """Until the main thread of a process sleeps and has used no CPU time for a second."""
    deadline, since, used = time.monotonic() + timeout, time.monotonic(), ""
    while time.monotonic() - since < 1:
        assert time.monotonic() < deadline
        time.sleep(0.05)
        status = Path(f"/proc/{process}/task/{process}/stat").read_text().rpartition(")")[2].split()
        if status[0] != "S" or " ".join(status[11:13]) != used:
            since, used = time.monotonic(), " ".join(status[11:13])


def test_a_killed_rank_ends_the_run_and_the_others_say_what_they_waited_for(
    launcher, tmp_path: Path
) -> None:
    run = launcher.start(*launcher.arguments(tmp_path / "out", *MESH, "--steps", "100000"))
    wait_for_step(run, 2)
    # Held first, so that the survivor is in a collective by the time it loses its peer.
    killed = rank_process(run, 1)
    os.kill(killed, signal.SIGSTOP)
    wait_until_it_waits(rank_process(run, 0))
    os.kill(killed, signal.SIGKILL)
    assert run.wait(timeout=200) != 0
    # The survivor's own report: where it was, and in which collective of whom. Which it hears of
    # first, the lost connection or torchrun's signal, is not ours to say.
    assert re.search(
        r"rank 0 on \S+ stopped( by its launcher \(SIGTERM\))? in hp-train, training step \d+",
        run.output.replace(": stopped", " stopped"),
    ), run.output
    assert re.search(rf"{IN_A_COLLECTIVE} on axis dp_shard", run.output), run.output
    assert re.search(r"rank +: 1 .*\n +exitcode +: -9", run.output)  # torchrun names the killed one


def test_a_rank_that_raises_names_itself_and_its_peer_names_it_too(
    launcher, tmp_path: Path
) -> None:
    failing = tmp_path / "failing_rank.py"
    failing.write_text(FAILING)
    run = launcher.start(
        *launcher.arguments(tmp_path / "out", *MESH, "--steps", "100"),
        module="failing_rank",
        environment={"PYTHONPATH": str(tmp_path), "WAITS": str(tmp_path / "waits")},
    )
    assert run.wait(timeout=200) != 0
    assert "rank 1 on" in run.output
    assert (
        "failed in hp-train, training step 3: ValueError: planted in the third step" in run.output
    )
    # Whether rank 0 hears of it from the backend, the store or the launcher first.
    peer = next(text for text in run.output.split("=" * 72) if text.strip().startswith("rank 0 on"))
    assert re.search(r"stopped (by its launcher \(SIGTERM\) )?in hp-train, training step 3", peer)
    assert re.search(rf"{IN_A_COLLECTIVE} on axis dp_shard .*asked by \w+", peer), peer
    assert "the first failure was: rank 1 on " in peer
    assert "training step 3: ValueError: planted in the third step" in peer


def test_a_mistake_in_the_inputs_is_one_line_of_one_rank(launcher, tmp_path: Path) -> None:
    run = launcher.start(*launcher.arguments(tmp_path / "out", "--mesh", "dp_shard=3"))
    assert run.wait(timeout=200) != 0
    lines = [line for line in run.output.splitlines() if "hp-train: error:" in line]
    assert len(lines) == 1, run.output
    assert "--mesh dp_shard=3 needs 3 ranks, this run has 2" in lines[0]
    assert "exitcode  : 2" in run.output
