"""Dropouts of a plan: every `nn.Dropout` with the layout of what it drops from.

The mask belongs to the global activation, so that every layout and one process drop the same
elements; for that the runtime has to know which part a rank holds (`hp_dtensor.dropouts`). The
layout follows from where the module is: hidden states between the blocks of a layer, the inner
features of an MLP, or what a block's last projection gives, whose summands are dropped alike.
Where the code does not show which of these, there is no entry, and lint names the dropout.
"""

from __future__ import annotations

from torch.distributed.tensor import Shard

from hp_dtensor.plan import (
    REPLICATED,
    BoundaryKind,
    BoundarySpec,
    BoundaryTensor,
    Contract,
    ShardingPlan,
)
from hp_planner.axis_specs import enclosing, is_whole, on_axis, replaced
from hp_planner.boundaries import Boundary
from hp_planner.data_flow import UNKNOWN
from hp_planner.graph import ModuleNode, parent
from hp_planner.layer_names import DOWN, OUTPUT
from hp_planner.manners import Manner
from hp_planner.settings import TENSOR_AXIS
from hp_planner.templates.context import Context

BLOCKS = (BoundaryKind.ATTENTION, BoundaryKind.MLP, BoundaryKind.MOE, BoundaryKind.MIXER)
STRUCTURE = (BoundaryKind.MODEL, BoundaryKind.LAYER)
Specs = dict[str, BoundarySpec]


def add_dropouts(context: Context, plan: ShardingPlan) -> ShardingPlan:
    """The plan with a boundary for every dropout whose place is known."""
    if context.settings.model_size == 1:
        return plan
    specs = {spec.module: spec for spec in plan.boundaries}
    for node in context.graph.modules:
        if node.drops:
            home = enclosing(
                (b for b in context.boundaries if b.kind in (*BLOCKS, *STRUCTURE)), node.name
            )
            contract = _contract(context, specs, node, home) if home is not None else None
            if home is not None and contract is not None:
                specs[node.name] = _spec(node, home, contract)
    return replaced(plan, context.graph, specs, plan.parameters)


def _spec(node: ModuleNode, home: Boundary, contract: Contract) -> BoundarySpec:
    return BoundarySpec(
        module=node.name,
        kind=home.kind or BoundaryKind.MODEL,
        inputs=(BoundaryTensor("input", contract, contract),),
        outputs=(BoundaryTensor("", contract, contract),),
        reason="dropout, whose mask is the global activation's",
    )


def _contract(context: Context, specs: Specs, node: ModuleNode, home: Boundary) -> Contract | None:
    """What the dropout is given; None if that is not known."""
    if is_whole(node.name, context.local) or home.kind is BoundaryKind.MODEL:
        return REPLICATED
    if home.kind is not BoundaryKind.LAYER and context.sharded_home(home) is not None:
        # Inside a block of experts hidden states are summands, or flattened.
        return None
    given = _given(specs, home)
    if home.kind is BoundaryKind.LAYER:
        return given
    if context.manner(home) is not Manner.SHARDED:
        # On whole hidden states; what lies along the sequence is known for the result alone.
        last = _after_last(context, node, home)
        return given if given == REPLICATED or last else None
    if _after_last(context, node, home):
        return _last_given(context, specs, home) or given
    if home.kind is BoundaryKind.MLP and _is_inner(context, node, home):
        cut = context.settings.tensor_size > 1
        stream = specs[home.module].inputs[0].inside if home.module in specs else REPLICATED
        whole = Contract(dict(stream.placements))
        return on_axis(whole, TENSOR_AXIS, Shard(-1)) if cut else whole
    return None


def _given(specs: Specs, home: Boundary) -> Contract:
    """What the block computes before its exit."""
    spec = specs.get(home.module)
    return spec.outputs[0].inside if spec is not None and spec.outputs else REPLICATED


def _fed_by(context: Context, node: ModuleNode, home: Boundary) -> frozenset[str] | None:
    """Parts of the block in what the dropout is called with; None where it is called elsewhere."""
    if parent(node.name) != home.module:
        return None
    return dict(context.graph.module(home.module).feeds).get(node.name.rpartition(".")[2])


def _after_last(context: Context, node: ModuleNode, home: Boundary) -> bool:
    """Whether the dropout takes what the block's last projection gives."""
    names = DOWN if home.kind is BoundaryKind.MLP else OUTPUT
    return bool((_fed_by(context, node, home) or frozenset()) & set(names))


def _is_inner(context: Context, node: ModuleNode, home: Boundary) -> bool:
    """Whether the dropout takes inner features: before the last projection, after another part."""
    fed = _fed_by(context, node, home)
    graph = context.graph
    parts = {
        name.rpartition(".")[2]: graph.find(name) for name in graph.module(home.module).children
    }
    return (
        fed is not None
        and UNKNOWN not in fed
        and any(part.parameters for name in fed if (part := parts.get(name)) is not None)
    )


def _last_given(context: Context, specs: Specs, home: Boundary) -> Contract | None:
    """What a last projection with a boundary of its own hands on: the sum, bias included."""
    names = DOWN if home.kind is BoundaryKind.MLP else OUTPUT
    found = (specs.get(f"{home.module}.{name}".removeprefix(".")) for name in names)
    spec = next((each for each in found if each is not None and each.outputs), None)
    return spec.outputs[0].outside if spec is not None else None
