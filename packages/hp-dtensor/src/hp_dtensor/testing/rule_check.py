"""`check_rule`: a function of tensors over all layouts of its arguments, against dense."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve, frozen
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils import _pytree as pytree

from hp_dtensor.layout import Layout
from hp_dtensor.placements import Partial, Placement, Replicate, Shard
from hp_dtensor.testing.dense_comparison import DenseCall, Refused
from hp_dtensor.testing.group import on_ranks
from hp_platform import HPError

__all__ = ["RuleReport", "axis_choices", "check_rule", "layout_choices"]

Choice = tuple[Placement, Placement]
"""Placement of the value and of the gradient on one axis."""


@frozen
class RuleReport:
    """What `check_rule` found; every layout that was accepted gave the dense result.

    Attributes:
        name: the function's.
        examples: number of examples.
        accepted: layouts of all arguments, over all examples, for which the function ran.
        refused: layouts for which it raised OperatorError.
        first_refusal: the first of these errors, or None.
    """

    name: str
    examples: int
    accepted: int
    refused: int
    first_refusal: str | None = None

    def with_(self, other: RuleReport) -> RuleReport:
        """Both runs of the same examples together."""
        return evolve(
            self,
            accepted=self.accepted + other.accepted,
            refused=self.refused + other.refused,
            first_refusal=self.first_refusal or other.first_refusal,
        )

    def __str__(self) -> str:
        text = (
            f"{self.name}: {self.examples} example(s), {self.accepted} layouts agree with the "
            f"dense result, {self.refused} refused"
        )
        return text if self.first_refusal is None else f"{text}, first: {self.first_refusal}"


def check_rule(
    fn: Callable[..., Any],
    *examples: Sequence[Any],
    world_size: int | None = None,
    max_layouts: int = 60,
    seed: int = 0,
    rtol: float | None = None,
    atol: float | None = None,
    timeout: float = 120,
) -> RuleReport:
    """Runs a function on DTensors of every layout and compares with its dense result.

    On a mesh of one axis every combination of R, R with gradient P, P and S(d) of the tensor
    arguments is tried. On two axes, where the number of ranks is a product, pairs of those that
    were accepted on one axis are tried. Values, gradients and each rank's local tensors are
    compared. Inside a process group, which all its ranks must call this in, the group is used;
    otherwise ranks are forked.

    Args:
        fn: deterministic function of tensors and plain values that changes none of its arguments:
            an operator (whose rule is checked) or anything made of operators.
        examples: tuples of arguments, global dense tensors among them, also within lists. Small
            whole numbers in float64 keep sums exact; uneven sizes find more.
        world_size: ranks to fork; with 4, two axes of 2 are tried too. By default 2, and once more
            3 or 5 where an example has dims that 2 ranks share equally and these do not: rules
            that are wrong for uneven or empty shards alone are found only there.
        max_layouts: combinations tried per example and mesh; of more, a sample.
        seed: of the sample.
        rtol, atol: as in `torch.testing.assert_close`.
        timeout: seconds for forked ranks.

    Returns:
        How many layouts were accepted and how many refused. A function that refuses everything
        passes: assert on `accepted`.

    Raises:
        AssertionError: a result is wrong, or the call ends in another error than OperatorError.
            The message names function, example, input layouts, rank and difference.
        TypeError, ValueError: the arguments cannot be checked.
    """
    _check_arguments(fn, examples, max_layouts)

    def run() -> RuleReport:
        return _Check(fn, max_layouts, seed, rtol, atol).run(examples)

    if not dist.is_initialized():
        report = on_ranks(run, 2 if world_size is None else world_size, timeout)
        more = None if world_size is not None else _uneven_ranks(examples)
        return report if more is None else report.with_(on_ranks(run, more, timeout))
    if world_size not in (None, dist.get_world_size()):
        raise ValueError(
            f"check_rule runs in the process group there is, of {dist.get_world_size()} ranks; "
            f"found world_size={world_size}: leave it out"
        )
    return run()


def _uneven_ranks(examples: Sequence[Sequence[Any]]) -> int | None:
    """How many ranks share unequally what two ranks share equally; None where there is nothing."""
    leaves = pytree.tree_leaves([list(example) for example in examples])
    sizes = {n for leaf in leaves if isinstance(leaf, Tensor) for n in leaf.shape}
    even = [n for n in sizes if n > 0 and n % 2 == 0]
    if not even:
        return None
    return max((3, 5), key=lambda ranks: sum(n % ranks != 0 for n in even))


def _check_arguments(fn: object, examples: Sequence[object], max_layouts: int) -> None:
    if not callable(fn):
        raise TypeError(
            f"check_rule needs a function of tensors, found {type(fn).__name__}; "
            "to check a rule, pass the operator that it is the rule of"
        )
    if not examples:
        raise ValueError(f"check_rule of {_name(fn)}: no example given")
    if max_layouts < 1:
        raise ValueError(f"max_layouts must be at least 1, found {max_layouts}")
    for number, example in enumerate(examples):
        where = f"check_rule of {_name(fn)}, example {number}"
        if not isinstance(example, (tuple, list)):
            raise TypeError(
                f"{where}: expected a tuple of arguments, found {type(example).__name__}; "
                "write (x,) for a single argument"
            )
        tensors = [leaf for leaf in pytree.tree_leaves(list(example)) if isinstance(leaf, Tensor)]
        if not tensors:
            raise ValueError(f"{where}: no tensor among the arguments, nothing to lay out")
        for tensor in tensors:
            if type(tensor) not in (Tensor, torch.nn.Parameter):
                raise TypeError(
                    f"{where}: expected plain global tensors, found {type(tensor).__name__}"
                )


@frozen(eq=False)
class _Check:
    fn: Callable[..., Any]
    max_layouts: int
    seed: int
    rtol: float | None
    atol: float | None

    def run(self, examples: Sequence[Sequence[Any]]) -> RuleReport:
        accepted, refusals = 0, []
        for number, example in enumerate(examples):
            call = DenseCall.of(self.fn, example)
            tensors = [call.leaves[i] for i in call.tensors]
            kind = tensors[0].device.type
            line = init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("tp",))
            agreeing = []
            for choice in self._on_one_axis(tensors):
                refusal = self._try(call, number, line, [choice])
                agreeing += [] if refusal else [choice]
                refusals += [refusal.reason] if refusal else []
            accepted += len(agreeing)
            for mesh, pair in self._on_two_axes(kind, agreeing):
                refusal = self._try(call, number, mesh, pair)
                accepted += refusal is None
                refusals += [refusal.reason] if refusal else []
        first = refusals[0] if refusals else None
        return RuleReport(_name(self.fn), len(examples), accepted, len(refusals), first)

    def _on_one_axis(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Choice, ...]]:
        """All combinations, or a sample of them without making them all."""
        choices = [axis_choices(tensor.shape, tensor.dtype) for tensor in tensors]
        count = math.prod(len(each) for each in choices)
        numbers = range(count)
        if count > self.max_layouts:
            sample = random.Random(self.seed).sample(numbers, self.max_layouts - 1)
            # Whatever is drawn, everything replicated is among them.
            yield from (_decoded(choices, number) for number in sorted({0, *sample}))
        else:
            yield from (_decoded(choices, number) for number in numbers)

    def _on_two_axes(
        self, kind: str, agreeing: Sequence[tuple[Choice, ...]]
    ) -> Iterator[tuple[DeviceMesh, list[tuple[Choice, ...]]]]:
        world = dist.get_world_size()
        outer = next((n for n in range(2, world) if world % n == 0), None)
        if outer is None or not agreeing:
            return
        mesh = init_device_mesh(kind, (outer, world // outer), mesh_dim_names=("dp", "tp"))
        count = len(agreeing)
        numbers = range(count**2)
        if count**2 > self.max_layouts:
            numbers_drawn = random.Random(self.seed).sample(numbers, self.max_layouts)
        else:
            numbers_drawn = list(numbers)
        for number in numbers_drawn:
            yield mesh, [agreeing[number // count], agreeing[number % count]]

    def _try(
        self,
        call: DenseCall,
        number: int,
        mesh: DeviceMesh,
        axes: Sequence[tuple[Choice, ...]],
    ) -> Refused | None:
        layouts = [
            Layout(
                mesh,
                [axis[i][0] for axis in axes],
                tuple(call.leaves[position].shape),
                [axis[i][1] for axis in axes],
            )
            for i, position in enumerate(call.tensors)
        ]
        try:
            return call.compare(call.on(layouts), mesh, rtol=self.rtol, atol=self.atol)
        except (AssertionError, HPError) as error:
            shown = ", ".join(str(layout) for layout in layouts)
            # Ranks that go different ways are told by the collectives, not by a comparison.
            apart = "" if isinstance(error, AssertionError) else "the ranks went apart: "
            raise AssertionError(
                f"{_name(self.fn)}, example {number}, input layouts {shown}, {apart}{error}"
            ) from error


def _decoded(choices: Sequence[Sequence[Choice]], number: int) -> tuple[Choice, ...]:
    """The combination of this number, the first tensor's choice varying slowest."""
    chosen = []
    for each in reversed(choices):
        number, index = divmod(number, len(each))
        chosen.append(each[index])
    return tuple(reversed(chosen))


def axis_choices(shape: Sequence[int], dtype: torch.dtype = torch.float64) -> list[Choice]:
    """Placements of value and gradient on one axis: R, R with gradient P, P, and S of each dim.

    Gradients are for floating point, pending sums for numbers.
    """
    choices: list[Choice] = [(Replicate(), Replicate())]
    if dtype.is_floating_point or dtype.is_complex:
        choices.append((Replicate(), Partial()))
    if dtype != torch.bool:
        choices.append((Partial(), Replicate()))
    return choices + [(Shard(dim), Shard(dim)) for dim in range(len(shape))]


def layout_choices(shape: Sequence[int], mesh: DeviceMesh) -> list[Layout]:
    """Every layout of a shape without strides, sections or ragged shares."""
    return [
        Layout(mesh, [value for value, _ in axes], shape, [grad for _, grad in axes])
        for axes in itertools.product(axis_choices(shape), repeat=mesh.ndim)
    ]


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", None) or type(fn).__name__
