"""Pass 1: what each parameter is for (paper section 4.1).

A role is proposed by the last segments of a parameter's qualified name and confirmed by what the
graph knows: the module's class and forward, shapes, and the neighbours in the same module. A
name that matches but is not confirmed gives no role, with the reason kept; lint then stops and
says which override settles it. Nothing is replicated because its name is unknown.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable

from attrs import field, frozen

from hp_planner.graph import ModuleGraph, ModuleNode, ParameterNode, join, parent
from hp_planner.heads import KEY, OUTPUT, QUERY, VALUE, attention_heads, child, weight_of

LINEAR = "torch.nn.modules.linear.Linear"
EMBEDDING_MODULE = "torch.nn.modules.sparse.Embedding"
GATE = ("gate_proj", "w1")
UP = ("up_proj", "w3", "fc1", "c_fc", "dense_h_to_4h")
DOWN = ("down_proj", "w2", "fc2", "c_proj", "dense_4h_to_h")
ROUTER = ("gate", "router")
SHARED_EXPERT = ("shared_expert", "shared_experts", "shared_mlp")


class Role(enum.Enum):
    """What a parameter is for. A bias has the role of its weight."""

    EMBEDDING = "embedding"
    HEAD = "head"
    NORM = "norm"
    HEAD_NORM = "head_norm"
    QUERY = "query_projection"
    KEY = "key_projection"
    VALUE = "value_projection"
    ATTENTION_OUTPUT = "attention_output"
    GATE = "gate_projection"
    UP = "up_projection"
    DOWN = "down_projection"
    ROUTER = "router"
    SHARED_EXPERT_GATE = "shared_expert_gate"
    EXPERT_GATE_UP = "expert_gate_up"
    EXPERT_DOWN = "expert_down"
    UNSUPPORTED = "unsupported"
    UNKNOWN = "unknown"


NO_TEMPLATE = (Role.UNKNOWN, Role.UNSUPPORTED)


@frozen
class Evidence:
    """What a rule may look at: the parameter, its module, and the whole graph."""

    graph: ModuleGraph
    module: ModuleNode
    parameter: ParameterNode

    @property
    def block(self) -> str:
        """The module that holds the parameter's module: the attention, MLP or layer."""
        return parent(self.module.name)

    @property
    def hidden(self) -> int | None:
        return self.graph.size("hidden_size")


# A confirmation returns what speaks against the role, or an empty text.
Confirm = Callable[[Evidence], str]


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


@frozen
class RoleAssignment:
    """One name of one parameter with its role.

    Attributes:
        boundary: the module whose boundary the parameter belongs to.
        reason: the rule and what confirmed it, or why there is no role.
    """

    parameter: ParameterNode
    role: Role
    boundary: str
    reason: str

    @property
    def name(self) -> str:
        return self.parameter.name

    @property
    def is_bias(self) -> bool:
        return self.parameter.leaf == "bias"

    @property
    def label(self) -> str:
        return f"{self.role.value}_bias" if self.is_bias else self.role.value


def _plain_linear(evidence: Evidence) -> str:
    owner = evidence.module.forward.owner
    if not evidence.module.is_a(LINEAR):
        return f"{evidence.module.class_name} is not a torch.nn.Linear, whose weight is [out, in]"
    return "" if owner == LINEAR else f"its forward is {owner}'s, not torch.nn.Linear's"


def _takes_hidden(evidence: Evidence) -> str:
    weight = evidence.module.parameter("weight")
    columns = weight.shape[-1] if weight is not None else None
    if evidence.hidden is None or columns == evidence.hidden:
        return ""
    return f"it takes {columns} features, the hidden size is {evidence.hidden}"


def _gives_hidden(evidence: Evidence) -> str:
    weight = evidence.module.parameter("weight")
    rows = weight.shape[0] if weight is not None else None
    if evidence.hidden is None or rows == evidence.hidden:
        return ""
    return f"it gives {rows} features, the hidden size is {evidence.hidden}"


def _attention(evidence: Evidence) -> str:
    heads = attention_heads(evidence.graph, evidence.block)
    return heads if isinstance(heads, str) else ""


def _mlp(evidence: Evidence) -> str:
    """Gate and up of one shape, down the other way round, in a module without routing."""
    graph, block = evidence.graph, evidence.block
    gate, up, down = (weight_of(graph, block, names) for names in (GATE, UP, DOWN))
    if up is None or down is None:
        return f"beside it there is no pair of {'/'.join(UP)} and {'/'.join(DOWN)}"
    if up.shape != down.shape[::-1] or (gate is not None and gate.shape != up.shape):
        shapes = [f"{w.name.split('.')[-2]} {list(w.shape)}" for w in (gate, up, down) if w]
        return f"shapes do not fit one MLP: {', '.join(shapes)}"
    used = graph.module(block).forward.names & {"chunk", "split"}
    return f"the block's forward splits tensors ({', '.join(sorted(used))})" if used else ""


def _embedding(evidence: Evidence) -> str:
    rows, columns = evidence.parameter.shape
    vocabulary = evidence.graph.size("vocab_size")
    if not evidence.module.is_a(EMBEDDING_MODULE):
        return f"{evidence.module.class_name} is not a torch.nn.Embedding"
    if vocabulary is not None and rows != vocabulary:
        return f"it has {rows} rows, the vocabulary has {vocabulary}"
    return "" if columns == (evidence.hidden or columns) else f"its rows have {columns} elements"


def _head(evidence: Evidence) -> str:
    rows = evidence.parameter.shape[0]
    vocabulary = evidence.graph.size("vocab_size")
    if vocabulary is None:
        return "the config does not say how large the vocabulary is"
    return "" if rows == vocabulary else f"it gives {rows} scores, the vocabulary has {vocabulary}"


def _hidden_norm(evidence: Evidence) -> str:
    shape = evidence.parameter.shape
    if not _is_row_norm(evidence.module):
        return f"{evidence.module.class_name} is not known to normalise the last dim alone"
    if evidence.hidden is not None and shape != (evidence.hidden,):
        return f"it spans {list(shape)}, the hidden size is {evidence.hidden}"
    return "it is inside an attention module" if _holds_query(evidence) else ""


def _head_norm(evidence: Evidence) -> str:
    if not _is_row_norm(evidence.module):
        return f"{evidence.module.class_name} is not known to normalise the last dim alone"
    heads = attention_heads(evidence.graph, evidence.block)
    if isinstance(heads, str):
        return heads
    if evidence.parameter.shape == (heads.dim,):
        return ""
    return (
        f"it spans {list(evidence.parameter.shape)} and not one head of {heads.dim}; "
        "a norm over all heads needs a sum over ranks that no template makes today"
    )


def _is_row_norm(module: ModuleNode) -> bool:
    """LayerNorm and RMSNorm by class name: batch and group norms mix rows or channels."""
    return bool(re.search(r"(RMS|Layer)_?Norm", module.class_name))


def _holds_query(evidence: Evidence) -> bool:
    return child(evidence.graph, evidence.block, QUERY) is not None


def _router(evidence: Evidence) -> str:
    experts = evidence.graph.find(join(evidence.block, "experts"))
    fused = experts.parameter("gate_up_proj") if experts is not None else None
    if fused is None:
        return "beside it there are no fused experts"
    expected = (fused.shape[0], evidence.hidden or evidence.parameter.shape[-1])
    if evidence.parameter.shape == expected:
        return ""
    return f"its shape is {list(evidence.parameter.shape)}, [experts, hidden] is {list(expected)}"


def _shared_expert_gate(evidence: Evidence) -> str:
    if child(evidence.graph, evidence.block, SHARED_EXPERT) is None:
        return "beside it there is no shared expert"
    return "" if evidence.parameter.shape[0] == 1 else "it gives more than one value per token"


def _experts(evidence: Evidence) -> str:
    """[E, 2I, H] and [E, H, I], gate before up, no bias: the two shapes decide together."""
    module = evidence.module
    fused, down = module.parameter("gate_up_proj"), module.parameter("down_proj")
    if fused is None or down is None or len(fused.shape) != 3 or len(down.shape) != 3:
        return "gate_up_proj and down_proj are not both three-dimensional"
    if child(evidence.graph, evidence.block, ROUTER) is None:
        return "beside it there is no router"
    experts, hidden, intermediate = down.shape
    if fused.shape != (experts, 2 * intermediate, hidden):
        return (
            f"gate_up_proj {list(fused.shape)} and down_proj {list(down.shape)} are not "
            "[E, 2I, H] and [E, H, I]"
        )
    if evidence.hidden is not None and hidden != evidence.hidden:
        return f"down_proj gives {hidden} features, the hidden size is {evidence.hidden}"
    return _section_order(module)


def _section_order(module: ModuleNode) -> str:
    """Gate then up, as two halves: known from flags of the module or from its forward."""
    if module.attribute("is_transposed") or module.attribute("has_bias"):
        return "its flags say transposed weights or biases"
    concatenated = module.attribute("is_concatenated")
    if concatenated or (concatenated is None and "chunk" in module.forward.names):
        return ""
    return "the order of gate and up inside gate_up_proj is not two halves, or cannot be known"


def _any(names: tuple[str, ...]) -> str:
    return "|".join(re.escape(name) for name in names)


def _all(*checks: Confirm) -> Confirm:
    def confirm(evidence: Evidence) -> str:
        return next((text for check in checks if (text := check(evidence))), "")

    return confirm


WEIGHT_OR_BIAS = "weight|bias"
IN_ATTENTION = _all(_plain_linear, _takes_hidden, _attention)
OUT_OF_ATTENTION = _all(_plain_linear, _gives_hidden, _attention)
IN_MLP = _all(_plain_linear, _takes_hidden, _mlp)
OUT_OF_MLP = _all(_plain_linear, _gives_hidden, _mlp)
HEADS_FIT = "linear layer of an attention whose sizes are whole heads"
MLP_FITS = "linear layer of an MLP whose shapes match"

RULES: tuple[Rule, ...] = (
    Rule(Role.QUERY, (_any(QUERY), WEIGHT_OR_BIAS), 2, IN_ATTENTION, HEADS_FIT),
    Rule(Role.KEY, (_any(KEY), WEIGHT_OR_BIAS), 2, IN_ATTENTION, HEADS_FIT),
    Rule(Role.VALUE, (_any(VALUE), WEIGHT_OR_BIAS), 2, IN_ATTENTION, HEADS_FIT),
    Rule(Role.ATTENTION_OUTPUT, (_any(OUTPUT), WEIGHT_OR_BIAS), 2, OUT_OF_ATTENTION, HEADS_FIT),
    Rule(
        Role.HEAD_NORM,
        (r"(q|k|query|key)_(norm|layernorm)", "weight"),
        2,
        _head_norm,
        "norm over head_dim inside attention",
    ),
    Rule(Role.GATE, (_any(GATE), WEIGHT_OR_BIAS), 2, IN_MLP, MLP_FITS),
    Rule(Role.UP, (_any(UP), WEIGHT_OR_BIAS), 2, IN_MLP, MLP_FITS),
    Rule(Role.DOWN, (_any(DOWN), WEIGHT_OR_BIAS), 2, OUT_OF_MLP, MLP_FITS),
    Rule(
        Role.EXPERT_GATE_UP,
        ("experts", "gate_up_proj"),
        1,
        _experts,
        "fused experts [E, 2I, H], gate before up",
    ),
    Rule(Role.EXPERT_DOWN, ("experts", "down_proj"), 1, _experts, "fused experts [E, H, I]"),
    Rule(
        Role.ROUTER,
        (_any(ROUTER), "weight"),
        2,
        _router,
        "one score per expert, beside fused experts",
    ),
    Rule(
        Role.SHARED_EXPERT_GATE,
        ("shared_expert_gate", "weight"),
        2,
        _all(_plain_linear, _shared_expert_gate),
        "one value per token beside a shared expert",
    ),
    Rule(
        Role.EMBEDDING,
        ("embed_tokens|word_embeddings|wte|embed_in|tok_embeddings|embeddings", "weight"),
        1,
        _embedding,
        "embedding module of vocabulary rows",
    ),
    Rule(
        Role.HEAD,
        ("lm_head|output|embed_out|output_projection", WEIGHT_OR_BIAS),
        1,
        _all(_plain_linear, _head),
        "linear with one score per vocabulary entry",
    ),
    Rule(
        Role.NORM,
        (r"(.*_)?(norm|layernorm|layer_norm|ln|rmsnorm)(_.*)?|norm\d?|ln_?\d?", WEIGHT_OR_BIAS),
        1,
        _hidden_norm,
        "row norm over the hidden size",
    ),
)


@frozen
class Refusal:
    """Names whose meaning is known but that no template shards today."""

    segments: str
    text: str


REFUSALS: tuple[Refusal, ...] = (
    Refusal("qkv_proj|query_key_value|c_attn|Wqkv|qkv|kv_proj", "fused q, k and v"),
    Refusal("gate_up_proj|Wi|gate_up", "fused gate and up"),
    Refusal(
        "kv_a_proj_with_mqa|q_a_proj|kv_b_proj|q_b_proj|(q|kv)_a_layernorm",
        "factored attention (MLA)",
    ),
    Refusal(
        "A_log|dt_bias|dt_proj|x_proj|in_proj.*|conv1d|mixer|mamba|ssm|D",
        "state-space or linear attention",
    ),
    Refusal("sinks?", "attention sinks"),
    Refusal("wpe|embed_positions|position_embeddings", "learned positions"),
)


def classify_roles(graph: ModuleGraph) -> tuple[RoleAssignment, ...]:
    """Pass 1: the role of every name of every parameter, in the graph's order."""
    return tuple(
        _assign(graph, node, parameter) for node in graph.modules for parameter in node.parameters
    )


def _assign(graph: ModuleGraph, module: ModuleNode, parameter: ParameterNode) -> RoleAssignment:
    evidence = Evidence(graph, module, parameter)
    objections = []
    for rule in RULES:
        if not rule.matches(parameter.name):
            continue
        objection = rule.confirm(evidence)
        if not objection:
            boundary = ".".join(parameter.name.split(".")[: -rule.depth])
            return RoleAssignment(parameter, rule.role, boundary, rule.because)
        objections.append(f"it is named like {rule.role.value}, but {objection}")
    role, reason = _why_not(parameter, objections)
    return RoleAssignment(parameter, role, module.name, reason)


def _why_not(parameter: ParameterNode, objections: list[str]) -> tuple[Role, str]:
    segments = parameter.name.split(".")
    for refusal in REFUSALS:
        if any(re.fullmatch(refusal.segments, segment) for segment in segments):
            detail = f" ({'; '.join(objections)})" if objections else ""
            return Role.UNSUPPORTED, f"{refusal.text}: no template shards it today{detail}"
    return Role.UNKNOWN, "; ".join(objections) or "no rule matches its name"
