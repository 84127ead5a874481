"""What a person sees while the model trains: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from attrs import define, field
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Reporter(Protocol):
    """Hears of every step."""

    def step(self, step: int, loss: float, learning_rate: float) -> None: ...


@contextmanager
def progress(
    console: Console | None, *, first: int, steps: int, tokens_per_step: int, every: int
) -> Iterator[Reporter]:
    """A reporter for steps `first` to `steps`; None for `console` makes a silent one."""
    if console is None:
        yield _Silent()
    elif console.is_terminal:
        with _bar(console) as bar:
            task = bar.add_task("train", total=steps, completed=first, status="")
            yield _Bar(bar, task, _Rate(tokens_per_step))
    else:
        yield _Lines(console, steps, every, _Rate(tokens_per_step))


class _Silent:
    def step(self, step: int, loss: float, learning_rate: float) -> None:
        pass


@define
class _Rate:
    """Tokens a second since it was last asked."""

    tokens_per_step: int
    _steps: int = 0
    _since: float = field(factory=time.perf_counter)

    def count(self) -> None:
        self._steps += 1

    def take(self) -> float:
        now = time.perf_counter()
        rate = self._steps * self.tokens_per_step / max(now - self._since, 1e-9)
        self._steps, self._since = 0, now
        return rate


@define
class _Bar:
    bar: Progress
    task: object
    rate: _Rate

    def step(self, step: int, loss: float, learning_rate: float) -> None:
        self.rate.count()
        status = _status(loss, self.rate.take(), learning_rate)
        self.bar.update(self.task, completed=step, status=status)  # type: ignore[arg-type]


@define
class _Lines:
    console: Console
    steps: int
    every: int
    rate: _Rate

    def step(self, step: int, loss: float, learning_rate: float) -> None:
        self.rate.count()
        if step == 1 or step % self.every == 0 or step == self.steps:
            status = _status(loss, self.rate.take(), learning_rate)
            self.console.print(f"step {step:>{len(str(self.steps))}}/{self.steps}  {status}")


def _status(loss: float, tokens_per_second: float, learning_rate: float) -> str:
    return f"loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s  lr {learning_rate:.2e}"


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(),
        console=console,
        expand=True,
    )
