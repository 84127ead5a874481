"""The names that propose a role, as data, and pass 1 over them.

Names are those that models in public use give to these parts. A rule looks at whole segments of a
qualified name, never at parts of a word. Where several rules match, the first one confirmed wins.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from attrs import field, frozen

from hp_planner.evidence import (
    Confirm,
    Evidence,
    all_of,
    beside_experts,
    block_of_experts,
    gives_hidden,
    in_factored_attention,
    in_state_space_block,
    lookup_table,
    nothing_to_confirm,
    plain_linear,
    projection,
    row_norm,
    scores_vocabulary,
    takes_hidden,
    vector,
)
from hp_planner.fused import order_of
from hp_planner.graph import ModuleGraph, ModuleNode, ParameterNode
from hp_planner.layer_names import (
    DOWN,
    FUSED_GATE_UP,
    FUSED_QKV,
    GATE,
    KEY,
    OUTPUT,
    QUERY,
    ROUTER,
    UP,
    VALUE,
)
from hp_planner.proofs import expert_shapes, is_head_norm, mlp_shapes
from hp_planner.roles import NO_TEMPLATE, Role, RoleAssignment


def _patterns(texts: Iterable[str]) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(text) for text in texts)


@frozen
class Rule:
    """Names that propose a role, and what must hold.

    Attributes:
        segments: one regular expression per trailing segment of the qualified name.
        depth: how many trailing segments to drop to get the module whose boundary it belongs to.
    """

    role: Role
    segments: tuple[re.Pattern[str], ...] = field(converter=_patterns)
    depth: int
    confirm: Confirm
    because: str

    def matches(self, name: str) -> bool:
        tail = name.split(".")[-len(self.segments) :]
        return len(tail) == len(self.segments) and all(
            pattern.fullmatch(segment) for pattern, segment in zip(self.segments, tail)
        )


def _any(names: Iterable[str]) -> str:
    return "|".join(re.escape(name) for name in names)


WEIGHT_OR_BIAS = "weight|bias"
NORMS = (
    r"(.*_)?(norm|layernorm|layer_norm|ln|rmsnorm|norms)(_.*)?"
    r"|norm\d?|ln_?\d?|layer_?norm_?\d?|LayerNorm|layernorm_embedding|post_norm\d"
)
INTO = all_of(projection, takes_hidden)
OUT_OF = all_of(projection, gives_hidden)
INTO_MLP = all_of(projection, takes_hidden, mlp_shapes)
OUT_OF_MLP = all_of(projection, gives_hidden, mlp_shapes)
PROJECTS = "linear layer of an attention, from or to the hidden size"
MLP_FITS = "linear layer of an MLP whose shapes match"
FACTOR = "factor of a latent attention"
STATE_SPACE = "state-space or linear-attention parameter"


def _linear(role: Role, names: Iterable[str], confirm: Confirm, because: str) -> Rule:
    return Rule(role, (_any(names), WEIGHT_OR_BIAS), 2, confirm, because)


RULES: tuple[Rule, ...] = (
    # State-space and linear attention first: they share names with attention and MLP.
    Rule(
        Role.STATE_SPACE,
        (r"A_log|dt_bias|D|A|recurrent_param|(input|recurrent)_gate_(weight|bias)",),
        1,
        in_state_space_block,
        STATE_SPACE,
    ),
    Rule(
        Role.STATE_SPACE_IN,
        (r"in_proj(_\w+)?|[gqkvz]_proj", WEIGHT_OR_BIAS),
        2,
        all_of(plain_linear, takes_hidden, in_state_space_block),
        STATE_SPACE,
    ),
    Rule(
        Role.STATE_SPACE_OUT,
        ("out_proj|o_proj|linear_out", WEIGHT_OR_BIAS),
        2,
        all_of(plain_linear, gives_hidden, in_state_space_block),
        STATE_SPACE,
    ),
    Rule(
        Role.STATE_SPACE,
        (
            r"in_proj(_\w+)?|x_proj|dt_proj|out_proj|[abfgqkvz]_proj|f_[ab]_proj|g_[ab]_proj"
            r"|o_proj|conv1d|conv_1d|[qkv]_conv1d|conv|linear_[xy]|linear_out"
            r"|(dt|b|c)_layernorm|norm|o_norm",
            WEIGHT_OR_BIAS,
        ),
        2,
        in_state_space_block,
        STATE_SPACE,
    ),
    _linear(Role.QUERY, QUERY, INTO, PROJECTS),
    _linear(Role.KEY, KEY, INTO, PROJECTS),
    _linear(Role.VALUE, VALUE, INTO, PROJECTS),
    _linear(Role.FUSED_QKV, FUSED_QKV, INTO, "fused projections of an attention"),
    _linear(Role.QUERY_UP, ("q_b_proj",), all_of(plain_linear, in_factored_attention), FACTOR),
    _linear(Role.KEY_VALUE_UP, ("kv_b_proj",), plain_linear, FACTOR),
    _linear(Role.QUERY_DOWN, ("q_a_proj",), all_of(plain_linear, takes_hidden), FACTOR),
    _linear(Role.KEY_VALUE_DOWN, ("kv_a_proj_with_mqa",), INTO, FACTOR),
    Rule(
        Role.LATENT_NORM,
        (r"(q|kv)_a_(layer)?norm", WEIGHT_OR_BIAS),
        2,
        all_of(row_norm, in_factored_attention),
        "norm between the factors of a latent attention",
    ),
    Rule(
        Role.INDEXER,
        ("indexer", "wq_b|wk|k_norm|weights_proj|wq|q_proj|k_proj", WEIGHT_OR_BIAS),
        2,
        nothing_to_confirm,
        "chooses the positions that a sparse attention looks at",
    ),
    Rule(Role.SINK, ("sinks?",), 1, nothing_to_confirm, "one value a head beside the scores"),
    _linear(Role.GATE, GATE, INTO_MLP, MLP_FITS),
    _linear(Role.UP, UP, INTO_MLP, MLP_FITS),
    _linear(Role.FUSED_GATE_UP, FUSED_GATE_UP, INTO_MLP, MLP_FITS),
    _linear(Role.DOWN, DOWN, OUT_OF_MLP, MLP_FITS),
    Rule(
        Role.UP,
        ("intermediate", "dense", WEIGHT_OR_BIAS),
        2,
        INTO,
        "way into the inner features of an MLP whose halves are modules of their own",
    ),
    _linear(Role.ATTENTION_OUTPUT, OUTPUT, OUT_OF, PROJECTS),
    _linear(
        Role.ATTENTION_GATE,
        ("gate_proj", "g_proj", "output_gate"),
        INTO,
        "gate on what an attention gives",
    ),
    Rule(
        Role.HEAD_NORM,
        (r"(q|k|query|key)_(norm|layernorm)", WEIGHT_OR_BIAS),
        2,
        all_of(row_norm, is_head_norm),
        "norm over head_dim inside attention",
    ),
    Rule(
        Role.ACTIVATION,
        (r"act_fn|act|activation", r"alpha_[pn]|beta|eps"),
        2,
        nothing_to_confirm,
        "scalar of an activation function",
    ),
    Rule(
        Role.EXPERT_GATE_UP,
        ("experts", "gate_up_proj"),
        1,
        expert_shapes,
        "fused experts, gate and up in one",
    ),
    Rule(Role.EXPERT_DOWN, ("experts", "down_proj"), 1, expert_shapes, "fused experts, way back"),
    Rule(
        Role.EXPERT_BIAS,
        ("experts", r"(gate_up|down)_proj_bias"),
        1,
        expert_shapes,
        "biases of fused experts",
    ),
    Rule(
        Role.ROUTER,
        (_any(ROUTER), WEIGHT_OR_BIAS),
        2,
        beside_experts,
        "one score per expert, beside experts",
    ),
    Rule(
        Role.ROUTER_BIAS,
        (r"e_score_correction_bias|expert_bias",),
        1,
        nothing_to_confirm,
        "shifts the choice of experts, not their weights",
    ),
    Rule(
        Role.SHARED_EXPERT_GATE,
        ("shared_expert_gate", "weight"),
        2,
        all_of(plain_linear, takes_hidden),
        "one value per token beside a shared expert",
    ),
    Rule(
        Role.EMBEDDING,
        (
            "embed_tokens|word_embeddings|wte|embed_in|tok_embeddings|embeddings|tokens_embed"
            "|input_embedding|word_embedding",
            "weight",
        ),
        1,
        lookup_table,
        "embedding module of vocabulary rows",
    ),
    Rule(
        Role.POSITION,
        (
            "wpe|embed_positions|positions?_embed(dings?)?|token_type_embeddings|segment_embedding",
            "weight",
        ),
        1,
        nothing_to_confirm,
        "table of learned positions or segments, the same on every rank",
    ),
    Rule(
        Role.HEAD,
        (
            "lm_head|output|embed_out|output_projection|decoder|proj_out|head|lm_loss"
            "|generator_lm_head",
            WEIGHT_OR_BIAS,
        ),
        1,
        all_of(plain_linear, scores_vocabulary),
        "linear with one score per vocabulary entry",
    ),
    Rule(Role.NORM, (NORMS, WEIGHT_OR_BIAS), 1, all_of(row_norm, vector), "row norm"),
)


@frozen
class Refusal:
    """Names whose meaning is known, when they are not confirmed."""

    segments: str
    text: str


REFUSALS: tuple[Refusal, ...] = (
    Refusal("|".join(FUSED_QKV), "fused q, k and v"),
    Refusal("gate_up_proj|Wi|gate_up", "fused gate and up"),
    Refusal("kv_a_proj_with_mqa|q_a_proj|kv_b_proj|q_b_proj", "factored attention (MLA)"),
    Refusal("A_log|dt_bias|dt_proj|x_proj|conv1d|mamba|ssm", "state-space or linear attention"),
)


def classify_roles(graph: ModuleGraph) -> tuple[RoleAssignment, ...]:
    """Pass 1: the role of every name of every parameter, in the graph's order."""
    found = tuple(
        _assign(graph, node, parameter) for node in graph.modules for parameter in node.parameters
    )
    by_name = {member.name: member for member in found}
    return tuple(_as_tied(graph, member, by_name) for member in found)


def _as_tied(
    graph: ModuleGraph, member: RoleAssignment, by_name: dict[str, RoleAssignment]
) -> RoleAssignment:
    """A name that is only held, never read by its module, has the role of what it is tied to."""
    if member.role not in NO_TEMPLATE:
        return member
    if member.parameter.leaf in graph.module(member.parameter.module).forward.own:
        return member
    for names in graph.tied:
        if member.name not in names:
            continue
        for other in (by_name[name] for name in names):
            if other.role in (Role.EMBEDDING, Role.HEAD):
                reason = f"tied to {other.name}: {other.reason}"
                return RoleAssignment(member.parameter, other.role, other.boundary, reason)
    return member


def _assign(graph: ModuleGraph, module: ModuleNode, parameter: ParameterNode) -> RoleAssignment:
    evidence = Evidence(graph, module, parameter)
    objections = []
    for rule in RULES:
        if not rule.matches(parameter.name):
            continue
        objection = rule.confirm(evidence)
        if not objection:
            boundary = ".".join(parameter.name.split(".")[: -rule.depth])
            if rule.role in (Role.ROUTER, Role.ROUTER_BIAS):
                boundary = block_of_experts(graph, module.name) or boundary
            because = _with_order(graph, rule, boundary, parameter)
            return RoleAssignment(parameter, rule.role, boundary, because)
        objections.append(f"it is named like {rule.role.value}, but {objection}")
    role, reason = _why_not(parameter, objections)
    return RoleAssignment(parameter, role, module.name, reason)


FUSED_ROLES = (Role.FUSED_QKV, Role.FUSED_GATE_UP, Role.EXPERT_GATE_UP, Role.QUERY)


def _with_order(graph: ModuleGraph, rule: Rule, boundary: str, parameter: ParameterNode) -> str:
    """The rule, and the order of a fused weight's rows with what tells it."""
    node = graph.find(boundary) if rule.role in FUSED_ROLES else None
    order = order_of(node) if node is not None else None
    if order is None or parameter.leaf == "bias":
        return rule.because
    told = order.told() if node is not None and node.stated else f"{order.name}: {order.source}"
    return f"{rule.because}; {told}"


def _why_not(parameter: ParameterNode, objections: list[str]) -> tuple[Role, str]:
    segments = parameter.name.split(".")
    for refusal in REFUSALS:
        if any(re.fullmatch(refusal.segments, segment) for segment in segments):
            detail = f" ({'; '.join(objections)})" if objections else ""
            return Role.UNSUPPORTED, f"{refusal.text}: not as any template knows it{detail}"
    return Role.UNKNOWN, "; ".join(objections) or "no rule matches its name"
