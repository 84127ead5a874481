"""A resumed run goes on as if it had never stopped, and may go on over another mesh."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hp_integration.train import Result
from hp_platform import RankFailure

Train = Callable[..., Result]


def rewind(folder: Path, step: int) -> None:
    """As if the run had died after saving `step`."""
    (folder / "latest").write_text(f"step-{step:06d}\n")


@pytest.mark.ranks
@pytest.mark.parametrize("mesh", ["dp_shard=2,tp=2", "dp_replicate=2,dp_shard=2"])
def test_the_losses_after_a_resume_are_those_of_an_uninterrupted_run(
    mesh: str, train: Train, tmp_path: Path
) -> None:
    options = ("--mesh", mesh, "--no-checks", "--steps", "8", "--save-every", "4")
    whole = train(*options, ranks=4, out=tmp_path)
    rewind(tmp_path, 4)
    resumed = train(*options, "--resume", ranks=4, out=tmp_path)
    assert resumed.losses == whole.losses
    assert resumed.evaluation_loss == whole.evaluation_loss


@pytest.mark.ranks
def test_a_run_can_be_resumed_on_another_mesh(train: Train, tmp_path: Path) -> None:
    options = ("--model", "moe", "--no-checks", "--steps", "8", "--save-every", "4")
    whole = train(*options, "--mesh", "dp_shard=2,ep=2", ranks=4, out=tmp_path)
    for layout, ranks in (("--mesh=dp_replicate=2,tp=2", 4), ("--single", 1)):
        rewind(tmp_path, 4)
        resumed = train(*options, layout, "--resume", ranks=ranks, out=tmp_path)
        assert resumed.losses[:4] == whole.losses[:4]
        assert resumed.losses == pytest.approx(whole.losses, rel=1e-3, abs=0)


def test_a_checkpoint_of_another_run_is_refused_by_the_option_that_differs(
    train: Train, tmp_path: Path
) -> None:
    options = ("--single", "--model", "dense", "--steps", "3")
    train(*options, out=tmp_path)
    for change, named in (
        (("--seed", "9"), "--seed 0, this run has 9"),
        (("--batch-size", "4"), "--batch-size 8, this run has 4"),
        (("--lr", "0.5"), "--lr 0.02, this run has 0.5"),
        (("--model", "llama"), "--model Qwen3Config, this run has LlamaConfig"),
        (("--steps", "2"), "is at step 3, beyond --steps 2"),
    ):
        with pytest.raises(RankFailure, match=named):
            train(*options, "--resume", *change, out=tmp_path)
