"""Layers that compute alike on one rank, over tensor parallelism and over expert parallelism.

A layer that has been given an axis holds plain local parameters with layouts, as
`hp_dtensor.parallelize` leaves them; without one it is its own dense reference.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hp_dtensor import Layout, Partial, Replicate, SectionedShard, Shard, attach_layout
from hp_fsdp import fully_shard
from hp_platform import MeshAxis, all_gather, all_reduce, reduce_scatter


class Entered(torch.autograd.Function):
    """Forward identity, backward all-reduce: what begins a tensor-parallel block."""

    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return all_reduce(gradient.clone(), ctx.axis).wait(), None


class Summed(torch.autograd.Function):
    """Forward all-reduce, backward identity: what ends one."""

    @staticmethod
    def forward(ctx, x, axis):
        return all_reduce(x.clone(), axis).wait()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Gathered(torch.autograd.Function):
    """Every rank's tokens; backward sums what each made of them."""

    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return all_gather(x.contiguous(), axis).wait()

    @staticmethod
    def backward(ctx, gradient):
        return reduce_scatter(gradient.contiguous(), ctx.axis).wait(), None


class Returned(torch.autograd.Function):
    """The sum of all ranks' results for this rank's tokens; backward hands gradients to all."""

    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return reduce_scatter(x.contiguous(), axis).wait()

    @staticmethod
    def backward(ctx, gradient):
        return all_gather(gradient.contiguous(), ctx.axis).wait(), None


def place(module, mesh, placements):
    """Keeps this rank's part of every own parameter of `module`.

    The ranks of an expert axis see different tokens: gradients of what is replicated there are
    averaged.

    Args:
        placements: by parameter and mesh axis, where it is not replicated: the placement and that
            of the gradient, if another.
    """
    for name, axes in placements.items():
        whole = getattr(module, name)
        if whole is None:
            continue
        values, gradients = [], []
        for axis in mesh.mesh_dim_names:
            value, gradient = axes.get(axis, AVERAGED if axis == "ep" else (Replicate(), None))
            values.append(value)
            gradients.append(gradient or value)
        layout = Layout(mesh, values, whole.shape, gradients)
        local = whole.detach().reshape(-1)[layout.owned_indices()].view(layout.local_shape())
        parameter = nn.Parameter(local.clone(), requires_grad=whole.requires_grad)
        setattr(module, name, attach_layout(parameter, layout))


AVERAGED = (Replicate(), Partial("avg"))


class Plain(nn.Linear):
    divides_by_all_ranks = False

    def distribute(self, mesh):
        place(self, mesh, {"weight": {}, "bias": {}})


class Tensor(nn.Module):
    """Column, then row parallel, by whole chunks or by those of two sections; `gain` is replicated
    and used on cut activations, so each rank's gradient of it is a summand."""

    divides_by_all_ranks = False

    def __init__(self, inputs, outputs, sections):
        super().__init__()
        hidden = sum(sections)
        self.sections, self.tp = sections, None
        self.norm = nn.Parameter(torch.randn(inputs))
        self.up = nn.Parameter(torch.randn(hidden, inputs))
        self.gain = nn.Parameter(torch.randn(1))
        self.down = nn.Parameter(torch.randn(outputs, hidden))

    def distribute(self, mesh):
        cut = Shard if len(self.sections) == 1 else lambda dim: SectionedShard(dim, self.sections)
        placements = {
            "norm": {},
            "up": {"tp": (cut(0), None)},
            "gain": {"tp": (Replicate(), Partial())},
            "down": {"tp": (cut(1), None)},
        }
        place(self, mesh, placements)
        if "tp" in mesh.mesh_dim_names:
            self.tp = MeshAxis.of_mesh(mesh, "tp")

    def forward(self, x):
        x = x * self.norm
        h = x if self.tp is None else Entered.apply(x, self.tp)
        y = (torch.tanh(h @ self.up.t()) * self.gain) @ self.down.t()
        return y if self.tp is None else Summed.apply(y, self.tp)


class Experts(nn.Module):
    """Row i goes to expert i, counted round; an axis shares the experts out, unevenly if need be.

    Each expert sees the tokens of all ranks of the axis, so its gradient is already their sum.
    """

    divides_by_all_ranks = True

    def __init__(self, inputs, outputs, experts):
        super().__init__()
        self.experts, self.first, self.ep = experts, 0, None
        self.weight = nn.Parameter(torch.randn(experts, outputs, inputs))

    def distribute(self, mesh):
        place(self, mesh, {"weight": {"ep": (Shard(0), None)}})
        if "ep" in mesh.mesh_dim_names:
            self.ep = MeshAxis.of_mesh(mesh, "ep")
            self.first = min(-(-self.experts // self.ep.size) * self.ep.rank, self.experts)

    def forward(self, x):
        chosen = torch.arange(x.shape[0]) % self.experts - self.first
        if self.ep is not None:
            x, chosen = Gathered.apply(x, self.ep), chosen.repeat(self.ep.size)
        here = (chosen >= 0) & (chosen < self.weight.shape[0])
        rows = here.nonzero().flatten()
        mine = torch.einsum("toi,ti->to", self.weight[chosen[rows]], x[rows])
        out = mine.new_zeros(x.shape[0], mine.shape[1]).index_add(0, rows, mine)
        return out if self.ep is None else Returned.apply(out, self.ep)


def mesh_of(*axes):
    """A mesh of axes such as "tp=2"."""
    names, sizes = zip(*(axis.split("=") for axis in axes))
    return init_device_mesh("cpu", tuple(map(int, sizes)), mesh_dim_names=names)


def data_axes(mesh):
    """The part of `mesh` over which `fully_shard` shards."""
    return mesh[tuple(name for name in mesh.mesh_dim_names if name.startswith("dp"))]


def shard(model, mesh, units, **options):
    """Distributes `model`, which has such `layers`, over the model axes and shards it.

    Args:
        units: which layers are units of their own. Shared out experts always are.
    """
    names = mesh.mesh_dim_names
    if {"tp", "ep"} & set(names):
        model.distribute(mesh)
    data = data_axes(mesh)
    for layer, unit in zip(model.layers, units):
        divides = layer.divides_by_all_ranks and "ep" in names
        if unit or divides:
            fully_shard(layer, mesh=data, **options)
        if divides:
            layer.set_gradient_divide_factor(data.size() * mesh["ep"].size())
    return fully_shard(model, mesh=data, **options)
