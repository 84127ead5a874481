"""Which logical matrices the parameters of a model family hold, for `Muon(views=...)`.

The planner knows what a parameter is for and how a fused one is laid out: its sections are those of
the placement that the planner gives it. Here that becomes a `MatrixView` a parameter; Muon itself
knows nothing of models. Stored [in, out] weights become [out, in] matrices, so that scale rules
that look at rows and cols see the same as for an ordinary linear layer.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from torch import nn

from hp_dtensor import SectionedShard, Shard, ShardingPlan
from hp_dtensor.plan import ParameterSpec
from hp_muon import MatrixView
from hp_muon.wrappers import bare
from hp_planner import plan as derive_plan

_logger = logging.getLogger("hp_integration")
_AXIS = "tp"

FUSED = ("fused_query_key_value", "fused_gate_up", "expert_gate_up")
_STORED_INPUT_FIRST = ("Conv1D",)


def muon_views(
    model: nn.Module, *, plan: ShardingPlan | None = None, per_head: bool = False
) -> dict[str, MatrixView]:
    """Views by parameter name; parameters that hold one plain matrix need none and have none.

    Fused query, key and value become three matrices, gate and up two (each of every expert), and
    the latent projections of multi-head latent attention the factors for positions with and
    without rotation, keys and values. A fused parameter whose inner order the planner does not
    know is left whole, and logged.

    Args:
        plan: the model's plan with a `tp` axis; derived when omitted.
        per_head: every head of a query, key or value projection is a matrix of its own.

    Raises:
        LintError, PlanError: the planner does not know the model.
    """
    if plan is None:
        model = bare(model)  # as split_parameters names what is in a wrapper
    found = derive_plan(model, {_AXIS: 2}) if plan is None else plan
    config = getattr(model, "config", None)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    flipped = _stored_input_first(model)
    views: dict[str, MatrixView] = {}
    unknown = []
    for spec in found.parameters:
        if spec.name not in parameters or len(spec.shape) < 2:
            continue
        view = _view(spec, config, spec.name in flipped, per_head)
        if view is not None:
            views[spec.name] = view
        elif spec.role in FUSED:
            unknown.append(spec.name)
    if unknown:
        _logger.info("Muon takes fused parameters of unknown inner order whole: %s", unknown)
    return views


def _view(spec: ParameterSpec, config: Any, flipped: bool, per_head: bool) -> MatrixView | None:
    if spec.role == "fused_query_key_value":
        return _query_key_value(spec, config, per_head)
    if spec.role in ("fused_gate_up", "expert_gate_up"):
        return _gate_up(spec, config)
    if spec.role == "expert_down" and _experts_stored_input_first(spec, config):
        return MatrixView("e i o -> e o i")
    if spec.role.startswith("latent_"):
        return _latent(spec, config)
    if per_head and spec.role in ("query_projection", "key_projection", "value_projection"):
        dim = _head_dim(config)
        if dim and len(spec.shape) == 2 and spec.shape[0] % dim == 0 and not flipped:
            return MatrixView("(h d) m -> h d m", d=dim)
    return MatrixView("i o -> o i") if flipped and len(spec.shape) == 2 else None


def _query_key_value(spec: ParameterSpec, config: Any, per_head: bool) -> MatrixView | None:
    """Three runs of rows (or of columns, stored [in, out]), or runs in every group of heads."""
    placement, dim = _placement(spec), _head_dim(config)
    if isinstance(placement, SectionedShard):
        if per_head and dim and all(size % dim == 0 for size in placement.sections):
            left = "(h d) m" if placement.dim == 0 else "m (h d)"
            return MatrixView(f"{left} -> h d m", d=dim)
        return _split(spec, placement, "m")
    queries, groups = (
        getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")
    )
    if not isinstance(placement, Shard) or placement.dim != 0 or not dim or not queries:
        return None
    groups = groups or queries
    if spec.shape[0] != (queries + 2 * groups) * dim:
        return None
    if per_head:
        return MatrixView("(h d) m -> h d m", d=dim)
    pieces = (queries // groups, 1, 1)
    return MatrixView("(g x d) m -> (g x d) m", g=groups, x=pieces, d=dim)


def _gate_up(spec: ParameterSpec, config: Any) -> MatrixView | None:
    placement = _placement(spec)
    if isinstance(placement, SectionedShard):
        return _split(spec, placement, "h", batch="e " if len(spec.shape) == 3 else "")
    if getattr(config, "model_type", None) == "gpt_oss":
        # Gate and up columns alternate.
        return MatrixView("e h (i x) -> e (i x) h", x=(1, 1))
    return None


def _split(
    spec: ParameterSpec, placement: SectionedShard, other: str, batch: str = ""
) -> MatrixView:
    """A view that splits the placement's dim into its sections; cols are the other dim."""
    unit = math.gcd(*placement.sections)
    pieces = tuple(size // unit for size in placement.sections)
    rows_first = placement.dim == len(spec.shape) - 2
    left = f"{batch}(x d) {other}" if rows_first else f"{batch}{other} (x d)"
    return MatrixView(f"{left} -> {batch}(x d) {other}", x=pieces, d=unit)


def _latent(spec: ParameterSpec, config: Any) -> MatrixView | None:
    """The factors of latent projections, by the sizes in the configuration."""
    plain, rotated, value, rank = (
        getattr(config, name, None)
        for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
    )
    sizes = {
        "latent_query_up": (plain, rotated),
        "latent_key_value_up": (plain, value),
        "latent_key_value_down": (rank, rotated),
    }.get(spec.role)
    pieces = tuple(size for size in sizes or () if size)
    if len(pieces) != 2 or len(spec.shape) != 2:
        return None
    if spec.role == "latent_key_value_down":
        return MatrixView("x m -> x m", x=pieces) if spec.shape[0] == sum(pieces) else None
    whole = spec.shape[0] % sum(pieces) == 0
    return MatrixView("(h x) r -> (h x) r", x=pieces) if whole else None


def _placement(spec: ParameterSpec) -> object:
    return dict(spec.contract.placements).get(_AXIS)


def _head_dim(config: Any) -> int | None:
    known = getattr(config, "head_dim", None)
    if isinstance(known, int):
        return known
    hidden, heads = (getattr(config, n, None) for n in ("hidden_size", "num_attention_heads"))
    return hidden // heads if hidden and heads else None


def _stored_input_first(model: nn.Module) -> set[str]:
    """Weights of modules that store [in, out]."""
    return {
        f"{path}.weight"
        for path, module in model.named_modules()
        if type(module).__name__ in _STORED_INPUT_FIRST
    }


def _experts_stored_input_first(spec: ParameterSpec, config: Any) -> bool:
    """[experts, intermediate, hidden] against the usual [experts, hidden, intermediate]."""
    hidden = getattr(config, "hidden_size", None)
    return len(spec.shape) == 3 and spec.shape[2] == hidden and spec.shape[1] != hidden
