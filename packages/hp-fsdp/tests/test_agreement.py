"""Random models, wrappings, meshes and ways to train agree with the dense model; so do the losses
of PyTorch's FSDP2."""

import copy

import pytest
import torch
import torch.distributed.fsdp as fsdp2
from attrs import evolve, frozen
from drawn_model import Experts, Plain, Tensor, mesh_of, place, shard
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from hp_fsdp import (
    CommPolicy,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingError,
    UsageError,
    fully_shard,
)
from hp_fsdp.testing import assert_same, full_gradients, full_parameters
from hp_platform.links import Link
from hp_platform.testing import run_ranks


@frozen
class Combination:
    """One way to build, shard and train a model."""

    kinds: tuple[str, ...]  # what layer i is
    widths: tuple[int, ...]  # widths[i] -> widths[i + 1] is layer i
    sections: tuple[int, ...]  # of the inner dim of tensor-parallel layers
    experts: int
    units: tuple[bool, ...]  # which layers are units of their own
    frozen: tuple[bool, ...]
    repeated: tuple[bool, ...]  # which square layers are called twice
    checkpointing: str  # "none", "saved", "reentrant"
    mesh: tuple[str, ...]
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
# Model axes come last. Of the data axes the first replicates, if there are two.
MESHES = {
    1: (("dp_shard=1",), ("dp_replicate=1", "dp_shard=1")),
    2: (("dp_shard=2",), ("dp_replicate=2", "dp_shard=1"), ("dp_shard=1", "tp=2"),
        ("dp_shard=1", "ep=2")),
    4: (("dp_shard=4",), ("dp_replicate=2", "dp_shard=2"), ("dp_shard=2", "tp=2"),
        ("dp_shard=2", "ep=2"), ("dp_replicate=2", "dp_shard=1", "tp=2"),
        ("dp_replicate=2", "dp_shard=1", "ep=2"), ("dp_shard=1", "tp=4"), ("dp_shard=1", "ep=4"),
        ("dp_shard=1", "ep=2", "tp=2")),
}  # fmt: skip

# What a model axis is for: a model on it has at least one such layer.
KINDS = {"tp": "tensor", "ep": "experts"}


def tuples(values, size):
    return st.lists(values, min_size=size, max_size=size).map(tuple)


@st.composite
def combinations(draw, mesh):
    layers = draw(st.integers(1, 4))
    kinds = draw(
        st.lists(st.sampled_from(["plain", *KINDS.values()]), min_size=layers, max_size=layers)
    )
    for axis, kind in KINDS.items():
        if any(name.startswith(axis) for name in mesh) and kind not in kinds:
            kinds.append(kind)
    layers = len(kinds)
    flags = tuples(st.booleans(), layers)
    return Combination(
        kinds=tuple(kinds),
        widths=draw(tuples(st.sampled_from([1, 2, 3, 4, 5, 8]), layers + 1)),
        sections=draw(st.sampled_from([(6,), (5,), (1,), (4, 2, 2), (3, 5)])),
        experts=draw(st.integers(1, 5)),
        units=draw(flags),
        frozen=draw(flags),
        repeated=draw(flags),
        checkpointing=draw(st.sampled_from(["none", "saved", "reentrant"])),
        mesh=mesh,
        reshard=draw(st.sampled_from([None, True, False, 2])),
        precision=draw(st.sampled_from(["own", "own", "fp64", "bf16"])),
        offload=draw(st.booleans()),
        scalar=draw(st.booleans()),
        last_dim=draw(st.booleans()),
        accumulation=draw(st.sampled_from(ACCUMULATION)),
        depth=draw(st.integers(0, 2)),
        comm_policy=draw(st.sampled_from(POLICIES)),
    )


class Drawn(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how
        made = {
            "plain": lambda i, a, b: Plain(a, b, bias=i % 2 == 0),
            "tensor": lambda i, a, b: Tensor(a, b, how.sections),
            "experts": lambda i, a, b: Experts(a, b, how.experts),
        }
        self.layers = nn.ModuleList(
            made[kind](i, *how.widths[i : i + 2]) for i, kind in enumerate(how.kinds)
        )
        for layer, frozen_ in zip(self.layers, how.frozen):
            layer.requires_grad_(not frozen_)
        self.scale = nn.Parameter(torch.randn(() if how.scalar else how.widths[-1]))

    def distribute(self, mesh):
        for layer in self.layers:
            layer.distribute(mesh)
        place(self, mesh, {"scale": {}})

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = torch.tanh(self.call(layer, x))
            if self.how.repeated[index] and self.how.widths[index] == self.how.widths[index + 1]:
                x = torch.tanh(self.call(layer, x))
        return x * self.scale

    def call(self, layer, x):
        if self.how.checkpointing == "none":
            return layer(x)
        return checkpoint(layer, x, use_reentrant=self.how.checkpointing == "reentrant")


def batch(how, rank, step):
    generator = torch.Generator().manual_seed(10 * rank + step)
    x = torch.randn(3, how.widths[0], generator=generator)
    # Reentrant checkpointing needs an input that requires a gradient.
    return x.requires_grad_(how.checkpointing == "reentrant")


PRECISION = {
    "own": MixedPrecisionPolicy(),
    "fp64": MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


def last_dim(parameter):
    return Shard(parameter.ndim - 1) if parameter.ndim else None


def sharded(how, model, mesh):
    """`model` under `fully_shard` as drawn."""
    options = {
        "reshard_after_forward": how.reshard,
        "comm_policy": how.comm_policy,
        "shard_placement_fn": last_dim if how.last_dim else None,
        "mp_policy": PRECISION[how.precision],
        "offload_policy": CPUOffloadPolicy() if how.offload else OffloadPolicy(),
    }
    if how.reshard == 2 and "dp_shard=4" not in how.mesh:
        options["reshard_after_forward"] = True
    shard(model, mesh, how.units, **options)
    model.set_prefetch_depth(how.depth, how.depth)
    return model


def dense_outputs(how, dense, x):
    """What `dense` computes in the types in which the sharded model does."""
    if how.precision == "fp64":
        return dense(x.double())
    if how.precision == "bf16":
        rounded = {name: value.bfloat16() for name, value in dense.named_parameters()}
        return torch.func.functional_call(dense, rounded, (x.bfloat16(),)).float()
    return dense(x)


def tolerance(how, expected):
    """In bf16 an error is judged beside the largest gradient of the model. Sums over
    tensor-parallel ranks are rounded elsewhere than those of one process, and from there on.
    Where all are tiny, tanh is saturated, and what is left of them is rounding."""
    if how.precision != "bf16":
        return {}
    largest = max((float(g.abs().max()) for g in expected.values() if g is not None), default=0.0)
    cut = any(axis.startswith("tp") for axis in how.mesh)
    return {"rtol": 0.0, "atol": (0.08 if cut else 0.03) * max(largest, 0.01)}


def agrees(how, world, rank):
    def made(how=how):
        torch.manual_seed(2)
        return Drawn(how)

    mesh = mesh_of(*how.mesh)
    # Ranks of a tensor-parallel axis, which is the last, work on the same batch.
    alike = mesh["tp"].size() if "tp" in mesh.mesh_dim_names else 1
    model, dense = sharded(how, made(), mesh), made(evolve(how, checkpointing="none"))
    if how.precision == "fp64":
        dense.double()
    for step in range(2):
        for micro_step in range(2):
            last = micro_step == 1
            if how.accumulation == "nothing until the last":
                model.set_requires_gradient_sync(last)
            elif how.accumulation == "fast tier until the last":
                model.set_requires_all_reduce(last)
            number = 2 * step + micro_step
            model(batch(how, rank // alike, number)).float().square().mean().backward()
            for other in range(world // alike):
                outputs = dense_outputs(how, dense, batch(how, other, number).detach())
                (outputs.square().mean() * alike / world).backward()
        expected = {
            name: None if p.grad is None else p.grad.float() for name, p in dense.named_parameters()
        }
        assert_same(full_gradients(model), expected, **tolerance(how, expected))
        for trained in (model, dense):
            torch.optim.SGD(trained.parameters(), lr=0.1).step()
            trained.zero_grad()


def drawn_on(mesh, count, number):
    """Examples on one mesh, drawn here once so that all ranks run the same."""
    found = []

    # Other examples for every mesh. The first of all that Hypothesis draws is the simplest.
    @seed("".join(mesh) + number)
    @settings(
        max_examples=count + 1, database=None, deadline=None,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(combinations(mesh))
    def collect(how):
        found.append(how)

    collect()
    return found[1:]


def drawn(world, count, number):
    """Examples shared out between all meshes."""
    meshes = MESHES[world]
    shares = [len(range(index, count, len(meshes))) for index in range(len(meshes))]
    return [how for mesh, share in zip(meshes, shares) for how in drawn_on(mesh, share, number)]


def agree(world, count, number=""):
    examples = drawn(world, count, number)

    def body(rank):
        for number, how in enumerate(examples):
            try:
                agrees(how, world, rank)
            except BaseException as error:
                error.add_note(f"example {number}: {how}")
                raise

    run_ranks(body, world, timeout=600)


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "count"), [(1, 6), (4, 8)])
def test_random_combinations_have_the_gradients_of_the_dense_model(world, count):
    agree(world, count)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_a_hundred_random_combinations_have_the_gradients_of_the_dense_model(world, request):
    """Others with another `--hypothesis-seed`."""
    agree(world, 100, request.config.getoption("--hypothesis-seed") or "")


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


def losses(shard, mesh, rank, steps=2, **options):
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


class Residual(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up, self.down = nn.Linear(4, hidden), nn.Linear(hidden, 4)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def by_pytorch(model, mesh):
    """Sequences stay cut between layers; a rank's gradients of a norm are summands."""
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    for layer in model:
        parallelize_module(layer, mesh, plan)
    return model


def trains_as_the_dense_one_that_parallelize_module_has_cut(rank):
    pair = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    # Other names, for PyTorch keeps what it has made on an equal mesh, with that one's parent.
    staged = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp_shard", "model"))
    dp, tp = divmod(rank, 2)
    for mesh, hidden, options in ((pair, 4, {}), (staged, 6, {"comm_policy": "shared_buffer"})):
        torch.manual_seed(0)
        dense = nn.Sequential(*(Residual(hidden) for _ in range(2)))
        model = by_pytorch(copy.deepcopy(dense), mesh[mesh.mesh_dim_names[-1]])
        model[0].up.weight.requires_grad_(False)
        before = list(model.parameters())
        for layer in model:
            fully_shard(layer, mesh=mesh["dp_shard"], **options)
        fully_shard(model, mesh=mesh["dp_shard"], **options)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, dense)]
        for step in range(2):
            data = torch.randn(2, 1, 4, 4, generator=torch.Generator().manual_seed(step))
            model(data[dp].chunk(2, dim=1)[tp]).square().sum().backward()
            sum(dense(x).square().sum() for x in data).div(2).backward()
            expected = {name: p.grad for name, p in dense.named_parameters()}
            expected["0.up.weight"] = None
            assert_same(full_gradients(model), expected)
            dense[0].up.weight.grad = None
            norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (model, dense)]
            torch.testing.assert_close(norms[0].full_tensor(), norms[1])
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_same(full_parameters(model), full_parameters(dense), rtol=1e-4, atol=1e-5)
        with pytest.raises(UsageError, match="parameter 0 of group 0"):
            torch.optim.SGD(before, lr=0.1).step()
        joined = [layer.up.weight.layout.mesh for layer in model]
        assert joined[0] is joined[1]
        assert joined[0].mesh_dim_names == mesh.mesh_dim_names[-2:]
    other = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    with pytest.raises(ShardingError, match=r"'0.norm.weight'.*same parent mesh"):
        fully_shard(by_pytorch(nn.Sequential(Residual(4)), other), mesh=mesh["dp_shard"])


@pytest.mark.ranks
def test_losses_equal_those_of_pytorch_fsdp2_and_its_tensor_parallelism_goes_on():
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
        # Here, for these processes have loaded what PyTorch's DTensor needs.
        trains_as_the_dense_one_that_parallelize_module_has_cut(rank)

    run_ranks(body, 4)
