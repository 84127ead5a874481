"""Structure: the plan's placements beside those of transformers' own tensor-parallel plan.

Transformers writes a style per module (`base_model_tp_plan` in the configuration, `_tp_plan` on
the model). Only modules that it names are compared: a missing name there means nothing. A style's
placement of weight and bias is what its layer does to them; contracts are not compared.
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

# Style: how it places a weight, and a bias: cut by output features, by input features, or not.
STYLES: dict[str, tuple[str, str]] = {
    "colwise": ("out", "out"),
    "colwise_rep": ("out", "out"),
    "colwise_gather_output": ("out", "out"),
    "packed_colwise": ("out", "out"),
    "rowwise": ("in", "whole"),
    "rowwise_rep": ("in", "whole"),
    "rowwise_split_input": ("in", "whole"),
    "packed_rowwise": ("in", "whole"),
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
        owner, _, leaf = spec.name.rpartition(".")
        style = _style(styles, owner) or _style(styles, spec.name)
        if style not in STYLES or len(spec.shape) > 2:
            continue
        wanted = STYLES[style][leaf == "bias"]
        transposed = type(modules[owner]).__name__ == "Conv1D"
        if placed(spec, transposed) != wanted:
            found[Disagreement(spec.role, style, _text(spec))] += 1
    return found


def compared(model: nn.Module, plan: ShardingPlan) -> int:
    """Parameters for which transformers' plan names a known style."""
    styles = plan_of_transformers(model)
    return sum(
        _style(styles, spec.name.rpartition(".")[0]) in STYLES and len(spec.shape) <= 2
        for spec in plan.parameters
    )


def plan_of_transformers(model: Any) -> dict[str, str]:
    """Patterns of module names with their style; empty where the family has no plan."""
    base = getattr(model.config, "base_model_tp_plan", None) or {}
    prefix = getattr(model, "base_model_prefix", "")
    styles = {f"{prefix}.{name}" if prefix else name: style for name, style in base.items()}
    return styles | dict(getattr(model, "_tp_plan", None) or {})


def placed(spec: ParameterSpec, transposed: bool) -> str:
    """Where the tensor-parallel axis cuts a parameter of at most two dims."""
    placement = spec.contract.placement("tp")
    if is_replicate(placement):
        return "whole"
    if not isinstance(placement, Shard | SectionedShard):
        return _text(spec)
    if spec.role == "embedding":
        return "rows" if placement.dim == 0 else "columns"
    output = 1 if transposed and len(spec.shape) == 2 else 0
    return "out" if placement.dim == output else "in"


def _style(styles: dict[str, str], name: str) -> str | None:
    for pattern, style in styles.items():
        if re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name):
            return style
    return None


def _text(spec: ParameterSpec) -> str:
    return describe(spec.contract.placement("tp"))
