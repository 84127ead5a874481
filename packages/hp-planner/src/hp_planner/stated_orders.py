"""Orders of fused weights that overrides state, written on the graph before the passes.

A stated order is a fact about a forward that cannot be read from it. The passes then treat the
block as one whose order is known; a statement that leads nowhere is an error, with what is still
missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import evolve

from hp_dtensor.plan import BoundaryKind, ShardingPlan
from hp_planner.boundaries import Boundary, group_boundaries, infer_boundary_types
from hp_planner.errors import PlanError
from hp_planner.folding import fold
from hp_planner.fused import refinements
from hp_planner.graph import ModuleGraph, parent
from hp_planner.heads import child
from hp_planner.layer_names import FUSED_GATE_UP, FUSED_QKV, QUERY
from hp_planner.manners import Manner
from hp_planner.order import (
    GATE_UP_ORDERS,
    INTERLEAVED,
    KV_ORDERS,
    PER_HEAD,
    QKV_ORDERS,
    SPLITTERS,
    Order,
    read_told,
)
from hp_planner.overrides import Targets, choose
from hp_planner.proofs import section_order
from hp_planner.rules import classify_roles
from hp_planner.settings import Settings

if TYPE_CHECKING:
    from hp_planner.override_file import Overrides


def state_orders(graph: ModuleGraph, settings: Settings, overrides: Overrides) -> ModuleGraph:
    """The graph with the orders that overrides state.

    Raises:
        PlanError: lists every statement that is about no fused weight, is of the wrong kind,
            contradicts what is known of the forward, or does not suffice to shard the block.
    """
    if not any(isinstance(override.value, Order) for override in overrides):
        return graph
    boundaries = _boundaries(graph)
    targets, kinds = Targets.of(graph, boundaries), {b.module: b for b in boundaries}
    chosen, problems = choose(targets, settings, overrides)
    orders: dict[str, Order] = {}
    objections: list[tuple[str, str, str]] = []
    for name, override in chosen.items():
        if not isinstance(override.value, Order):
            continue
        block = _block(graph, name)
        text = _problem(graph, block, override.value, orders) or _contradiction(
            graph, kinds.get(block or ""), override.value
        )
        if text or block is None:
            objections.append((override.key, name, text))
        else:
            orders[block] = override.value
    stated = with_orders(graph, orders)
    if settings.tensor_size > 1:
        objections += [
            (orders[b.module].source, b.module, _insufficient(b))
            for b in _boundaries(stated)
            if b.module in orders and b.manner is not Manner.SHARDED
        ]
    problems += _folded(objections)
    if problems:
        raise PlanError("\n".join(problems))
    return stated


def _folded(objections: list[tuple[str, str, str]]) -> list[str]:
    """Key, name and text of each, those of repeated layers as one."""
    groups = fold(objections, lambda o: o[1], lambda o: (o[0], o[2]))
    return [f"override {key!r} on {name}: {text}" for name, ((key, _, text), *_) in groups]


def with_orders(graph: ModuleGraph, orders: Mapping[str, Order]) -> ModuleGraph:
    """The graph with these orders, by name of the block."""
    if not orders:
        return graph
    known = {name: evolve(order, names=order.names | SPLITTERS) for name, order in orders.items()}
    return evolve(
        graph,
        modules=tuple(
            evolve(node, stated=known[node.name]) if node.name in known else node
            for node in graph.modules
        ),
    )


def as_stated(graph: ModuleGraph, plan: ShardingPlan) -> ModuleGraph:
    """The graph with the orders that a plan was made with."""
    found = ((spec.boundary, read_told(spec.reason)) for spec in plan.parameters)
    orders = {name: order for name, order in found if order is not None}
    return with_orders(graph, {n: o for n, o in orders.items() if graph.find(n) is not None})


def _boundaries(graph: ModuleGraph) -> tuple[Boundary, ...]:
    return infer_boundary_types(graph, group_boundaries(graph, classify_roles(graph)))


def _block(graph: ModuleGraph, name: str) -> str | None:
    """The block that a name is about: itself, or the one whose fused weight it is."""
    for _ in range(3):
        if graph.find(name) is not None and orders_for(graph, name):
            return name
        name = parent(name)
    return None


def orders_for(graph: ModuleGraph, module: str) -> tuple[str, ...]:
    """The orders that the fused weight of a block can have; none if it holds no such weight."""
    query = child(graph, module, QUERY) is not None
    if child(graph, module, FUSED_QKV) is not None:
        return KV_ORDERS if query else QKV_ORDERS
    if query:
        return (PER_HEAD,)
    fused = child(graph, module, FUSED_GATE_UP) is not None
    experts = graph.module(module).parameter("gate_up_proj") is not None
    return GATE_UP_ORDERS if fused or experts else ()


def _problem(
    graph: ModuleGraph, block: str | None, order: Order, others: Mapping[str, Order]
) -> str:
    """Why a statement cannot be meant; empty if it can."""
    if block is None:
        return "no fused weight here whose order could be stated"
    possible, node = orders_for(graph, block), graph.module(block)
    if order.name not in possible:
        return f"its fused weight has one of the orders {', '.join(possible)}"
    if block in others and others[block] != order:
        return f"its order is stated as {others[block].name} by {others[block].source!r} already"
    known = refinements().get(node.forward.owner)
    if known is not None and known.name != order.name:
        return f"its order is {known.name}: {known.source}"
    unread = sorted(
        name
        for name in order.divide
        if not (name in node.forward.own and node.attribute(name) is not None)
        and not (f"config.{name}" in node.forward.own and name in dict(node.config))
    )
    if unread:
        return f"its forward reads no integer self.{unread[0]} or self.config.{unread[0]} to divide"
    return ""


def _contradiction(graph: ModuleGraph, boundary: Boundary | None, order: Order) -> str:
    """What the code shows against a statement about gate and up; empty if nothing."""
    if boundary is None or order.name not in GATE_UP_ORDERS:
        return ""
    node, known = graph.module(boundary.module), None
    if boundary.kind is BoundaryKind.MLP and boundary.manner is Manner.SHARDED:
        known = "halves"
    elif node.parameter("gate_up_proj") is not None:
        known = section_order(node)
    if known is None or (known == INTERLEAVED) == (order.name == INTERLEAVED):
        return ""
    return f"its forward shows that gate and up are {known}"


def _insufficient(boundary: Boundary) -> str:
    remedy = "remove the statement: linear layer by linear layer the block is right without it"
    if boundary.kind is BoundaryKind.EXPERTS:
        remedy = "use none on the block around it"
    elif boundary.problem.startswith(("its forward uses", "its forward takes")):
        remedy = (
            "add `divide: [...]` for integers among these that count heads or features over all "
            "heads, and `names: [...]` for what acts on each of them by itself"
        )
    return f"the order alone does not let it be sharded as one: {boundary.problem}; {remedy}"
