"""Redistribution: values, bytes, printing and gradients, on simulated and on gloo ranks."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from hp_dtensor.adjoint import dual
from hp_dtensor.layout import Layout
from hp_dtensor.mesh import AbstractMesh, mesh_axis
from hp_dtensor.path import Kind
from hp_dtensor.placements import RaggedShard, SectionedShard, StridedShard
from hp_dtensor.testing import (
    check_redistribute,
    collect,
    layouts,
    meshes,
    pairs_of,
    shapes,
    spread,
)
from hp_dtensor.transition import Transition
from hp_platform.axis import MeshAxis
from hp_platform.ledger import Origin, ledger
from hp_platform.testing import run_ranks

PARTIAL_GRADIENT = (Partial(),)


def on_one_axis(
    source: Placement,
    target: Placement,
    shape: tuple[int, ...] = (5, 6),
    gradients: tuple[Placement | None, Placement | None] = (None, None),
    size: int = 4,
) -> Transition:
    made = [
        Layout({"tp": size}, (placement,), shape, None if gradient is None else (gradient,))
        for placement, gradient in zip((source, target), gradients)
    ]
    return Transition.compile(*made)


def kinds(transition: Transition) -> list[str]:
    return [step.move.kind.value for step in transition.steps]


R, P, S = Replicate(), Partial(), Shard


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (S(0), R, ["all-gather"]),
        (S(1), R, ["all-gather"]),
        (P, R, ["all-reduce"]),
        (P, S(0), ["reduce-scatter"]),
        (P, S(1), ["reduce-scatter"]),
        (R, S(1), ["slice"]),
        (R, P, ["keep on coordinate 0"]),
        (S(0), P, ["pad with zeros"]),
        (S(0), S(1), ["all-to-all"]),
        (P, P, []),
        (R, R, []),
        (S(0), S(0), []),
        (R, Partial("avg"), []),  # the average of equal values is the value
        (Partial("max"), S(0), ["all-reduce", "slice"]),
        (SectionedShard(0, (3, 2)), S(0), ["all-to-all"]),
        (StridedShard(0, 2), R, ["all-gather"]),
        (RaggedShard((0, 1), (0, 0, 0, 1)), S(1), ["all-to-all"]),
    ],
)
def test_common_pairs_take_one_collective(
    source: Placement, target: Placement, expected: list[str]
) -> None:
    assert kinds(on_one_axis(source, target)) == expected


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        # Two axes on one dim, cut in another order: no more than one gather of the inner axis.
        ((R, S(0)), (S(0), S(0)), ["all-to-all"]),
        ((S(0), S(0)), (R, R), ["all-gather", "all-gather"]),
        ((P, R), (S(0), S(0)), ["reduce-scatter"]),
        ((StridedShard(0, 2), S(0)), (R, S(0)), ["all-gather"]),
        ((R, S(0)), (StridedShard(0, 2), S(0)), ["slice"]),
        ((S(0), P), (S(0), S(1)), ["reduce-scatter"]),
    ],
)
def test_two_axes_take_the_cheap_path(
    source: tuple[Placement, ...], target: tuple[Placement, ...], expected: list[str]
) -> None:
    mesh = {"dp": 2, "tp": 2}
    transition = Transition.compile(Layout(mesh, source, (8, 8)), Layout(mesh, target, (8, 8)))
    assert kinds(transition) == expected


def test_bytes_are_what_a_rank_exchanges_with_others() -> None:
    assert on_one_axis(S(0), R, (8, 4)).bytes == 4 * 24
    assert on_one_axis(P, R, (8, 4)).bytes == 4 * 2 * 24
    assert on_one_axis(P, S(0), (8, 4)).elements == 24
    assert on_one_axis(S(0), S(1), (8, 4)).elements == 6
    assert on_one_axis(R, S(0), (8, 4)).bytes == 0


def test_a_transition_prints_what_it_does() -> None:
    text = str(on_one_axis(P, S(0), (8, 4)))
    assert "reduce-scatter on tp: (P(sum)) -> (S(0)), 24 elements" in text
    assert "nothing to do" in str(on_one_axis(R, R))


def test_ends_must_share_mesh_and_shape() -> None:
    layout = Layout({"tp": 2}, (R,), (4,))
    with pytest.raises(ValueError, match="keeps the global shape"):
        Transition.compile(layout, layout.with_shape((5,)))
    with pytest.raises(ValueError, match="stays on one mesh"):
        Transition.compile(layout, Layout({"tp": 4}, (R,), (4,)))


def test_compiling_again_reuses_the_steps() -> None:
    assert on_one_axis(S(0), S(1)).steps is on_one_axis(S(0), S(1)).steps


@pytest.mark.parametrize(
    ("source", "target", "gradients", "forward", "backward"),
    [
        (R, R, (None, P), [], ["all-reduce"]),
        (R, R, (P, None), [], ["keep on coordinate 0"]),
        (S(1), R, (None, P), ["all-gather"], ["reduce-scatter"]),
        (S(1), R, (None, None), ["all-gather"], ["slice"]),
        (P, S(1), (None, None), ["reduce-scatter"], ["all-gather"]),
        (P, R, (None, None), ["all-reduce"], []),
        (R, S(0), (None, None), ["slice"], ["all-gather"]),
        (R, S(0), (P, None), ["slice"], ["pad with zeros"]),
        (S(0), S(1), (None, None), ["all-to-all"], ["all-to-all"]),
    ],
)
def test_the_adjoint_follows_from_gradient_placements(
    source: Placement,
    target: Placement,
    gradients: tuple[Placement | None, Placement | None],
    forward: list[str],
    backward: list[str],
) -> None:
    transition = on_one_axis(source, target, gradients=gradients)
    assert kinds(transition) == forward
    assert kinds(transition.adjoint) == backward
    assert kinds(transition.adjoint.adjoint) == forward


def test_a_maximum_over_ranks_has_no_adjoint() -> None:
    with pytest.raises(ValueError, match="not linear"):
        _ = on_one_axis(Partial("max"), R).adjoint


@st.composite
def pairs(draw: st.DrawFn, number: int = 2, gradients: bool = True) -> list[Layout]:
    mesh, shape = draw(meshes()), draw(shapes())
    reductions = draw(st.sampled_from([("sum",), ("avg",), ("max",), ("min",), ("sum", "avg"), ()]))
    return [
        draw(layouts(mesh, shape, gradients=gradients, reductions=reductions))
        for _ in range(number)
    ]


@settings(max_examples=250, deadline=None)
@given(pairs())
def test_values_and_the_adjoint_identity_hold_for_every_pair(pair: list[Layout]) -> None:
    check_redistribute(*pair)


@settings(max_examples=60, deadline=None)
@given(pairs(number=3, gradients=False))
def test_redistributions_compose(three: list[Layout]) -> None:
    first, middle, last = three
    dense = torch.randint(-8, 9, first.shape).double()
    by_way = Transition.compile(middle, last).simulate(
        Transition.compile(first, middle).simulate(spread(dense, first))
    )
    assert torch.equal(collect(last, by_way), dense)
    back = Transition.compile(last, first).simulate(by_way)
    assert torch.equal(collect(first, back), dense)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_adjoints_compose_in_the_opposite_order(data: st.DataObject) -> None:
    mesh, shape = data.draw(meshes()), data.draw(shapes())
    first, middle, last = (
        data.draw(layouts(mesh, shape, gradients=True, reductions=("sum", "avg"))) for _ in range(3)
    )
    gradient = torch.randint(-8, 9, shape).double()
    incoming = spread(gradient, dual(last))
    direct = Transition.compile(first, last).adjoint.simulate(incoming)
    by_way = Transition.compile(first, middle).adjoint.simulate(
        Transition.compile(middle, last).adjoint.simulate(incoming)
    )
    found = [collect(dual(first), locals_) for locals_ in (direct, by_way)]
    assert torch.allclose(*found, rtol=1e-12, atol=1e-12)


def test_a_pair_that_shares_one_value_needs_no_detour_on_an_axis_of_one_rank() -> None:
    mesh = {"a": 1, "b": 2}
    transition = Transition.compile(Layout(mesh, (P, S(0)), (4,)), Layout(mesh, (S(0), S(0)), (4,)))
    assert transition.is_identity


def test_what_is_gathered_from_single_columns_is_contiguous() -> None:
    mesh = AbstractMesh.of({"tp": 2})
    move = Transition.compile(Layout(mesh, [Shard(1)], (3, 2)), Layout(mesh, [R], (3, 2)))
    assert all(found.is_contiguous() for found in move.simulate([torch.ones(3, 1)] * 2))


def test_elements_never_exceed_gathering_everything() -> None:
    mesh = AbstractMesh(("a", "b"), (2, 3))
    shape = (12, 6)
    options = [R, S(0), S(1), StridedShard(0, 3)]
    made = [Layout(mesh, chosen, shape) for chosen in product(options, repeat=2)]
    whole = Layout(mesh, (R, R), shape)
    for source, target in product(made, made):
        moved = Transition.compile(source, target).elements
        assert moved <= Transition.compile(source, whole).elements


def exchanged(transition: Transition) -> int:
    """The most that one rank sends or receives in every step, its own part left out; summed."""
    total = 0
    for step in transition.steps:
        move, most = step.move, 0
        for coord in move.before.abstract_mesh.coordinates():
            part, own = step.at(coord), coord[move.axis]
            if move.kind is Kind.ALL_REDUCE:
                most = max(most, math.prod(part.view))
            elif move.kind is Kind.ALL_GATHER:
                most = max(most, sum(part.receive_sizes) - part.receive_sizes[own])
            elif move.kind.communicates:
                sends, receives = part.send_sizes, part.receive_sizes
                most = max(most, sum(sends) - sends[own])
                if move.kind is Kind.ALL_TO_ALL:
                    most = max(most, sum(receives) - receives[own])
        total += most
    return total


@settings(max_examples=200, deadline=None)
@given(pairs(gradients=False))
def test_no_rank_exchanges_more_than_the_bound(pair: list[Layout]) -> None:
    transition = Transition.compile(*pair)
    assert exchanged(transition) <= transition.elements, transition
    whole = [R] * len(pair[0].placements)
    gathered = Transition.compile(pair[0], pair[0].with_placements(whole))
    assert transition.elements <= gathered.elements, f"{transition}\n{gathered}"


# -- gloo: the second opinion --------------------------------------------------------------------


def random_layout(rng: random.Random, mesh: DeviceMesh, shape: tuple[int, ...]) -> Layout:
    while True:
        chosen = []
        for size in mesh.shape:
            dim = rng.randrange(len(shape))
            first = rng.randint(0, shape[dim])
            units = [rng.randint(0, 2) for _ in range(size - 1)]
            total = rng.choice([1, 2, shape[0]])
            chosen.append(
                rng.choice(
                    [
                        Replicate(),
                        Partial(rng.choice(["sum", "avg"])),
                        Shard(dim),
                        StridedShard(dim, rng.randint(1, 3)),
                        SectionedShard(dim, (first, shape[dim] - first)),
                        RaggedShard((0,), [*units, max(total - sum(units), 1)]),
                    ]
                )
            )
        grads = [
            rng.choice([Replicate(), Partial()])
            if isinstance(p, Replicate)
            else Replicate()
            if isinstance(p, Partial)
            else p
            for p in chosen
        ]
        try:
            return Layout(mesh, chosen, shape, grads)
        except ValueError:
            continue


def examples_on_gloo(rank: int, sizes: tuple[int, ...]) -> int:
    """Forward, backward and second backward equal the simulator's, for many pairs."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[-len(sizes) :])
    rng = random.Random(7)
    for example in range(40):
        shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 3)))
        source, target = (random_layout(rng, mesh, shape) for _ in range(2))
        transition = Transition.compile(source, target)
        dense = torch.arange(source.numel, dtype=torch.float64).reshape(shape)
        values = spread(dense, source.abstract, seed=example)
        expected = transition.simulate(values)
        local = values[rank].clone().requires_grad_()
        result = transition.apply(local)
        assert torch.equal(result, expected[rank]), f"{transition}"
        incoming = [torch.full_like(value, 1.0) + i for i, value in enumerate(expected)]
        weight = incoming[rank].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(result, local, weight, create_graph=True)
        assert torch.equal(gradient, transition.adjoint.simulate(incoming)[rank]), f"{transition}"
        # The gradient is linear in the incoming one: its own gradient is the transition again.
        again = [torch.full_like(value, 2.0) - i for i, value in enumerate(values)]
        (second,) = torch.autograd.grad(gradient, weight, again[rank])
        assert torch.equal(second, transition.simulate(again)[rank]), f"{transition}"
        # Everything fixed but the local tensor: the same, with and without a graph, and once more.
        replay = transition.replay(Origin("test", "replay", "forward"))
        for _ in range(2):
            assert torch.equal(replay(values[rank]), expected[rank]), f"{transition}"
            other = values[rank].clone().requires_grad_()
            result = replay(other)
            assert torch.equal(result, expected[rank]), f"{transition}"
            (gradient_,) = torch.autograd.grad(result, other, weight, create_graph=True)
            assert torch.equal(gradient_, gradient), f"{transition}"
            (second_,) = torch.autograd.grad(gradient_, weight, again[rank])
            assert torch.equal(second_, second), f"{transition}"
    return example + 1


@pytest.mark.ranks
@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2)])
def test_gloo_agrees_with_the_simulator(sizes: tuple[int, ...]) -> None:
    world = torch.Size(sizes).numel()
    results = run_ranks(lambda rank: examples_on_gloo(rank, sizes), world, timeout=240)
    assert results == [40] * world


Records = list[tuple[str, str, str, int]]


def many_paths() -> str:
    """Paths between layouts, of which many have others that cost the same, and a hash."""
    pairs = pairs_of(AbstractMesh(("dp", "tp"), (2, 2)), (4, 4))
    found = [str(Transition.compile(*pair)) for pair in random.Random(0).sample(pairs, 200)]
    return "\n".join([*found, str(hash("a"))])


def test_processes_that_hash_differently_choose_the_same_paths() -> None:
    """Of paths that cost the same, every rank must take the same one, or they deadlock."""
    other = subprocess.run(
        [sys.executable, "-c", "import test_transition as t; print(t.many_paths())"],
        env={**os.environ, "PYTHONHASHSEED": "20240229", "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    *theirs, their_hash = other.split("\n")[:-1]
    *ours, our_hash = many_paths().split("\n")
    assert their_hash != our_hash
    assert theirs == ours
    assert "\n".join(ours).count("->") > 200


def ledger_of_a_round_trip(rank: int) -> tuple[Records, Records]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    sharded = Layout(mesh, (S(1),), (4, 6))
    consumed = Layout(mesh, (R,), (4, 6), (P,))
    local = torch.ones(4, 3, requires_grad=True)
    transition, origin = Transition.compile(sharded, consumed), Origin("test", "asks", "forward")
    found = []
    for run in (lambda tensor: transition.apply(tensor, origin=origin), transition.replay(origin)):
        local.grad = None
        with ledger() as log:
            run(local).sum().backward()
        assert isinstance(local.grad, Tensor)
        assert torch.equal(local.grad, torch.full((4, 3), 2.0))
        found.append([(r.operation, r.origin.name, r.origin.phase, r.bytes) for r in log.records])
    return found[0], found[1]


@pytest.mark.ranks
def test_the_ledger_shows_one_collective_each_way() -> None:
    expected = [("all_gather", "asks", "forward", 96), ("reduce_scatter", "asks", "backward", 96)]
    assert run_ranks(ledger_of_a_round_trip, 2) == [(expected, expected)] * 2


def errors_before_communication(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    abstract = Transition.compile(Layout({"tp": 2}, (S(0),), (4,)), Layout({"tp": 2}, (R,), (4,)))
    messages = []
    for arguments in ({}, {"axes": {}}):
        try:
            abstract.apply(torch.zeros(2), **arguments)  # type: ignore[arg-type]
        except ValueError as error:
            messages.append(str(error))
    axes: dict[str, MeshAxis] = {"tp": mesh_axis(mesh, 0)}
    gathered = abstract.apply(torch.full((2,), float(rank)), axes=axes)
    assert gathered.tolist() == [0, 0, 1, 1]
    try:
        abstract.apply(torch.zeros(3), axes=axes)
    except ValueError as error:
        messages.append(str(error))
    return messages


@pytest.mark.ranks
def test_a_wrong_call_is_refused_before_it_communicates() -> None:
    for messages in run_ranks(errors_before_communication, 2):
        assert len(messages) == 3
        assert "abstract mesh" in messages[0]
        assert "axes lacks ['tp']" in messages[1]
        assert "shape (3,)" in messages[2]
