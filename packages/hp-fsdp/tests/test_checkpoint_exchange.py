"""Checkpoints of model and optimizer move between world sizes, meshes, layouts and FSDP2."""

import functools
import itertools
import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as states
import torch.distributed.fsdp as fsdp2
from drawn_model import Experts, Plain, Tensor, mesh_of, shard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hp_dtensor import DTensor
from hp_fsdp import fully_shard
from hp_fsdp.testing import full_parameters
from hp_platform.testing import run_ranks


class Tied(nn.Module):
    """Sizes that no mesh here divides, a tied weight and a buffer."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(5, 3)
        self.middle = nn.Linear(3, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros(3))

    def forward(self, ids):
        return self.head(torch.tanh(self.middle(self.embed(ids))))


def data_mesh(shape):
    names = ("dp_replicate", "dp_shard")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def sharded(kind, shape, seed=0):
    model, mesh = Tied(seed), data_mesh(shape)
    if kind == "fsdp2":
        fsdp2.fully_shard(model.middle, mesh=mesh)
        fsdp2.fully_shard(model, mesh=mesh)
    else:
        fully_shard(model.middle, mesh=mesh, comm_policy=kind)
        fully_shard(model, mesh=mesh, comm_policy=kind)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model, optimizer, seed):
    ids = torch.randint(5, (4, 3), generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    optimizer.step()
    model.steps.add_(1)


# What is saved, and where and how each of them is loaded: world sizes, meshes and policies change.
EXCHANGES = {
    ("per_parameter", (3,)): [
        ("shared_buffer", (1,)),
        ("shared_buffer", (2, 2)),
        ("fsdp2", (2,)),
    ],
    ("shared_buffer", (2, 2)): [("per_parameter", (2,)), ("fsdp2", (4,))],
    ("fsdp2", (3,)): [("per_parameter", (2, 2)), ("shared_buffer", (2,))],
}


def path_of(saved, directory):
    kind, shape = saved
    return directory / f"{kind}-{'x'.join(map(str, shape))}"


def save(kind, shape, path):
    model, optimizer = sharded(kind, shape)
    step(model, optimizer, 0), step(model, optimizer, 1)
    found = states.get_state_dict(model, optimizer)
    dcp.save({"model": found[0], "optimizer": found[1]}, checkpoint_id=path)


def resumed(kind, shape, path):
    """Parameters after loading into other values and one more step."""
    model, optimizer = sharded(kind, shape, seed=7)
    model_state, optimizer_state = states.get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    states.set_state_dict(
        model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state
    )
    assert model.embed.weight is model.head.weight
    assert model.steps.tolist() == [2, 2, 2]
    step(model, optimizer, 2)
    if kind != "fsdp2":
        assert all(isinstance(p, DTensor) for p in model.parameters())
        return full_parameters(model)
    return {n: p.full_tensor().detach() for n, p in model.named_parameters()}


def by_world(pairs):
    """Pairs whose last one is for as many ranks, by that number."""
    found = {}
    for pair in pairs:
        found.setdefault(torch.Size(pair[-1][1]).numel(), []).append(pair)
    return found.items()


@pytest.mark.ranks
def test_training_continues_as_if_it_had_not_been_interrupted(tmp_path):
    dense = Tied()
    reference = torch.optim.AdamW(dense.parameters(), lr=0.01)
    for seed in range(3):
        step(dense, reference, seed)
    loads = [(saved, load) for saved, found in EXCHANGES.items() for load in found]

    def save_all(saves):
        for (saved,) in saves:
            save(*saved, path_of(saved, tmp_path))

    def load_all(loads):
        for saved, load in loads:
            found = resumed(*load, path_of(saved, tmp_path))
            for name, value in dense.named_parameters():
                torch.testing.assert_close(
                    found[name],
                    value.detach(),
                    rtol=1e-5,
                    atol=1e-6,
                    msg=lambda text, case=(saved, load): f"{case}: {text}",
                )

    for world, saves in by_world([(saved,) for saved in EXCHANGES]):
        run_ranks(lambda rank, saves=saves: save_all(saves), world)
    for world, found in by_world(loads):
        run_ranks(lambda rank, found=found: load_all(found), world)


class Layers(nn.Module):
    """Uneven sizes on every axis."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList([Tensor(3, 5, (4, 3)), Experts(5, 5, 3), Plain(5, 2)])

    def distribute(self, mesh):
        for layer in self.layers:
            layer.distribute(mesh)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


# Meshes on which checkpoints are saved, and those on which they are loaded.
A_FEW = [[("dp_shard=2", "tp=2")], [("dp_replicate=2", "dp_shard=1", "ep=2"), ("dp_shard=3",)]]
EVERY_ONE = [
    [
        *[(f"dp_shard={ranks}",) for ranks in (1, 2, 3, 4)],
        ("dp_replicate=2", "dp_shard=2"),
        ("dp_shard=1", "tp=2"),
        ("dp_shard=1", "ep=2"),
        ("dp_shard=2", "tp=2"),
        ("dp_shard=2", "ep=2"),
        ("dp_replicate=2", "dp_shard=1", "ep=2"),
        ("dp_shard=1", "ep=2", "tp=2"),
    ]
] * 2


def layers_on(axes, policy, seed=0):
    mesh = mesh_of(*axes)
    model = shard(Layers(seed), mesh, (True, True, False), comm_policy=policy)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01), mesh


def train_on_slice(model, optimizer, seed, slices=1, position=0):
    x = torch.randn(36, 3, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    model(x.chunk(slices)[position]).square().mean().backward()
    optimizer.step()


def own_slice(mesh):
    """Number of slices of a batch and this rank's: ranks of a tensor-parallel axis share one."""
    alike = mesh["tp"].size() if "tp" in mesh.mesh_dim_names else 1
    return mesh.size() // alike, dist.get_rank() // alike


def size_of(axes):
    return math.prod(int(axis.split("=")[1]) for axis in axes)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("saves", "loads"), [A_FEW, pytest.param(*EVERY_ONE, marks=pytest.mark.slow)]
)
def test_a_checkpoint_moves_between_data_tensor_and_expert_axes(tmp_path, saves, loads):
    dense = Layers()
    reference = torch.optim.AdamW(dense.parameters(), lr=0.01)
    for seed in range(3):
        train_on_slice(dense, reference, seed)

    def path(axes):
        return tmp_path / "-".join(axes)

    def save(axes):
        model, optimizer, mesh = layers_on(axes, "per_parameter")
        for seed in range(2):
            train_on_slice(model, optimizer, seed, *own_slice(mesh))
        found = states.get_state_dict(model, optimizer)
        dcp.save({"model": found[0], "optimizer": found[1]}, checkpoint_id=path(axes))

    def load(saved, axes, policy):
        model, optimizer, mesh = layers_on(axes, policy, seed=7)
        found = dict(zip(("model", "optimizer"), states.get_state_dict(model, optimizer)))
        dcp.load(found, checkpoint_id=path(saved))
        states.set_state_dict(
            model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"]
        )
        train_on_slice(model, optimizer, 2, *own_slice(mesh))
        for name, value in full_parameters(model).items():
            torch.testing.assert_close(
                value,
                dense.get_parameter(name).detach(),
                rtol=1e-4,
                atol=1e-5,
                msg=lambda text, name=name: f"{saved} to {axes}, {policy}, {name}: {text}",
            )

    def on(axes, work):
        def body(rank):
            for each in work:
                each()

        run_ranks(body, size_of(axes), timeout=200)

    for axes in saves:
        on(axes, [functools.partial(save, axes)])
    policies = itertools.cycle(("shared_buffer", "per_parameter"))
    for axes in loads:
        moves = [functools.partial(load, saved, axes, next(policies)) for saved in saves]
        on(axes, moves)
