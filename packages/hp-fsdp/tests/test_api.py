"""The sharded model computes what the dense one does, whatever it is made of."""

import itertools

import pytest
import torch
import torch.distributed as dist
from small_networks import Block, Net, Stack, Switch, data, each_child, meshes, seeded, square_loss
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import hp_fsdp
from hp_dtensor import DTensor
from hp_fsdp import MixedPrecisionPolicy, fully_shard
from hp_fsdp.testing import (
    assert_same,
    assert_trains_like_dense,
    full_gradients,
    full_parameters,
)
from hp_platform import ledger
from hp_platform.testing import run_ranks

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
}


def token_loss(model, ids):
    logits = model(ids)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def token_batches(steps, ranks, vocabulary=11):
    generator = torch.Generator().manual_seed(5)
    return [
        [torch.randint(vocabulary, (2, 6), generator=generator) for _ in range(ranks)]
        for _ in range(steps)
    ]


def vector_batches(steps, ranks, width):
    generator = torch.Generator().manual_seed(7)
    return [
        [torch.randn(3, width, generator=generator) for _ in range(ranks)] for _ in range(steps)
    ]


def shard_blocks(model, **kwargs):
    for block in model.blocks:
        fully_shard(block, **kwargs)
    return fully_shard(model, **kwargs)


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 4])
def test_gradients_and_three_optimizer_steps_equal_the_dense_model(world):
    cases = [("sgd", True, None), ("adamw", False, None), ("sgd", False, False)]

    def body(rank):
        mesh = meshes(world)[-1]
        for name, tied, reshard in cases:
            assert_trains_like_dense(
                seeded(lambda tied=tied: Net(depth=2, tied=tied)),
                lambda m, r=reshard: shard_blocks(m, mesh=mesh, reshard_after_forward=r),
                token_batches(3, world),
                rank,
                token_loss,
                OPTIMIZERS[name],
                rtol=1e-4 if name == "adamw" else 1e-5,
                atol=1e-5,
            )

    run_ranks(body, world, timeout=240)


# -- uneven shards, other dims, precision ---------------------------------------------------------


@pytest.mark.ranks
def test_dims_smaller_than_the_number_of_ranks_leave_some_without_rows():
    def body(rank):
        model = fully_shard(nn.Linear(4, 2), mesh=meshes(4)[0])
        rows = [1, 1, 0, 0][rank]
        assert model.weight.to_local().shape == (rows, 4)
        assert model.bias.to_local().shape == (rows,)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.full((1, 4), rank + 1.0)).sum().backward()
        assert model.weight.grad.to_local().shape == (rows, 4)
        assert torch.equal(full_gradients(model)["weight"], torch.full((2, 4), 2.5))
        before = full_parameters(model)
        optimizer.step()
        after = full_parameters(model)
        assert all((before[name] != after[name]).all() for name in before)

    run_ranks(body, 4)


class Odd(nn.Module):
    """Sizes that no number of ranks divides, one-row and many-dimensional parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.conv = nn.Conv1d(7, 3, 3, padding=1)
        self.scale = nn.Parameter(torch.randn(1))
        self.last = nn.Linear(3, 1)

    def forward(self, x):
        x = self.first(x).t().unsqueeze(0)
        return self.last(self.conv(x).squeeze(0).t() * self.scale)


@pytest.mark.ranks
@pytest.mark.parametrize("world", [1, 2, 4])
def test_uneven_sizes_and_other_dims_train_like_the_dense_model(world):
    def body(rank):
        for mesh in meshes(world):
            for placement in (None, lambda p: Shard(p.ndim - 1), lambda p: Shard(-1)):
                assert_trains_like_dense(
                    seeded(Odd),
                    lambda m, mesh=mesh, p=placement: fully_shard(
                        m, mesh=mesh, shard_placement_fn=p
                    ),
                    vector_batches(3, world, 5),
                    rank,
                    square_loss,
                    OPTIMIZERS["adamw"],
                    rtol=1e-4,
                )

    run_ranks(body, world)


@pytest.mark.ranks
def test_bf16_computation_with_fp32_reduction_keeps_fp32_master_weights():
    def body(rank):
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
        )
        x = data(rank, requires_grad=True)
        for mesh in meshes(4):
            seen = []
            model = seeded(lambda: Stack(lambda: Block(8)))()
            dense = [seeded(lambda: Stack(lambda: Block(8)))().bfloat16() for _ in range(4)]
            model.layers[0].up.register_forward_hook(
                lambda m, args, out, seen=seen: seen.extend([m.weight.dtype, args[0].dtype])
            )
            each_child_with(model, mesh, policy)
            out = model(x)
            assert seen == [torch.bfloat16, torch.bfloat16]
            assert out.dtype == torch.float32
            out.square().mean().backward()
            # bf16 gradients of every rank, computed alone, summed in fp32.
            for other, single in enumerate(dense):
                single(data(other).bfloat16()).float().square().mean().backward()
            names = dict(model.named_parameters())
            for name, gradient in full_gradients(model).items():
                assert names[name].dtype == gradient.dtype == torch.float32
                each = [dict(single.named_parameters())[name].grad.float() for single in dense]
                torch.testing.assert_close(
                    gradient, torch.stack(each).mean(0), rtol=1e-6, atol=1e-7
                )

    run_ranks(body, 4)


def each_child_with(model, mesh, policy):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


@pytest.mark.ranks
def test_parameters_of_several_types_share_a_unit():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.low = nn.Linear(8, 8).bfloat16()
            self.high = nn.Linear(8, 8)

        def forward(self, x):
            return self.high(self.low(x.bfloat16()).float())

    def body(rank):
        mesh = meshes(4)[1]
        model, dense = seeded(Mixed)(), seeded(Mixed)()
        fully_shard(model, mesh=mesh)
        for _ in range(2):
            square_loss(model, data(0)).backward()
            square_loss(dense, data(0)).backward()
        assert_same(full_gradients(model), {n: p.grad for n, p in dense.named_parameters()})

    run_ranks(body, 4)


# -- modules ---------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_a_list_of_modules_is_one_unit_that_keeps_tied_weights_tied():
    def body(rank):
        def shard(model):
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard([model.embed, model.head], mesh=mesh)
            fully_shard(model, mesh=mesh)
            assert model.embed.weight is model.head.weight
            assert len(list(model.parameters())) == 1 + 3 * 5

        mesh = meshes(4)[1]
        for tied in (True,):
            assert_trains_like_dense(
                seeded(lambda tied=tied: Net(tied=tied, vocabulary=5)),
                shard,
                token_batches(2, 4, vocabulary=5),
                rank,
                token_loss,
                OPTIMIZERS["sgd"],
                atol=1e-5,
            )

    run_ranks(body, 4)


@pytest.mark.ranks
def test_conditionally_used_units_and_two_models_at_once():
    def body(rank):
        mesh = meshes(2)[0]
        models = [seeded(Switch)() for _ in range(2)]
        dense = [seeded(Switch)() for _ in range(2)]
        for model in models:
            each_child(model, mesh)
        for branches in ((0, 1), (1, 0), (1, 1)):
            losses = [m(data(rank), b).square().mean() for m, b in zip(models, branches)]
            for loss in losses:
                loss.backward()
            for single, branch in zip(dense, branches):
                for other in range(2):
                    (single(data(other), branch).square().mean() / 2).backward()
            for model, single in zip(models, dense):
                expected = {n: p.grad for n, p in single.named_parameters()}
                assert_same(full_gradients(model), expected)

    run_ranks(body, 2)


@pytest.mark.ranks
def test_an_optimizer_built_after_a_no_grad_forward_trains_the_shards():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x):
            return x * self.scale

    def body(rank):
        model = fully_shard(Scale(), mesh=meshes(2)[0])
        with torch.no_grad():
            model(torch.ones(8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(8)).sum().backward()
        optimizer.step()
        torch.testing.assert_close(full_parameters(model)["scale"], torch.full((8,), 0.9))
        # The next forward uses the new values, although a no-grad one ran before the step.
        torch.testing.assert_close(model(torch.ones(8)).detach(), torch.full((8,), 0.9))

    run_ranks(body, 2)


@pytest.mark.ranks
def test_values_written_between_forwards_are_gathered_again():
    def body(rank):
        model = fully_shard(
            nn.Linear(4, 2, bias=False), mesh=meshes(2)[0], reshard_after_forward=False
        )
        with torch.no_grad():
            model(torch.ones(1, 4))
            model.reshard()
            model(torch.ones(1, 4))
            shard = next(p for p in model._hp_fsdp_unit.parameters)
            shard.sharded.fill_(3.0)
            assert torch.equal(model(torch.ones(1, 4)), torch.full((1, 2), 12.0))

    run_ranks(body, 2)


@pytest.mark.ranks
def test_other_methods_compute_once_they_are_registered_and_say_how_before():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x)

        def encode(self, x):
            return torch.tanh(self.layer(x))

    def body(rank):
        model, dense = seeded(Encoder)(), seeded(Encoder)()
        fully_shard(model, mesh=meshes(2)[0])
        x = torch.ones(2, 4)
        for wrong in (model.forward, model.encode):
            with pytest.raises(RuntimeError, match="register_fsdp_forward_method"):
                wrong(x)
        hp_fsdp.register_fsdp_forward_method(model, "encode")
        hp_fsdp.register_fsdp_forward_method(dense, "encode")
        model.encode(x).sum().backward()
        dense.encode(x).sum().backward()
        assert_same(full_gradients(model), {n: p.grad for n, p in dense.named_parameters()})

    run_ranks(body, 2)


@pytest.mark.ranks
def test_unshard_gathers_and_reshard_releases_what_it_says():
    def body(rank):
        model = seeded(Net)()
        shard_blocks(model, mesh=meshes(2)[0])
        reference = seeded(Net)()
        block = model.blocks[1]
        handle = block.unshard(async_op=True)
        handle.wait()
        assert type(block.up.weight) is nn.Parameter
        assert torch.equal(block.up.weight, reference.blocks[1].up.weight)
        assert isinstance(model.blocks[0].up.weight, DTensor)
        buffer = block._hp_fsdp_unit.buckets[0]._buffer
        assert buffer.is_held
        block.reshard()
        assert not buffer.is_held
        assert isinstance(block.up.weight, DTensor)

    run_ranks(body, 2)


class Penalty(torch.autograd.Function):
    """The sum of squares of a whole parameter or of a shard, whose gradient is a shard's."""

    @staticmethod
    def forward(ctx, parameter):
        ctx.save_for_backward(parameter)
        part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return part.square().sum()

    @staticmethod
    def backward(ctx, gradient):
        (parameter,) = ctx.saved_tensors
        return 2 * gradient.item() * parameter.detach()


@pytest.mark.ranks
def test_a_function_that_makes_a_plain_tensor_of_a_shard_adds_its_gradient():
    def body(rank):
        for comm_policy in ("per_parameter", "shared_buffer"):
            model, dense = (seeded(lambda: nn.Linear(8, 5))() for _ in range(2))
            fully_shard(model, mesh=meshes(2)[0], comm_policy=comm_policy)
            penalties = [Penalty.apply(parameter) for parameter in model.parameters()]
            square_loss(model, data(rank)).backward()
            sum(penalties).backward()  # a reduced gradient is there already
            for other in range(2):
                (square_loss(dense, data(other)) / 2).backward()
            sum(Penalty.apply(parameter) for parameter in dense.parameters()).backward()
            expected = {name: p.grad for name, p in dense.named_parameters()}
            assert_same(full_gradients(model), expected)

    run_ranks(body, 2)


@pytest.mark.ranks
def test_ignored_parameters_and_the_default_mesh():
    def body(rank):
        model = nn.Linear(4, 4)
        fully_shard(model, ignored_params={model.bias})
        assert type(model.bias) is nn.Parameter
        # As FSDP2's: a tensor that a program distributes by itself is on an equal mesh.
        assert model.weight.device_mesh == init_device_mesh("cpu", (2,))
        assert model.weight._spec.placements == (Shard(0),)
        assert model.weight._spec.shape == (4, 4)
        assert model.weight._local_tensor is model.weight.to_local()
        model(torch.full((1, 4), dist.get_rank() + 1.0)).sum().backward()
        assert torch.equal(full_gradients(model)["weight"], torch.full((4, 4), 1.5))
        assert torch.equal(model.bias.grad, torch.ones(4))

    run_ranks(body, 2)


@pytest.mark.ranks
def test_resharding_after_forward_and_backward_can_be_set():
    def check(when, recurse, mesh):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model[0], mesh=mesh, reshard_after_forward=True)
        fully_shard(model, mesh=mesh, reshard_after_forward=True)

        def found():
            loss = model(torch.ones(2, 4)).sum()
            if when == "forward":
                return [type(layer.weight) is nn.Parameter for layer in model]
            loss.backward()
            # The shards are shown between steps, so the next forward tells what is gathered.
            assert not any(type(layer.weight) is nn.Parameter for layer in model)
            with ledger() as log, torch.no_grad():
                model(torch.ones(2, 4))
            units = {r.origin.name for r in log.records if r.origin.phase == "forward"}
            return [name not in units for name in ("0", "root")]

        assert found() == [False, False]
        getattr(model, f"set_reshard_after_{when}")(False, recurse=recurse)
        assert found() == [recurse, True], (when, recurse)
        model.reshard(), model[0].reshard()
        getattr(model, f"set_reshard_after_{when}")(True)
        assert found() == [False, False]

    def body(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        for when, recurse in itertools.product(("forward", "backward"), (True, False)):
            check(when, recurse, mesh)

    run_ranks(body, 2)
