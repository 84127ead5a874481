"""The whole run, checks included, on meshes and models beside those of the loss comparison."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hp_integration import checks
from hp_integration.train import Result
from hp_integration.trainer import Trainer, next_token_loss
from hp_platform import RankFailure
from hp_platform.testing import run_ranks

Train = Callable[..., Result]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        (("--mesh", "tp=2"), 2),
        (("--mesh", "dp_replicate=2,tp=2", "--no-sequence-parallel", "--model", "llama"), 4),
        (("--mesh", "dp_shard=3", "--batch-size", "6", "--model", "dense"), 3),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_a_run_with_its_checks_ends_with_the_losses_of_one_process(
    options: tuple[str, ...], ranks: int, train: Train
) -> None:
    many = train("--steps", "3", *options, ranks=ranks)
    without_mesh = [
        o for i, o in enumerate(options) if "--mesh" not in options[max(0, i - 1) : i + 1]
    ]
    one = train("--steps", "3", *without_mesh, "--single")
    assert many.losses == pytest.approx(one.losses, rel=1e-4, abs=0)
    assert many.frequency_loss == one.frequency_loss


@pytest.mark.ranks
def test_training_does_not_start_when_the_gradients_differ(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(model, batch, vocabulary=None):
        loss = next_token_loss(model, batch, vocabulary)
        in_production = getattr(model, "_hp_parallelized", "") == "production"
        return loss * 1.01 if in_production else loss

    def never(self: Trainer) -> float:
        raise AssertionError("training has started")

    monkeypatch.setattr(checks, "next_token_loss", wrong)
    monkeypatch.setattr(Trainer, "train_step", never)
    with pytest.raises(RankFailure, match="DIFFERENT"):
        train("--mesh", "tp=2", ranks=2)


def test_a_run_of_no_remaining_steps_evaluates_again(train: Train, tmp_path: Path) -> None:
    options = ("--single", "--model", "dense", "--steps", "2")
    first = train(*options, out=tmp_path)
    assert train(*options, "--resume", out=tmp_path) == first


@pytest.mark.ranks
def test_the_report_is_complete(small_run: list[str], tmp_path: Path, capfd) -> None:
    from hp_integration.train import run
    from hp_integration.world import World

    arguments = [*small_run, "--mesh", "dp_shard=2,tp=2", "--steps", "2", "--out", str(tmp_path)]
    run_ranks(lambda: run(arguments, World.current()), 4, timeout=240)
    shown = capfd.readouterr().out
    for part in (
        "4 ranks on 1 host",
        "query_projection",  # the plan: roles, placements, transitions
        "reduce-scatter",
        "boundaries and 25 parameters checked: loss",
        "equal: 50 gradients",
        "step 2/2",
        "token frequencies alone",
        "Communication of rank 0 in step 2",
        str(tmp_path / "run.png"),
    ):
        assert part in shown, part
    assert shown.count("step 2/2") == 1
