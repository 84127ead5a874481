"""Structure: the plan's placements beside those of transformers' own tensor-parallel plan.

Transformers writes a style per module (`base_model_tp_plan` in the configuration, `_tp_plan` on
the model). Only modules that it names are compared: a missing name there means nothing. A style's
placement of weight and bias is what its layer does to them; contracts are not compared. Of fused
experts, stored [experts, a, b], "colwise" cuts a and "rowwise" b, whichever way round they lie.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from attrs import frozen
from torch import nn
from torch.distributed.tensor import Shard

from hp_dtensor.placements import SectionedShard, describe, is_replicate
from hp_dtensor.plan import ParameterSpec, ShardingPlan

# Style: how it places a weight, and a bias: cut by output features, by input features, or not; or
# by one of the two with both halves of a fused weight cut by themselves.
STYLES: dict[str, tuple[str, str]] = {
    "colwise": ("out", "out"),
    "colwise_rep": ("out", "out"),
    "colwise_gather_output": ("out", "out"),
    "packed_colwise": ("out packed", "out packed"),
    "rowwise": ("in", "whole"),
    "rowwise_rep": ("in", "whole"),
    "rowwise_split_input": ("in", "whole"),
    "packed_rowwise": ("in packed", "whole"),
    "replicated_with_grad_allreduce": ("whole", "whole"),
    "mla_kv_a_proj": ("whole", "whole"),
    "embedding_rowwise": ("rows", "whole"),
}


@frozen
class Disagreement:
    """One signature on which the two plans differ: role, style, and what the plan does."""

    role: str
    style: str
    placement: str


def disagreements(model: nn.Module, plan: ShardingPlan) -> Counter[Disagreement]:
    """Signatures that differ, with the number of parameters of each."""
    styles = plan_of_transformers(model)
    modules = dict(model.named_modules())
    found: Counter[Disagreement] = Counter()
    for spec in plan.parameters:
        style = style_of(styles, spec)
        if style not in STYLES:
            continue
        owner, _, leaf = spec.name.rpartition(".")
        wanted = STYLES[style][leaf == "bias"]
        transposed = type(modules[owner]).__name__ == "Conv1D"
        if wanted not in placed(spec, transposed):
            found[Disagreement(spec.role, style, _text(spec))] += 1
    return found


def compared(model: nn.Module, plan: ShardingPlan) -> Counter[str]:
    """Parameters for which transformers' plan names a known style, by role."""
    styles = plan_of_transformers(model)
    return Counter(spec.role for spec in plan.parameters if style_of(styles, spec) in STYLES)


def style_of(styles: dict[str, str], spec: ParameterSpec) -> str | None:
    """The style of a parameter named itself, or of the linear layer that holds it."""
    own = _style(styles, spec.name)
    return own or _style(styles, spec.name.rpartition(".")[0])


def plan_of_transformers(model: Any) -> dict[str, str]:
    """Patterns of module names with their style; empty where the family has no plan."""
    base = getattr(model.config, "base_model_tp_plan", None) or {}
    prefix = getattr(model, "base_model_prefix", "")
    styles = {f"{prefix}.{name}" if prefix else name: style for name, style in base.items()}
    return styles | dict(getattr(model, "_tp_plan", None) or {})


def placed(spec: ParameterSpec, transposed: bool) -> tuple[str, ...]:
    """What the cut by the tensor-parallel axis may be called; sections are a plain cut as well."""
    placement = spec.contract.placement("tp")
    if is_replicate(placement):
        return ("whole",)
    if not isinstance(placement, Shard | SectionedShard):
        return (_text(spec),)
    if spec.role == "embedding":
        return ("rows" if placement.dim == 0 else "columns",)
    sides = ("in", "out") if transposed else ("out", "in")
    first = len(spec.shape) - 2 if len(spec.shape) > 1 else 0
    if placement.dim not in (first, first + 1):
        return (_text(spec),)
    side = "out" if len(spec.shape) == 1 else sides[placement.dim - first]
    return (side, f"{side} packed") if isinstance(placement, SectionedShard) else (side,)


def _style(styles: dict[str, str], name: str) -> str | None:
    for pattern, style in styles.items():
        if re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name):
            return style
    return None


def _text(spec: ParameterSpec) -> str:
    return describe(spec.contract.placement("tp"))
