"""One call on distributed tensors held to the same call on dense tensors, gradients included.

A call goes in stages with an agreement of all ranks after each. A rank that has found something
wrong stops the others there, instead of leaving them in a collective that it does not join.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field, frozen
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.utils import _pytree as pytree

from hp_dtensor.dtensor import DTensor
from hp_dtensor.errors import ContractError
from hp_dtensor.layout import Layout
from hp_dtensor.placements import Placement, is_partial
from hp_dtensor.rules.engine import OperatorError
from hp_dtensor.testing.group import from_everyone
from hp_dtensor.testing.lockstep import LockstepMesh, was_stopped
from hp_dtensor.testing.strategies import spread
from hp_platform import Origin

ORIGIN = Origin("hp_dtensor", "comparison with dense", "check")


_RULE_IS_WRONG = "a fault of the operator's rule"
"""Dispatch compares local shapes with what the rule says; that they differ is no refusal."""


@frozen
class Refused:
    """The call was refused; `reason` is the error's text."""

    reason: str


@frozen(eq=False)
class DenseCall:
    """A function of dense tensors: what it gives, and the gradients for one seed per output.

    Attributes:
        function: of the example's arguments.
        leaves, structure: the arguments, flattened.
        tensors: positions in `leaves` of the tensors.
        outputs: the result, flattened; tensors and plain values.
        seeds: gradient of each output; None where it has none.
        gradients: by position of `tensors`; None where there is none.
        differentiates: gradients are compared too.
    """

    function: Callable[..., Any]
    leaves: tuple[Any, ...]
    structure: pytree.TreeSpec
    tensors: tuple[int, ...]
    outputs: tuple[Any, ...]
    seeds: tuple[Tensor | None, ...]
    gradients: tuple[Tensor | None, ...]
    differentiates: bool = True

    @classmethod
    def of(
        cls, function: Callable[..., Any], example: Sequence[Any], *, gradients: bool = True
    ) -> DenseCall:
        """Makes the call; without `gradients` only forward, for what has no derivative."""
        leaves, structure = pytree.tree_flatten(tuple(example))
        tensors = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        sources = [
            leaf.detach().clone().requires_grad_(gradients and _has_gradient(leaf))
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in leaves
        ]
        outputs = pytree.tree_leaves(function(*pytree.tree_unflatten(sources, structure)))
        seeds = tuple(
            _seed(output, i) if isinstance(output, Tensor) and output.requires_grad else None
            for i, output in enumerate(outputs)
        )
        for output, seed in zip(outputs, seeds):
            if seed is not None:
                output.backward(seed, retain_graph=True)
        return cls(
            function,
            tuple(leaves),
            structure,
            tensors,
            tuple(each.detach() if isinstance(each, Tensor) else each for each in outputs),
            seeds,
            tuple(sources[i].grad for i in tensors),
            gradients,
        )

    def on(self, layouts: Sequence[Layout]) -> list[DTensor]:
        """The example's tensors laid out; those of floating point require a gradient."""
        return [
            placed(self.leaves[i], layout).requires_grad_(self.has_gradient(self.leaves[i]))
            for i, layout in zip(self.tensors, layouts)
        ]

    def has_gradient(self, tensor: Tensor) -> bool:
        return self.differentiates and _has_gradient(tensor)

    def compare(
        self,
        operands: Sequence[DTensor],
        mesh: DeviceMesh,
        *,
        rtol: float | None = None,
        atol: float | None = None,
    ) -> Refused | None:
        """Runs the function on distributed operands; None if everything is as in the dense call.

        Every rank of the mesh makes the call, and all return or raise alike.

        Raises:
            AssertionError: something differs, on the rank that the message names.
        """
        trial = _Trial(self, operands, rtol, atol)
        for stage in (trial.forward, trial.backward, trial.values):
            found = _outcome(stage)
            everyone = _everyones(found, mesh)
            everyone.sort(key=lambda entry: entry[0])
            for rank, text in everyone:
                if isinstance(text, str):
                    raise AssertionError(f"on rank {rank}: {text}")
            refusals = [text for _, text in everyone if isinstance(text, Refused)]
            if refusals and len(refusals) < len(everyone):
                refusing = [rank for rank, text in everyone if isinstance(text, Refused)]
                raise AssertionError(f"refused on ranks {refusing} alone: {refusals[0].reason}")
            if refusals:
                return refusals[0]
        return None


def _everyones(found: Any, mesh: DeviceMesh) -> list[tuple[int, Any]]:
    """Every rank's outcome. Ranks in lockstep need none but their own: one that raises stops all,
    and refusals are compared afterwards."""
    if isinstance(mesh, LockstepMesh):
        return [(mesh.own_rank, found)]
    return from_everyone((dist.get_rank(), found), mesh, ORIGIN)


def _outcome(stage: Callable[[], None]) -> Refused | str | None:
    """A stage's failure as a value that can be sent."""
    try:
        stage()
    except (OperatorError, ContractError) as error:
        text = str(error)
        return text if _RULE_IS_WRONG in text else Refused(text)
    except AssertionError as error:
        return str(error)
    except Exception as error:
        if was_stopped(error):
            raise
        return f"neither a result nor an OperatorError, but {type(error).__name__}: {error}"
    return None


@define(eq=False)
class _Trial:
    """One distributed call, in stages."""

    dense: DenseCall
    operands: Sequence[DTensor]
    rtol: float | None
    atol: float | None
    outputs: list[Any] = field(factory=list)

    def forward(self) -> None:
        leaves = list(self.dense.leaves)
        for position, operand in zip(self.dense.tensors, self.operands):
            leaves[position] = operand
        arguments = pytree.tree_unflatten(leaves, self.dense.structure)
        self.outputs = pytree.tree_leaves(self.dense.function(*arguments))
        self._check_outlines()

    def _check_outlines(self) -> None:
        """Kinds and shapes, without communication: before a backward pass that needs them."""
        assert len(self.outputs) == len(self.dense.outputs), (
            f"{len(self.outputs)} outputs, expected {len(self.dense.outputs)}"
        )
        for i, (found, expected) in enumerate(zip(self.outputs, self.dense.outputs)):
            if not isinstance(expected, Tensor):
                assert found == expected, f"output {i} is {found!r}, expected {expected!r}"
                continue
            assert isinstance(found, DTensor), (
                f"output {i} is a {type(found).__name__}, expected a DTensor"
            )
            _check_outline(f"output {i}", found, expected)
            if self.dense.seeds[i] is not None:
                assert found.requires_grad, f"output {i} does not require a gradient"

    def backward(self) -> None:
        for found, seed in zip(self.outputs, self.dense.seeds):
            if seed is not None:
                found.backward(placed(seed, found.grad_layout), retain_graph=True)

    def values(self) -> None:
        named = [
            (f"output {i}", found.detach(), expected)
            for i, (found, expected) in enumerate(zip(self.outputs, self.dense.outputs))
            if isinstance(expected, Tensor)
        ]
        named += self._gradients()
        # Pending sums are reduced on all ranks before any rank compares.
        reduced = [(name, _reduced(found), expected) for name, found, expected in named]
        for name, found, expected in reduced:
            self._same(name, found, expected)

    def _gradients(self) -> list[tuple[str, DTensor, Tensor]]:
        """Layouts follow from the operands', so what is missing is missing on every rank."""
        named = []
        for i, (operand, expected) in enumerate(zip(self.operands, self.dense.gradients)):
            name = f"gradient of tensor {i}"
            found = operand.grad
            if found is None:
                assert expected is None, f"{name} is missing"
                continue
            wanted = torch.zeros_like(self._source(i)) if expected is None else expected
            _check_outline(name, found, wanted)
            named.append((name, found.detach(), wanted))
        return named

    def _source(self, index: int) -> Tensor:
        source: Tensor = self.dense.leaves[self.dense.tensors[index]]
        return source

    def _same(self, name: str, found: DTensor, expected: Tensor) -> None:
        layout = found.layout
        own = expected.reshape(-1)[layout.owned_indices().to(expected.device)]
        torch.testing.assert_close(
            found.to_local(),
            own.reshape(layout.local_shape()),
            rtol=self.rtol,
            atol=self.atol,
            equal_nan=True,
            msg=lambda text: f"{name}, laid out {layout}, is not the dense one: {text}",
        )


def _check_outline(name: str, found: DTensor, expected: Tensor) -> None:
    assert tuple(found.shape) == tuple(expected.shape), (
        f"{name} has shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    )
    assert found.dtype == expected.dtype, f"{name} is {found.dtype}, expected {expected.dtype}"
    local, wanted = tuple(found.to_local().shape), found.layout.local_shape()
    assert local == wanted, (
        f"{name} has local shape {local}, but its layout {found.layout} gives {wanted}"
    )


def _reduced(tensor: DTensor) -> DTensor:
    placements: list[Placement] = [
        Replicate() if is_partial(placement) else placement for placement in tensor.placements
    ]
    return tensor.redistribute(placements=placements)


def placed(value: Tensor, layout: Layout) -> DTensor:
    """This rank's part of a dense value; a pending sum is split into parts that differ."""
    coordinates = list(layout.abstract_mesh.coordinates())
    part = spread(value.detach().cpu(), layout)[coordinates.index(layout.coordinate())]
    return DTensor.of_layout(part.clone().to(value.device), layout)


def _has_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _seed(output: Tensor, index: int) -> Tensor:
    """Small whole numbers, so that sums of them are exact."""
    generator = torch.Generator().manual_seed(7 + index)
    whole = torch.randint(-4, 5, tuple(output.shape), generator=generator)
    return whole.to(output.device, output.dtype)
