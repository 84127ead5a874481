"""Runs the catalogue of operator examples on simulated ranks and records what ran on parts."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from attrs import define, field
from operator_examples import Example
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from hp_dtensor.layout import Layout
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.placements import Replicate
from hp_dtensor.testing.dense_comparison import DenseCall
from hp_dtensor.testing.lockstep import LockstepMesh, run_lockstep
from hp_dtensor.testing.simulated_check import drawn_column, placed_on
from hp_dtensor.testing.strategies import spread


class Recorder(TorchFunctionMode):
    """The torch functions that gave a result for a DTensor which is not whole on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: set[Any] = set()

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        layouts = [getattr(leaf, "_layout", None) for leaf in pytree.tree_leaves((args, kwargs))]
        if any(layout is not None and not layout.is_replicated for layout in layouts):
            self.functions.add(function)
        return found


@define
class Evidence:
    """What the examples showed.

    Attributes:
        functions: torch functions that ran on shards or pending sums, as the dense ones do.
        accepted: by label, layouts for which the example agreed with its dense result.
        wrong: by label, the first disagreement.
    """

    functions: set[Any] = field(factory=set)
    accepted: dict[str, int] = field(factory=dict)
    wrong: dict[str, str] = field(factory=dict)


def dense_call(example: Example) -> DenseCall:
    """With gradients, unless torch has none; a dense call that fails otherwise is an error."""
    return DenseCall.of(example.call, example.args, gradients=example.has_derivative)


def draws_of(call: DenseCall, mesh: AbstractMesh, count: int, seed: int) -> list[Sequence[Layout]]:
    """Layouts of all tensors, none of them whole everywhere."""
    draw = random.Random(seed)
    tensors = [call.leaves[i] for i in call.tensors]
    drawn: list[Sequence[Layout]] = []
    for _ in range(8 * count):
        columns = [drawn_column(tensors, size, draw) for size in mesh.sizes]
        if all(isinstance(p, Replicate) for column in columns for p, _ in column):
            continue
        try:
            drawn.append(
                [
                    Layout(mesh, [c[i][0] for c in columns], t.shape, [c[i][1] for c in columns])
                    for i, t in enumerate(tensors)
                ]
            )
        except ValueError:
            continue
        if len(drawn) == count:
            break
    return drawn


def gather_evidence(
    examples: Iterable[Example],
    mesh: dict[str, int],
    *,
    draws: int,
    enough: int,
    seed: int = 0,
) -> Evidence:
    """Tries up to `draws` layouts of each example, and stops where `enough` were accepted."""
    evidence = Evidence()
    abstract = AbstractMesh.of(mesh)
    for number, example in enumerate(examples):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call = dense_call(example)
            layouts = draws_of(call, abstract, draws, seed + number)
            try:
                accepted, functions = _run(call, mesh, layouts, enough)
            except AssertionError as error:
                evidence.wrong[example.label] = str(error)
                continue
        evidence.accepted[example.label] = accepted
        evidence.functions |= functions
    return evidence


def _run(
    call: DenseCall, mesh: dict[str, int], combinations: list[Sequence[Layout]], enough: int
) -> tuple[int, set[Any]]:
    values = [call.leaves[i] for i in call.tensors]
    parts: dict[int, list[list[torch.Tensor]]] = {}

    def body(own: LockstepMesh) -> tuple[int, set[Any]]:
        accepted, functions = 0, set()
        for number, layouts in enumerate(combinations):
            if number not in parts:
                parts[number] = [spread(v.detach(), each) for v, each in zip(values, layouts)]
            operands = [
                placed_on(own, layout, every[own.own_rank], call.has_gradient(value))
                for layout, every, value in zip(layouts, parts[number], values)
            ]
            recorder = Recorder()
            try:
                with recorder:
                    refused = call.compare(operands, own)
            except Exception as error:
                shown = "; ".join(str(layout) for layout in layouts)
                raise AssertionError(f"input layouts {shown}: {error}") from error
            if refused is None:
                accepted += 1
                functions |= recorder.functions
            if accepted == enough:
                break
        return accepted, functions

    everyone = run_lockstep(body, mesh)
    assert len({accepted for accepted, _ in everyone}) == 1, "ranks accept different layouts"
    return everyone[0]
