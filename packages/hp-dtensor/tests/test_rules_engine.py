"""Axis patterns: what they parse to, what they derive, and that wrong rules are found out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dtensor_checks import agrees, integers, leaf, mesh_of
from hypothesis import given, settings
from hypothesis import strategies as st

import hp_dtensor.dispatch
from hp_dtensor.layout import Layout
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.placements import (
    Partial,
    RaggedShard,
    Replicate,
    SectionedShard,
    Shard,
    StridedShard,
)
from hp_dtensor.rules.engine import OperatorError, derive, parse
from hp_dtensor.rules.recipe import Call, Recipe, Rule
from hp_dtensor.rules.table import rule_for
from hp_dtensor.rules.views import view_pattern
from hp_dtensor.testing import check_rule, layouts, meshes
from hp_dtensor.testing.dense_comparison import DenseCall
from hp_dtensor.testing.simulated_check import compare_simulated
from hp_platform.testing import run_ranks

TP = AbstractMesh(("tp",), (2,))
DP_TP = AbstractMesh(("dp", "tp"), (2, 2))
LINEAR = "... i, o i + o -> ... o"


def on(placement: Any, shape: tuple[int, ...], grad: Any = None) -> Layout:
    return Layout(TP, [placement], shape, None if grad is None else [grad])


def test_a_pattern_lists_terms_factors_and_outputs() -> None:
    pattern = parse("... i, o i + o -> ... o")
    assert pattern.terms == (((("...",), ("i",)), (("o",), ("i",))), ((("o",),),))
    assert pattern.outputs == ((("...",), ("o",)),)


def test_brackets_mark_dims_that_must_be_whole_and_parentheses_products() -> None:
    pattern = parse("b (h d) [s] 1 -> b h d s")
    assert pattern.operands == ((("b",), ("h", "d"), ("s",), ()),)
    assert pattern.whole == {"s"}


@pytest.mark.parametrize("text", ["a b", "a -> b -> c", "a ? -> a"])
def test_a_malformed_pattern_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="pattern"):
        parse(text)


def test_a_kept_letter_stays_cut_and_operands_without_it_get_summands() -> None:
    made = derive(
        "linear",
        parse(LINEAR),
        [on(Shard(0), (4, 6)), on(Replicate(), (8, 6)), on(Replicate(), (8,))],
    )
    assert made.outputs[0] == on(Shard(0), (4, 8))
    assert made.operands[1] == on(Replicate(), (8, 6), Partial())
    assert made.operands[2] == on(Replicate(), (8,), Partial())


def test_a_contracted_letter_gives_a_pending_sum_and_the_bias_one_summand() -> None:
    made = derive(
        "linear", parse(LINEAR), [on(Shard(1), (4, 6)), on(Shard(1), (8, 6)), on(Replicate(), (8,))]
    )
    assert made.outputs[0] == on(Partial(), (4, 8))
    assert made.operands[2] == on(Partial(), (8,))


def test_a_replicated_activation_in_front_of_cut_weights_needs_the_adjoint() -> None:
    made = derive(
        "linear", parse(LINEAR), [on(Replicate(), (4, 6)), on(Shard(0), (8, 6)), on(Shard(0), (8,))]
    )
    assert made.operands[0] == on(Replicate(), (4, 6), Partial())
    assert made.outputs[0] == on(Shard(1), (4, 8))


def test_replicated_operands_share_a_gradient_that_is_a_summand() -> None:
    made = derive(
        "mul", parse("..., ... -> ..."), [on(Replicate(), (4,), Partial()), on(Replicate(), (4,))]
    )
    assert made.operands[1] == on(Replicate(), (4,), Partial())
    assert made.outputs[0] == on(Replicate(), (4,), Partial())


def test_a_pending_sum_passes_what_is_linear_and_is_reduced_before_the_rest() -> None:
    pending = on(Partial(), (4,))
    assert derive("neg", parse("... -> ..."), [pending]).outputs[0] == pending
    exp = derive("exp", parse("... -> ...", linear=False), [pending])
    assert exp.operands[0] == exp.outputs[0] == on(Replicate(), (4,))
    product = derive("mul", parse("..., ... -> ..."), [pending, pending])
    assert product.operands == (on(Replicate(), (4,)),) * 2


def test_a_merged_dim_is_cut_where_its_outer_factor_is_and_strided_where_an_inner_one_is() -> None:
    pattern = parse("b s d -> (b s) d")
    outer = derive("view", pattern, [on(Shard(0), (4, 6, 2))])
    inner = derive("view", pattern, [on(Shard(1), (4, 6, 2))])
    assert outer.outputs[0] == on(Shard(0), (24, 2))
    assert inner.outputs[0] == on(StridedShard(0, 4), (24, 2))


def test_a_split_dim_passes_its_cut_to_the_factor() -> None:
    pattern, sizes = parse("(h d) -> h d"), {"h": 4, "d": 6}
    assert derive("view", pattern, [on(Shard(0), (24,))], sizes=sizes).outputs[0] == on(
        Shard(0), (4, 6)
    )
    strided = derive("view", pattern, [on(StridedShard(0, 4), (24,))], sizes=sizes)
    assert strided.outputs[0] == on(Shard(1), (4, 6))
    sections = derive("view", pattern, [on(SectionedShard(0, (6, 6, 6, 6)), (24,))], sizes=sizes)
    assert sections.outputs[0] == on(Shard(1), (4, 6))


def test_placements_keep_their_kind_along_a_dim_that_is_only_moved() -> None:
    source = on(SectionedShard(0, (4, 2, 2)), (8, 3))
    made = derive("t", parse("a b -> b a"), [source])
    assert made.outputs[0] == on(SectionedShard(1, (4, 2, 2)), (3, 8))


@pytest.mark.parametrize(
    ("layouts", "words"),
    [
        ([on(Shard(0), (4, 6)), on(Shard(0), (8, 6))], "cut different dims"),
        ([on(Shard(1), (4, 6)), on(StridedShard(1, 3), (8, 6))], "the same dim in different ways"),
        ([on(Replicate(), (4, 6)), on(Replicate(), (8, 5))], "size 5 where"),
    ],
)
def test_layouts_that_do_not_fit_are_refused_with_operator_axis_layouts_and_remedy(
    layouts: list[Layout], words: str
) -> None:
    with pytest.raises(OperatorError) as caught:
        derive("linear", parse("... i, o i -> ... o"), layouts, names=("input", "weight"))
    text = str(caught.value)
    assert text.startswith("linear: ")
    assert words in text
    assert "input: (4, 6)" in text
    assert "weight: (8, " in text
    if "size" not in words:
        assert "mesh axis 'tp'" in text
        assert "Remedy: redistribute" in text


def test_an_operand_that_is_whole_or_pending_is_brought_to_the_cut_of_the_others() -> None:
    linear = parse("... i, o i -> ... o")
    for free in (on(Replicate(), (8, 6)), on(Partial(), (8, 6)), on(Partial("avg"), (8, 6))):
        contracted = derive("linear", linear, [on(Shard(1), (4, 6)), free])
        assert contracted.operands[1] == on(Shard(1), (8, 6))
        assert contracted.outputs == (on(Partial(), (4, 8)),)
        batch = derive("linear", linear, [on(Shard(0), (4, 6)), free])
        assert batch.operands[1] == on(Replicate(), (8, 6), Partial())
    grouped = parse("(g r) d, g d -> (g r) d")
    sizes = {"g": 2, "r": 3}
    with pytest.raises(OperatorError, match="operand 0 holds all of a dim that another holds in"):
        derive("groups", grouped, [on(Replicate(), (6, 4)), on(Shard(0), (2, 4))], sizes=sizes)


def test_what_is_written_in_place_stays_and_masks_yield() -> None:
    product, rows, columns = parse("..., ... -> ..."), on(Shard(0), (4, 6)), on(Shard(1), (4, 6))
    whole = on(Replicate(), (4, 6))
    for target in (rows, columns, whole):
        led = derive("mul_", product, [target, rows], leader=0)
        assert led.operands[0].placements == led.operands[1].placements == target.placements
    masked = derive("where", product, [rows, columns], yielding=(0,))
    assert masked.operands == (columns, columns)
    attention = parse("q [k], q [k] -> q", linear=False)
    assert derive("attention", attention, [whole, columns], yielding=(1,)).operands[1] == whole
    with pytest.raises(OperatorError, match="needs whole"):
        derive("attention", attention, [whole, columns])


def test_a_dim_that_must_be_whole_is_refused_when_cut() -> None:
    with pytest.raises(OperatorError, match=r"softmax: on mesh axis 'tp'.*needs whole"):
        derive("softmax", parse("a [b] -> a b", linear=False), [on(Shard(1), (4, 6))])


def test_a_merged_dim_whose_factor_is_cut_unevenly_is_cut_ragged_or_in_sections() -> None:
    """Case 3: (6, 4) cut over 4 ranks flattens to shares of 8, 8, 8 and 0."""
    mesh = AbstractMesh(("tp",), (4,))

    def merged(shape: tuple[int, ...], dim: int) -> Any:
        names = " ".join("abc"[: len(shape)])
        pattern = parse(f"{names} -> ({names})")
        return derive("view", pattern, [Layout(mesh, [Shard(dim)], shape)]).outputs[0].placements[0]

    assert merged((6, 4), 0) == RaggedShard((0,), (2, 2, 2, 0))
    for shape, view in (
        ((6, 4), lambda x: x.view(-1)),
        ((2, 8, 4), lambda x: x.flatten(0, 1).view(2, 8, 4)),
    ):
        call = DenseCall.of(view, [integers(shape)])
        layouts = [[Layout(mesh, [Shard(dim)], shape)] for dim in (0, len(shape) - 2)]
        assert compare_simulated(call, {"tp": 4}, layouts) == [None, None]
    assert merged((3, 5), 1) == SectionedShard(0, (5, 5, 5))
    with pytest.raises(OperatorError, match=r"'tp'.*size 5, which 4 ranks cannot share equally"):
        merged((3, 5, 2), 1)


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 10), min_size=0, max_size=2),
)
@settings(deadline=None, derandomize=True)
def test_a_view_pattern_reproduces_both_shapes(sizes: list[int], cuts: list[int]) -> None:
    total = 1
    for size in sizes:
        total *= size
    target: list[int] = []
    rest = total
    for cut in cuts:
        divisors = [d for d in range(1, rest + 1) if rest % d == 0]
        target.append(divisors[cut % len(divisors)])
        rest //= target[-1]
    target.append(rest)
    text, named = view_pattern(sizes, target)
    layout = Layout(TP, [Replicate()], sizes)
    assert derive("view", parse(text), [layout], sizes=named).outputs[0].shape == tuple(target)


VIEW_SHAPES = st.lists(st.sampled_from([1, 2, 3, 4, 5, 6]), min_size=1, max_size=4)


@given(data=st.data(), mesh=meshes(min_axes=1, max_axes=3), shape=VIEW_SHAPES, merge=st.integers())
@settings(max_examples=400, deadline=None, derandomize=True)
def test_a_view_never_moves_an_element_to_another_rank(
    data: Any, mesh: AbstractMesh, shape: list[int], merge: int
) -> None:
    """Row-major flat indices are what a view keeps, so owned indices must not change."""
    layout = data.draw(layouts(mesh, tuple(shape), reductions=()))
    at = merge % len(shape)
    if shape[at] % 2 == 0:
        target = [*shape[:at], 2, shape[at] // 2, *shape[at + 1 :]]
    else:
        target = [*shape[:at], math.prod(shape[at : at + 2]), *shape[at + 2 :]]
    text, sizes = view_pattern(shape, target)
    try:
        made = derive("view", parse(text), [layout], sizes=sizes).outputs[0]
    except OperatorError:
        return
    for coordinate in mesh.coordinates():
        assert torch.equal(made.owned_indices(coordinate), layout.owned_indices(coordinate))
    text, sizes = view_pattern(target, shape)
    back = derive("view", parse(text), [made], sizes=sizes).outputs[0]
    for coordinate in mesh.coordinates():
        assert torch.equal(back.owned_indices(coordinate), layout.owned_indices(coordinate))


# -- planted faults ----------------------------------------------------------------------------


def _without_adjoint(call: Call) -> Recipe:
    recipe = _true(call)
    assert recipe.operands is not None
    return Recipe(tuple(call.layouts), recipe.outputs, recipe.run)


def _true(call: Call) -> Recipe:
    rule = rule_for({"linear": F.linear, "mean": torch.mean}[call.operator])
    assert rule is not None
    recipe = rule.derive(call)
    assert recipe is not None
    return recipe


def _from_pattern(text: str, linear: bool = True) -> Callable[[Call], Recipe]:
    def rule(call: Call) -> Recipe:
        made = derive(call.operator, parse(text, linear=linear), call.layouts)
        return Recipe(made.operands, made.outputs[0])

    return rule


def _rank_mean(call: Call) -> Recipe:
    return Recipe(None, _true(call).outputs)


FAULTS: dict[str, tuple[Any, Callable[[Call], Recipe], Any, list[Any], list[tuple[int, ...]]]] = {
    "a missing adjoint": (
        F.linear,
        _without_adjoint,
        F.linear,
        [Replicate(), Shard(0)],
        [(4, 6), (8, 6)],
    ),
    "a bias added by every rank": (
        F.linear,
        _from_pattern("... i, o i, o -> ... o"),
        F.linear,
        [Shard(1), Shard(1), Replicate()],
        [(4, 6), (8, 6), (8,)],
    ),
    "softmax over a part": (
        F.softmax,
        _from_pattern("a b -> a b", linear=False),
        lambda a: F.softmax(a, dim=1),
        [Shard(1)],
        [(4, 6)],
    ),
    "exp of summands": (torch.exp, _from_pattern("... -> ..."), torch.exp, [Partial()], [(4,)]),
    "a mean of means": (torch.mean, _rank_mean, torch.mean, [Shard(0)], [(5, 2)]),
    "a transposed output": (
        torch.mm,
        _from_pattern("m k, k n -> n m"),
        torch.mm,
        [Shard(0), Replicate()],
        [(4, 6), (6, 4)],
    ),
}


@pytest.mark.ranks
@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_planted_wrong_rule_is_found_by_the_comparison_with_dense(fault: str) -> None:
    function, wrong, call, placements, shapes = FAULTS[fault]
    rule = rule_for(function)
    assert rule is not None

    def body() -> bool:
        planted = Rule(rule.name, wrong, rule.parameters)
        mesh = mesh_of(2)
        dense = [integers(shape, i) for i, shape in enumerate(shapes)]

        def passes() -> bool:
            placed = [
                leaf(value, Layout(mesh, [placement], value.shape))
                for value, placement in zip(dense, placements)
            ]
            try:
                agrees(call, dense, placed)
            except (AssertionError, OperatorError):
                return False
            return True

        def kit_passes() -> bool:
            try:
                return check_rule(call, dense).accepted > 0
            except AssertionError:
                return False

        original = hp_dtensor.dispatch.rule_for
        assert kit_passes()
        right = fault in ("softmax over a part",) or passes()
        mesh.__dict__.pop("_hp_plans", None)
        hp_dtensor.dispatch.rule_for = lambda f: planted if f is function else original(f)
        return right and not passes() and not kit_passes()

    assert run_ranks(body, 2) == [True, True]
