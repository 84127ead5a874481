"""Products of groups of rows (`grouped_mm`): which layouts run, and what the kernel cannot take.

The kernel takes float32 and 16-bit floats alone, so these examples are not in
`operator_examples.py`, whose numbers are float64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hp_dtensor.layout import Layout
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.placements import Partial, Placement, Replicate, Shard
from hp_dtensor.testing import check_simulated
from hp_dtensor.testing.dense_comparison import DenseCall
from hp_dtensor.testing.simulated_check import compare_simulated

R, S0, S1, S2, P = Replicate(), Shard(0), Shard(1), Shard(2), Partial()
ENDS = torch.tensor([3, 3, 8], dtype=torch.int32)  # the second group is empty


def halves(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + len(shape))
    return torch.randint(-4, 5, shape, generator=generator).float() / 2


ROWS, WEIGHTS = halves(8, 16), halves(3, 16, 8)
FORMS: dict[str, tuple[Tensor, ...]] = {
    "rows by matrices": (ROWS, WEIGHTS, ENDS),
    "matrices by columns": (halves(3, 8, 16), halves(16, 8), ENDS),
    "groups of the sum": (halves(16, 8), halves(8, 8), ENDS),
    "batches": (halves(4, 8, 16), halves(4, 16, 8)),
}


def product(a: Tensor, b: Tensor, offs: Tensor | None = None) -> Tensor:
    return F.grouped_mm(a, b, offs=offs)


def agreeing(form: str, placed: tuple[Placement, ...], function: Any = product) -> str | None:
    """None where values and gradients are the dense ones, or why the call is refused."""
    operands = FORMS[form]
    mesh = AbstractMesh.of({"tp": 2})
    given = (*placed, R)[: len(operands)]
    layouts = [
        Layout(mesh, [p], t.shape, [P if isinstance(p, Replicate) and t.is_floating_point() else p])
        if not isinstance(p, Partial)
        else Layout(mesh, [p], t.shape)
        for p, t in zip(given, operands)
    ]
    [refused] = compare_simulated(DenseCall.of(function, operands), {"tp": 2}, [layouts])
    return None if refused is None else refused.reason


@pytest.mark.parametrize(
    ("form", "left", "right"),
    [
        ("rows by matrices", R, S2),  # columns of every expert
        ("rows by matrices", S1, S1),  # a pending sum
        ("rows by matrices", P, R),
        ("matrices by columns", S1, R),
        ("matrices by columns", S2, S0),
        ("groups of the sum", S0, R),
        ("groups of the sum", R, S1),
        ("batches", S0, S0),
        ("batches", S2, S1),
    ],
)
def test_grouped_products_run_on_parts(form: str, left: Placement, right: Placement) -> None:
    assert agreeing(form, (left, right)) is None


@pytest.mark.parametrize(
    ("form", "left", "right"),
    [
        ("rows by matrices", S0, R),
        ("rows by matrices", R, S0),
        ("matrices by columns", R, S1),
        ("groups of the sum", S1, S0),
    ],
)
def test_offsets_count_rows_of_all_ranks_so_rows_and_groups_are_whole(
    form: str, left: Placement, right: Placement
) -> None:
    assert "whole on every rank" in str(agreeing(form, (left, right)))


def test_the_private_name_follows_the_same_rule() -> None:
    def private(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        return torch._grouped_mm(a, b, offs=offs)

    assert agreeing("rows by matrices", (R, S2), private) is None


def test_parts_that_the_kernel_cannot_take_are_refused_on_every_rank() -> None:
    """Rows of memory are multiples of 16 bytes: four numbers, and not the six of each half."""
    a, b = halves(8, 16), halves(3, 16, 12)
    mesh = AbstractMesh.of({"tp": 2})
    layouts = [
        Layout(mesh, [R], a.shape, [P]),
        Layout(mesh, [S2], b.shape),
        Layout(mesh, [R], ENDS.shape),
    ]
    call = DenseCall.of(product, (a, b, ENDS))
    [refused] = compare_simulated(call, {"tp": 2}, [layouts])
    assert refused is not None
    assert "16 bytes" in refused.reason


def test_a_bias_is_refused() -> None:
    def biased(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        return F.grouped_mm(a, b, offs=offs, bias=a if a.__class__ is not Tensor else None)

    assert "a bias has no rule" in str(agreeing("rows by matrices", (R, R), biased))


def agree_on_drawn_layouts(form: str, mesh: dict[str, int], draws: int) -> None:
    accepted, refused = check_simulated(product, FORMS[form], mesh=mesh, draws=draws)
    assert accepted >= 2, (accepted, refused)


@pytest.mark.parametrize("form", FORMS)
def test_grouped_products_agree_on_whatever_layouts_they_accept(form: str) -> None:
    agree_on_drawn_layouts(form, {"tp": 2}, 15)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_grouped_products_agree_on_two_axes(form: str) -> None:
    agree_on_drawn_layouts(form, {"dp": 2, "tp": 2}, 60)
