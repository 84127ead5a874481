"""Random models, wrappings, meshes and ways to train agree with the dense model; so do the losses
of PyTorch's FSDP2."""

import pytest
import torch
import torch.distributed.fsdp as fsdp2
from attrs import frozen
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from hp_fsdp import (
    CommPolicy,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from hp_fsdp.testing import assert_same, full_gradients
from hp_platform.links import Link
from hp_platform.testing import run_ranks


@frozen
class Combination:
    """One way to build, shard and train a model."""

    widths: tuple[int, ...]  # widths[i] -> widths[i + 1] is layer i
    units: tuple[bool, ...]  # which layers are units of their own
    frozen: tuple[bool, ...]
    repeated: tuple[bool, ...]  # which square layers are called twice
    checkpointing: str  # "none", "saved", "reentrant"
    replicas: bool
    reshard: bool | int | None
    precision: str
    offload: bool
    scalar: bool  # a 0-dimensional parameter beside the others
    last_dim: bool  # shard the last dim instead of the first
    accumulation: str
    depth: int
    comm_policy: object


# The link makes anything below 128 bytes travel with others.
POLICIES = ("per_parameter", "shared_buffer", CommPolicy("auto", Link(1e-6, 1.6e7)))
ACCUMULATION = ("every time", "fast tier until the last", "nothing until the last")


@st.composite
def combinations(draw):
    layers = draw(st.integers(1, 4))
    flags = st.lists(st.booleans(), min_size=layers, max_size=layers).map(tuple)
    return Combination(
        widths=tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 5, 8]), min_size=layers + 1,
                                   max_size=layers + 1))),
        units=draw(flags),
        frozen=draw(flags),
        repeated=draw(flags),
        checkpointing=draw(st.sampled_from(["none", "saved", "reentrant"])),
        replicas=draw(st.booleans()),
        reshard=draw(st.sampled_from([None, True, False, 2])),
        precision=draw(st.sampled_from(["own", "own", "fp64", "bf16"])),
        offload=draw(st.booleans()),
        scalar=draw(st.booleans()),
        last_dim=draw(st.booleans()),
        accumulation=draw(st.sampled_from(ACCUMULATION)),
        depth=draw(st.integers(0, 2)),
        comm_policy=draw(st.sampled_from(POLICIES)),
    )  # fmt: skip


class Drawn(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList(
            nn.Linear(a, b, bias=i % 2 == 0)
            for i, (a, b) in enumerate(zip(how.widths, how.widths[1:]))
        )
        for layer, frozen_ in zip(self.layers, how.frozen):
            layer.requires_grad_(not frozen_)
        self.scale = nn.Parameter(torch.randn(() if how.scalar else how.widths[-1]))

    def forward(self, x):
        for layer, repeated in zip(self.layers, self.how.repeated):
            x = torch.tanh(self.call(layer, x))
            if repeated and layer.in_features == layer.out_features:
                x = torch.tanh(self.call(layer, x))
        return x * self.scale

    def call(self, layer, x):
        if self.how.checkpointing == "none":
            return layer(x)
        return checkpoint(layer, x, use_reentrant=self.how.checkpointing == "reentrant")


def batch(how, rank, micro_step):
    generator = torch.Generator().manual_seed(10 * rank + micro_step)
    x = torch.randn(2, how.widths[0], generator=generator)
    # Reentrant checkpointing needs an input that requires a gradient.
    return x.requires_grad_(how.checkpointing == "reentrant")


PRECISION = {
    "own": MixedPrecisionPolicy(),
    "fp64": MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


def last_dim(parameter):
    return Shard(parameter.ndim - 1) if parameter.ndim else None


def agrees(how, world, rank):
    def made():
        torch.manual_seed(2)
        return Drawn(how)

    if how.replicas and world == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    else:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
    model, dense = made(), made()
    options = {
        "mesh": mesh,
        "reshard_after_forward": how.reshard,
        "comm_policy": how.comm_policy,
        "shard_placement_fn": last_dim if how.last_dim else None,
        "mp_policy": PRECISION[how.precision],
        "offload_policy": CPUOffloadPolicy() if how.offload else OffloadPolicy(),
    }
    if how.reshard == 2 and mesh.size() != 4:
        options["reshard_after_forward"] = True
    wide = how.precision == "fp64"
    if wide:
        dense.double()
    # What bf16 rounds away is a few parts in a thousand of every product.
    close = {"rtol": 0.1, "atol": 0.05} if how.precision == "bf16" else {}

    def of(*args):
        x = batch(*args)
        return x.detach().double().requires_grad_(x.requires_grad) if wide else x

    for layer, unit in zip(model.layers, how.units):
        if unit:
            fully_shard(layer, **options)
    fully_shard(model, **options)
    model.set_prefetch_depth(how.depth, how.depth)
    for _ in range(2):
        for micro_step in range(2):
            last = micro_step == 1
            if how.accumulation == "nothing until the last":
                model.set_requires_gradient_sync(last)
            elif how.accumulation == "fast tier until the last":
                model.set_requires_all_reduce(last)
            model(batch(how, rank, micro_step)).float().square().mean().backward()
            for other in range(world):
                (dense(of(how, other, micro_step)).square().mean() / world).backward()
        expected = {
            name: None if p.grad is None else p.grad.float() for name, p in dense.named_parameters()
        }
        assert_same(full_gradients(model), expected, **close)
        model.zero_grad()
        dense.zero_grad()


def agree(drawn, world):
    def body(rank):
        for how in drawn:
            try:
                agrees(how, world, rank)
            except BaseException as error:
                error.add_note(repr(how))
                raise

    run_ranks(body, world, timeout=600)


DRAWN_ONCE = settings(
    max_examples=1,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)


def distinct(count):
    return given(drawn=st.lists(combinations(), min_size=count, max_size=count, unique=True))


@pytest.mark.ranks
@DRAWN_ONCE
@distinct(8)
def test_random_combinations_have_the_gradients_of_the_dense_model(drawn):
    agree(drawn, 4)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@DRAWN_ONCE
@distinct(100)
def test_a_hundred_random_combinations_have_the_gradients_of_the_dense_model(world, drawn):
    agree(drawn, world)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(8, 16)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def losses(shard, mesh, rank, steps=5, **options):
    torch.manual_seed(0)
    model = Net()
    for layer in model.layers:
        shard(layer, mesh=mesh, **options)
    shard(model, mesh=mesh, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = []
    for step in range(steps):
        ids = torch.randint(16, (2, 6), generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.ranks
def test_losses_equal_those_of_pytorch_fsdp2():
    def body(rank):
        names = ("dp_replicate", "dp_shard")
        for mesh in (
            init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",)),
            init_device_mesh("cpu", (2, 2), mesh_dim_names=names),
        ):
            ours = losses(fully_shard, mesh, rank)
            theirs = losses(fsdp2.fully_shard, mesh, rank)
            assert len(set(ours)) == len(ours)
            assert ours == pytest.approx(theirs, rel=1e-5)

    run_ranks(body, 4)
