"""Lint checks of the model's code: what its forwards read, take and draw at random.

A forward is known by the names it uses, not by running it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from hp_dtensor.plan import BoundaryKind
from hp_planner.facts import Facts, Violation
from hp_planner.graph import ModuleGraph, generalized, join

# Methods that read or change the sequence dim of the hidden states.
SEQUENCE_METHODS = frozenset(
    {"shape", "size", "view", "reshape", "cat", "roll", "chunk", "split", "unbind"}
    | {"mean", "sum", "amax", "cumsum", "flip", "var", "std"}
)


def check_code(facts: Facts) -> Iterator[Violation]:
    """A loss that the router's gradient would not fit: inside a block it is a partial sum."""
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


def check_dropouts(facts: Facts) -> Iterator[Violation]:
    """Dropout that the ranks of a model axis would do differently.

    What `nn.Dropout` modules draw is in the plan, where the layout of what they are given is
    known. A rate that a module hands to a function, attention's among them, draws from each
    process's own numbers. A model in eval mode draws none.
    """
    if facts.plan.model_mesh.world_size == 1:
        return
    if not any(node.training for node in facts.graph.modules):
        return
    found = list(_own_draws(facts.graph, {spec.module for spec in facts.plan.boundaries}))
    if not found:
        return
    where = list(dict.fromkeys(f"{text} = {rate}" for text, _, rate in found))
    names = list(dict.fromkeys(n for _, leaf, rate in found for n in _settings(facts, leaf, rate)))
    zeros = " ".join(f"{name}=0" for name in names)
    yield Violation(
        "random",
        "",
        "dropout by nn.Dropout modules whose place is known, so that ranks share its mask",
        ", ".join(where),
        f"set what is named to 0 (hp-plan: --set {zeros})" if names else "set what is named to 0",
    )


def _own_draws(graph: ModuleGraph, planned: set[str]) -> Iterator[tuple[str, str, float]]:
    """Rates that no plan covers: where, the name to look for in the config, and the rate."""
    config = dict(graph.config)
    read = {
        join(node.name, name[:-2])
        for node in graph.modules
        for name in node.forward.own
        if name.endswith(".p")
    }
    for node in graph.modules:
        for leaf, rate in () if node.drops else node.rates:
            yield f"{node.class_name}.{leaf}", leaf, rate
        for name in sorted(node.forward.own):
            leaf, _, rest = name.partition(".")
            part = graph.find(join(node.name, leaf))
            if rest == "p" and part is not None and part.drops:
                yield f"{node.class_name}.{name}", leaf, part.rates[0][1]
            if leaf == "config" and _drops(rest, config.get(rest)):
                yield f"{node.class_name}.{name}", rest, float(str(config[rest]))
        if node.drops and node.name not in planned | read:
            yield generalized(node.name), node.name.rpartition(".")[2], node.rates[0][1]


def _settings(facts: Facts, leaf: str, rate: float) -> list[str]:
    """Config values that a rate may come from: of its name, else of its size and its kind."""
    values = dict(facts.graph.config)
    if leaf.endswith("()"):  # a number in the code, which no setting changes
        return []
    if _drops(leaf, values.get(leaf)):
        return [leaf]
    alike = [name for name, value in facts.graph.config if _drops(name, value) and value == rate]
    kind = [name for name in alike if ("att" in name) == ("att" in leaf)]
    return kind or alike


def _drops(name: str, value: object) -> bool:
    """Whether a config value is the rate of a dropout that a language model draws."""
    rate = re.search(r"drop", name) and "classifi" not in name
    return bool(rate) and isinstance(value, float) and value > 0


def check_draws(facts: Facts) -> Iterator[Violation]:
    """Random numbers that every rank would draw for itself, in values that ranks share or part."""
    if facts.plan.model_mesh.world_size == 1:
        return
    for node in facts.graph.modules:
        for draw in node.draws:
            names = [n for leaf, _ in draw.settings for n in _config_names(facts, leaf)]
            zeros = " and ".join(f"config.{name} = 0.0" for name in dict.fromkeys(names))
            yield Violation(
                "random",
                node.name,
                "numbers that every rank draws alike",
                f"{node.class_name}.forward draws by {draw.code}, each process its own",
                f"set {zeros}"
                if zeros
                else "take the draw out of the forward, or plan the model "
                "in eval mode if it draws in training only",
            )


def _config_names(facts: Facts, leaf: str) -> list[str]:
    """Config values that a setting of a module may come from: of its name, or longer ones."""
    named = [name for name, value in facts.graph.config if name == leaf and value]
    return named or [n for n, value in facts.graph.config if n.endswith(f"_{leaf}") and value]
