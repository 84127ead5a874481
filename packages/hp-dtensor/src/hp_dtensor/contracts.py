"""What a plan's contracts mean for concrete tensors, and where those tensors are in a call.

A contract names placements by mesh axis and knows no sizes. Here it meets a tensor: the global
shape is derived from the local one, source and target contract become layouts and, once per
global shape, a compiled `Transition`.

Activations are cut evenly. A rank that holds a piece can then tell the global shape from its own
piece, without asking the others; a boundary that would cut a dim unevenly refuses it, on every
rank alike and before any collective (decision D13). Parameters are free of this rule.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass, replace
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from hp_dtensor.errors import ContractError, PlanError
from hp_dtensor.layout import Layout
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.placements import SectionedShard, describe, sharded_dims
from hp_dtensor.plan import BoundaryTensor, Contract, ShardingPlan
from hp_dtensor.transition import Transition

__all__ = [
    "Argument",
    "ContractError",
    "Crossing",
    "ModelAxes",
    "PlanError",
    "cut_factors",
    "describe_contract",
    "describe_layout",
    "global_shape",
    "has_tensor",
    "layout_under",
    "map_tensors",
    "read_output",
    "write_output",
]


@frozen(eq=False)
class ModelAxes:
    """The mesh axes that a plan shards over, as this rank sees them.

    Attributes:
        abstract: names and sizes.
        coordinate: this rank's coordinate on them.
        mesh: the sub-mesh of these axes; abstract without process groups.
    """

    abstract: AbstractMesh
    coordinate: tuple[int, ...]
    mesh: DeviceMesh | AbstractMesh

    @classmethod
    def of(cls, plan: ShardingPlan, mesh: DeviceMesh | AbstractMesh) -> ModelAxes:
        """The plan's model axes on `mesh`; all of its axes where the plan has no model axis.

        An `AbstractMesh` stands for a single process: all sizes are then 1.
        """
        whole = AbstractMesh.of(mesh)
        names = plan.model_mesh.axis_names or whole.axis_names
        abstract = AbstractMesh(names, tuple(whole.size(name) for name in names))
        if isinstance(mesh, AbstractMesh):
            return cls(abstract, (0,) * abstract.ndim, abstract)
        own = mesh.get_coordinate()
        if own is None:
            raise PlanError("this rank is not part of the mesh; only its ranks may parallelize")
        coordinate = tuple(own[whole.axis_index(name)] for name in names)
        return cls(abstract, coordinate, mesh if names == whole.axis_names else mesh[names])

    def same(self, one: Contract, other: Contract) -> bool:
        """Whether two contracts say the same on the axes that have more than one rank."""
        return all(
            one.placement(axis) == other.placement(axis)
            and one.grad_placement(axis) == other.grad_placement(axis)
            for axis, size in zip(self.abstract.axis_names, self.abstract.sizes)
            if size > 1
        )


def layout_under(
    contract: Contract, mesh: DeviceMesh | AbstractMesh, shape: tuple[int, ...]
) -> Layout:
    """The contract's layout of a tensor of global shape `shape`."""
    placements, grads = contract.on(AbstractMesh.of(mesh))
    return Layout(mesh, placements, shape, grads)


def cut_factors(contract: Contract, mesh: AbstractMesh, ndim: int) -> tuple[int, ...]:
    """Into how many pieces the contract cuts each dim of a tensor of `ndim` dims."""
    factors = [1] * ndim
    for axis, placement in contract.placements:
        for dim in sharded_dims(placement):
            if not -ndim <= dim < ndim:
                raise ContractError(
                    f"mesh axis {axis!r}: {describe(placement)} names dim {dim}, but the tensor "
                    f"has {ndim} dims"
                )
            factors[dim] *= mesh.size(axis)
    return tuple(factors)


def global_shape(
    contract: Contract, mesh: AbstractMesh, local_shape: tuple[int, ...]
) -> tuple[int, ...]:
    """The global shape of which `local_shape` is one of equal pieces."""
    factors = cut_factors(contract, mesh, len(local_shape))
    return tuple(size * factor for size, factor in zip(local_shape, factors))


def describe_contract(contract: Contract, mesh: AbstractMesh) -> str:
    """For errors: `tp: S(1)`, `tp: R (gradient P(sum))`, or `R` where nothing is cut."""
    parts = []
    for axis in mesh.axis_names:
        if axis not in contract.axes():
            continue
        grad = dict(contract.grad_placements).get(axis)
        note = f" (gradient {describe(grad)})" if grad else ""
        parts.append(f"{axis}: {describe(contract.placement(axis))}{note}")
    return ", ".join(parts) or "R"


def describe_layout(layout: Layout) -> str:
    """A layout in the words of `describe_contract`."""
    mesh = layout.abstract_mesh
    contract = Contract(
        dict(zip(mesh.axis_names, layout.placements)),
        dict(zip(mesh.axis_names, layout.grad_placements)),
    )
    return describe_contract(contract, mesh)


class Crossing:
    """One tensor of one boundary in one direction: source contract to target contract.

    Compiles a transition per global shape when it first meets the shape, and keeps it.
    """

    __slots__ = ("_compiled", "abstract", "mesh", "name", "source", "spec", "target")

    def __init__(
        self,
        name: str,
        spec: BoundaryTensor,
        source: Contract,
        target: Contract,
        mesh: DeviceMesh | AbstractMesh,
    ) -> None:
        self.name, self.spec, self.mesh = name, spec, mesh
        self.abstract = AbstractMesh.of(mesh)
        self.source, self.target = source, target
        self._compiled: dict[tuple[int, ...], Transition] = {}

    def from_local_shape(self, local_shape: tuple[int, ...]) -> Transition:
        """The transition for a source tensor whose piece on this rank has `local_shape`."""
        return self.from_global_shape(global_shape(self.source, self.abstract, tuple(local_shape)))

    def from_global_shape(self, shape: tuple[int, ...]) -> Transition:
        """The transition for a tensor of global shape `shape`.

        Raises:
            ContractError: a dim cannot be cut into equal pieces; the same on every rank.
        """
        found = self._compiled.get(shape)
        if found is None:
            source = layout_under(self.source, self.mesh, shape)
            target = layout_under(self.target, self.mesh, shape)
            self._check_even(source)
            self._check_even(target)
            found = self._compiled[shape] = Transition.compile(source, target)
        return found

    def read(self, output: Any) -> Any:
        """The part of a module's output that this crossing carries; None when absent.

        Raises:
            ContractError: the output has no such part.
        """
        try:
            return read_output(output, self.spec.where)
        except LookupError as error:
            raise ContractError(
                f"{self.name}: the module returned no such output ({error.args[0]})"
            ) from None

    def _check_even(self, layout: Layout) -> None:
        if layout.is_even:
            return
        for index, placement in enumerate(layout.placements):
            axis, size = self.abstract.axis_names[index], self.abstract.sizes[index]
            for dim in sharded_dims(placement):
                length = layout.shape[dim]
                parts = placement.sections if isinstance(placement, SectionedShard) else (length,)
                if any(part % size for part in parts):
                    raise ContractError(
                        f"{self.name}: {describe(placement)} over mesh axis {axis!r} of size "
                        f"{size} needs equal pieces, but dim {dim} of the global shape "
                        f"{layout.shape} has size {length}; pad it to a multiple of {size}"
                    )
        raise ContractError(
            f"{self.name}: {layout} does not give all ranks equal pieces; pad the dims that it cuts"
        )

    def __deepcopy__(self, memo: object) -> Crossing:
        # Copies of a module share what is compiled: it depends on values only.
        return self


@frozen
class Argument:
    """Where a named argument of `forward` is in a call."""

    name: str
    position: int | None

    @classmethod
    def of(cls, module: nn.Module, name: str) -> Argument | None:
        """None when `forward` takes no such argument."""
        parameters = inspect.signature(module.forward).parameters
        kinds = inspect.Parameter
        if any(p.kind is kinds.VAR_KEYWORD for p in parameters.values()):
            absent: Argument | None = cls(name, None)
        else:
            absent = None
        parameter = parameters.get(name)
        if parameter is None or parameter.kind in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL):
            return absent
        if parameter.kind is kinds.KEYWORD_ONLY:
            return cls(name, None)
        return cls(name, list(parameters).index(name))

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The value passed, or None."""
        if self.position is not None and self.position < len(args):
            return args[self.position]
        return kwargs.get(self.name)

    def write(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call with another value."""
        position = self.position
        if position is not None and position < len(args):
            return (*args[:position], value, *args[position + 1 :]), kwargs
        return args, {**kwargs, self.name: value}


def read_output(output: Any, where: str) -> Any:
    """The part of a module's output that `BoundaryTensor.where` names; None when absent.

    Raises:
        LookupError: the output has no such part.
    """
    if not where:
        return output
    if where.isdecimal():
        if not isinstance(output, tuple | list):
            raise LookupError(f"position {where} of a {type(output).__name__}")
        if int(where) >= len(output):
            raise LookupError(f"position {where} of a {type(output).__name__} of {len(output)}")
        return output[int(where)]
    if isinstance(output, Mapping):
        # A model output of transformers leaves out the fields that are None.
        return output.get(where)
    if hasattr(output, where) and not isinstance(output, Tensor):
        return getattr(output, where)
    raise LookupError(f"field {where!r} of a {type(output).__name__}")


def write_output(output: Any, where: str, value: Any) -> Any:
    """The output with the part that `where` names replaced."""
    if not where:
        return value
    if where.isdecimal():
        index = int(where)
        if hasattr(output, "_fields"):
            return output._replace(**{output._fields[index]: value})
        return type(output)((*output[:index], value, *output[index + 1 :]))
    if isinstance(output, dict):
        # The module made this mapping for this call; assignment also keeps the attributes of
        # transformers' model outputs in step.
        output[where] = value
        return output
    if is_dataclass(output) and not isinstance(output, type):
        return replace(output, **{where: value})
    raise LookupError(f"cannot replace field {where!r} of a {type(output).__name__}")


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Applies `function` to a tensor, or to every tensor of a nested tuple, list or dict.

    `torch.utils._pytree` is private, but where transformers registers its outputs and caches;
    `test_contracts` fails if its meaning changes.
    """
    if isinstance(value, Tensor):
        return function(value)
    return pytree.tree_map_only(torch.Tensor, function, value)


def has_tensor(value: Any) -> bool:
    """Whether the value is a tensor or a nest that contains one."""
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))
