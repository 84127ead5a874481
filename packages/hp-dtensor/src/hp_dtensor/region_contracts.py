"""Regions: code whose inside is checked operator by operator, or only held to what it declares.

A *transparent* region runs on DTensors like any other code; what it returns must be laid out as
declared. An *opaque* region runs on plain local tensors: what it is given must be laid out as
declared, and what it returns is taken to be, values and gradients alike. Those declarations are its
obligations; `check_gradients` holds it to them by value. `torch.autograd.Function`, kernels and
code that chooses by value belong in opaque regions.

A region is an entry of the plan (`BoundarySpec.region`, for a module), or a decorated function. In
production, where tensors are plain, a decorated function is called as it is.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from attrs import frozen
from torch import Tensor

from hp_dtensor.contracts import (
    describe_contract,
    describe_layout,
    global_shape,
    layout_under,
    map_tensors,
    read_output,
    write_output,
)
from hp_dtensor.dtensor import DTensor
from hp_dtensor.errors import ContractError
from hp_dtensor.layout import Layout
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.plan import Contract

__all__ = ["check_like", "mismatch", "opaque_region", "transparent_region", "unvalued"]

F = TypeVar("F", bound=Callable[..., Any])
Contracts = Mapping[str, Contract]


def mismatch(contract: Contract, tensor: DTensor) -> str | None:
    """How a tensor's layout differs from a contract, in words; None where it does not."""
    found = tensor.layout
    expected = layout_under(contract, found.mesh, found.shape)
    same = found.placements == expected.placements and (
        not tensor.requires_grad or found.grad_placements == expected.grad_placements
    )
    if same:
        return None
    return (
        f"expected {describe_layout(expected)}, found {describe_layout(found)} for a tensor of "
        f"global shape {found.shape}"
    )


def opaque_region(
    inputs: Contracts, outputs: Contract | Contracts, *, like: str | Mapping[str, str] = ""
) -> Callable[[F], F]:
    """Makes a function an opaque region: it computes on plain local tensors.

    Args:
        inputs: by argument name, what each tensor (or nest of tensors) must be laid out like.
            The gradient placements say what the function's backward pass owes.
        outputs: of the returned tensor; or by position ("0") or field name. Every tensor that is
            returned must be declared.
        like: the input whose global shape and dtype the output has, for one output or by its
            name. It is checked, and stands for running the function on meta tensors.

    Raises:
        TypeError: the function takes no such argument.
        ContractError: at the call, where a tensor is not what is declared.
    """
    return _decorator(_Declared("opaque", dict(inputs), _named(outputs), _likes(like, outputs)))


def transparent_region(outputs: Contract | Contracts, *, inputs: Contracts | None = None) -> Any:
    """Makes a function a transparent region: what it returns must be laid out as declared.

    Args and errors as for `opaque_region`; inputs that are not declared are not checked.
    """
    return _decorator(_Declared("transparent", dict(inputs or {}), _named(outputs), {}))


def _named(outputs: Contract | Contracts) -> dict[str, Contract]:
    return {"": outputs} if isinstance(outputs, Contract) else dict(outputs)


def _likes(like: str | Mapping[str, str], outputs: Contract | Contracts) -> dict[str, str]:
    if not like:
        return {}
    if isinstance(like, str):
        return dict.fromkeys(_named(outputs), like)
    return dict(like)


@frozen
class _Declared:
    kind: str
    inputs: dict[str, Contract]
    outputs: dict[str, Contract]
    like: dict[str, str]


def _decorator(declared: _Declared) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        known = list(signature.parameters)
        for name in (*declared.inputs, *declared.like.values()):
            if name not in known:
                raise TypeError(
                    f"{declared.kind} region {function.__qualname__}: no argument {name!r}; it "
                    f"takes {known}"
                )

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            mesh = _mesh_of(args, kwargs)
            if mesh is None:
                return function(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            return _Call(declared, function, mesh).run(bound)

        return call  # type: ignore[return-value]

    return decorate


def _mesh_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    found: list[Any] = []

    def look(tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor):
            found.append(tensor.layout.mesh)
        return tensor

    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor | tuple | list | dict):
            map_tensors(look, value)
    return found[0] if found else None


@frozen(eq=False)
class _Call:
    """One call of a decorated function on DTensors."""

    declared: _Declared
    function: Callable[..., Any]
    mesh: Any

    def run(self, bound: inspect.BoundArguments) -> Any:
        shapes: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            if name in self.declared.inputs:
                entered = map_tensors(functools.partial(self._enter, name), value)
                shapes[name] = (value, entered)
                bound.arguments[name] = entered
            elif self.declared.kind == "opaque":
                map_tensors(functools.partial(self._undeclared, name), value)
        if self.declared.kind == "transparent":
            return self._leave_all(self.function(*bound.args, **bound.kwargs), shapes)
        if self._unvalued(shapes):
            return self._leave_all(self._stand_in(shapes), shapes)
        return self._leave_all(self.function(*bound.args, **bound.kwargs), shapes)

    def _where(self, what: str) -> str:
        return f"{self.declared.kind} region {self.function.__qualname__}, {what}"

    def _enter(self, name: str, tensor: Tensor) -> Tensor:
        contract = self.declared.inputs[name]
        if not isinstance(tensor, DTensor):
            raise ContractError(
                f"{self._where(f'input {name!r}')}: a plain tensor of shape {tuple(tensor.shape)} "
                f"arrived beside DTensors, where "
                f"{describe_contract(contract, AbstractMesh.of(self.mesh))} is declared; keep it a "
                "DTensor"
            )
        text = mismatch(contract, tensor)
        if text is not None:
            raise ContractError(
                f"{self._where(f'input {name!r}')}: {text}; redistribute it before the call, or "
                "correct the declaration"
            )
        return tensor.to_local() if self.declared.kind == "opaque" else tensor

    def _undeclared(self, name: str, tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor):
            raise ContractError(
                f"{self._where(f'argument {name!r}')} is a DTensor that no contract declares; "
                "declare it among the region's inputs"
            )
        return tensor

    def _leave_all(self, output: Any, shapes: Mapping[str, Any]) -> Any:
        if output is None:
            return None
        if "" not in self.declared.outputs:
            parts = output.items() if isinstance(output, Mapping) else enumerate(output)
            for where, value in parts:
                if str(where) not in self.declared.outputs and isinstance(value, Tensor):
                    raise ContractError(
                        f"{self._where(f'output {str(where)!r}')} is declared by no contract; "
                        "declare it among the region's outputs"
                    )
        for where in self.declared.outputs:
            leave = functools.partial(self._leave, where, shapes)
            output = write_output(output, where, map_tensors(leave, read_output(output, where)))
        return output

    def _leave(self, where: str, shapes: Mapping[str, Any], tensor: Tensor) -> Tensor:
        contract, name = self.declared.outputs[where], self._where(f"output {where!r}")
        if self.declared.kind == "transparent":
            if not isinstance(tensor, DTensor):
                raise ContractError(
                    f"{name}: a plain tensor of shape {tuple(tensor.shape)} is returned: it lost "
                    "its layout; keep it a DTensor, or make the region opaque"
                )
            text = mismatch(contract, tensor)
            if text is not None:
                raise ContractError(f"{name}: {text}; correct the code or the declaration")
            return tensor
        if isinstance(tensor, DTensor):
            raise ContractError(
                f"{name}: an opaque region returned a DTensor; inside it everything is plain and "
                "local"
            )
        shape = global_shape(contract, AbstractMesh.of(self.mesh), tuple(tensor.shape))
        if where in self.declared.like:
            source = self.declared.like[where]
            model = shapes[source][0]
            check_like(name, source, tuple(model.shape), shape, model.dtype, tensor.dtype)
        return DTensor.of_layout(tensor, layout_under(contract, self.mesh, shape))

    def _unvalued(self, shapes: Mapping[str, Any]) -> bool:
        return set(self.declared.like) == set(self.declared.outputs) and any(
            isinstance(entered, Tensor) and entered.is_meta for _, entered in shapes.values()
        )

    def _stand_in(self, shapes: Mapping[str, Any]) -> Any:
        sources = [entered for _, entered in shapes.values() if isinstance(entered, Tensor)]
        made = {}
        for where, contract in self.declared.outputs.items():
            model = shapes[self.declared.like[where]][0]
            layout = layout_under(contract, self.mesh, tuple(model.shape))
            made[where] = unvalued(layout, model.dtype, sources)
        if "" in made:
            return made[""]
        if all(where.isdecimal() for where in made):
            return tuple(made[str(index)] for index in range(len(made)))
        return made


def check_like(
    name: str,
    source: str,
    wanted: tuple[int, ...],
    shape: tuple[int, ...],
    wanted_dtype: torch.dtype,
    dtype: torch.dtype,
) -> None:
    """Holds an output to the input that it is declared to be like.

    Raises:
        ContractError: shape or dtype differ.
    """
    if wanted != shape or wanted_dtype != dtype:
        raise ContractError(
            f"{name}: declared to be like input {source!r}, of global shape {wanted} and "
            f"{wanted_dtype}, but the local result makes {shape} and {dtype}; correct the "
            "output's contract, or its like"
        )


def unvalued(layout: Layout, dtype: torch.dtype, sources: list[Tensor]) -> Tensor:
    """A meta tensor that stands for coordinate 0's part of a result computed from `sources`."""
    shape = layout.local_shape((0,) * layout.mesh.ndim)
    made: Tensor = _Unvalued.apply(shape, dtype, *sources)
    return made


class _Unvalued(torch.autograd.Function):
    """Something that depends on its inputs, and whose gradients have their shapes."""

    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], dtype: torch.dtype, *sources: Tensor) -> Tensor:
        ctx.likes = [source if source.requires_grad else None for source in sources]
        return sources[0].new_empty(shape, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        empty = [None if each is None else torch.empty_like(each) for each in ctx.likes]
        return (None, None, *empty)
