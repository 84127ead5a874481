"""The methods of `FSDPModule` mean what FSDP2's do."""

import copy
import gc
import itertools
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import hp_fsdp
from hp_dtensor import DTensor
from hp_fsdp import FSDPModule, fully_shard
from hp_fsdp.testing import assert_same, full_gradients, full_parameters
from hp_platform import ledger
from hp_platform.testing import run_ranks


def flat(size):
    return init_device_mesh("cpu", (size,), mesh_dim_names=("dp_shard",))


def stack(depth=3, width=6):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)])


def shard_each(model, mesh, **options):
    for layer in model:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def batch(rank, seed=0, width=6):
    return torch.randn(3, width, generator=torch.Generator().manual_seed(10 * seed + rank))


def gradients_of(dense, world, run):
    for rank in range(world):
        (run(dense, rank) / world).backward()
    return {name: p.grad for name, p in dense.named_parameters()}


@pytest.mark.ranks
def test_the_sharded_class_state_slices_and_copies():
    def body(rank):
        class Mine(nn.Linear):
            pass

        mesh = flat(2)
        model = nn.Sequential(Mine(4, 4), nn.Tanh(), Mine(4, 4))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        assert fully_shard.state(model) is None
        fully_shard(model, mesh=mesh)
        states = [fully_shard.state(m) for m in (model, model[0], model[2])]
        assert None not in states
        assert len(set(states)) == 3
        assert type(model).__name__ == "FSDPSequential"
        assert isinstance(model, FSDPModule)
        assert type(model[0]).__name__ == "FSDPMine"
        assert isinstance(model[0], Mine)
        # A slice is a new container that no call of fully_shard has seen.
        piece = model[:2]
        assert type(piece) is nn.Sequential
        assert piece[0] is model[0]
        piece(torch.ones(1, 4)).sum().backward()
        for make_copy in (copy.deepcopy, AveragedModel):
            with pytest.raises(AssertionError, match=r"FSDP does not support deepcopy.*state_dict"):
                make_copy(model)
        again = fully_shard(nn.Sequential(nn.Linear(2, 2)), mesh=mesh)
        assert type(again) is type(model)
        assert fully_shard([nn.Linear(2, 2)], mesh=mesh)[0].in_features == 2

        class Chain(nn.ModuleList):
            def forward(self, x):
                for module in self:
                    x = module(x)
                return x

        chain = fully_shard(Chain([nn.Linear(2, 2)]), mesh=mesh)
        chain(torch.ones(1, 2)).sum().backward()
        assert torch.equal(full_gradients(chain)["0.bias"], torch.ones(2))
        with pytest.raises(ValueError, match="containers that do not implement forward"):
            fully_shard(nn.ModuleList([nn.Linear(2, 2)]), mesh=mesh)
        hp_fsdp.share_comm_ctx([model[0], model[2]])
        with pytest.raises(hp_fsdp.UsageError, match="Expects list of FSDPModules"):
            hp_fsdp.share_comm_ctx([nn.Linear(2, 2)])

    run_ranks(body, 2)


@pytest.mark.ranks
def test_hooks_on_shards_run_with_the_reduced_gradient_before_and_after_it_is_accumulated():
    def body(rank):
        model, dense = shard_each(stack(), flat(2)), stack()
        seen, stepped = [], []
        for name, parameter in model.named_parameters():

            def halve(gradient, name=name):
                assert isinstance(gradient, DTensor)
                seen.append(("gradient", name))
                return gradient / 2

            def step(parameter, name=name):
                seen.append(("accumulated", name))
                stepped.append((name, parameter.grad.full_tensor()))
                with torch.no_grad():
                    parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None

            parameter.register_hook(halve)
            handle = parameter.register_post_accumulate_grad_hook(step)
        expected = gradients_of(dense, 2, lambda m, r: m(batch(r)).square().mean())
        model(batch(rank)).square().mean().backward()
        names = [name for name, _ in dense.named_parameters()]
        assert sorted(seen) == sorted((k, n) for k in ("gradient", "accumulated") for n in names)
        assert_same(dict(stepped), {n: g / 2 for n, g in expected.items()})
        # The optimizer that ran inside backward has changed what the next forward computes with.
        with torch.no_grad():
            for parameter in dense.parameters():
                parameter.sub_(parameter.grad, alpha=0.05)
        assert_same(full_parameters(model), full_parameters(dense))
        torch.testing.assert_close(model(batch(0)).detach(), dense(batch(0)).detach())
        handle.remove()
        seen.clear()
        model(batch(rank)).square().mean().backward()
        assert ("accumulated", names[-1]) not in seen
        assert ("gradient", names[-1]) in seen

    run_ranks(body, 2)


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(7, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.ranks
def test_a_unit_that_is_not_gathered_in_backward_has_its_gradients_all_the_same():
    def body(rank):
        model, dense = Embedded(), Embedded()
        for module in (model.embed, *model.layers, model):
            fully_shard(module, mesh=flat(2), reshard_after_forward=True)
        model.embed.set_unshard_in_backward(False)
        ids = [torch.tensor([[0, 3, 3]]), torch.tensor([[6, 1, 0]])]
        for _ in range(2):
            expected = gradients_of(dense, 2, lambda m, r: m(ids[r]).square().mean())
            with ledger() as log:
                model(ids[rank]).square().mean().backward()
            assert_same(full_gradients(model), expected)
        gathers = [
            (r.origin.name, r.origin.phase) for r in log.records if r.operation == "all_gather"
        ]
        assert ("layers.0", "backward") in gathers
        assert [phase for name, phase in gathers if name == "embed"] == ["forward"]

    run_ranks(body, 2)


@pytest.mark.ranks
def test_a_hook_on_the_sums_can_reduce_over_replicas_that_the_mesh_does_not_know():
    def body(rank):
        whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "dp_shard"))
        model, dense = shard_each(stack(), whole["dp_shard"]), stack()
        group, sums = whole.get_group("replicas"), []

        def over_replicas(total):
            dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
            sums.append(total.double().sum())

        for module in (model, *model):
            module.set_all_reduce_hook(over_replicas)
            module.set_reduce_scatter_divide_factor(4.0)  # the older name
        expected = gradients_of(dense, 4, lambda m, r: m(batch(r)).square().mean())
        model(batch(rank)).square().mean().backward()
        assert_same(full_gradients(model), expected)
        # The hook gets sums; they are divided afterwards.
        found = sum(p.grad.to_local().double().sum() for p in model.parameters())
        torch.testing.assert_close(sum(sums), 4 * found)

    run_ranks(body, 4)


@pytest.mark.ranks
def test_the_next_forward_waits_once_for_the_event_after_the_optimizer():
    class Event:
        waited = 0

        def wait(self):
            self.waited += 1

    def body(rank):
        model = shard_each(stack(), flat(2))
        event = Event()
        model.set_post_optim_event(event)
        for _ in range(2):
            model(batch(rank)).sum().backward()
        assert event.waited == 1

    run_ranks(body, 2)


class Experts(nn.Module):
    """Each rank uses the experts that its data asks for, in the order in which it asks."""

    def __init__(self, how="plain"):
        super().__init__()
        torch.manual_seed(2)
        self.how = how
        self.first = nn.Linear(6, 6)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.last = nn.Linear(6, 6)

    def forward(self, x, chosen):
        x = torch.tanh(self.first(x))
        for index in chosen:
            expert = self.experts[index]
            if self.how == "plain":
                x = x + torch.tanh(expert(x))
            else:
                x = x + torch.tanh(checkpoint(expert, x, use_reentrant=self.how == "reentrant"))
        return self.last(x)


@pytest.mark.ranks
@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)])
def test_units_that_only_some_ranks_use_count_as_zero_on_the_others(mesh_shape):
    world = torch.Size(mesh_shape).numel()
    # Nobody uses expert 2 in the first step; rank 1 uses none in the second.
    steps = [[(0, 1), (1,)] * 2, [(2, 0, 0), ()] * 2, [(1, 2), (2, 1)] * 2]
    ways = itertools.product(("plain", "saved", "reentrant"), (True, False))
    if world == 4:  # replicas add one reduction of the sums, whichever way they came about
        ways = (("plain", True), ("saved", False))
    ways = tuple(ways)

    def body(rank):
        names = ("dp_replicate", "dp_shard")[-len(mesh_shape) :]
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
        for how, reshard in ways:
            model, dense = Experts(how), Experts()
            units = (model.first, *model.experts, model.last, model)
            for module in units:
                fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
            for expert in model.experts:
                expert.set_reduce_scatter_unused_params(True)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for chosen in steps:
                with torch.no_grad():  # leaves nothing behind that ranks could differ in
                    model(batch(rank), chosen[rank])
                dense.zero_grad()
                for other in range(world):
                    (dense(batch(other), chosen[other]).square().mean() / world).backward()
                expected = {name: p.grad for name, p in dense.named_parameters()}
                model.zero_grad()
                model(batch(rank), chosen[rank]).square().mean().backward()
                assert_same(
                    full_gradients(model),
                    {n: torch.zeros_like(p) if expected[n] is None else expected[n]
                     for n, p in dense.named_parameters()},
                )  # fmt: skip
                assert all(isinstance(p, DTensor) for p in model.parameters())
                optimizer.step()
                with torch.no_grad():
                    for parameter in dense.parameters():
                        if parameter.grad is not None:
                            parameter.sub_(parameter.grad, alpha=0.1)

    run_ranks(body, world, timeout=240)


class Scaled(nn.Module):
    """A 0-dimensional parameter beside others."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.tensor(2.0))
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.a * (self.w * x).sum()


@pytest.mark.ranks
def test_a_0_dimensional_parameter_is_held_by_every_rank_and_trained():
    def body(rank):
        meshes = [flat(4), init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "dp_shard"))]
        for mesh in meshes:
            for policy in ("per_parameter", "shared_buffer"):
                model = fully_shard(Scaled(), mesh=mesh, comm_policy=policy)
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
                x = torch.full((4,), 2.0 * rank / 3)  # 1 on average
                for micro_step in range(2):
                    model.set_requires_gradient_sync(micro_step == 1)
                    model(x).backward()
                found = full_gradients(model)
                assert found["a"].shape == ()
                assert found["a"].item() == pytest.approx(8)
                torch.testing.assert_close(found["w"], torch.full((4,), 4.0))
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
                norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
                assert norm.item() == pytest.approx((64 + 4 * 16) ** 0.5)
                optimizer.step()
                assert full_parameters(model)["a"].item() == pytest.approx(1.9)
                other = fully_shard(Scaled(), mesh=mesh, comm_policy=policy)
                other.load_state_dict(model.state_dict())
                assert full_parameters(other)["a"].item() == pytest.approx(1.9)
                assert other(torch.ones(4)).item() == pytest.approx(1.9 * 4 * 0.9)

    run_ranks(body, 4)


@pytest.mark.ranks
def test_compiled_layers_compute_and_differentiate_like_dense_ones():
    def body(rank):
        model, dense = stack(2), stack(2)
        graphs = []

        def counting(graph, inputs):
            graphs.append(graph)
            return graph.forward

        for layer in model:
            layer.compile(backend=counting)
        shard_each(model, flat(2), reshard_after_forward=True)
        for step in range(2):
            dense.zero_grad(), model.zero_grad()
            expected = gradients_of(dense, 2, lambda m, r, s=step: m(batch(r, s)).square().mean())
            model(batch(rank, step)).square().mean().backward()
            assert_same(full_gradients(model), expected)
        assert graphs

    run_ranks(body, 2, timeout=240)


@pytest.mark.ranks
def test_a_model_that_is_dropped_is_freed_with_its_memory():
    def body(rank):
        model = shard_each(stack(), flat(2))
        for _ in range(2):
            model(batch(rank)).square().mean().backward()
        unit = fully_shard.state(model[0])
        held = [model, unit, unit.buckets[0], model[0][0].weight, unit.parameters[0].full]
        gone = [weakref.ref(each) for each in held if each is not None]
        loss = model(batch(rank)).square().mean()
        del model, unit, held
        # The graph keeps what its backward needs.
        loss.backward()
        del loss
        gc.collect()
        assert [each() for each in gone] == [None] * len(gone)

    run_ranks(body, 2)
