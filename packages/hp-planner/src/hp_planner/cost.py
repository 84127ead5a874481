"""What a plan costs: bytes of every message of a step, by axis, and memory on a rank.

Works out what the runtime will send from the plan alone, for a given batch and sequence length, in
the ledger's units: a message's bytes are an all-gather's output, a reduce-scatter's input and the
tensor of the others, as one rank sees them. What depends on the data is counted for even loads.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from attrs import frozen
from torch.distributed.tensor import Partial, Placement, Replicate

from hp_dtensor.layout import Layout
from hp_dtensor.placements import is_sharding, sharded_dims
from hp_dtensor.plan import (
    BoundaryKind,
    BoundarySpec,
    BoundaryTensor,
    Contract,
    ParameterSpec,
    ShardingPlan,
)
from hp_planner.context_axis import GATHERED_ATTENTION
from hp_planner.expert_axis import DISPATCH, DISPATCH_WITH_BIASES
from hp_planner.settings import CONTEXT_AXIS, EXPERT_AXIS

SHARD_AXIS, REPLICATE_AXIS = "dp_shard", "dp_replicate"
WIDE_AXIS = "dp_shard_ep"
"""What `hp_integration.assemble` calls the axis over which parameters other than experts are cut:
ranks of the expert axis see different batches, so they are data ranks for these."""
INDEX_BYTES = 8


@frozen
class Workload:
    """What one rank is given in one step.

    Attributes:
        batch: sequences, before any axis cuts them: those of one data-parallel rank.
        sequence: tokens of a sequence, before any axis cuts it.
        element_size: bytes of an element of parameters, gradients and activations.
        optimizer_bytes: bytes of optimizer state for every parameter element.
        experts_per_token: routed experts of a token; None leaves expert traffic out.
    """

    batch: int = 1
    sequence: int = 4096
    element_size: int = 2
    optimizer_bytes: int = 8
    experts_per_token: int | None = None


@frozen
class Message:
    """One collective of one step.

    Attributes:
        where: boundary or parameter group; phase: "forward", "backward" or "settlement".
        bytes: size of the message, in the ledger's sense.
    """

    where: str
    axis: str
    operation: str
    phase: str
    bytes: int


@frozen
class Memory:
    """Bytes on the rank that holds most, between steps and at the end of forward.

    Attributes:
        parameters: those held between steps, once `fully_shard` has cut them over `dp_shard`, and
            other than experts over `ep`, too.
        gradients, optimizer: of the same elements.
        gathered: all parameters as the model axes cut them; with `fully_shard` only a few layers
            of these exist at a time.
        activations: results of embedding, norms and projections kept for backward; an estimate
            from below, without what attention and elementwise operators keep.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int

    @property
    def held(self) -> int:
        """Parameters, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer


def messages(plan: ShardingPlan, workload: Workload) -> tuple[Message, ...]:
    """Every collective of one forward and backward pass.

    Raises:
        ValueError: batch or sequence cannot be cut as the plan says, or the plan does not show
            how long a hidden state is.
    """
    return (
        *_boundary_messages(plan, workload),
        *_region_messages(plan, workload),
        *_settlement(plan, workload),
        *_data_parallel(plan, workload),
    )


def totals(found: tuple[Message, ...]) -> dict[tuple[str, str], tuple[int, int]]:
    """(axis, operation) to number of messages and bytes."""
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for message in found:
        key = (message.axis, message.operation)
        counts[key] += 1
        sizes[key] += message.bytes
    return {key: (counts[key], sizes[key]) for key in sorted(counts)}


def memory(plan: ShardingPlan, workload: Workload) -> Memory:
    """Memory of one rank; see `Memory`.

    Raises:
        ValueError: as in `messages`.
    """
    held = sum(shard_elements(plan, spec) for spec in plan.parameters)
    gathered = sum(math.prod(local_shape(plan, spec)) for spec in plan.parameters)
    return Memory(
        parameters=held * workload.element_size,
        gradients=held * workload.element_size,
        optimizer=held * workload.optimizer_bytes,
        gathered=gathered * workload.element_size,
        activations=_activations(plan, workload) * workload.element_size,
    )


# -- sizes ---------------------------------------------------------------------------------------


def axis_size(plan: ShardingPlan, axis: str) -> int:
    return plan.mesh.size(axis) if axis in plan.mesh.axis_names else 1


def local_shape(plan: ShardingPlan, spec: ParameterSpec) -> tuple[int, ...]:
    """The parameter's shape on the first rank, which holds most, after the model axes."""
    placements, _ = spec.contract.on(plan.mesh)
    return tuple(Layout(plan.mesh, placements, spec.shape).local_shape((0,) * plan.mesh.ndim))


def shard_axis(plan: ShardingPlan, spec: ParameterSpec) -> tuple[str, int]:
    """Name and size of the axis over which `fully_shard` cuts a parameter."""
    size = axis_size(plan, SHARD_AXIS)
    experts = axis_size(plan, EXPERT_AXIS)
    own = EXPERT_AXIS in dict(spec.contract.placements)
    if experts == 1 or own or SHARD_AXIS not in plan.mesh.axis_names:
        return SHARD_AXIS, size
    return WIDE_AXIS, size * experts


def shard_elements(plan: ShardingPlan, spec: ParameterSpec) -> int:
    """Elements left once `fully_shard` has cut the rows, too."""
    shape = local_shape(plan, spec)
    if not shape:
        return 1
    _, ways = shard_axis(plan, spec)
    return math.ceil(shape[0] / ways) * math.prod(shape[1:])


def hidden_size(plan: ShardingPlan) -> int:
    """Length of a hidden state: that of an embedding's or a head's rows, or of a norm.

    Raises:
        ValueError: the plan has none of these.
    """
    for role in ("embedding", "head", "norm"):
        for spec in plan.parameters:
            if spec.role == role and spec.shape:
                return spec.shape[-1]
    raise ValueError(
        f"the plan for {plan.model} has no embedding, head or norm, so it does not show how long "
        "a hidden state is; bytes and memory cannot be worked out"
    )


def _widths(plan: ShardingPlan) -> dict[str, tuple[int, int]]:
    """Features in and out of modules whose own weight is a matrix."""
    widths = {}
    for spec in plan.parameters:
        module, _, leaf = spec.name.rpartition(".")
        if leaf == "weight" and len(spec.shape) == 2:
            lookup = spec.role == "embedding"
            rows, columns = spec.shape
            widths[module] = (1, columns) if lookup else (columns, rows)
    return widths


def _cut(
    plan: ShardingPlan, contract: Contract, shape: tuple[int, ...], where: str
) -> tuple[int, ...]:
    """The local shape of an activation, which has equal pieces only."""
    sizes = list(shape)
    for axis, placement in contract.placements:
        for dim in sharded_dims(placement) if is_sharding(placement) else ():
            ranks = axis_size(plan, axis)
            if sizes[dim] % ranks:
                raise ValueError(
                    f"boundary {where or '(model)'}: dim {dim} of {list(shape)} cannot be cut over "
                    f"{axis}={ranks}; choose a batch and a sequence length that can"
                )
            sizes[dim] //= ranks
    return tuple(sizes)


# -- boundaries ----------------------------------------------------------------------------------


def operation(source: Placement, target: Placement) -> str:
    """The collective that turns one placement into another on one axis; empty if none does."""
    if source == target or isinstance(source, Replicate):
        return ""
    if isinstance(source, Partial):
        return "all_reduce" if isinstance(target, Replicate) else "reduce_scatter"
    return "all_to_all" if is_sharding(target) else "all_gather"


def _boundary_messages(plan: ShardingPlan, workload: Workload) -> Iterator[Message]:
    widths = _widths(plan)
    for spec in plan.boundaries:
        for tensor, inward in (
            *((t, True) for t in spec.inputs),
            *((t, False) for t in spec.outputs),
        ):
            if tensor.plain or tensor.outside == tensor.inside:
                continue
            shape = _activation(plan, workload, spec, widths, inward)
            ends = (tensor.outside, tensor.inside)
            source, target = ends if inward else ends[::-1]
            yield from _walk(plan, workload, spec.module, shape, source, target, "forward")
            yield from _walk(
                plan, workload, spec.module, shape, _dual(target), _dual(source), "backward"
            )


def _dual(contract: Contract) -> Contract:
    """The gradient's placements as values."""
    axes = contract.axes()
    return Contract({axis: contract.grad_placement(axis) for axis in axes})


def _activation(
    plan: ShardingPlan,
    workload: Workload,
    spec: BoundarySpec,
    widths: dict[str, tuple[int, int]],
    inward: bool,
) -> tuple[int, int, int]:
    hidden = hidden_size(plan)
    width = widths.get(spec.module, (hidden, hidden))[0 if inward else 1]
    return (workload.batch, workload.sequence, width)


def _walk(
    plan: ShardingPlan,
    workload: Workload,
    where: str,
    shape: tuple[int, ...],
    source: Contract,
    target: Contract,
    phase: str,
) -> Iterator[Message]:
    """One axis after another: slices first, which cost nothing and leave less to send; then
    innermost first, as nested cuts are undone."""
    here = source
    free = [axis for axis in plan.model_axes if isinstance(source.placement(axis), Replicate)]
    for axis in (*free, *(axis for axis in reversed(plan.model_axes) if axis not in free)):
        step = operation(here.placement(axis), target.placement(axis))
        after = Contract({**dict(here.placements), axis: target.placement(axis)})
        if axis_size(plan, axis) > 1 and step:
            before_size = math.prod(_cut(plan, here, shape, where))
            after_size = math.prod(_cut(plan, after, shape, where))
            size = after_size if step == "all_gather" else before_size
            yield Message(where, axis, step, phase, size * workload.element_size)
        here = after


# -- regions -------------------------------------------------------------------------------------


def _region_messages(plan: ShardingPlan, workload: Workload) -> Iterator[Message]:
    for spec in plan.boundaries:
        function = spec.region.function if spec.region is not None else ""
        if function in (DISPATCH, DISPATCH_WITH_BIASES):
            yield from _dispatch(plan, workload, spec)
        elif function == GATHERED_ATTENTION:
            yield from _gathered_keys(plan, workload, spec)


def _dispatch(plan: ShardingPlan, workload: Workload, spec: BoundarySpec) -> Iterator[Message]:
    """Tokens to their experts and back, both ways: counts once, rows and weights, results."""
    if workload.experts_per_token is None:
        return
    tokens = workload.batch * workload.sequence // axis_size(plan, CONTEXT_AXIS)
    rows = tokens * workload.experts_per_token
    hidden = rows * hidden_size(plan) * workload.element_size
    weights = rows * workload.element_size
    experts = next(p.shape[0] for p in plan.parameters if p.boundary == spec.module)
    for size in (experts * INDEX_BYTES, hidden, weights, hidden):
        yield Message(spec.module, EXPERT_AXIS, "all_to_all", "forward", size)
    for size in (hidden, hidden, weights):
        yield Message(spec.module, EXPERT_AXIS, "all_to_all", "backward", size)


def _gathered_keys(plan: ShardingPlan, workload: Workload, spec: BoundarySpec) -> Iterator[Message]:
    """Keys and values of this rank's heads; nothing where the plan does not show their size."""
    rows = [
        local_shape(plan, p)[0]
        for p in plan.parameters
        if p.boundary == spec.module and p.role in ("key_projection", "value_projection")
    ]
    size = workload.batch * workload.sequence * sum(rows) * workload.element_size
    if len(rows) == 2:
        yield Message(spec.module, CONTEXT_AXIS, "all_gather", "forward", size)
        yield Message(spec.module, CONTEXT_AXIS, "reduce_scatter", "backward", size)


# -- parameters ----------------------------------------------------------------------------------


def _settlement(plan: ShardingPlan, workload: Workload) -> Iterator[Message]:
    """Gradients that are summands: one fused all-reduce for each axis and reduction."""
    sizes: Counter[tuple[str, str]] = Counter()
    for spec in plan.parameters:
        wide = shard_axis(plan, spec)[0] == WIDE_AXIS
        for axis, gradient in spec.contract.grad_placements:
            if wide and axis == EXPERT_AXIS:
                continue  # averaged where the gradients are scattered
            if axis_size(plan, axis) > 1 and isinstance(gradient, Partial):
                elements = shard_elements(plan, spec)
                sizes[axis, gradient.reduce_op] += elements * workload.element_size
    for (axis, _), size in sizes.items():
        yield Message("gradient settlement", axis, "all_reduce", "settlement", size)


def _data_parallel(plan: ShardingPlan, workload: Workload) -> Iterator[Message]:
    """`fully_shard` as it is by default: gathered for forward and again for backward."""
    replicas = axis_size(plan, REPLICATE_AXIS)
    for spec in plan.parameters:
        axis, shards = shard_axis(plan, spec)
        shard = shard_elements(plan, spec) * workload.element_size
        if shards > 1:
            whole = shard * shards
            yield Message(spec.name, axis, "all_gather", "forward", whole)
            yield Message(spec.name, axis, "all_gather", "backward", whole)
            yield Message(spec.name, axis, "reduce_scatter", "backward", whole)
        if replicas > 1:
            yield Message(spec.name, REPLICATE_AXIS, "all_reduce", "backward", shard)


# -- memory --------------------------------------------------------------------------------------


def _activations(plan: ShardingPlan, workload: Workload) -> int:
    """Elements of what embedding, norms and projections return on one rank."""
    specs = {spec.module: spec for spec in plan.boundaries}
    everywhere = workload.batch * workload.sequence
    total = 0
    for spec in plan.parameters:
        tokens = everywhere // _sequence_ways(plan, specs.get(spec.boundary))
        shape = local_shape(plan, spec)
        if len(shape) == 3:
            # Fused experts: what all of them return, two of three dims are features.
            rows = tokens * (workload.experts_per_token or 1)
            total += rows * (shape[1] if "gate" in spec.role or "up" in spec.role else shape[-2])
        elif len(shape) == 2:
            total += tokens * (spec.shape[1] if spec.role == "embedding" else shape[0])
        elif spec.role == "norm":
            total += tokens * math.prod(shape)
    return total


def _sequence_ways(plan: ShardingPlan, spec: BoundarySpec | None) -> int:
    """Into how many parts the sequence is cut inside a boundary."""
    first: BoundaryTensor | None = next(iter(spec.inputs), None) if spec is not None else None
    if first is None or (spec is not None and spec.kind is BoundaryKind.EXPERTS):
        return axis_size(plan, CONTEXT_AXIS) if first is not None else 1
    ways = 1
    for axis, placement in first.inside.placements:
        if is_sharding(placement) and sharded_dims(placement) == (1,):
            ways *= axis_size(plan, axis)
    return ways
