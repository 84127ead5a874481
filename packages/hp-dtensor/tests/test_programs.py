"""Random compositions of operators on random layouts give the dense values and gradients."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, event, given, note, settings
from hypothesis import strategies as st
from programs import OPERATORS, Program, Step, of_numbers
from torch import Tensor

from hp_dtensor.layout import Layout
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.placements import Partial, Placement, Replicate
from hp_dtensor.testing.dense_comparison import DenseCall
from hp_dtensor.testing.simulated_check import compare_simulated, drawn_column

MESHES = ({"tp": 2}, {"tp": 3}, {"dp": 2, "tp": 2})
SHAPES = ((4, 6), (5, 7), (2, 4, 6), (3, 1), (1, 5, 2), (8,))

steps = st.lists(
    st.tuples(st.sampled_from(OPERATORS), st.integers(0, 7), st.integers(0, 7)),
    min_size=3,
    max_size=6,
)


def drawn_layouts(mesh: dict[str, int], shape: tuple[int, ...], seed: int) -> list[Layout] | None:
    draw = random.Random(seed)
    tensors = [of_numbers(shape, 0), of_numbers(shape, 1), of_numbers(shape[-1:], 2)]
    columns = [drawn_column(tensors, size, draw) for size in mesh.values()]
    try:
        return [
            Layout(
                AbstractMesh.of(mesh),
                [column[i][0] for column in columns],
                tensor.shape,
                [column[i][1] for column in columns],
            )
            for i, tensor in enumerate(tensors)
        ]
    except ValueError:
        return None


def check_program(
    program: list[Step], mesh: dict[str, int], shape: tuple[int, ...], seed: int
) -> None:
    layouts = drawn_layouts(mesh, shape, seed)
    if layouts is None:
        return
    note(f"{mesh}, {[str(layout) for layout in layouts]}")
    tensors = [of_numbers(shape, 0), of_numbers(shape, 1), of_numbers(shape[-1:], 2)]
    run = Program(program)
    call = DenseCall.of(run, tensors)
    [refused] = compare_simulated(call, mesh, [layouts], rtol=1e-6, atol=1e-6)
    assert refused is None, refused
    for name in run.ran:
        event(name)


def copied(x: Tensor, y: Tensor) -> Tensor:
    target = x * 1
    target.copy_(y)
    return target


@pytest.mark.parametrize("source", [(Replicate(), Replicate()), (Partial(), Replicate())])
def test_what_is_copied_in_place_gets_the_gradient_of_its_target(
    source: tuple[Placement, Placement],
) -> None:
    mesh, shape = AbstractMesh.of({"tp": 2}), (4, 6)
    target = Layout(mesh, [Replicate()], shape, [Partial()])
    given = Layout(mesh, [source[0]], shape, [source[1]])
    call = DenseCall.of(copied, [of_numbers(shape, 0), of_numbers(shape, 1)])
    assert compare_simulated(call, {"tp": 2}, [[target, given]]) == [None]


@settings(max_examples=30, deadline=None, derandomize=True, print_blob=True)
@given(steps, st.sampled_from(MESHES), st.sampled_from(SHAPES), st.integers(0, 10_000))
def test_programs_of_three_to_six_operators_agree_with_the_dense_ones(
    program: list[Step], mesh: dict[str, int], shape: tuple[int, ...], seed: int
) -> None:
    check_program(program, mesh, shape, seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=1500, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps, st.sampled_from(MESHES), st.sampled_from(SHAPES), st.integers(0, 10_000))
def test_many_programs_agree_with_the_dense_ones(
    program: list[Step], mesh: dict[str, int], shape: tuple[int, ...], seed: int
) -> None:
    check_program(program, mesh, shape, seed)
