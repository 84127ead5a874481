"""Production mode: plain local parameters, and boundary collectives replayed by module hooks.

After `apply_production` no wrapper exists (decision D7). A boundary whose contracts agree costs
nothing; at the others a hook looks up the transition compiled for the tensor's shape and replays
it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hp_dtensor.contracts import (
    Argument,
    ContractError,
    Crossing,
    ModelAxes,
    has_tensor,
    layout_under,
    map_tensors,
    write_output,
)
from hp_dtensor.cut_size import CutSize
from hp_dtensor.late_bias import install_late_bias
from hp_dtensor.layout import Layout, attach_layout
from hp_dtensor.layout_keeper import LayoutKeeper
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.plan import BoundarySpec, ShardingPlan
from hp_dtensor.regions import install_region
from hp_dtensor.transition import Replay
from hp_dtensor.vocabulary import is_vocabulary_sharded, shard_vocabulary
from hp_platform import Origin

__all__ = [
    "apply_production",
    "crossings",
    "cut_parameter",
    "install_boundary",
    "install_vocabulary",
    "local_part",
    "localize",
    "remember_cuts",
]


def apply_production(
    module: nn.Module,
    plan: ShardingPlan,
    mesh: DeviceMesh | AbstractMesh,
    axes: ModelAxes,
    settlement_dtype: torch.dtype | None = None,
) -> None:
    """Cuts the parameters in place, localises attributes and installs the boundary hooks."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    layouts = {}
    for spec in plan.parameters:
        layouts[spec.name] = layout = layout_under(spec.contract, mesh, spec.shape)
        on_model_axes = layout_under(spec.contract, axes.abstract, spec.shape)
        cut_parameter(parameters[spec.name], layout, on_model_axes, axes)
    for boundary in plan.boundaries:
        target = module.get_submodule(boundary.module)
        localize(target, boundary, axes)
        install_boundary(target, boundary, plan, axes)
    LayoutKeeper(layouts, plan.tied, settlement_dtype).watch(module)


def cut_parameter(
    parameter: nn.Parameter, layout: Layout, on_model_axes: Layout, axes: ModelAxes
) -> None:
    """Leaves this rank's part in the parameter.

    The object stays the same one, so ties, and optimizers that hold it, stay valid.
    """
    parameter.data = local_part(parameter.detach(), on_model_axes, axes.coordinate)
    attach_layout(parameter, layout)


def local_part(full: Tensor, layout: Layout, coordinate: tuple[int, ...]) -> Tensor:
    """The part of a full tensor that `coordinate` holds; meta stays meta.

    A part has memory of its own, so that the full tensor's is freed.
    """
    if full.is_meta:
        return full.new_empty(layout.local_shape(coordinate))
    if layout.flat_dims > 1:
        indices = layout.owned_indices(coordinate).to(full.device)
        return full.reshape(-1)[indices].reshape(layout.local_shape(coordinate))
    part = full
    for dim in sorted({dim for dims in layout.sharding_axes().values() for dim in dims}):
        indices = layout.dim_indices(dim, coordinate).to(full.device)
        part = part.index_select(dim, indices)
    return part


def localize(module: nn.Module, boundary: BoundarySpec, axes: ModelAxes) -> None:
    """Divides the attributes that hold global sizes.

    An attribute of an object that other modules may hold too, such as `config.num_heads`, is
    divided on a copy that becomes this module's own.
    """
    owned: set[str] = set()
    for attribute in boundary.localize:
        holder, last = _own_holder(module, attribute.name, owned)
        setattr(holder, last, attribute.value // axes.abstract.size(attribute.axis))


def remember_cuts(module: nn.Module, boundary: BoundarySpec, axes: ModelAxes) -> None:
    """For code whose shapes are global: these attributes stay whole and know their cut."""
    owned: set[str] = set()
    for attribute in boundary.localize:
        ways = axes.abstract.size(attribute.axis)
        if ways > 1:
            holder, last = _own_holder(module, attribute.name, owned)
            axis = axes.abstract.axis_names.index(attribute.axis)
            setattr(holder, last, CutSize(attribute.value, (axis,), ways))


def _own_holder(module: nn.Module, name: str, owned: set[str]) -> tuple[object, str]:
    """The holder of the attribute `name`, and its last part; copied unless a module or `owned`."""
    *path, last = name.split(".")
    holder: object = module
    for depth, part in enumerate(path):
        inner = getattr(holder, part)
        place = ".".join(path[: depth + 1])
        if not isinstance(inner, nn.Module) and place not in owned:
            inner = copy.copy(inner)
            setattr(holder, part, inner)
            owned.add(place)
        holder = inner
    return holder, last


def install_boundary(
    module: nn.Module, boundary: BoundarySpec, plan: ShardingPlan, axes: ModelAxes
) -> None:
    """Registers the hooks of one boundary: entry, vocabulary range, region, exit, in this order."""
    name = boundary.module or "(root)"
    entering = [
        (Argument.of(module, each.spec.where), each)
        for each in crossings(boundary, "input", axes)
        if not axes.same(each.source, each.target)
    ]
    if entering:
        entry = Entry(name, [(argument, each) for argument, each in entering if argument])
        module.register_forward_pre_hook(entry, with_kwargs=True)
    install_vocabulary(module, boundary, plan, axes)
    install_region(module, boundary, axes)
    leaving = [
        each
        for each in crossings(boundary, "output", axes)
        if not axes.same(each.source, each.target)
    ]
    if leaving:
        module.register_forward_hook(Exit(name, leaving))
    install_late_bias(module, boundary, axes)


def crossings(boundary: BoundarySpec, direction: str, axes: ModelAxes) -> Iterator[Crossing]:
    """The boundary's inputs (outside to inside) or outputs (inside to outside), in plan order."""
    inward = direction == "input"
    for spec in boundary.inputs if inward else boundary.outputs:
        source, target = (spec.outside, spec.inside) if inward else (spec.inside, spec.outside)
        name = f"boundary {boundary.module or '(root)'}, {direction} {spec.where!r}"
        yield Crossing(name, spec, source, target, axes.mesh)


def install_vocabulary(
    module: nn.Module, boundary: BoundarySpec, plan: ShardingPlan, axes: ModelAxes
) -> None:
    """Hooks that make an embedding with sharded rows look up global ids."""
    if not isinstance(module, nn.Embedding):
        return
    weight = f"{boundary.module}.weight".removeprefix(".")
    names = {weight, *(name for group in plan.tied if weight in group for name in group)}
    for spec in plan.parameters:
        if spec.name in names:
            layout = layout_under(spec.contract, axes.abstract, spec.shape)
            if is_vocabulary_sharded(module, layout):
                own = shard_vocabulary(module, layout, axes.coordinate)
                module.register_forward_pre_hook(own.enter, with_kwargs=True)
                module.register_forward_hook(own.leave, with_kwargs=True)


class _Replays:
    """One crossing on plain local tensors: a transition per shape, made when the shape first comes.

    Attributes:
        known: the replay for a source tensor of a given local shape.
    """

    __slots__ = ("crossing", "known", "origin")

    def __init__(self, crossing: Crossing, origin: Origin) -> None:
        self.crossing, self.origin = crossing, origin
        self.known: dict[tuple[int, ...], Replay] = {}

    def cross(self, value: Any) -> Any:
        """A tensor, a nest of tensors, or None where the plan calls the value optional."""
        crossing = self.crossing
        if value is None:
            if crossing.spec.optional:
                return None
            raise ContractError(
                f"{crossing.name} is missing, and the plan does not call it optional"
            )
        if isinstance(value, Tensor):
            return self._one(value)
        if not has_tensor(value):
            raise ContractError(f"{crossing.name}: expected a tensor, found {type(value).__name__}")
        return map_tensors(self._one, value)

    def _one(self, tensor: Tensor) -> Tensor:
        shape = tensor.shape
        replay = self.known.get(shape)
        if replay is None:
            transition = self.crossing.from_local_shape(shape)
            replay = self.known[shape] = transition.replay(self.origin)
        return replay(tensor)


class Entry:
    """Forward pre-hook: declared inputs, outside to inside."""

    def __init__(self, name: str, inputs: Sequence[tuple[Argument, Crossing]]) -> None:
        self.origin = Origin("hp_dtensor", name, "forward")
        self.inputs = tuple((argument, _Replays(each, self.origin)) for argument, each in inputs)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for argument, replays in self.inputs:
            position = argument.position
            if position is None or position >= len(args):
                position, value = -1, kwargs.get(argument.name)
            else:
                value = args[position]
            # The usual case: one tensor, of a shape seen before.
            replay = replays.known.get(value.shape) if type(value) is Tensor else None
            inside = replays.cross(value) if replay is None else replay(value)  # type: ignore[arg-type]
            if inside is value:
                continue
            if position < 0:
                kwargs = {**kwargs, argument.name: inside}
            else:
                args = (*args[:position], inside, *args[position + 1 :])
        return args, kwargs

    def __deepcopy__(self, memo: object) -> Entry:
        return self  # a copy of the module communicates over the same groups


class Exit:
    """Forward hook: declared outputs, inside to outside."""

    def __init__(self, name: str, outputs: Sequence[Crossing]) -> None:
        self.origin = Origin("hp_dtensor", name, "forward")
        self.outputs = tuple(
            (each, each.spec.where, _position(each.spec.where), _Replays(each, self.origin))
            for each in outputs
        )

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        for crossing, where, position, replays in self.outputs:
            in_tuple = type(output) is tuple and position < len(output)
            value = output[position] if in_tuple else crossing.read(output)
            replay = replays.known.get(value.shape) if type(value) is Tensor else None
            outside = replays.cross(value) if replay is None else replay(value)
            if outside is value:
                continue
            if not where:
                output = outside
            elif in_tuple:
                output = (*output[:position], outside, *output[position + 1 :])
            else:
                output = write_output(output, where, outside)
        return output

    def __deepcopy__(self, memo: object) -> Exit:
        return self


def _position(where: str) -> int:
    """In a tuple of outputs; beyond any where the output is named otherwise."""
    return int(where) if where.isdecimal() else sys.maxsize
