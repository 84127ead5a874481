"""Sharded parameters: their layouts, their memory, and tensor parallelism underneath."""

import copy
import os

import pytest
import torch
from drawn_model import Entered, Summed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hp_dtensor import (
    DTensor,
    Layout,
    Partial,
    Replicate,
    SectionedShard,
    Shard,
    StridedShard,
    attach_layout,
)
from hp_dtensor.mesh import mesh_axis
from hp_fsdp import MixedPrecisionPolicy, ShardingError, fully_shard
from hp_fsdp.bucket import Bucket
from hp_fsdp.piecewise_bucket import PiecewiseBucket
from hp_fsdp.testing import assert_same, full_gradients, full_parameters
from hp_platform import MeshAxis, ledger, reduce_scatter
from hp_platform.buffers import aligned_empty
from hp_platform.lent_pieces import piecewise_reduce_scatter
from hp_platform.meeting import SWITCH, share_memory
from hp_platform.repeatable import repeatable_reduce_scatter
from hp_platform.testing import run_ranks

R = Replicate()


def dp_tp():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))


class Mlp(nn.Module):
    """Column, then row parallel; `gain` is replicated and used on sharded activations, so each
    tensor-parallel rank's gradient of it is a summand."""

    def __init__(self, hidden=6):
        super().__init__()
        self.norm = nn.Parameter(torch.randn(5))
        self.up = nn.Parameter(torch.randn(hidden, 5))
        self.gain = nn.Parameter(torch.randn(1))
        self.down = nn.Parameter(torch.randn(5, hidden))
        self.tp = None

    def forward(self, x):
        x = x * self.norm
        h = Entered.apply(x, self.tp) if self.tp else x
        h = torch.tanh(h @ self.up.t()) * self.gain
        y = h @ self.down.t()
        return Summed.apply(y, self.tp) if self.tp else y


def made(hidden=6):
    torch.manual_seed(0)
    return Mlp(hidden)


def tensor_parallel(model, mesh, up=None):
    """Plain local parameters with layouts, as hp_dtensor.parallelize leaves them."""
    placements = {
        "norm": ((R, R), None),
        "up": ((R, up or Shard(0)), None),
        "gain": ((R, R), (R, Partial())),
        "down": ((R, Shard(1)), None),
    }
    for name, (value, gradient) in placements.items():
        whole = getattr(model, name).detach()
        layout = Layout(mesh, value, whole.shape, gradient)
        local = whole.reshape(-1)[layout.owned_indices()].view(layout.local_shape())
        setattr(model, name, attach_layout(nn.Parameter(local.clone()), layout))
    model.tp = MeshAxis.of_mesh(mesh, "tp")
    return model


def batch(dp):
    generator = torch.Generator().manual_seed(dp)
    return torch.randn(3, 5, generator=generator)


def dense_step(dense):
    (sum(dense(batch(dp)).square().mean() for dp in range(2)) / 2).backward()


@pytest.mark.ranks
def test_gradients_over_tensor_parallelism_equal_the_dense_ones():
    def body(rank):
        mesh = dp_tp()
        for hidden in (6, 8, 5):
            dense = made(hidden)
            model = tensor_parallel(made(hidden), mesh)
            fully_shard(model, mesh=mesh["dp_shard"])
            optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, dense)]
            for _ in range(3):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                model(batch(rank // 2)).square().mean().backward()
                dense_step(dense)
                assert_same(full_gradients(model), {n: p.grad for n, p in dense.named_parameters()})
                norms = [
                    nn.utils.clip_grad_norm_(m.parameters(), max_norm=0.01) for m in (model, dense)
                ]
                found = norms[0].full_tensor() if isinstance(norms[0], DTensor) else norms[0]
                torch.testing.assert_close(found, norms[1])
                assert_same(full_gradients(model), {n: p.grad for n, p in dense.named_parameters()})
                for optimizer in optimizers:
                    optimizer.step()
                assert_same(full_parameters(model), full_parameters(dense), rtol=1e-4, atol=1e-5)

    run_ranks(body, 4)


@pytest.mark.ranks
def test_layouts_over_tensor_parallelism_are_on_the_whole_mesh():
    def body(rank):
        mesh = dp_tp()
        model = tensor_parallel(made(8), mesh)
        fully_shard(model, mesh=mesh["dp_shard"])
        found = {name: p.layout.placements for name, p in model.named_parameters()}
        assert found == {
            "norm": (Shard(0), R),
            "up": (StridedShard(0, 2), Shard(0)),
            "gain": (Shard(0), R),
            "down": (Shard(0), Shard(1)),
        }
        dp, tp = divmod(rank, 2)
        assert torch.equal(model.up.to_local(), made(8).up.chunk(2)[tp].chunk(2)[dp])
        # A summed gradient is laid out like the value: no partial sum is left.
        model(batch(dp)).sum().backward()
        assert model.gain.grad.placements == (Shard(0), R)

    run_ranks(body, 4)


@pytest.mark.ranks
def test_a_section_wise_cut_weight_is_cut_again_within_its_local_rows():
    def body(rank):
        mesh = dp_tp()
        sections = SectionedShard(0, (4, 2, 2))
        model = tensor_parallel(made(8), mesh, up=sections)
        before = model.up.detach().clone()
        fully_shard(model, mesh=mesh["dp_shard"])
        assert model.up.layout.placements == (StridedShard(0, 2), sections)
        assert torch.equal(model.up.to_local(), before.chunk(2)[rank // 2])
        assert torch.equal(model.up.full_tensor(), made(8).up)

    run_ranks(body, 4)


@pytest.mark.ranks
def test_partial_gradients_are_summed_once_fused_and_on_shards():
    def body(rank):
        mesh = dp_tp()
        model = nn.Sequential(*(tensor_parallel(made(6), mesh) for _ in range(2)))
        for layer in model:
            fully_shard(layer, mesh=mesh["dp_shard"])
        fully_shard(model, mesh=mesh["dp_shard"])
        with ledger() as log:
            model(batch(rank // 2)).sum().backward()
        mine = [r for r in log.records if r.axis == "tp" and r.origin.package == "hp_fsdp"]
        # Two gains of one element: the second data rank's shards are empty, and nothing is sent.
        assert len(mine) == (1 if rank < 2 else 0), log.table()
        assert all(r.origin.phase == "settlement" for r in mine)

    run_ranks(body, 4)


@pytest.mark.ranks
def test_a_layout_that_does_not_fit_the_mesh_is_refused_by_name():
    def body(rank):
        mesh = dp_tp()

        def refuses(match, value, gradient=None, axis="dp_shard"):
            model = nn.Linear(4, 4, bias=False)
            layout = Layout(mesh, value, (4, 4), gradient)
            local = nn.Parameter(torch.zeros(layout.local_shape()))
            model.weight = attach_layout(local, layout)
            with pytest.raises(ShardingError, match=match):
                fully_shard(model, mesh=axis)

        refuses("'weight' is already placed", (Shard(0), R), axis=mesh["dp_shard"])
        refuses("'weight'.*data axis", (R, R), (Partial(), R), axis=mesh["dp_shard"])
        other = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        refuses("'weight'.*no axis 'dp' of size 4", (R, R), axis=other)
        model = fully_shard(nn.Linear(4, 4), mesh=mesh["dp_shard"])
        holder = nn.Module()
        holder.p = nn.Parameter(DTensor.of_layout(model.weight.to_local(), model.weight.layout))
        with pytest.raises(ShardingError, match=r"'p'.*parallelize"):
            fully_shard(holder, mesh=mesh["dp_shard"])

    run_ranks(body, 4)


@pytest.mark.ranks
def test_hsdp_over_tensor_parallelism_takes_a_slice_of_the_whole_mesh():
    def body(rank):
        names = ("dp_replicate", "dp_shard", "tp")
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)
        model, dense = made(8), made(8)
        placements = {
            "norm": ((R, R, R), None),
            "up": ((R, R, Shard(0)), None),
            "gain": ((R, R, R), (R, R, Partial())),
            "down": ((R, R, Shard(1)), None),
        }
        for name, (value, gradient) in placements.items():
            whole = getattr(model, name).detach()
            layout = Layout(mesh, value, whole.shape, gradient)
            local = whole.reshape(-1)[layout.owned_indices()].view(layout.local_shape())
            setattr(model, name, attach_layout(nn.Parameter(local.clone()), layout))
        model.tp = MeshAxis.of_mesh(mesh, "tp")
        fully_shard(model, mesh=mesh["dp_replicate", "dp_shard"])
        assert model.up.layout.placements == (R, StridedShard(0, 2), Shard(0))
        model(batch(rank // 2)).square().mean().backward()
        (sum(dense(batch(dp)).square().mean() for dp in range(4)) / 4).backward()
        assert_same(full_gradients(model), {n: p.grad for n, p in dense.named_parameters()})

    run_ranks(body, 8)


# -- memory ----------------------------------------------------------------------------


@pytest.mark.ranks
def test_shards_and_buffers_are_aligned_and_gathering_copies_nothing():
    def body(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        model = nn.Linear(7, 5)
        fully_shard(model, mesh=mesh)
        bucket = model._hp_fsdp_unit.buckets[0]
        (shard,) = bucket.parameters
        assert shard.local.data_ptr() % 512 == 0
        addresses = set()
        for _ in range(3):
            model.unshard()
            assert model.weight.data_ptr() == bucket._buffer.data.data_ptr()
            addresses.add(model.weight.data_ptr())
            model.reshard()
        assert len(addresses) == 1
        assert addresses.pop() % 512 == 0
        # What travels is the shard's own memory, padding included.
        assert bucket._travelling_part().data_ptr() == shard.local.data_ptr()
        assert bucket._travelling_part().numel() >= 3 * 7

    run_ranks(body, 2)


def seen_scatters(monkeypatch, see):
    """Shows `see` the input of every reduce-scatter when it is issued."""

    def once(tensor, axis, **kwargs):
        see(tensor)
        return reduce_scatter(tensor, axis, **kwargs)

    def repeatable(tensor, axis, **kwargs):
        scatter = repeatable_reduce_scatter(tensor, axis, **kwargs)
        return lambda output, origin: (see(tensor), scatter(output, origin))[1]

    monkeypatch.setattr("hp_fsdp.bucket.reduce_scatter", once)
    monkeypatch.setattr("hp_fsdp.bucket.repeatable_reduce_scatter", repeatable)


@pytest.mark.ranks
@pytest.mark.parametrize("comm_policy", ["per_parameter", "shared_buffer"])
def test_gradients_are_sent_from_where_autograd_accumulated_them(monkeypatch, comm_policy):
    sent = []

    def body(rank):
        os.environ[SWITCH] = "0"  # where peers read them there is no place
        seen_scatters(monkeypatch, sent.append)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))  # uneven rows
        fully_shard(model, mesh=mesh, comm_policy=comm_policy)
        places = {}

        def remember(name, parameter):
            places[name] = parameter.grad.data_ptr()

        for _ in range(2):
            sent.clear()
            out = model(torch.ones(2, 6))
            for name, p in model.named_parameters():
                # Before autograd accumulates, the place is there already.
                p.register_hook(lambda _, n=name, p=p: remember(n, p))
            out.sum().backward()
            assert len(places) == 4
            spans = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in sent]
            for place in places.values():
                assert any(start <= place < stop for start, stop in spans)
            model.zero_grad()

    run_ranks(body, 2)


@pytest.mark.ranks
@pytest.mark.parametrize("comm_policy", ["per_parameter", "shared_buffer"])
@pytest.mark.parametrize("reduce_dtype", [None, torch.float64])
def test_gradients_are_read_where_autograd_left_them(monkeypatch, comm_policy, reduce_dtype):
    def body(rank):
        lent = []

        def seen(*description):
            call = piecewise_reduce_scatter(*description)

            def scatter(pieces, *rest):
                lent.extend(each.data_ptr() for each in pieces if each is not None)
                return call(pieces, *rest)

            return scatter

        monkeypatch.setattr("hp_fsdp.piecewise_bucket.piecewise_reduce_scatter", seen)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3), nn.Linear(3, 3))  # uneven rows
        dense = copy.deepcopy(model)
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        fully_shard(model, mesh=mesh, comm_policy=comm_policy, mp_policy=policy)
        if not share_memory(mesh_axis(mesh, 0)):
            return False
        left, take = {}, PiecewiseBucket._take

        def remember(bucket, **options):
            found = [p for p in bucket.parameters if p.full.grad is not None]
            left.update({p.name: p.full.grad.data_ptr() for p in found})
            return take(bucket, **options)

        monkeypatch.setattr(PiecewiseBucket, "_take", remember)
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
        for steps in (1, 3):
            lent.clear()
            for step in range(steps):
                model.set_requires_gradient_sync(step == steps - 1)
                model(x).square().sum().backward()
            if reduce_dtype is None:
                assert sorted(lent) == sorted(left.values())
            for each in range(2):
                y = torch.randn(4, 6, generator=torch.Generator().manual_seed(each))
                for _ in range(steps):
                    dense(y).square().sum().backward()
            for (name, p), q in zip(model.named_parameters(), dense.parameters()):
                torch.testing.assert_close(p.grad.full_tensor(), q.grad / 2, msg=name)
            model.zero_grad()
            dense.zero_grad()
        return True

    if not all(run_ranks(body, 2)):
        pytest.skip("this system lets no process read another's memory")


@pytest.mark.ranks
@pytest.mark.parametrize("comm_policy", ["per_parameter", "shared_buffer"])
def test_gathers_are_prepared_again_only_when_something_has_changed(monkeypatch, comm_policy):
    def body(rank):
        prepared = []
        prepare = Bucket._prepare
        monkeypatch.setattr(Bucket, "_prepare", lambda b: (prepared.append(b), prepare(b)))
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        model = nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 3))  # empty shards on one rank
        fully_shard(model, mesh=mesh, comm_policy=comm_policy)
        assert rank == 0 or any(p.to_local().numel() == 0 for p in model.parameters())
        seen = []
        for dtype in (torch.float32, torch.float32, torch.float64, torch.float64):
            prepared.clear()
            model.to(dtype)(torch.ones(2, 4, dtype=dtype)).sum().backward()
            seen.append(len(prepared) > 0)
            model.zero_grad()
        assert seen == [True, False, True, False]

    run_ranks(body, 2)


@pytest.mark.ranks
def test_padding_travels_as_zeros(monkeypatch):
    def poisoned(numel, dtype, device):
        return aligned_empty(numel, dtype, device).fill_(float("nan"))

    sent = []

    def body(rank):
        os.environ[SWITCH] = "0"
        monkeypatch.setattr("hp_fsdp.bucket.aligned_empty", poisoned)
        monkeypatch.setattr("hp_fsdp.packed_bucket.aligned_empty", poisoned)
        seen_scatters(monkeypatch, lambda tensor: sent.append(tensor.clone()))
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        for dim in (0, 1):
            model = nn.Linear(5, 3, bias=False)
            fully_shard(model, mesh=mesh, shard_placement_fn=lambda p, d=dim: Shard(d))
            model(torch.ones(1, 5)).sum().backward()
            assert sent[-1].sum() == 15
            bucket = model._hp_fsdp_unit.buckets[0]
            assert bucket._travelling_part().isfinite().all()

    run_ranks(body, 2)


@pytest.mark.ranks
def test_meta_parameters_are_materialised_as_shards():
    def body(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)
        out = model(torch.ones(1, 5))
        torch.testing.assert_close(out, torch.full((1, 2), 5.0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        out.sum().backward()
        optimizer.step()
        torch.testing.assert_close(full_parameters(model)["1.bias"], torch.full((2,), 0.4))

    run_ranks(body, 2)


@pytest.mark.ranks
def test_values_assigned_to_data_are_used():
    def body(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        model = nn.Linear(4, 3, bias=False)
        fully_shard(model, mesh=mesh)
        local = torch.full(tuple(model.weight.to_local().shape), 2.0)
        model.weight.data = DTensor.of_layout(local, model.weight.layout)
        assert torch.equal(model(torch.ones(1, 4)), torch.full((1, 3), 8.0))

    run_ranks(body, 2)


@pytest.mark.ranks
def test_a_change_of_type_after_sharding_reaches_computation_and_gradients():
    def body(rank):
        for before in (False, True):  # a forward
            model = fully_shard(
                nn.Linear(4, 2), mesh=init_device_mesh("cpu", (4,))
            )  # two ranks hold no row
            if before:
                model(torch.ones(1, 4)).sum().backward()
                model.zero_grad()
            model.to(torch.float64)
            out = model(torch.ones(1, 4, dtype=torch.float64))
            out.sum().backward()
            assert out.dtype == torch.float64
            assert model.weight.grad.dtype == torch.float64
            assert model.weight.grad.full_tensor().equal(torch.ones(2, 4, dtype=torch.float64))

    run_ranks(body, 4)


@pytest.mark.ranks
def test_ties_survive_what_replaces_parameters():
    def body(rank):
        with torch.device("meta"):
            model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
            model[1].weight = model[0].weight
        fully_shard(model, mesh=init_device_mesh("cpu", (2,))).to_empty(device="cpu")
        assert model[1].weight is model[0].weight
        assert len(list(model.parameters())) == 1

    run_ranks(body, 2)
