"""How a block is sharded: as one, linear layer by linear layer, or not at all.

A block is sharded *as one* where its code is known to act on every head or every inner feature by
itself; it then computes with its share of them. Where that is not known the result is right
whatever the code does if every linear layer is sharded by itself, its input and output whole: the
weights and their products are cut, and what lies between is computed on every rank. A block with
parameters that no layer of that kind holds is left whole, each with its reason.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from hp_dtensor.plan import BoundaryKind
from hp_planner.code_names import (
    ATTENTION_ARGUMENTS,
    LATENT_NAMES,
    LOCAL_SIZES,
    MLP_NAMES,
    MOE_NAMES,
    PER_HEAD_NAMES,
)
from hp_planner.evidence import features
from hp_planner.fused import heads_of, order_of
from hp_planner.graph import ModuleGraph, ModuleNode, is_inside, join
from hp_planner.heads import Heads, child
from hp_planner.latent import latent_heads
from hp_planner.layer_names import (
    DOWN,
    FUSED_GATE_UP,
    FUSED_QKV,
    GATE,
    KEY,
    OUTPUT,
    QUERY,
    SHARED_EXPERT,
    UP,
    VALUE,
)
from hp_planner.proofs import expert_biases, fused_experts, section_order, spans_all_heads
from hp_planner.roles import Role, RoleAssignment
from hp_planner.summand_code import SummandCode


class Manner(enum.Enum):
    """How a boundary's parameters are laid out over the tensor-parallel axis."""

    SHARDED = "sharded"
    BY_LINEAR = "by linear layer"
    WHOLE = "whole"


COLUMNWISE = frozenset(
    {Role.QUERY, Role.KEY, Role.VALUE, Role.FUSED_QKV, Role.ATTENTION_GATE, Role.QUERY_UP}
    | {Role.KEY_VALUE_UP, Role.GATE, Role.UP, Role.FUSED_GATE_UP, Role.STATE_SPACE_IN}
    | {Role.STATE_SPACE_OUT}
)
ROWWISE = frozenset({Role.ATTENTION_OUTPUT, Role.DOWN})
IN_DENSE_ATTENTION = frozenset(
    {Role.QUERY, Role.KEY, Role.VALUE, Role.ATTENTION_OUTPUT, Role.ATTENTION_GATE}
    | {Role.HEAD_NORM, Role.SINK, Role.FUSED_QKV}
)
IN_LATENT_ATTENTION = frozenset(
    {Role.QUERY, Role.QUERY_DOWN, Role.QUERY_UP, Role.KEY_VALUE_DOWN, Role.KEY_VALUE_UP}
    | {Role.LATENT_NORM, Role.ATTENTION_OUTPUT}
)


# Modules of activation functions and dropout; those that take several features together are not
# elementwise.
ELEMENTWISE_MODULES = (
    "torch.nn.modules.dropout.",
    "torch.nn.modules.activation.",
    "torch.nn.modules.linear.Identity",
    "transformers.activations.",
)
_LINEAR_MODULES = ("torch.nn.modules.dropout.", "torch.nn.modules.linear.Identity")
ACROSS_FEATURES = ("Softmax", "LogSoftmax", "Softmin", "Softmax2d", "GLU", "MultiheadAttention")


def manner_of(
    graph: ModuleGraph, kind: BoundaryKind | None, module: str, members: Iterable[RoleAssignment]
) -> tuple[Manner, str]:
    """The manner, and why it is not the one that shards the block as one."""
    roles = frozenset(member.role for member in members)
    node = graph.module(module)
    if kind is BoundaryKind.ATTENTION:
        return _lesser(graph, node, roles, attention_problem(graph, node, roles))
    if kind is BoundaryKind.MLP:
        return _lesser(graph, node, roles, mlp_code_problem(graph, node))
    if kind is BoundaryKind.MOE:
        problem = moe_problem(graph, node, roles)
        return (Manner.WHOLE, problem) if problem else (Manner.SHARDED, "")
    if kind is BoundaryKind.EXPERTS:
        problem = experts_problem(graph, node)
        return (Manner.WHOLE, problem) if problem else (Manner.SHARDED, "")
    if kind in (BoundaryKind.EMBEDDING, BoundaryKind.HEAD):
        direct = sorted(name for name in graph.used_directly if is_inside(name, module))
        if direct:
            return Manner.WHOLE, f"{', '.join(direct)} is used without calling its module"
    if kind is BoundaryKind.MIXER:
        return _lesser(graph, node, roles, "no template shards it as one")
    if kind is None:
        return Manner.WHOLE, "no template shards it"
    return Manner.SHARDED, ""


def _lesser(
    graph: ModuleGraph, node: ModuleNode, roles: frozenset[Role], problem: str
) -> tuple[Manner, str]:
    direct = sorted(name for name in graph.used_directly if is_inside(name, node.name))
    if direct:
        problem = f"{', '.join(direct)} is used without calling its layer"
    if not problem:
        return Manner.SHARDED, ""
    if roles & (COLUMNWISE | ROWWISE):
        return Manner.BY_LINEAR, problem
    return Manner.WHOLE, problem


def attention_problem(graph: ModuleGraph, node: ModuleNode, roles: frozenset[Role]) -> str:
    """Why an attention may not be split into heads; empty if it may."""
    known = PER_HEAD_NAMES
    if roles <= IN_LATENT_ATTENTION and Role.KEY_VALUE_UP in roles:
        heads = latent_heads(graph, node.name)
        if isinstance(heads, str):
            return heads
        known = LATENT_NAMES
    else:
        dense = heads_of(graph, node.name)
        if isinstance(dense, str):
            return dense
        told = order_of(node)
        known |= told.known if told is not None else frozenset()
        stray = sorted(role.value for role in roles - IN_DENSE_ATTENTION)
        if stray:
            return f"no rule says how heads share {', '.join(stray)}"
        problem = _parts_problem(graph, node, dense)
        if problem:
            return problem
    return (
        _code_problem(node, known, ATTENTION_ARGUMENTS)
        or size_problem(node)
        or summand_problem(graph, node)
    )


def _parts_problem(graph: ModuleGraph, node: ModuleNode, heads: Heads) -> str:
    """Parts of an attention that its heads may not share."""
    sinks = [p for p in node.parameters if p.shape != (heads.query,)]
    if sinks:
        return f"{sinks[0].leaf} {list(sinks[0].shape)} has not one value a head"
    for name in node.children:
        inner, leaf = graph.find(name), name.rpartition(".")[2]
        if inner is None:
            return f"{leaf} is also a part of something else"
        if not inner.parameters:
            if not _is_elementwise(inner) and "Rotary" not in inner.class_name:
                return f"it is not known what {inner.class_name} does to heads"
        elif not _known_part(inner, leaf, heads):
            return f"no rule says how heads share {leaf}"
    return ""


def _known_part(node: ModuleNode, leaf: str, heads: Heads) -> bool:
    """A projection, a norm of heads, or a norm over all of them, whose input is gathered."""
    weight = node.parameter("weight")
    if weight is None:
        return False
    if len(weight.shape) == 1:
        return weight.shape == (heads.dim,) or spans_all_heads(heads, node)
    if leaf in (*QUERY, *KEY, *VALUE, *FUSED_QKV, *OUTPUT):
        return True
    by_head = (heads.query, heads.query * heads.value_dim)
    per_head = ((heads.query, heads.dim), (heads.key_value, heads.dim))
    return features(node)[1] in by_head or weight.shape in per_head


def _is_elementwise(node: ModuleNode) -> bool:
    """A part without parameters that treats every element by itself."""
    if node.children or node.class_name in ACROSS_FEATURES:
        return False
    return any(base.startswith(ELEMENTWISE_MODULES) for base in node.bases)


def _code_problem(node: ModuleNode, known: frozenset[str], arguments: frozenset[str] | None) -> str:
    children = {name.rpartition(".")[2] for name in node.children}
    unknown = sorted(node.forward.names - known - children - {p.leaf for p in node.parameters})
    vouched = node.stated.names if node.stated is not None else frozenset()
    taken = node.forward.arguments[1:] if arguments is not None else ()
    strange = [name for name in taken if name not in (arguments or ()) and name not in vouched]
    uses = f"its forward uses {', '.join(unknown if node.stated else unknown[:6])}"
    uses += ", of which it is not known how they act"
    takes = f"its forward takes {', '.join(strange)}"
    # Whoever states an order is told all that is still to be said.
    told = [text for text, names in ((uses, unknown), (takes, strange)) if names]
    return "; ".join(told if node.stated else told[:1])


def size_problem(node: ModuleNode) -> str:
    """Sizes over all heads that the forward reads where they cannot be divided."""
    ambiguous = sorted(
        name
        for name in node.forward.names & LOCAL_SIZES
        if (name not in node.forward.own and f"config.{name}" not in node.forward.own)
        or (name in node.forward.own and node.attribute(name) is None)
    )
    return f"its forward reads {', '.join(ambiguous)} of something else" if ambiguous else ""


def summand_problem(graph: ModuleGraph, node: ModuleNode) -> str:
    """Why the sum of what its output layer returns may not be left to the end of a block."""
    return _sum_problem(graph, node, node.summand)


def _sum_problem(graph: ModuleGraph, node: ModuleNode, code: SummandCode) -> str:
    if code.problem:
        return code.problem
    for part in code.parts:
        inner = graph.find(join(node.name, part))
        if inner is None or not inner.bases[0].startswith(_LINEAR_MODULES):
            return f"its forward hands its output layer's sum to {part}"
    return ""


def mlp_code_problem(graph: ModuleGraph, node: ModuleNode) -> str:
    """Why an MLP's inner features may not be split; empty if they may."""
    extra = [name.rpartition(".")[2] for name in node.children if not _mlp_part(graph.find(name))]
    if extra:
        return f"no rule says how features share {', '.join(extra)}"
    fused = child(graph, node.name, FUSED_GATE_UP)
    if fused is not None and node.stated is None and "chunk" not in node.forward.names:
        return "the order of gate and up inside the fused weight cannot be known"
    known = MLP_NAMES | ({"chunk"} if fused is not None else frozenset())
    known |= node.stated.known if node.stated is not None else frozenset()
    return (
        _code_problem(node, known, frozenset())
        or size_problem(node)
        or summand_problem(graph, node)
    )


def _mlp_part(node: ModuleNode | None) -> bool:
    """A linear layer by one of the names of an MLP's, or something elementwise."""
    if node is None:
        return False
    if node.name.rpartition(".")[2] in (*GATE, *UP, *FUSED_GATE_UP, *DOWN):
        return True
    scalars = all(p.shape in ((), (1,)) for p in node.parameters)
    return (
        scalars
        and any(base.startswith(ELEMENTWISE_MODULES) for base in node.bases)
        and (node.class_name not in ACROSS_FEATURES)
    )


def moe_problem(graph: ModuleGraph, node: ModuleNode, roles: frozenset[Role]) -> str:
    """Why what the parts of a block of experts return may not be summed once, at its end."""
    known_parts = (*SHARED_EXPERT, "experts", "gate", "router", "shared_expert_gate", "act_fn")
    for name in node.children:
        if name.rpartition(".")[2] not in known_parts:
            return f"no rule says what {name.rpartition('.')[2]} does in it"
    experts = graph.find(join(node.name, "experts"))
    if experts is None or experts_problem(graph, experts):
        return "its experts are not sharded"
    for name in SHARED_EXPERT:
        shared = graph.find(join(node.name, name))
        if shared is not None and mlp_code_problem(graph, shared):
            return f"{name} is not sharded as one"
    return _code_problem(node, MOE_NAMES, frozenset()) or _sum_problem(
        graph, node, node.experts_sum
    )


def experts_problem(graph: ModuleGraph, node: ModuleNode) -> str:
    """Why the features of fused experts may not be split; empty if they may."""
    shapes = fused_experts(node, graph.size("hidden_size"))
    if isinstance(shapes, str):
        return shapes
    stray = sorted({p.leaf for p in node.parameters} - {"gate_up_proj", "down_proj"})
    if stray and not expert_biases(node, shapes):
        return f"no rule says how features share {', '.join(stray)}"
    if node.children and any(
        (inner := graph.find(name)) is not None and inner.parameters for name in node.children
    ):
        return "its experts hold parameters besides the fused ones"
    if node.attribute("has_post_expert_norm"):
        return "a norm follows every expert, which needs all its features"
    if node.attribute("has_gate") == 0:
        return "its experts have no gate"
    if section_order(node) is None:
        return "the order of gate and up inside gate_up_proj cannot be known"
    if len(node.forward.arguments) < 3:
        return "its forward does not take hidden states, indices and weights"
    return ""
