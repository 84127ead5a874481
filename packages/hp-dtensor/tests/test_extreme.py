"""Maxima and minima over ranks: their gradient, and values of pending tensors as numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hp_dtensor.dtensor import DTensor
from hp_dtensor.layout import Layout
from hp_dtensor.placements import Partial, Replicate, Shard
from hp_dtensor.rules.engine import OperatorError
from hp_dtensor.testing.lockstep import LockstepMesh, run_lockstep

PARTS = torch.tensor([[1.0, 5.0, 3.0], [2.0, 5.0, -1.0]], dtype=torch.float64)
SEED = torch.tensor([10.0, 4.0, 7.0], dtype=torch.float64)


@pytest.mark.parametrize("reduction", ["max", "min"])
@pytest.mark.parametrize("target", [Replicate(), Shard(0)])
def test_the_gradient_goes_to_the_rank_that_won_and_ties_share_it(
    reduction: str, target: Replicate | Shard
) -> None:
    def body(mesh: LockstepMesh) -> tuple[Tensor, Tensor]:
        local = PARTS[mesh.own_rank].clone().requires_grad_()
        pending = DTensor.of_layout(local, Layout(mesh, [Partial(reduction)], (3,)))
        found = pending.redistribute(placements=[target])
        seed = DTensor.of_layout(SEED.clone(), Layout(mesh, [Replicate()], (3,)))
        found.backward(seed.redistribute(placements=[target]))
        assert local.grad is not None
        return found.full_tensor().detach(), local.grad

    dense = PARTS.clone().requires_grad_()
    whole = dense.amax(0) if reduction == "max" else dense.amin(0)
    whole.backward(SEED)
    assert dense.grad is not None
    for rank, (value, gradient) in enumerate(run_lockstep(body, {"tp": 2})):
        assert torch.equal(value, whole.detach())
        assert torch.equal(gradient, dense.grad[rank])


def test_numbers_of_pending_and_sharded_tensors_are_the_global_ones_or_errors() -> None:
    def body(mesh: LockstepMesh) -> list[str]:
        rank = mesh.own_rank
        total = DTensor.of_layout(torch.tensor(1.0 + rank), Layout(mesh, [Partial()], ()))
        high = DTensor.of_layout(torch.tensor(1.0 + rank), Layout(mesh, [Partial("max")], ()))
        one = DTensor.of_layout(torch.arange(1 - rank) + 7, Layout(mesh, [Shard(0)], (1,)))
        assert (total.item(), float(total), int(total)) == (3.0, 3.0, 3)
        assert (high.item(), bool(high > 1.5), one.item(), int(one)) == (2.0, True, 7, 7)
        assert f"{total:.2f}" == "3.00"
        assert torch.equal(one, one)
        assert 7 in one
        assert 1 not in one
        for part in (total, DTensor.of_layout(torch.ones(1), Layout(mesh, [Shard(0)], (2,)))):
            # A rank's own part is never shown as if it were the tensor.
            assert "tensor(" not in repr(part).replace("DTensor(", "")
            assert "tensor(" not in str(part).replace("DTensor(", "")
            for ask in (part.tolist, part.numpy):
                with pytest.raises(OperatorError, match="only a part"):
                    ask()
        return [repr(total), str(one)]

    first, second = run_lockstep(body, {"tp": 2})
    assert first == second
