"""What `hp-train` prints and draws, on the leading rank alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen
from rich.console import Console

import hp_planner
from hp_dtensor.plan import ShardingPlan
from hp_integration.models import abstract_model, parameter_count
from hp_integration.options import counted
from hp_integration.plot import save_picture
from hp_platform.ledger import Ledger
from hp_platform.topology import Topology

if TYPE_CHECKING:
    from hp_dtensor.equivalence import GradientReport
    from hp_integration.inputs import Inputs
    from hp_integration.train import Result
    from hp_integration.world import World

_WIDTH_WHERE_NO_TERMINAL = 120


@frozen
class Report:
    """The run's output; silent where `console` is None."""

    console: Console | None

    @classmethod
    def of_rank(cls, world: World) -> Report:
        if not world.is_leader:
            return cls(None)
        console = Console(highlight=False, markup=False, emoji=False)
        if not console.is_terminal:
            console.width = _WIDTH_WHERE_NO_TERMINAL
        return cls(console)

    def inputs(self, inputs: Inputs, topology: Topology) -> None:
        """What the run is made of, and the plan."""
        if self.console is None:
            return
        options, corpus = inputs.options, inputs.corpus
        count = parameter_count(abstract_model(inputs.config))
        places = (
            f"{counted(topology.world_size, 'rank')} on {counted(len(set(topology.hosts)), 'host')}"
        )
        mesh = " x ".join(f"{axis}={size}" for axis, size in options.mesh.items())
        rows = {
            "mesh": f"{places}, {mesh}",
            "model": f"{inputs.model_name}, {count:,} parameters",
            "text": f"{corpus.name}: {len(corpus.train):,} tokens to train on, "
            f"{len(corpus.held_out):,} held out, vocabulary {corpus.vocabulary}",
            "batch": f"{options.batch_size} sequences of {options.seq_len} tokens",
        }
        self._print_pairs(rows)
        if inputs.plan is not None:
            self._section("Plan")
            self._print_text(hp_planner.explain(inputs.plan))

    def validated(self, plan: ShardingPlan, loss: float) -> None:
        if self.console is not None:
            self._section("Validate mode")
            self._print_text(
                f"one step forward and backward, {len(plan.boundaries)} boundaries and "
                f"{len(plan.parameters)} parameters checked: loss {loss:.6f} on the first batch"
            )

    def nothing_to_check(self) -> None:
        """For a plan that cuts nothing: both modes and the plain model are the same program."""
        if self.console is not None:
            self._section("Validate mode and gradients")
            self.console.print(
                "not run: with one tensor-parallel rank the plan has no boundary to check"
            )

    def gradients(self, gradients: GradientReport) -> None:
        if self.console is not None:
            self._section("Gradients under the plan against the unsharded model")
            self._print_text(_summary(gradients) if gradients.ok else str(gradients))

    def training(self, first: int, steps: int) -> None:
        if self.console is not None:
            self._section(f"Training, production mode: steps {first + 1} to {steps}")

    def resumed(self, checkpoint: Path, step: int) -> None:
        if self.console is not None:
            self.console.print(f"resumed from {checkpoint} after step {step}")

    def finished(self, inputs: Inputs, result: Result, log: Ledger | None) -> None:
        """Losses, communication and the files that were written."""
        if self.console is None:
            return
        out = inputs.options.out
        self._section("Held-out text")
        self._print_pairs(
            {
                "model": f"{result.evaluation_loss:.4f} nats a token",
                "token frequencies alone": f"{result.frequency_loss:.4f} nats a token",
            }
        )
        written = {"checkpoint": result.checkpoint, "losses": _save_metrics(out, result)}
        if log is not None and log.records:
            self._section(f"Communication of rank 0 in step {inputs.options.steps}, by tier")
            self._print_text(str(log.summary()))
            written["trace"] = out / "communication.trace.json"
            log.to_chrome_trace(written["trace"])
        written["picture"] = _save_picture(out / "run.png", inputs, result, log)
        self._section("Written")
        self._print_pairs({name: str(path) for name, path in written.items()})

    def _section(self, title: str) -> None:
        assert self.console is not None
        self.console.print()
        self.console.rule(title, align="left")

    def _print_text(self, text: str) -> None:
        """Text with its own line breaks, such as a wide table; none are added."""
        assert self.console is not None
        self.console.print(text, soft_wrap=True)

    def _print_pairs(self, rows: Mapping[str, str]) -> None:
        assert self.console is not None
        width = max(map(len, rows))
        for name, value in rows.items():
            self._print_text(f"{name.ljust(width)}  {value}")


def _summary(gradients: GradientReport) -> str:
    """Two lines for a report in which everything agrees."""
    losses = ", ".join(f"{mode} {loss:.6f}" for mode, loss in gradients.losses.items())
    worst = max(gradients.gradients, key=lambda each: each.deviation / each.limit)
    return (
        f"equal: {len(gradients.gradients)} gradients, and the collectives of both modes; "
        f"losses of rank 0's rows: {losses}\n"
        f"nearest to its limit: {worst.name} in {worst.mode} mode, "
        f"off by {worst.deviation:.1e} of {worst.limit:.1e}"
    )


def _save_metrics(out: Path, result: Result) -> Path:
    path = out / "metrics.json"
    values = {
        "losses": result.losses,
        "evaluation_loss": result.evaluation_loss,
        "frequency_loss": result.frequency_loss,
    }
    path.write_text(json.dumps(values, indent=1) + "\n")
    return path


def _save_picture(path: Path, inputs: Inputs, result: Result, log: Ledger | None) -> Path:
    mesh = " x ".join(f"{axis}={size}" for axis, size in inputs.options.mesh.items())
    return save_picture(
        path,
        losses=list(enumerate(result.losses, start=1)),
        evaluation=(len(result.losses), result.evaluation_loss),
        frequency_loss=result.frequency_loss,
        records=[] if log is None else log.records,
        title=f"{inputs.model_name} on {mesh}",
    )
