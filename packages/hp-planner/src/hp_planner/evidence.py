"""What confirms a role that a name proposes: the module's class and forward, shapes, neighbours.

A confirmation returns what speaks against the role, or an empty text.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from attrs import frozen

from hp_planner.graph import ModuleGraph, ModuleNode, ParameterNode, join, parent

LINEAR = "torch.nn.modules.linear.Linear"
# Forwards that multiply with the weight and add the bias, and do no more.
LINEARS = (LINEAR, "transformers.models.falcon.modeling_falcon.FalconLinear")
CONV1D_OF_TRANSFORMERS = "transformers.pytorch_utils.Conv1D"
EMBEDDING_MODULE = "torch.nn.modules.sparse.Embedding"

# An embedding's forward may do this around the lookup, which is the same for every row.
AROUND_LOOKUP = frozenset({"super", "forward", "embed_scale", "to", "weight", "dtype"})

# A block is one of state-space or linear attention layers where one of these is near.
STATE_SPACE_SIGNS = ("A_log", "conv1d", "conv_1d", "conv", "recurrent_param", "dt_bias")


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


Confirm = Callable[[Evidence], str]


def all_of(*checks: Confirm) -> Confirm:
    def confirm(evidence: Evidence) -> str:
        return next((text for check in checks if (text := check(evidence))), "")

    return confirm


def nothing_to_confirm(evidence: Evidence) -> str:
    return ""


def plain_linear(evidence: Evidence) -> str:
    owner = evidence.module.forward.owner
    if not evidence.module.is_a(LINEAR):
        return f"{evidence.module.class_name} is not a torch.nn.Linear, whose weight is [out, in]"
    return "" if owner in LINEARS else f"its forward is {owner}'s, not torch.nn.Linear's"


def is_transposed(module: ModuleNode) -> bool:
    """A layer that stores its weight [in, out]."""
    return module.forward.owner == CONV1D_OF_TRANSFORMERS


def projection(evidence: Evidence) -> str:
    """A layer that multiplies its input's last dim with its weight, either way round."""
    return "" if is_transposed(evidence.module) else plain_linear(evidence)


def features(module: ModuleNode) -> tuple[int, int]:
    """Features that a projection takes and gives."""
    weight = module.parameter("weight")
    rows, columns = weight.shape if weight is not None and len(weight.shape) == 2 else (0, 0)
    return (rows, columns) if is_transposed(module) else (columns, rows)


def takes_hidden(evidence: Evidence) -> str:
    taken, _ = features(evidence.module)
    if evidence.hidden is None or taken == evidence.hidden:
        return ""
    return f"it takes {taken} features, the hidden size is {evidence.hidden}"


def gives_hidden(evidence: Evidence) -> str:
    _, given = features(evidence.module)
    if evidence.hidden is None or given == evidence.hidden:
        return ""
    return f"it gives {given} features, the hidden size is {evidence.hidden}"


def lookup_table(evidence: Evidence) -> str:
    """An embedding whose rows are the vocabulary's, and whose forward looks them up."""
    if not evidence.module.is_a(EMBEDDING_MODULE):
        return f"{evidence.module.class_name} is not a torch.nn.Embedding"
    rows = evidence.parameter.shape[0]
    vocabulary = evidence.graph.size("vocab_size")
    if vocabulary is not None and rows < vocabulary:
        return f"it has {rows} rows, the vocabulary has {vocabulary}"
    forward = evidence.module.forward
    if forward.owner == EMBEDDING_MODULE or forward.names <= AROUND_LOOKUP:
        return ""
    return f"{evidence.module.class_name}.forward does more than look rows up"


def scores_vocabulary(evidence: Evidence) -> str:
    rows = evidence.parameter.shape[0]
    vocabulary = evidence.graph.size("vocab_size")
    if vocabulary is None:
        return "the config does not say how large the vocabulary is"
    return "" if rows == vocabulary else f"it gives {rows} scores, the vocabulary has {vocabulary}"


def row_norm(evidence: Evidence) -> str:
    """LayerNorm and RMSNorm by class name: batch and group norms mix rows or channels."""
    name = evidence.module.class_name
    if not re.search(r"(RMS|Layer|L2)_?Norm", name):
        return f"{name} is not known to normalise the last dim alone"
    return "" if len(evidence.parameter.shape) in (1, 2) else "its weight is no vector"


def vector(evidence: Evidence) -> str:
    return "" if len(evidence.parameter.shape) == 1 else "it is no vector"


def block_of_experts(graph: ModuleGraph, module: str) -> str | None:
    """The block that routes with `module`: the nearest one, of two, that holds experts."""
    for block in (parent(module), parent(parent(module))):
        if expert_count(graph, block) is not None:
            return block
    return None


def beside_experts(evidence: Evidence) -> str:
    """One score per expert, in a block of experts."""
    block = block_of_experts(evidence.graph, evidence.module.name)
    experts = expert_count(evidence.graph, block) if block is not None else None
    if experts is None:
        return "beside it there are no experts"
    shape = evidence.parameter.shape
    if shape[0] == experts and shape[1:] in ((evidence.hidden or shape[-1],), ()):
        return ""
    expected = [experts, evidence.hidden]
    return f"its shape is {list(shape)}, [experts, hidden] is {expected}"


def expert_count(graph: ModuleGraph, block: str) -> int | None:
    """Experts of a block: rows of its fused weights, or the length of its list of experts."""
    node = graph.find(join(block, "experts"))
    if node is None:
        return None
    fused = [p.shape[0] for p in node.parameters if len(p.shape) == 3]
    return fused[0] if fused else len(node.children) or None


def in_state_space_block(evidence: Evidence) -> str:
    """Some module around it, short of the layer, holds what only such blocks have."""
    name = evidence.module.name
    for _ in range(3):
        node = evidence.graph.find(name)
        if node is None or node.as_layer is not None:
            break
        leaves = {p.leaf for p in node.parameters}
        leaves |= {child.rpartition(".")[2] for child in node.children}
        leaves |= {
            p.leaf
            for child in node.children
            if (inner := evidence.graph.find(child)) is not None
            for p in inner.parameters
        }
        if leaves & set(STATE_SPACE_SIGNS):
            return ""
        name = parent(name)
    return "it is in no block with the parameters of a state-space or linear-attention layer"


def in_factored_attention(evidence: Evidence) -> str:
    """Beside the factors of multi-head latent attention."""
    node = evidence.graph.find(evidence.block)
    leaves = {child.rpartition(".")[2] for child in node.children} if node is not None else set()
    signs = {"kv_a_proj_with_mqa", "kv_b_proj", "q_b_proj", "q_a_proj"}
    return "" if leaves & signs else "beside it there are no factors of a latent attention"
