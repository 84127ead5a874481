"""The sharded model computes what the dense one does, whatever it is made of."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy as TorchOffload
from torch.distributed.fsdp import DataParallelMeshDims
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import hp_fsdp
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


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Token ids in, so that no input requires a gradient."""

    def __init__(self, width: int = 8, vocabulary: int = 11, depth: int = 3, tied: bool = False):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def seeded(make):
    def made():
        torch.manual_seed(3)
        return make()

    return made


def token_loss(model, ids):
    logits = model(ids)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def square_loss(model, x):
    return model(x).square().mean()


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


def meshes(world):
    """One axis, and two where they fit."""
    found = [init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))]
    if world == 4:
        names = ("dp_replicate", "dp_shard")
        found.append(init_device_mesh("cpu", (2, 2), mesh_dim_names=names))
    return found


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

    run_ranks(body, world, timeout=120)


# -- models that use their parameters in unusual ways ---------------------------------------------


class Twice(nn.Module):
    """The same layer twice, the second time on the first's result."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)

    def forward(self, x):
        return self.last(self.layer(torch.tanh(self.layer(x))))


class Lora(nn.Module):
    """A frozen base beside trainable adapters, in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.a = nn.Linear(8, 2, bias=False)
        self.b = nn.Linear(2, 8, bias=False)

    def forward(self, x):
        return torch.tanh(self.base(x) + self.b(self.a(x)))


class FrozenAfterTrainable(nn.Module):
    """The frozen layer is still needed in backward when the trainable bias is long done."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, x):
        return self.frozen(torch.tanh(self.frozen(x))) + self.bias


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)

    def forward(self, x):
        return self.used(x)


class Tuple(nn.Module):
    """Several outputs in a nested structure, of which the loss uses two."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x, *, scale):
        return {"a": self.first(x) * scale, "rest": (self.second(x), x.sum())}


class Stack(nn.Module):
    """Layers in sequence, checkpointed in one of several ways."""

    def __init__(self, layer, depth=2, how="plain"):
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(depth))
        self.how = how

    def segment(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x):
        if self.how == "plain":
            return self.segment(x)
        kind, reentrant = self.how.split()
        if kind == "whole":
            return checkpoint(self.segment, x, use_reentrant=reentrant == "reentrant")
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=reentrant == "reentrant")
        return x


class Switch(nn.Module):
    """Uses one of its branches, chosen by the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.last = nn.Linear(8, 8)

    def forward(self, x, branch):
        return self.last(self.branches[branch](x))


def each_child(model, mesh):
    for child in model.children():
        if not isinstance(child, nn.ModuleList):
            fully_shard(child, mesh=mesh)
        else:
            for grandchild in child:
                fully_shard(grandchild, mesh=mesh)
    fully_shard(model, mesh=mesh)


class PartlyCheckpointed(nn.Module):
    """A unit that checkpoints a layer of its own, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        for _ in range(2):
            x = torch.tanh(checkpoint(self.layer, x, use_reentrant=True))
        return x * self.scale


class FrozenBehindAUnit(nn.Module):
    """The root's trainable bias is done before its frozen weight has served the inner unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.frozen = nn.Parameter(torch.randn(8, 8), requires_grad=False)
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, x):
        return self.first(x) @ self.frozen + self.bias


class ReusedInCheckpoints(nn.Module):
    """The root's weight gets a gradient from two backwards inside the outer one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(lambda y: torch.tanh(y @ self.weight), x, use_reentrant=True)
        return x


def one_unit(model, mesh):
    fully_shard(model, mesh=mesh)


def check_backward(make, shard, run, world, rank, *, passes=2, zero_is_none=False):
    """`run(model, rank, scale)` does forwards and backwards; the dense model does all ranks'."""
    model, dense = seeded(make)(), seeded(make)()
    shard(model)
    for _ in range(passes):
        run(model, rank, 1.0)
        for other in range(world):
            run(dense, other, 1.0 / world)
        expected = {name: p.grad for name, p in dense.named_parameters()}
        assert_same(full_gradients(model), expected, zero_is_none=zero_is_none)
        for parameter in model.parameters():
            assert isinstance(parameter, hp_dtensor_type()), "a gathered parameter was left behind"
        model.zero_grad()
        dense.zero_grad()


def hp_dtensor_type():
    from hp_dtensor import DTensor

    return DTensor


def data(rank, width=8, seed=0, requires_grad=False):
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(3, width, generator=generator).requires_grad_(requires_grad)


def simple(model, rank, scale, requires_grad=False):
    (model(data(rank, requires_grad=requires_grad)).square().mean() * scale).backward()


def with_input_gradient(model, rank, scale):
    simple(model, rank, scale, requires_grad=True)


def two_forwards(model, rank, scale):
    first = model(data(rank)).square().mean()
    second = model(data(rank, seed=1)).sin().sum()
    (first * scale).backward()
    (second * scale).backward()


def two_forwards_together(model, rank, scale):
    ((model(data(rank)) * model(data(rank))).sum() * scale).backward()


def twice_through_the_graph(model, rank, scale):
    loss = model(data(rank)).square().mean() * scale
    loss.backward(retain_graph=True)
    loss.backward()


def after_no_grad(model, rank, scale):
    with torch.no_grad():
        model(data(rank, seed=2))
    with torch.inference_mode():
        model(data(rank, seed=3))
    simple(model, rank, scale)


def nested_outputs(model, rank, scale):
    found = model(data(rank), scale=2.0)
    ((found["a"].sum() + found["rest"][0].square().sum()) * scale).backward()


CHECKPOINTING = [f"{kind} {how}" for kind in ("each", "whole") for how in ("reentrant", "saved")]
CASES = {
    "twice": (Twice, [simple, with_input_gradient, two_forwards, two_forwards_together]),
    "lora": (lambda: Stack(Lora), [simple, with_input_gradient, two_forwards_together]),
    "frozen after trainable": (
        lambda: Stack(FrozenAfterTrainable),
        [simple, with_input_gradient, two_forwards_together],
    ),
    "frozen unit": (
        lambda: nn.Sequential(
            nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)
        ),
        [simple, two_forwards_together, twice_through_the_graph],
    ),
    "plain": (
        lambda: Stack(lambda: Block(8)),
        [twice_through_the_graph, after_no_grad, two_forwards],
    ),
    "nested outputs": (Tuple, [nested_outputs]),
    **{
        f"checkpoint {how}": (
            lambda how=how: Stack(lambda: Block(8), how=how),
            # Reentrant checkpointing needs an input that requires a gradient.
            [with_input_gradient, two_forwards_together]
            if how.endswith("saved")
            else [with_input_gradient],
        )
        for how in CHECKPOINTING
    },
    "frozen behind a unit": (FrozenBehindAUnit, [simple]),
    "reused in checkpoints": (ReusedInCheckpoints, [simple]),
    "checkpoint inside": (lambda: Stack(PartlyCheckpointed), [with_input_gradient]),
    "checkpoint frozen": (
        lambda: Stack(Lora, how="each saved"),
        [with_input_gradient, simple, two_forwards_together],
    ),
}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world", "wrappings"),
    [
        (2, (one_unit, each_child)),
        (4, (each_child,)),
        pytest.param(4, (one_unit,), marks=pytest.mark.slow),
    ],
)
def test_gradients_equal_the_dense_ones_however_parameters_are_used(world, wrappings):
    def body(rank):
        mesh = meshes(world)[-1]
        for name, (make, runs) in CASES.items():
            for run in runs:
                for shard in wrappings:
                    try:
                        check_backward(make, lambda m, s=shard: s(m, mesh), run, world, rank)
                    except BaseException as error:
                        error.add_note(f"case {name}, {run.__name__}, {shard.__name__}")
                        raise

    run_ranks(body, world, timeout=120)


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
        assert isinstance(model.blocks[0].up.weight, hp_dtensor_type())
        buffer = block._hp_fsdp_unit.buckets[0]._buffer
        assert buffer.is_held
        block.reshard()
        assert not buffer.is_held
        assert isinstance(block.up.weight, hp_dtensor_type())

    run_ranks(body, 2)


@pytest.mark.ranks
def test_a_sharded_module_is_still_what_it_was():
    def body(rank):
        model = fully_shard(Net(), mesh=meshes(2)[0])
        assert isinstance(model, hp_fsdp.FSDPModule)
        assert isinstance(model, Net)
        assert type(model).__name__ == "FSDPNet"
        assert fully_shard([nn.Linear(2, 2)], mesh=meshes(2)[0])[0].in_features == 2
        other = fully_shard(Net(), mesh=meshes(2)[0])
        assert type(other) is type(model)
        with pytest.raises(hp_fsdp.UsageError, match="state_dict"):
            copy.deepcopy(model)

    run_ranks(body, 2)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_what_cannot_be_sharded_is_refused_by_name():
    def body(rank):
        mesh = meshes(4)[0]

        def refuses(match, module, **kwargs):
            with pytest.raises((hp_fsdp.ShardingError, hp_fsdp.NotAvailableError), match=match):
                fully_shard(module, **{"mesh": mesh, **kwargs})

        outer = Net()
        fully_shard(outer, mesh=mesh)
        refuses("'norm.weight'.*submodules before", outer.blocks[0])
        refuses("already sharded", outer)
        tied = Net(tied=True)
        fully_shard(tied.embed, mesh=mesh)
        refuses("'weight'.*fully_shard\\(\\[first, second\\]\\)", tied.head)
        left_over = Net(tied=True)
        fully_shard(left_over.embed, mesh=mesh)
        fully_shard(left_over, mesh=mesh, ignored_params={left_over.head.weight})
        with pytest.raises(hp_fsdp.UsageError, match=r"'head.weight' was tied"):
            left_over(torch.ones(1, 2, dtype=torch.long))
        refuses("empty list", [])
        refuses("ModuleList", nn.ModuleList([nn.Linear(2, 2)]))
        linear = nn.Linear(2, 2)
        refuses("contains it", [nn.Sequential(linear), linear])
        scalar = nn.Linear(2, 2)
        scalar.scale = nn.Parameter(torch.tensor(1.0))
        refuses("has no dim 0", scalar, shard_placement_fn=lambda p: Shard(0))
        refuses("has no dim 3", nn.Linear(2, 2), shard_placement_fn=lambda p: Shard(3))
        refuses("shard_placement_fn returned", nn.Linear(2, 2), shard_placement_fn=lambda p: 0)
        refuses("factor of 4", nn.Linear(2, 2), reshard_after_forward=3)
        refuses("a bool or an int", nn.Linear(2, 2), reshard_after_forward="yes")
        refuses("import it from hp_fsdp", nn.Linear(2, 2), offload_policy=TorchOffload())
        refuses("must be a torch.distributed.device_mesh.DeviceMesh", nn.Linear(2, 2), mesh=4)
        refuses(
            "import MixedPrecisionPolicy from hp_fsdp", nn.Linear(2, 2), mp_policy=TorchPolicy()
        )
        refuses("MixedPrecisionPolicy, found builtins.NoneType", nn.Linear(2, 2), mp_policy=None)
        refuses("ignored_params must be a set", nn.Linear(2, 2), ignored_params={"weight"})
        for factor in (0, float("nan"), float("inf"), "2"):
            with pytest.raises(hp_fsdp.ShardingError, match="must be a positive number"):
                outer.set_gradient_divide_factor(factor)
        for depth in (-1, 1.5, "1"):
            with pytest.raises(hp_fsdp.ShardingError, match="integers >= 0"):
                outer.set_prefetch_depth(depth)
        refuses("mesh_dim_names", nn.Linear(2, 2), mesh=init_device_mesh("cpu", (2, 2)))
        cube = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("a", "b", "c"))
        refuses("one axis", nn.Linear(2, 2), mesh=cube)
        with pytest.raises(hp_fsdp.NotAvailableError, match="dp_mesh_dims"):
            fully_shard(nn.Linear(2, 2), dp_mesh_dims=DataParallelMeshDims(shard="dp"))
        with torch.device("meta"):
            meta = fully_shard(nn.Linear(4, 4), mesh=mesh)
        with pytest.raises(hp_fsdp.ShardingError, match=r"weight.*meta device"):
            meta(torch.ones(1, 4))
        with pytest.raises(hp_fsdp.NotAvailableError, match="set_all_reduce_hook"):
            outer.set_all_reduce_hook(print, stream=object())
        with pytest.raises(hp_fsdp.ShardingError, match="needs a function"):
            outer.set_all_reduce_hook(None)
        with pytest.raises(hp_fsdp.ShardingError, match="param_dtype"):
            MixedPrecisionPolicy(param_dtype=torch.int32)

    run_ranks(body, 4)


@pytest.mark.ranks
def test_a_loss_that_bypasses_the_outputs_is_refused():
    class Leaky(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            self.aside = self.layer(x).sum()
            return x.detach()

    def body(rank):
        model = nn.Sequential(Leaky())
        fully_shard(model[0], mesh=meshes(2)[0], reshard_after_forward=True)
        model(torch.ones(1, 4))
        with pytest.raises(hp_fsdp.UsageError, match=r"without passing\s+through an output"):
            model[0].aside.backward()

    run_ranks(body, 2)


@pytest.mark.ranks
def test_ignored_parameters_and_the_default_mesh():
    def body(rank):
        model = nn.Linear(4, 4)
        fully_shard(model, ignored_params={model.bias})
        assert type(model.bias) is nn.Parameter
        assert model.weight.layout.abstract_mesh.axis_names == ("dp_shard",)
        model(torch.full((1, 4), dist.get_rank() + 1.0)).sum().backward()
        assert torch.equal(full_gradients(model)["weight"], torch.full((4, 4), 1.5))
        assert torch.equal(model.bias.grad, torch.ones(4))

    run_ranks(body, 2)


REFUSED = {
    "set_custom_all_gather": None,
    "set_custom_reduce_scatter": None,
    "set_allocate_memory_from_process_group_for_comm": True,
    "set_symm_mem_for_comm": "NCCL",
    "set_separate_reduce_scatter_group": True,
    "set_reduce_scatter_max_input_buffers": 2,
}


@pytest.mark.parametrize("method", REFUSED)
def test_a_method_of_fsdp2_that_is_not_available_says_so(method):
    with pytest.raises(hp_fsdp.NotAvailableError, match=rf"FSDPModule\.{method} is not available"):
        getattr(hp_fsdp.FSDPModule(), method)(REFUSED[method])


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
