"""What a value and its gradient are to one another."""

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from hp_dtensor.adjoint import dual, factor, has_adjoint, pairing
from hp_dtensor.layout import Layout
from hp_dtensor.transition import Transition

MESH = {"dp": 2, "tp": 2}


def test_the_dual_exchanges_value_and_gradient() -> None:
    layout = Layout(MESH, (Replicate(), Shard(0)), (4,), (Partial(), Shard(0)))
    assert dual(layout).placements == (Partial(), Shard(0))
    assert dual(layout).grad_placements == (Replicate(), Shard(0))
    assert dual(dual(layout)) == layout


def test_replicas_count_once_and_summands_each() -> None:
    replicated = Layout({"tp": 2}, (Replicate(),), (1,))
    summed = Layout({"tp": 2}, (Replicate(),), (1,), (Partial(),))
    values = [torch.tensor([3.0])] * 2
    assert pairing(replicated, values, [torch.tensor([5.0])] * 2) == 15
    assert pairing(summed, values, [torch.tensor([1.0]), torch.tensor([4.0])]) == 15


def test_the_gradient_of_an_average_is_shared_out() -> None:
    """y = mean over ranks of x_r: each dL/dx_r is dL/dy over the number of ranks."""
    source = Layout({"tp": 2}, (Partial("avg"),), (1,))
    transition = Transition.compile(source, source.with_placements((Replicate(),)))
    assert transition.factor == 1
    assert transition.adjoint.factor == 0.5
    assert transition.adjoint.simulate([torch.tensor([6.0])] * 2)[1] == 3
    assert factor(dual(source), dual(source)) == 1


def test_a_sum_over_many_ranks_keeps_a_replicated_gradient_whole() -> None:
    """Backward of an all-reduce of a value is the identity, not a second all-reduce."""
    source = Layout({"tp": 2}, (Partial(),), (1,))
    adjoint = Transition.compile(source, source.with_placements((Replicate(),))).adjoint
    assert adjoint.is_identity


def test_a_maximum_is_not_linear() -> None:
    assert not has_adjoint(Layout({"tp": 2}, (Partial("max"),), (1,)))
    assert has_adjoint(Layout({"tp": 2}, (Partial("avg"),), (1,)))
