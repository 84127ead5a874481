"""Validate mode: tensors carry their layouts, and every boundary checks them (decisions D5, D8).

Parameters become `DTensor`s on the model axes. At each boundary the declared inputs must arrive as
the contract says, and as the neighbour that made them declared; the transition is the one that
production replays. An operator that would have to communicate by itself is an error: production
would not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hp_dtensor.contracts import (
    Argument,
    ContractError,
    Crossing,
    ModelAxes,
    describe_contract,
    global_shape,
    has_tensor,
    layout_under,
    map_tensors,
    write_output,
)
from hp_dtensor.dtensor import DTensor
from hp_dtensor.end_of_backward import EndOfBackward, SettledGradient, settled_placements
from hp_dtensor.implicit import implicit
from hp_dtensor.late_bias import install_late_bias
from hp_dtensor.layout import Layout
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.placements import Partial
from hp_dtensor.plan import BoundaryKind, BoundarySpec, Contract, RegionKind, ShardingPlan
from hp_dtensor.production import (
    crossings,
    cut_parameter,
    install_boundary,
    install_vocabulary,
    local_part,
    localize,
)
from hp_dtensor.region_contracts import check_like, mismatch, unvalued
from hp_dtensor.regions import install_region
from hp_dtensor.settlement import needs_settlement
from hp_platform import Origin

__all__ = ["apply_validate", "opaque_regions", "trace_places"]

_PRODUCER = "_hp_producer"
"""Attribute of a DTensor that a boundary has handed out: the boundary's name, and the contract."""


def apply_validate(
    module: nn.Module,
    plan: ShardingPlan,
    axes: ModelAxes,
    settlement_dtype: torch.dtype | None = None,
) -> None:
    """Wraps the parameters in place and installs checking boundaries."""
    opaque = opaque_regions(plan)
    valued = not any(parameter.is_meta for parameter in module.parameters())
    settled = _wrap_parameters(module, plan, axes, opaque)
    trace_places(module, refuse_implicit=True, plain=axes.abstract.world_size == 1)
    for boundary in plan.boundaries:
        target = module.get_submodule(boundary.module)
        if _inside(boundary.module, opaque - {boundary.module}):
            localize(target, boundary, axes)
            install_boundary(target, boundary, plan, axes)
        else:
            _install(target, boundary, plan, axes, boundary.module in opaque, valued)
    EndOfBackward(settled, settlement_dtype).install()
    for child in module.modules():
        vars(child)["__deepcopy__"] = _refuse_copy


def _refuse_copy(memo: object) -> Any:
    raise TypeError(
        "a module in validate mode cannot be copied: its forwards are bound to its own modules. "
        "Build another module and parallelize it, or copy before parallelize"
    )


def opaque_regions(plan: ShardingPlan) -> frozenset[str]:
    """Names of the modules whose inside runs on plain local tensors."""
    return frozenset(
        spec.module
        for spec in plan.boundaries
        if spec.region is not None and spec.region.kind is RegionKind.OPAQUE
    )


def _inside(name: str, regions: frozenset[str]) -> bool:
    return any(not r or name == r or name.startswith(f"{r}.") for r in regions)


def _wrap_parameters(
    module: nn.Module,
    plan: ShardingPlan,
    axes: ModelAxes,
    opaque: frozenset[str],
) -> list[SettledGradient]:
    """Parameters outside opaque regions become DTensors; those inside stay plain and local."""
    named = dict(module.named_parameters(remove_duplicate=False))
    planned = {spec.name: spec for spec in plan.parameters}
    settled = []
    replaced: dict[int, nn.Parameter] = {}
    for name, parameter in named.items():
        if id(parameter) in replaced:
            continue
        spec = planned.get(name)
        contract = spec.contract if spec is not None else Contract()
        shape = tuple(parameter.shape)
        layout = layout_under(contract, axes.mesh, shape)
        abstract = layout_under(contract, axes.abstract, shape)
        if _inside(name, opaque):
            cut_parameter(parameter, layout, abstract, axes)
            replaced[id(parameter)] = parameter
            leaf: Tensor = parameter
            told = None
        else:
            local = local_part(parameter.detach(), abstract, axes.coordinate)
            carried = layout_under(_of_own_batch(contract), axes.mesh, shape)
            made = nn.Parameter(DTensor.of_layout(local, carried), parameter.requires_grad)
            replaced[id(parameter)] = made
            leaf = made.to_local()  # type: ignore[attr-defined]
            told = functools.partial(_mark_settled, made, layout)
        if needs_settlement(layout):
            settled.append(SettledGradient(leaf, layout, name, told))
    for owner in module.modules():
        for leaf_name, held in list(owner._parameters.items()):
            if held is not None:
                owner._parameters[leaf_name] = replaced[id(held)]
    return settled


def _of_own_batch(contract: Contract) -> Contract:
    """The contract as operators see it: an average over an axis is over batches.

    Ranks along such an axis each compute the whole gradient of their own batch, as they would
    without the axis; the average is taken at the end of backward.
    """
    kept = {axis: g for axis, g in contract.grad_placements if g != Partial("avg")}
    return Contract(contract.placements, kept)


def _mark_settled(parameter: Any, layout: Layout) -> None:
    """The gradient is the sum now, and says so."""
    whole = layout.with_placements(settled_placements(layout))
    parameter.grad = DTensor.of_layout(parameter.to_local().grad, whole)


def trace_places(module: nn.Module, *, refuse_implicit: bool, plain: bool = False) -> None:
    """Errors inside a module's forward name the module.

    With `refuse_implicit` an operator that would have to communicate by itself is an error; with
    `plain`, on a mesh of one rank, a plain tensor is taken for the whole one that it is.
    """
    for name, child in module.named_modules():
        child.forward = _placed(child.forward, name, refuse_implicit and child is module, plain)


def _placed(
    forward: Callable[..., Any], name: str, refuse_implicit: bool, plain: bool
) -> Callable[..., Any]:
    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            if not refuse_implicit:
                return forward(*args, **kwargs)
            with implicit(reductions=False, adjoints=False, plain=plain):
                return forward(*args, **kwargs)
        except Exception as error:
            if not getattr(error, "_hp_placed", False):
                error.add_note(f"in module {name or '(root)'}")
                error._hp_placed = True  # type: ignore[attr-defined]
            raise

    return call


def _install(
    module: nn.Module,
    boundary: BoundarySpec,
    plan: ShardingPlan,
    axes: ModelAxes,
    opaque: bool,
    valued: bool,
) -> None:
    name = boundary.module or "(root)"
    inputs = _arguments(module, boundary, axes)
    entry = CheckedEntry(name, inputs, axes, opaque, valued)
    module.register_forward_pre_hook(entry, with_kwargs=True)
    if opaque:
        localize(module, boundary, axes)
        install_vocabulary(module, boundary, plan, axes)
        install_region(module, boundary, axes)
    outputs = list(crossings(boundary, "output", axes))
    likes = _likes(boundary, inputs)
    # What a region's own function hands the module is not what arrived at the boundary.
    function = boundary.region.function if boundary.region is not None else ""
    leave = CheckedExit(name, outputs, axes, opaque, valued, {} if function else likes)
    module.register_forward_hook(leave, with_kwargs=True)
    install_late_bias(module, boundary, axes)
    if opaque and likes and not valued:
        module.forward = _stand_in(module, inputs, outputs, likes)


Inputs = Sequence[tuple[Argument, Crossing]]
Likes = Mapping[str, tuple[Argument, Crossing]]


def _arguments(module: nn.Module, boundary: BoundarySpec, axes: ModelAxes) -> Inputs:
    return [
        (argument, crossing)
        for crossing in crossings(boundary, "input", axes)
        if (argument := Argument.of(module, crossing.spec.where)) is not None
    ]


def _likes(boundary: BoundarySpec, inputs: Inputs) -> Likes:
    """By output, the input whose shape it has. Experts give back what they are given."""
    by_name = {crossing.spec.where: (argument, crossing) for argument, crossing in inputs}
    default = boundary.inputs[0].where if _gives_back(boundary) else ""
    found = {spec.where: spec.like or default for spec in boundary.outputs}
    return {where: by_name[name] for where, name in found.items() if name in by_name}


def _gives_back(boundary: BoundarySpec) -> bool:
    return (
        boundary.kind is BoundaryKind.EXPERTS
        and len(boundary.inputs) > 0
        and len(boundary.outputs) == 1
    )


def _stand_in(
    module: nn.Module, inputs: Inputs, outputs: Sequence[Crossing], likes: Likes
) -> Callable[..., Any]:
    """An opaque region without values is not run: its outputs have the shapes it declares."""
    run = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = [argument.read(args, kwargs) for argument, _ in inputs]
        sources = [each for each in given if isinstance(each, Tensor)]
        sources += list(module.parameters())
        owed = [crossing for crossing in outputs if not crossing.spec.optional]
        if not any(each.is_meta for each in sources) or set(likes) != {
            crossing.spec.where for crossing in owed
        }:
            return run(*args, **kwargs)
        made = {}
        for crossing in owed:
            argument, source = likes[crossing.spec.where]
            model = argument.read(args, kwargs)
            shape = global_shape(source.target, source.abstract, tuple(model.shape))
            layout = layout_under(crossing.source, crossing.mesh, shape)
            made[crossing.spec.where] = unvalued(layout, model.dtype, sources)
        if "" in made:
            return made[""]
        if all(where.isdecimal() for where in made):
            # What is optional is None, at its place in the tuple.
            size = 1 + max(int(crossing.spec.where) for crossing in outputs)
            return tuple(made.get(str(index)) for index in range(size))
        return made

    return forward


def _without_values(tensor: Tensor) -> Tensor:
    """The same on the meta device, whatever device a mode would choose."""
    with torch._C.DisableTorchFunction():
        return tensor.to("meta")


class _Check:
    """Compares a tensor with a contract, and moves it along a crossing."""

    def __init__(
        self,
        name: str,
        axes: ModelAxes,
        opaque: bool,
        valued: bool,
    ) -> None:
        self.name, self.mesh, self.opaque, self.valued = name, axes.mesh, opaque, valued
        self.origin = Origin("hp_dtensor", name, "forward")

    def __deepcopy__(self, memo: object) -> Any:
        return self

    def _present(self, crossing: Crossing, value: Any) -> bool:
        if has_tensor(value):
            return True
        if value is None and crossing.spec.optional:
            return False
        found = "missing" if value is None else f"a {type(value).__name__}"
        raise ContractError(
            f"{crossing.name}: expected {self._declared(crossing)}, found {found}; declare it "
            "optional in the plan if the module may leave it out"
        )

    def _declared(self, crossing: Crossing) -> str:
        return describe_contract(crossing.source, crossing.abstract)

    def _wrapped(self, crossing: Crossing, tensor: Tensor) -> DTensor:
        """A plain tensor taken as the declared source layout."""
        shape = global_shape(crossing.source, crossing.abstract, tuple(tensor.shape))
        if not self.valued:
            tensor = _without_values(tensor)
        return DTensor.of_layout(tensor, layout_under(crossing.source, self.mesh, shape))

    def _check(self, crossing: Crossing, tensor: DTensor) -> None:
        if tensor.layout.mesh != self.mesh:
            raise ContractError(
                f"{crossing.name}: the tensor is on mesh {tensor.layout.abstract_mesh}, the plan's "
                f"model axes are {AbstractMesh.of(self.mesh)}"
            )
        text = mismatch(crossing.source, tensor)
        if text is not None:
            raise ContractError(
                f"{crossing.name}: {text}{self._made_by(tensor)}; correct one of the contracts in "
                "the plan"
            )

    def _made_by(self, tensor: DTensor) -> str:
        producer = getattr(tensor, _PRODUCER, None)
        if producer is None:
            return ", made by operators since the last boundary"
        name, contract, mesh = producer
        return f", made by {name}, which declares {describe_contract(contract, mesh)} outside"

    def _move(self, crossing: Crossing, tensor: DTensor) -> DTensor:
        transition = crossing.from_global_shape(tensor.layout.shape)
        local = transition.apply(tensor.to_local(), origin=self.origin)
        return DTensor.of_layout(local, transition.target)

    def _lost(self, crossing: Crossing, tensor: Tensor, remedy: str) -> ContractError:
        return ContractError(
            f"{crossing.name}: a plain tensor of shape {tuple(tensor.shape)} arrived where "
            f"{self._declared(crossing)} is declared: it lost its layout (to_local, full_tensor, "
            f"numpy, .data or code outside torch functions); {remedy}"
        )


class CheckedEntry(_Check):
    """Forward pre-hook: inputs must be `outside`, and become `inside`."""

    def __init__(
        self,
        name: str,
        inputs: Sequence[tuple[Argument, Crossing]],
        axes: ModelAxes,
        opaque: bool,
        valued: bool,
    ) -> None:
        super().__init__(name, axes, opaque, valued)
        self.inputs = tuple(inputs)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for argument, crossing in self.inputs:
            value = argument.read(args, kwargs)
            if self._present(crossing, value):
                inside = map_tensors(functools.partial(self._enter, crossing), value)
                args, kwargs = argument.write(args, kwargs, inside)
        if self.opaque:
            args = tuple(self._undeclared(index, value) for index, value in enumerate(args))
            kwargs = {name: self._undeclared(name, value) for name, value in kwargs.items()}
        return args, kwargs

    def _enter(self, crossing: Crossing, tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor):
            self._check(crossing, tensor)
        elif crossing.spec.plain:
            tensor = self._wrapped(crossing, tensor)
        else:
            raise self._lost(
                crossing, tensor, "keep it a DTensor, or declare it plain if it has no layout"
            )
        moved = self._move(crossing, tensor)
        return moved.to_local() if self.opaque else moved

    def _undeclared(self, position: object, value: Any) -> Any:
        """An argument that no contract declares: the whole tensor, as in production, if it is one
        and has no gradient; else refused."""
        if not _has_dtensor(value):
            return value

        def whole(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, DTensor):
                return tensor
            if tensor.layout.is_replicated and not tensor.requires_grad:
                return tensor.to_local()
            raise ContractError(
                f"boundary {self.name}: argument {position!r} of the opaque region is a DTensor "
                "that no contract declares; declare it in the plan"
            )

        return map_tensors(whole, value)


class CheckedExit(_Check):
    """Forward hook: outputs must be `inside`, and become `outside`."""

    def __init__(
        self,
        name: str,
        outputs: Sequence[Crossing],
        axes: ModelAxes,
        opaque: bool,
        valued: bool,
        likes: Likes,
    ) -> None:
        super().__init__(name, axes, opaque, valued)
        self.outputs = tuple(outputs)
        self.likes = likes

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        declared = {crossing.spec.where for crossing in self.outputs}
        if self.opaque:
            self._refuse_undeclared(output, declared)
        for crossing in self.outputs:
            value = crossing.read(output)
            if self._present(crossing, value):
                self._check_like(crossing, args, kwargs, value)
                outside = map_tensors(functools.partial(self._leave, crossing), value)
                output = write_output(output, crossing.spec.where, outside)
        return output

    def _check_like(
        self, crossing: Crossing, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any
    ) -> None:
        if not self.opaque or crossing.spec.where not in self.likes:
            return
        argument, source = self.likes[crossing.spec.where]
        model = argument.read(args, kwargs)
        if isinstance(model, Tensor) and isinstance(value, Tensor):
            given = global_shape(source.target, source.abstract, tuple(model.shape))
            shape = global_shape(crossing.source, crossing.abstract, tuple(value.shape))
            check_like(crossing.name, source.spec.where, given, shape, model.dtype, value.dtype)

    def _leave(self, crossing: Crossing, tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor):
            if self.opaque:
                raise ContractError(
                    f"{crossing.name}: an opaque region returned a DTensor; inside it everything "
                    "is plain and local"
                )
            self._check(crossing, tensor)
        elif self.opaque or crossing.spec.plain:
            tensor = self._wrapped(crossing, tensor)
        else:
            raise self._lost(
                crossing, tensor, "keep it a DTensor, or declare the module an opaque region"
            )
        moved = self._move(crossing, tensor)
        if crossing.spec.plain:
            return moved.to_local()
        setattr(moved, _PRODUCER, (f"boundary {self.name}", crossing.target, crossing.abstract))
        return moved

    def _refuse_undeclared(self, output: Any, declared: set[str]) -> None:
        if "" in declared:
            return
        parts = output.items() if isinstance(output, Mapping) else enumerate(_as_tuple(output))
        for where, value in parts:
            if str(where) not in declared and has_tensor(value):
                raise ContractError(
                    f"boundary {self.name}: output {str(where)!r} of the opaque region is declared "
                    "by no contract; declare it in the plan"
                )


def _as_tuple(output: Any) -> tuple[Any, ...]:
    return tuple(output) if isinstance(output, tuple | list) else (output,)


def _has_dtensor(value: Any) -> bool:
    found = []

    def look(tensor: Tensor) -> Tensor:
        found.append(isinstance(tensor, DTensor))
        return tensor

    map_tensors(look, value)
    return any(found)
