"""`check_rule` passes what is right and names what is wrong: value, gradient, rank, layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dtensor_checks import integers
from torch import Tensor

from hp_dtensor.dtensor import DTensor
from hp_dtensor.layout import Layout
from hp_dtensor.placements import Partial, Replicate, Shard
from hp_dtensor.rules.table import rule_for
from hp_dtensor.testing import RuleReport, check_rule
from hp_platform.testing import run_ranks

pytestmark = pytest.mark.ranks


def softmax_of_each_part(x: Tensor) -> Tensor:
    """Right where the last dim is whole."""
    if isinstance(x, DTensor):
        return DTensor.of_layout(F.softmax(x.to_local(), -1), x.layout)
    return F.softmax(x, -1)


def doubled_gradient(x: Tensor) -> Tensor:
    if isinstance(x, DTensor):
        local = x.to_local()
        return DTensor.of_layout(2 * local - local.detach(), x.layout)
    return x * 1


def wrong_on_the_second_rank(x: Tensor) -> Tensor:
    if isinstance(x, DTensor):
        return DTensor.of_layout(x.to_local() + dist.get_rank(), x.layout)
    return x * 1


def fails_on_parts(x: Tensor) -> Tensor:
    if isinstance(x, DTensor):
        raise RuntimeError("no kernel")
    return x * 1


def mean_of_means(x: Tensor) -> Tensor:
    """Right where every rank has equally many rows."""
    if not isinstance(x, DTensor) or x.placements != (Shard(0),):
        return x.mean(0)
    own = Layout(x.device_mesh, [Partial("avg")], x.shape[1:])
    return DTensor.of_layout(x.to_local().mean(0), own).redistribute(placements=[Replicate()])


def not_distributed(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x * 1


def rows_of_one_rank(x: Tensor) -> int:
    return (x.to_local() if isinstance(x, DTensor) else x).shape[0]


def test_an_operator_is_run_over_all_layouts_and_refusals_are_counted() -> None:
    report = check_rule(F.linear, (integers((4, 5)), integers((2, 5), 1)), world_size=2)
    # R, R with gradient P, P, S(0), S(1) of two arguments.
    assert report.accepted + report.refused == 25
    assert report.accepted >= 20
    assert str(report).startswith(f"linear: 1 example(s), {report.accepted} layouts agree")
    assert "input S(0), weight S(0)" in str(report)


def test_plain_values_lists_and_several_outputs_are_arguments_and_results() -> None:
    def split_of_both(parts: list[Tensor], dim: int) -> tuple[Any, ...]:
        joined = torch.cat(parts, dim)
        return *joined.split(3, dim), joined.shape[0]

    report = check_rule(split_of_both, ([integers((4, 5)), integers((4, 1), 1)], 1), world_size=2)
    assert report.accepted >= 4


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (softmax_of_each_part, r"input layouts Layout\(.*P\(sum\).*on rank 0: output 0, laid out"),
        (doubled_gradient, "on rank 0: gradient of tensor 0.*Greatest absolute difference"),
        (wrong_on_the_second_rank, "on rank 1: output 0.*Greatest absolute difference: 1"),
        (fails_on_parts, "neither a result nor an OperatorError, but RuntimeError: no kernel"),
        (not_distributed, "output 0 is a Tensor, expected a DTensor"),
        (rows_of_one_rank, "on rank 0: output 0 is 3, expected 5"),
    ],
)
def test_what_is_wrong_is_named(function: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=rf"(?s)^{function.__name__}, example 0, .*{message}"):
        check_rule(function, (integers((5, 3)),))


def test_the_example_that_fails_is_named() -> None:
    with pytest.raises(AssertionError, match="example 1, "):
        check_rule(
            lambda x: x * 1 if x.ndim == 1 else softmax_of_each_part(x),
            (integers((5,)),),
            (integers((5, 3)),),
        )


def test_shards_that_are_uneven_on_other_ranks_only_are_tried() -> None:
    with pytest.raises(AssertionError, match=r"mean_of_means, example 0, .*S\(0\)\) on tp=3"):
        check_rule(mean_of_means, (integers((4, 3)),))


def test_in_a_process_group_all_ranks_report_and_raise_alike() -> None:
    def body() -> tuple[RuleReport, str]:
        report = check_rule(torch.mul, (integers((4, 5)), integers((5,), 1)))
        with pytest.raises(AssertionError) as error:
            check_rule(wrong_on_the_second_rank, (integers((5, 3)),))
        return report, str(error.value)

    first, second = run_ranks(body, 2)
    assert first == second
    assert first[0].accepted > 0
    assert "on rank 1" in first[1]


def test_four_ranks_are_also_two_axes_of_two() -> None:
    one_axis = check_rule(torch.neg, (integers((5, 3)),))
    both = check_rule(torch.neg, (integers((5, 3)),), world_size=4)
    assert (one_axis.accepted, one_axis.refused) == (5, 0)
    assert both.accepted == 5 + 5**2


def test_more_layouts_than_the_limit_are_sampled() -> None:
    report = check_rule(torch.add, (integers((4, 5)), integers((4, 5), 1)), max_layouts=7)
    # Seven on two ranks, and seven on three, which share four rows unequally.
    assert report.accepted + report.refused == 14
    assert report.accepted > 0


def test_indices_that_are_a_pending_sum_are_refused_by_a_lookup() -> None:
    report = check_rule(
        F.embedding, (torch.tensor([[0, 3], [4, 1]]), integers((5, 3))), world_size=2
    )
    assert report.first_refusal is not None
    assert "the indices are a pending sum" in report.first_refusal
    assert report.accepted > 5


def test_arguments_that_cannot_be_checked_are_errors() -> None:
    rule: Any = rule_for(torch.add)
    with pytest.raises(TypeError, match="pass the operator that it is the rule of"):
        check_rule(rule, (integers((2,)),))
    with pytest.raises(ValueError, match="no example given"):
        check_rule(torch.neg)
    with pytest.raises(TypeError, match=r"example 0: expected a tuple .* write \(x,\)"):
        check_rule(torch.neg, integers((2,)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no tensor among the arguments"):
        check_rule(torch.neg, (1,))
    with pytest.raises(ValueError, match="max_layouts must be at least 1"):
        check_rule(torch.neg, (integers((2,)),), max_layouts=0)

    def body() -> None:
        with pytest.raises(ValueError, match="of 1 ranks; found world_size=2"):
            check_rule(torch.neg, (integers((2,)),), world_size=2)

    run_ranks(body, 1)
