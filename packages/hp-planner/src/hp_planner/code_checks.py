"""Lint checks of the model's code: what its forwards read, take and draw at random.

A forward is known by the names it uses, not by running it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from hp_dtensor.plan import BoundaryKind
from hp_planner.boundaries import Boundary
from hp_planner.facts import Facts, Violation, generalized
from hp_planner.graph import ModuleNode

# Names of attributes that hold a number of heads or of features over all heads. A forward that
# reads one views its tensors with the global size, which a rank's share does not have.
GLOBAL_SIZES = frozenset(
    {
        "num_heads",
        "num_attention_heads",
        "n_heads",
        "n_head",
        "num_key_value_heads",
        "num_kv_heads",
        "hidden_size",
        "embed_dim",
        "all_head_size",
        "hidden_dim",
        "intermediate_size",
        "inner_dim",
    }
)


# Arguments of a layer's or an attention's forward that are no hidden states of their own.
KNOWN_ARGUMENTS = frozenset(
    {
        "attention_mask",
        "position_ids",
        "position_embeddings",
        "cache",
        "past_key_values",
        "past_key_value",
        "use_cache",
        "cache_position",
        "output_attentions",
        "output_router_logits",
        "layer_idx",
    }
)


# Methods that read or change the sequence dim of the hidden states.
SEQUENCE_METHODS = frozenset(
    {"shape", "size", "view", "reshape", "cat", "roll", "chunk", "split", "unbind"}
    | {"mean", "sum", "amax", "cumsum", "flip", "var", "std"}
)


# Methods that take several features of a tensor together, of which an MLP's inner ones are cut.
FEATURE_METHODS = frozenset(
    {
        "norm",
        "vector_norm",
        "normalize",
        "layer_norm",
        "rms_norm",
        "mean",
        "sum",
        "var",
        "std",
        "softmax",
        "log_softmax",
        "amax",
        "amin",
        "argmax",
        "topk",
        "sort",
        "cumsum",
        "flip",
        "roll",
    }
)


def check_code(facts: Facts) -> Iterator[Violation]:
    """Forwards that view with global sizes, take unknown tensors, or need the whole sequence."""
    for boundary in facts.sharded(BoundaryKind.ATTENTION, BoundaryKind.MLP):
        node = facts.graph.module(boundary.module)
        hard_coded = _hard_coded(node)
        if hard_coded:
            yield Violation(
                "code",
                node.name,
                "a forward that takes sizes from its tensors",
                f"{node.class_name}.forward reads {', '.join(hard_coded)}, global sizes",
                f"override {generalized(node.name)!r} with none",
            )
    for boundary in facts.sharded(BoundaryKind.ATTENTION, BoundaryKind.LAYER):
        node = facts.graph.module(boundary.module)
        unknown = [a for a in node.forward.arguments[1:] if a not in KNOWN_ARGUMENTS]
        if unknown:
            yield Violation(
                "code",
                node.name,
                "arguments whose layout is known",
                f"{node.class_name}.forward takes {', '.join(unknown)}",
                f"override {generalized(node.name)!r} with none",
            )
    yield from _feature_code(facts)
    yield from _sequence_code(facts)
    yield from _router_loss(facts)
    yield from _randomness(facts)


def _hard_coded(node: ModuleNode) -> list[str]:
    return sorted(GLOBAL_SIZES & node.forward.names & {name for name, _ in node.attributes})


def _feature_code(facts: Facts) -> Iterator[Violation]:
    for boundary in facts.sharded(BoundaryKind.MLP):
        node = facts.graph.module(boundary.module)
        used = sorted(FEATURE_METHODS & node.forward.names)
        if used:
            yield Violation(
                "code",
                node.name,
                "an MLP that treats every inner feature alike, as each rank has a part of them",
                f"{node.class_name}.forward uses {', '.join(used)}",
                f"override {generalized(node.name)!r} with none",
            )


def _sequence_code(facts: Facts) -> Iterator[Violation]:
    for boundary in facts.sharded(BoundaryKind.LAYER) if facts.sequence_parallel else ():
        node = facts.graph.module(boundary.module)
        used = sorted(SEQUENCE_METHODS & node.forward.names)
        if used:
            yield Violation(
                "code",
                node.name,
                "a layer that treats every position alike outside its blocks",
                f"{node.class_name}.forward uses {', '.join(used)}",
                "plan with sequence_parallel=False",
            )


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


def _randomness(facts: Facts) -> Iterator[Violation]:
    """Random numbers that must agree between ranks: on summands, or on what all ranks hold.

    Dropout of attention weights is drawn for each rank's own heads, and is left alone.
    """
    blocks = (BoundaryKind.ATTENTION, BoundaryKind.MLP, BoundaryKind.MOE)
    for name, value in facts.graph.config if any(facts.sharded(*blocks)) else ():
        drops = re.search(r"dropout|pdrop|drop_rate", name) and not re.match(r"att", name)
        if drops and isinstance(value, float) and value > 0:
            yield Violation(
                "random",
                "",
                "no dropout outside attention weights, whose mask all ranks would have to share",
                f"config.{name} = {value}",
                f"set config.{name} = 0.0",
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
