"""A bar on a terminal, lines elsewhere, nothing on the other ranks."""

import io

import pytest
from rich.console import Console

from hp_integration.progress import progress


def lines(every: int, *, first: int = 0, steps: int = 6) -> list[str]:
    console = Console(file=io.StringIO(), width=120)
    with progress(console, first=first, steps=steps, tokens_per_step=8, every=every) as reporter:
        for step in range(first + 1, steps + 1):
            reporter.step(step, loss=2.5, learning_rate=0.02)
    return console.file.getvalue().splitlines()


def test_without_a_terminal_there_is_a_line_at_the_first_the_last_and_every_nth_step() -> None:
    shown = lines(every=4)
    assert [line.split()[1] for line in shown] == ["1/6", "4/6", "6/6"]
    assert all("loss 2.5000" in line and "tokens/s" in line for line in shown)
    assert all("lr 2.00e-02" in line for line in shown)


def test_a_terminal_gets_a_bar() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with progress(console, first=0, steps=2, tokens_per_step=8, every=1) as reporter:
        for step in (1, 2):
            reporter.step(step, loss=2.5, learning_rate=0.02)
    text = console.file.getvalue()
    assert "2/2" in text
    assert "tokens/s" in text


def test_without_a_console_nothing_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(None, first=0, steps=2, tokens_per_step=8, every=1) as reporter:
        reporter.step(1, loss=2.5, learning_rate=0.02)
    assert capsys.readouterr() == ("", "")
