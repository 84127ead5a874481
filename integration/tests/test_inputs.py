"""A mistake in the inputs stops every rank with the same line, before training."""

from pathlib import Path

import pytest

from hp_integration.errors import InputError
from hp_integration.train import run
from hp_integration.world import World
from hp_platform.testing import run_ranks


def message_on_every_rank(arguments: list[str]) -> str:
    """What a run over two ranks refuses with; fails where ranks differ or the run goes on."""

    def body() -> str:
        with pytest.raises(InputError) as caught:
            run(arguments, World.current())
        return str(caught.value)

    first, second = run_ranks(body, 2)
    assert first == second
    assert "\n" not in first
    return str(first)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--mesh", "dp_shard=3"), "--mesh dp_shard=3 needs 3 ranks, this run has 2"),
        (("--mesh", "dp=2"), "unknown axis 'dp'"),
        (("--model", "gpt-17"), "--model gpt-17: unknown"),
        (("--config", "/no/such.json"), "--config /no/such.json: no such file"),
        (("--data", "/no/such/folder"), "--data /no/such/folder: no such folder"),
        (("--out", "/proc/forbidden"), "--out /proc/forbidden: cannot write there"),
        (("--resume",), "holds no checkpoint"),
        (("--stepz", "3"), "unrecognized arguments: --stepz 3"),
        (("--overrides", "/no/such.yaml"), "/no/such.yaml"),
    ],
)
def test_a_mistake_is_one_line(
    options: tuple[str, ...], message: str, small_run: list[str], tmp_path: Path
) -> None:
    arguments = [*small_run, "--out", str(tmp_path), "--mesh", "dp_shard=2", *options]
    assert message in message_on_every_rank(arguments)


@pytest.mark.ranks
def test_an_override_that_matches_nothing_is_named(small_run: list[str], tmp_path: Path) -> None:
    overrides = tmp_path / "overrides.yaml"
    overrides.write_text("rules:\n  - match: 'model.no_such_module'\n    compute: none\n")
    options = ("--mesh", "tp=2", "--overrides", str(overrides), "--out", str(tmp_path))
    message = message_on_every_rank([*small_run, *options])
    assert "model.no_such_module" in message


@pytest.mark.ranks
def test_ranks_that_read_different_text_are_named(small_run: list[str], tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"text{rank}").mkdir()
        (tmp_path / f"text{rank}" / "a.txt").write_text(f"rank {rank} " * 1000)

    def body(rank: int) -> str:
        arguments = [*small_run, "--data", str(tmp_path / f"text{rank}")]
        with pytest.raises(InputError) as caught:
            run([*arguments, "--out", str(tmp_path), "--mesh", "tp=2"], World.current())
        return str(caught.value)

    messages = run_ranks(body, 2)
    assert messages[0] == messages[1]
    assert "disagree about text" in messages[0]
