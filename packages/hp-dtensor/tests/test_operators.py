"""Every operator with a rule, by example; the page that lists them; and rules gone wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from operator_evidence import gather_evidence
from operator_examples import (
    UNTRIED,
    WITHOUT_DERIVATIVE,
    Example,
    example_of,
    examples,
    functions_of,
)

import hp_dtensor.dispatch
from hp_dtensor import coverage
from hp_dtensor.dtensor import DTensor
from hp_dtensor.layout import Layout
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.placements import Partial, Replicate, Shard
from hp_dtensor.rules.engine import OperatorError
from hp_dtensor.rules.recipe import Call, Recipe, Rule
from hp_dtensor.rules.table import named, rule_for
from hp_dtensor.testing.dense_comparison import DenseCall

SHARES = 6
"""Into so many tests the examples of all functions are divided, each below the time limit."""
PAGE = Path(__file__).parents[3] / "docs" / "operators.md"


def firsts() -> list[Example]:
    """One function of every rule."""
    found = []
    for name, rule in named().items():
        if name in UNTRIED or rule.refuses:
            continue
        example = next(
            (e for f in functions_of(name) if (e := example_of(name, f)) is not None), None
        )
        if example is not None:
            found.append(example)
    return found


def test_the_page_of_operators_is_up_to_date() -> None:
    assert PAGE.read_text() == coverage.page(), (
        "run: python -m hp_dtensor.coverage > docs/operators.md"
    )


def test_every_function_with_a_rule_has_an_example_or_a_reason() -> None:
    assert set(UNTRIED) <= set(named())
    tried = {example.function for example in examples()}
    for space, name, function in coverage.functions():
        if coverage.status_of(function) is coverage.Status.RULE and function not in tried:
            rule = rule_for(function)
            assert rule is not None
            known = rule.name in UNTRIED or function.__name__ in UNTRIED
            assert known, f"{space}.{name} is listed as covered without an example"


def test_functions_listed_without_a_derivative_have_none() -> None:
    listed = [example for example in examples() if not example.has_derivative]
    assert len(listed) >= len(WITHOUT_DERIVATIVE)
    for example in listed:
        with pytest.raises((NotImplementedError, RuntimeError), match="derivative for"):
            DenseCall.of(example.call, example.args)


def test_every_function_without_a_rule_is_refused_on_parts_with_what_where_and_a_remedy() -> None:
    mesh = AbstractMesh.of({"tp": 2})
    part = DTensor.of_layout(torch.zeros(2, 4), Layout(mesh, [Shard(0)], (4, 4)))
    refused = {coverage.Status.REPLICATED, coverage.Status.REFUSED}
    functions = [each for *_, each in coverage.functions() if coverage.status_of(each) in refused]
    assert len(functions) > 300
    for function in functions:
        with pytest.raises(OperatorError) as caught:
            DTensor.__torch_function__(function, (DTensor,), (part,), {})
        text = str(caught.value)
        assert text.startswith(f"{function.__name__}: "), text
        assert "Operands: operand 0: (4, 4) tp=S(0)" in text
        assert "Remedy: " in text


def test_one_function_of_every_rule_agrees_with_the_dense_one_on_parts() -> None:
    evidence = gather_evidence(firsts(), {"tp": 2}, draws=24, enough=1)
    assert evidence.wrong == {}
    assert [label for label, count in evidence.accepted.items() if not count] == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"tp": 3}, {"dp": 2, "tp": 2}])
def test_every_function_agrees_with_the_dense_one_on_parts(
    mesh: dict[str, int], share: int
) -> None:
    mine = list(examples())[share::SHARES]
    evidence = gather_evidence(mine, mesh, draws=40, enough=2, seed=5 + 1000 * share)
    assert evidence.wrong == {}
    none = [label for label, count in evidence.accepted.items() if not count]
    assert len(none) <= (0 if mesh == {"tp": 2} else 3), none


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("share", range(4))
def test_rules_agree_with_the_dense_functions_on_three_axes(share: int) -> None:
    mesh = {"dp": 2, "cp": 2, "tp": 2}
    mine = firsts()[share::4]
    evidence = gather_evidence(mine, mesh, draws=30, enough=3, seed=9 + 1000 * share)
    assert evidence.wrong == {}
    assert sum(count > 0 for count in evidence.accepted.values()) > 0.8 * len(mine)


# -- planted faults --------------------------------------------------------------------------------


def without_run(recipe: Recipe) -> Recipe:
    """The local kernel with the right layouts: no offsets, no other ranks' values."""
    return evolve(recipe, run=None)


def kept_whole(recipe: Recipe) -> Recipe:
    """Cut results are said to be whole."""
    return evolve(recipe, outputs=_changed(recipe.outputs, lambda p: Replicate()))


def summed(recipe: Recipe) -> Recipe:
    """Results that are cut or whole are said to be pending sums."""
    return evolve(recipe, outputs=_changed(recipe.outputs, lambda p: Partial()))


def settled(recipe: Recipe) -> Recipe:
    """Pending results are said to be finished."""
    return evolve(
        recipe,
        outputs=_changed(recipe.outputs, lambda p: Replicate() if isinstance(p, Partial) else p),
    )


def without_adjoints(recipe: Recipe) -> Recipe:
    """Operands are taken as they are."""
    return evolve(recipe, operands=None)


def _changed(outputs: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(outputs, tuple | list):
        return [_changed(output, change) for output in outputs]
    if not isinstance(outputs, Layout):
        return outputs
    return outputs.with_placements([change(p) for p in outputs.placements])


FAULTS: dict[Callable[[Recipe], Recipe], str] = {
    without_run: "argmax max topk amax var std prod all cumsum gather index_select index_add "
    "index_put scatter_add scatter_reduce index_copy embedding vector_norm triu "
    "mse_loss kl_div mean trace __setitem__ view expand group_norm conv1d pad",
    kept_whole: "linear silu cat layer_norm scaled_dot_product_attention repeat_interleave one_hot "
    "softmax reshape chunk stack conv2d",
    summed: "linear add where repeat softmax squeeze transpose",
    settled: "sum matmul einsum embedding gather bmm inner index_select",
    without_adjoints: "linear matmul mul layer_norm rms_norm scaled_dot_product_attention "
    "index_add conv1d prelu addcmul bilinear group_norm",
}


# Every fault is planted in two rules each day, in all the others by the slow tests.
EVERY_DAY = 2


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        pytest.param(
            fault,
            name,
            id=f"{fault.__name__}-{name}",
            marks=[pytest.mark.slow] if place >= EVERY_DAY else [],
        )
        for fault, names in FAULTS.items()
        for place, name in enumerate(names.split())
    ],
)
def test_a_planted_wrong_rule_is_found(
    fault: Callable[[Recipe], Recipe], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = named()[name]
    tried = (example_of(name, function) for function in functions_of(name))
    example = next(each for each in tried if each is not None)

    def derive(call: Call) -> Recipe | None:
        recipe = rule.derive(call)
        if recipe is None or recipe.composite is not None:
            return recipe
        return fault(recipe)

    wrong = Rule(rule.name, derive, rule.parameters)

    def patched(function: Callable[..., Any]) -> Rule | None:
        found = rule_for(function)
        return wrong if found is rule else found

    monkeypatch.setattr(hp_dtensor.dispatch, "rule_for", patched)
    evidence = gather_evidence([example], {"tp": 2}, draws=60, enough=60, seed=2)
    assert evidence.wrong, f"{fault.__name__} of {name} passes {evidence.accepted}"
