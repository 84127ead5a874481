"""Ranks that use different units: an error that names them, unless the units are declared so."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hp_fsdp import fully_shard
from hp_fsdp.testing import assert_same, full_gradients
from hp_platform import AgreementError, ledger, lookout
from hp_platform.testing import run_ranks


class Branches(nn.Module):
    """Units of equal size, of which `b` may be left out."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in "abc")

    def forward(self, x, with_b):
        x = self.a(x)
        return self.c(self.b(x) if with_b else x)


class ZeroWeight(Branches):
    def forward(self, x, with_b):
        x = self.a(x)
        return self.c(self.b(x) if with_b else x + 0 * self.b(torch.zeros_like(x)))


def used_here(model, with_b):
    for _ in range(1000):
        model(torch.ones(2, 4), with_b).sum().backward()


def frozen_elsewhere(model, trains_b):
    model(torch.ones(2, 4), True).sum().backward()  # alike, as long as models are compared
    model.b.requires_grad_(trains_b)
    used_here(model, True)


def told(rank, sizes, body, with_b):
    """What the error says that ends the training."""
    lookout._GATHERING = 100.0  # all ranks come so far, however long it takes here
    names = ("dp_replicate", "dp_shard")[-len(sizes) :]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    torch.manual_seed(0)
    model = Branches()
    for module in (model.a, model.b, model.c, model):
        fully_shard(module, mesh=mesh)
    with pytest.raises(AgreementError) as raised:
        body(model, with_b(rank))
    return str(raised.value)


GATHERS = "all_gather asked by hp_fsdp {0} forward (parameters '{0}.weight', '{0}.bias')"
REDUCES = "asked by hp_fsdp b backward (parameters 'b.weight', 'b.bias')"


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("sizes", "body", "with_b", "axis", "parts"),
    [
        (
            (2,), used_here, lambda rank: rank == 0, "dp_shard",
            [f"rank 0: {GATHERS.format('b')}", f"rank 1: {GATHERS.format('c')}"],
        ),
        (
            (4,), used_here, lambda rank: rank != 2, "dp_shard",
            [f"ranks 0, 1, 3: {GATHERS.format('b')}", f"rank 2: {GATHERS.format('c')}"],
        ),
        # Whole replicas differ, so only the slow tier can tell.
        ((2, 2), used_here, lambda rank: rank < 2, "dp_replicate", [f"all_reduce {REDUCES}"]),
        ((4,), frozen_elsewhere, lambda rank: rank != 3, "dp_shard",
         [f"ranks 0, 1, 2: reduce_scatter {REDUCES}", "rank 3: "]),
    ],
)  # fmt: skip
def test_ranks_that_use_different_units_fail_and_name_parameters_and_ranks(
    sizes, body, with_b, axis, parts
):
    world = torch.Size(sizes).numel()
    for message in run_ranks(lambda rank: told(rank, sizes, body, with_b), world, timeout=200):
        assert f"mesh axis {axis!r}" in message
        for part in parts:
            assert part in message
        assert "set_reduce_scatter_unused_params(True)" in message


@pytest.mark.ranks
def test_a_rank_that_takes_part_with_weight_zero_counts_as_zero():
    """Instead of leaving `b` out; nothing has to be declared."""

    def body(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        torch.manual_seed(0)
        model, dense = ZeroWeight(), ZeroWeight()
        dense.load_state_dict(model.state_dict())
        for module in (model.a, model.b, model.c, model):
            fully_shard(module, mesh=mesh)
        # Called before the model, a part has the model's name for it, by which ranks are told.
        with ledger() as log, torch.no_grad():
            model.a(torch.ones(2, 4))
        assert {record.origin.name for record in log.records} == {"a", "models"}
        # Parts of a model that is not sharded as a whole are told by their number.
        with ledger() as log, torch.no_grad():
            for part in [fully_shard(nn.Linear(2, 2), mesh=mesh) for _ in range(2)]:
                part(torch.ones(1, 2))
        origins = [r.origin for r in log.records if r.origin.phase == "forward"]
        assert {origin.name for origin in origins} == {"root"}
        assert len({origin.detail for origin in origins}) == 2
        # A part may have run before the module that contains it is sharded.
        whole, alike = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
        alike.load_state_dict(whole.state_dict())
        x = torch.ones(2, 4)
        for trained in (whole, alike):
            part = trained[0] if trained is alike else fully_shard(trained[0], mesh=mesh)
            part(x).square().sum().backward()
        for trained in (fully_shard(whole, mesh=mesh), alike):
            trained(x).square().sum().backward()
        assert_same(full_gradients(whole), {n: p.grad for n, p in alike.named_parameters()})
        model(torch.ones(2, 4) + rank, rank == 0).square().sum().backward()
        for other in range(2):
            (dense(torch.ones(2, 4) + other, other == 0).square().sum() / 2).backward()
        assert_same(full_gradients(model), {n: p.grad for n, p in dense.named_parameters()})

    run_ranks(body, 2)
