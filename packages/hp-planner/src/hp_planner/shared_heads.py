"""Fewer key/value heads than ranks: ranks share heads, so that each holds what its queries need.

Query head q attends to key/value head q // (queries / key_values). Where the key/value heads do not
divide over the ranks, each is repeated until they do: with E the least common multiple of heads
and ranks, a rank has E / ranks of them, and the result is the dense one, because repeating heads is
what grouped queries do anyway. The weights of k and v are replicated; a rank computes with the rows
of its own heads, so a gradient is a summand, and ranks that share a head add theirs.
"""

from __future__ import annotations

from attrs import evolve

from hp_dtensor.plan import BoundarySpec, BoundaryTensor, Contract, Region, RegionKind
from hp_planner.evidence import is_transposed
from hp_planner.graph import ModuleGraph
from hp_planner.heads import Heads, child
from hp_planner.layer_names import FUSED_QKV, KEY, VALUE
from hp_planner.roles import Role, RoleAssignment

SHARED_HEADS = "hp_integration.regions:shared_heads"
REGION = Region(
    RegionKind.OPAQUE,
    "every rank computes the key and value heads that its query heads need, which ranks share",
    SHARED_HEADS,
)
# Attention weights, of which a rank has its heads' only, are not returned.
NO_WEIGHTS = BoundaryTensor("1", Contract(), Contract(), plain=True, optional=True)
SHARED_ROLES = frozenset({Role.KEY, Role.VALUE})
GROUPS = "num_key_value_groups"


def needs_sharing(heads: Heads, size: int) -> bool:
    """Whether the query heads divide over the ranks and the key/value heads do not."""
    return heads.key_value % size != 0 and heads.query % size == 0


def sharing_problem(
    graph: ModuleGraph, module: str, heads: Heads, members: tuple[RoleAssignment, ...]
) -> str:
    """Why the ranks cannot share the key/value heads of an attention; empty if they can."""
    if child(graph, module, FUSED_QKV) is not None:
        return "q, k and v are one weight"
    node = graph.module(module)
    if node.attribute(GROUPS) != heads.query // heads.key_value:
        return f"it has no {GROUPS} that says how many queries share a head"
    if node.attribute("head_dim", "head_size") != heads.dim:
        return "it has no head_dim"
    counted = sorted(name for name in node.forward.own if _counts_in_config(name))
    if counted:
        return f"its forward reads {', '.join(counted)}"
    for names in (KEY, VALUE):
        projection = child(graph, module, names)
        if projection is None or is_transposed(projection):
            return f"its {names[0]} is stored [in, out]"
    if any(m.role is Role.HEAD_NORM and len(m.parameter.shape) == 2 for m in members):
        return "its heads have norms of their own"
    return ""


def _counts_in_config(name: str) -> bool:
    return name in ("config.num_key_value_heads", "config.num_kv_heads")


def with_shared_heads(spec: BoundarySpec) -> BoundarySpec:
    """The boundary of an attention whose ranks share key/value heads."""
    outputs = tuple(evolve(tensor, like=spec.inputs[0].where) for tensor in spec.outputs)
    if [tensor.where for tensor in outputs] == ["0"]:
        outputs = (*outputs, NO_WEIGHTS)
    counts = ("num_key_value_heads", "num_kv_heads")
    localize = tuple(attribute for attribute in spec.localize if attribute.name not in counts)
    return evolve(spec, outputs=outputs, localize=localize, region=REGION)


def spans_key_heads(graph: ModuleGraph, norm: str, heads: Heads) -> bool:
    """Whether a norm is over all key heads together, which every rank then computes."""
    weight = graph.module(norm).parameter("weight")
    return weight is not None and weight.shape == (heads.key_value * heads.dim,)
