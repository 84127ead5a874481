"""Lint checks of the model's code: what its forwards read, take and draw at random.

A forward is known by the names it uses, not by running it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from hp_dtensor.plan import BoundaryKind
from hp_planner.boundaries import Boundary
from hp_planner.facts import Facts, Violation

# Methods that read or change the sequence dim of the hidden states.
SEQUENCE_METHODS = frozenset(
    {"shape", "size", "view", "reshape", "cat", "roll", "chunk", "split", "unbind"}
    | {"mean", "sum", "amax", "cumsum", "flip", "var", "std"}
)


def check_code(facts: Facts) -> Iterator[Violation]:
    """A loss that the router's gradient would not fit, and random numbers that ranks must share."""
    yield from _router_loss(facts)
    yield from _randomness(facts)


def _router_loss(facts: Facts) -> Iterator[Violation]:
    """The router's gradient inside a block is a partial sum; a loss on its logits is not."""
    if dict(facts.graph.config).get("output_router_logits") and any(
        facts.sharded(BoundaryKind.MOE)
    ):
        yield Violation(
            "code",
            "",
            "no loss on the router's logits",
            "config.output_router_logits is set, whose loss every rank computes in full",
            "set config.output_router_logits = False, or override the MoE blocks with none",
        )


def _drops(name: str, value: object) -> bool:
    """Whether a config value is the rate of a dropout that a language model draws."""
    rate = re.search(r"dropout|pdrop|drop_rate", name) and "classifi" not in name
    return bool(rate) and isinstance(value, float) and value > 0


def _randomness(facts: Facts) -> Iterator[Violation]:
    """Random numbers that must agree between ranks: on summands, or on what all ranks hold.

    A model in eval mode draws none. Heads are shared among ranks, so a mask over attention weights
    would differ from that of one process too.
    """
    blocks = (BoundaryKind.ATTENTION, BoundaryKind.MLP, BoundaryKind.MOE, BoundaryKind.MIXER)
    draws = any(facts.sharded(*blocks)) and any(node.training for node in facts.graph.modules)
    drawn = [entry for entry in facts.graph.config if _drops(*entry)] if draws else []
    if drawn:
        names = ", ".join(f"config.{name} = {value}" for name, value in drawn)
        zeros = " ".join(f"{name}=0" for name, _ in drawn)
        yield Violation(
            "random",
            "",
            "no dropout, whose mask all ranks would have to share",
            names,
            f"set what is named to 0 (hp-plan: --set {zeros})",
        )
    for boundary in facts.sharded(BoundaryKind.MOE):
        noise = _noise(facts, boundary)
        if noise:
            yield Violation(
                "random",
                boundary.module,
                "tokens that are the same on every rank",
                f"config.{noise}, by which each rank changes its own copy",
                f"set config.{noise} = 0.0",
            )


def _noise(facts: Facts, boundary: Boundary) -> str:
    """The config value behind the noise that a block's forward draws, if it is not zero."""
    uses = facts.graph.module(boundary.module).forward.names
    name = "input_jitter_noise" if "input_jitter_noise" in uses else "router_jitter_noise"
    value = dict(facts.graph.config).get(name)
    return name if isinstance(value, float) and value > 0 and "uniform_" in uses else ""
