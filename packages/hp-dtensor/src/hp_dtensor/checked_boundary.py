"""A boundary in validate mode: what arrives and what leaves is held to its contract."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
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
from hp_dtensor.layout import Layout
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.operands import is_known_whole
from hp_dtensor.placements import Replicate
from hp_dtensor.region_contracts import check_like, mismatch
from hp_dtensor.unvalued import without_values
from hp_dtensor.whole_values import mark_whole, unfollowed
from hp_platform import Origin

__all__ = ["CheckedEntry", "CheckedExit", "Likes"]

_PRODUCER = "_hp_producer"
"""Attribute of a DTensor that a boundary has handed out: the boundary's name, and the contract."""

Likes = Mapping[str, tuple[Argument, Crossing]]


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
        return self._of_plain(tensor, layout_under(crossing.source, self.mesh, shape))

    def _whole(self, tensor: Tensor) -> DTensor:
        """A plain tensor that is known to be the same on every rank."""
        everywhere = [Replicate()] * self.mesh.ndim
        return self._of_plain(tensor, Layout(self.mesh, everywhere, tuple(tensor.shape)))

    def _of_plain(self, tensor: Tensor, layout: Layout) -> DTensor:
        # An alias, of which nothing is known: `to_local` gives it back.
        local = tensor.view_as(tensor) if self.valued else without_values(tensor)
        return DTensor.of_layout(local, layout)

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
        transition, local = crossing.from_global_shape(tensor.layout.shape), tensor.to_local()
        with unfollowed():
            moved = transition.apply(local, origin=self.origin)
        return DTensor.of_layout(moved, transition.target)

    def _lost(self, crossing: Crossing, tensor: Tensor, remedy: str) -> ContractError:
        return ContractError(
            f"{crossing.name}: a plain tensor of shape {tuple(tensor.shape)} arrived where "
            f"{self._declared(crossing)} is declared: it lost its layout (to_local, full_tensor, "
            f"numpy, .data or code outside torch functions); {remedy}"
        )


class CheckedEntry(_Check):
    """Forward pre-hook: inputs must be `outside`, and become `inside`.

    Attributes:
        given: global shape and dtype of what an opaque region was given last, by input. What the
            region's own function hands on to the module may be something else.
    """

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
        self.given: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for argument, crossing in self.inputs:
            value = argument.read(args, kwargs)
            if self._present(crossing, value):
                inside = map_tensors(functools.partial(self._enter, crossing), value)
                if self.opaque and isinstance(inside, Tensor):
                    shape = global_shape(crossing.target, crossing.abstract, tuple(inside.shape))
                    self.given[crossing.spec.where] = shape, inside.dtype
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
        elif is_known_whole(tensor):
            tensor = self._whole(tensor)
            self._check(crossing, tensor)
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
        entry: CheckedEntry,
    ) -> None:
        super().__init__(name, axes, opaque, valued)
        self.outputs = tuple(outputs)
        self.likes, self.entry = likes, entry

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        declared = {crossing.spec.where for crossing in self.outputs}
        if self.opaque:
            self._refuse_undeclared(output, declared)
        for crossing in self.outputs:
            value = crossing.read(output)
            if self._present(crossing, value):
                self._check_like(crossing, value)
                outside = map_tensors(functools.partial(self._leave, crossing), value)
                output = write_output(output, crossing.spec.where, outside)
        return output

    def _check_like(self, crossing: Crossing, value: Any) -> None:
        if not self.opaque or crossing.spec.where not in self.likes:
            return
        source = self.likes[crossing.spec.where][1].spec.where
        if source in self.entry.given and isinstance(value, Tensor):
            given, dtype = self.entry.given[source]
            shape = global_shape(crossing.source, crossing.abstract, tuple(value.shape))
            check_like(crossing.name, source, given, shape, dtype, value.dtype)

    def _leave(self, crossing: Crossing, tensor: Tensor) -> Tensor:
        known = is_known_whole(tensor) and not self.opaque
        if isinstance(tensor, DTensor):
            if self.opaque:
                raise ContractError(
                    f"{crossing.name}: an opaque region returned a DTensor; inside it everything "
                    "is plain and local"
                )
            self._check(crossing, tensor)
        elif self.opaque or crossing.spec.plain:
            tensor = self._wrapped(crossing, tensor)
        elif known:
            tensor = self._whole(tensor)
            self._check(crossing, tensor)
        else:
            raise self._lost(
                crossing, tensor, "keep it a DTensor, or declare the module an opaque region"
            )
        moved = self._move(crossing, tensor)
        if crossing.spec.plain:
            plain = moved.to_local()
            if known and moved.layout.is_replicated:
                mark_whole(plain)
            return plain
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
