"""Updates of tensors laid out alike: the short way and the rules give the same."""

import itertools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from hp_dtensor import DTensor, Partial, RaggedShard, Replicate, Shard, distribute_tensor
from hp_dtensor.alike import _ELEMENTWISE, UPDATES, foreach_alike
from hp_dtensor.dispatch import dispatch
from hp_dtensor.rules.engine import OperatorError
from hp_platform.testing import run_ranks

PLACEMENTS = {
    "rows": [Shard(0)],
    "columns": [Shard(1)],
    "whole": [Replicate()],
    "sum": [Partial()],
    "ragged": [RaggedShard((0,), (1, 2))],
}


def operands(name, values, kinds, mesh):
    """A target and as many more as the operator takes, laid out as `kinds` says in turn."""
    ternary = name.rstrip("_") in ("addcmul", "addcdiv")
    unary = name.rstrip("_") in ("sqrt", "neg", "reciprocal")
    count = 3 if ternary else 1 if unary else 2
    laid = [
        distribute_tensor(values[i] + 1, mesh, PLACEMENTS[kinds[min(i, 1)]]) for i in range(count)
    ]
    return [*laid, 0.25] if name.rstrip("_") == "lerp" else laid


def outcome(call):
    try:
        found = call()
    except OperatorError as error:
        return str(error).split(":")[0]
    found = found[0] if isinstance(found, list | tuple) else found
    return found.layout, found.to_local().clone(), found.requires_grad


def assert_alike(first, second, what):
    assert type(first) is type(second), (what, first, second)
    if isinstance(first, str):
        assert first == second, what
        return
    assert first[0] == second[0], what
    assert torch.equal(first[1], second[1]), what
    assert first[2] == second[2], what


@pytest.mark.ranks
def test_the_short_way_and_the_rules_give_the_same():
    def body(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        values = torch.rand(3, 3, 4, generator=torch.Generator().manual_seed(0))
        short = 0
        for name, kinds in itertools.product(UPDATES, itertools.product(PLACEMENTS, repeat=2)):
            function = getattr(torch.Tensor, name)
            for leaf in (False, True):
                mine, theirs = (operands(name, values, kinds, mesh) for _ in range(2))
                mine[0].requires_grad_(leaf)
                theirs[0].requires_grad_(leaf)
                with torch.no_grad():
                    first = outcome(lambda: function(*mine))  # noqa: B023
                    second = outcome(lambda: dispatch(function, tuple(theirs), {}))  # noqa: B023
                assert_alike(first, second, (name, kinds, leaf))
        for name, kinds in itertools.product(
            sorted(_ELEMENTWISE), itertools.product(PLACEMENTS, repeat=2)
        ):
            function = getattr(torch, f"_foreach_{name}", None)
            if function is None:
                continue
            single = getattr(torch.Tensor, name, None) or getattr(torch.Tensor, name.rstrip("_"))
            mine, theirs = (operands(name, values, kinds, mesh) for _ in range(2))
            columns = [each if isinstance(each, float) else [each] for each in mine]
            target = columns[0]
            first = foreach_alike(function, name, columns, {})
            if first is NotImplemented:
                assert len(set(kinds)) > 1 or kinds[0] == "sum"
                continue
            short += 1
            first = outcome(lambda: target if name.endswith("_") else first)  # noqa: B023
            second = outcome(lambda: dispatch(single, tuple(theirs), {}))  # noqa: B023
            assert_alike(first, second, (name, kinds))
        assert short >= 4 * len([n for n in _ELEMENTWISE if hasattr(torch, f"_foreach_{n}")])

    run_ranks(body, 2)


@pytest.mark.ranks
def test_what_the_short_way_leaves_to_the_rules():
    def body(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        weight = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]).requires_grad_()
        # In a graph, with its gradient.
        twice = weight * 2
        twice.mul_(weight).add_(1.0)
        twice.sum().backward()
        assert torch.equal(weight.grad.full_tensor(), torch.full((4, 2), 4.0))
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            weight.add_(1)
        # A copy that torch would have as a view.
        row = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])[1]
        with pytest.raises(OperatorError, match="the write would be lost"):
            row.add_(row)
        # Plain tensors, and tensors as numbers.
        plain = torch.tensor(2.0)
        with torch.no_grad():
            weight.mul_(DTensor.from_local(plain, mesh, [Replicate()]))
        assert torch.equal(weight.full_tensor(), torch.full((4, 2), 2.0))

    run_ranks(body, 2)
