"""What travels together: layouts of shared buffers, the decision, and its consequences."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from hp_dtensor import DTensor, Layout, RaggedShard
from hp_fsdp import CommPolicy, ShardingError, explain, fully_shard
from hp_fsdp.cut import SharedCut, SharedLayout
from hp_fsdp.data_mesh import DataMesh
from hp_platform import AgreementError, ledger
from hp_platform.links import Link
from hp_platform.testing import run_ranks

SHAPES = st.lists(
    st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6
)


@given(shapes=SHAPES, world=st.integers(1, 5), itemsize=st.sampled_from([2, 4, 8]))
def test_a_shared_buffer_holds_every_tensor_once_and_cuts_evenly(shapes, world, itemsize):
    layout = SharedLayout.of(shapes, itemsize, world)
    assert layout.part * itemsize % 512 == 0
    owner = [-1] * (layout.part * world)
    for index, (shape, offset) in enumerate(zip(shapes, layout.offsets)):
        for position in range(offset, offset + torch.Size(shape).numel()):
            assert owner[position] == -1
            owner[position] = index


@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple),
    offset=st.integers(0, 40),
    part=st.integers(1, 60),
    world=st.integers(1, 5),
)
def test_shares_are_those_of_the_ragged_layout(shape, offset, part, world):
    cuts = [SharedCut(shape, offset, part, world, rank) for rank in range(world)]
    numel = torch.Size(shape).numel()
    if sum(cuts[0].shares) < numel:  # the buffer would be too small
        return
    whole = torch.arange(numel).view(shape)
    layout = Layout({"dp": world}, (cuts[0].placement,), shape)
    pieces = []
    for rank, cut in enumerate(cuts):
        piece = cut.take(whole)
        assert piece.shape == cut.local_shape == layout.local_shape((rank,))
        assert torch.equal(piece.reshape(-1), layout.owned_indices((rank,)))
        pieces.append(piece.reshape(-1))
    assert torch.equal(torch.cat(pieces), whole.reshape(-1))


def test_cuts_of_ordinary_layers_fall_between_rows():
    shapes = [(512, 512), (128, 512), (2048, 512), (512, 2048), (512,)]
    for world in (2, 4, 8):
        layout = SharedLayout.of(shapes, 4, world)
        used = sum(torch.Size(shape).numel() for shape in shapes)
        assert layout.part * world < 1.07 * used
        for shape, offset in zip(shapes, layout.offsets):
            for rank in range(world):
                cut = SharedCut(shape, offset, layout.part, world, rank)
                assert cut.placement.dims == (0,)


def test_auto_sends_alone_what_takes_long_against_the_latency():
    policy, link = CommPolicy("auto"), Link(latency=1e-3, bandwidth=1e9)
    assert policy.shares(31_999_999, link)
    assert not policy.shares(32_000_000, link)
    assert CommPolicy("auto", Link(0.0, 1e9)).shares(1, link) is False
    assert CommPolicy("shared_buffer").shares(1 << 40, None)
    assert not CommPolicy("per_parameter").shares(1, None)


def test_a_policy_that_is_none_is_refused():
    with pytest.raises(ShardingError, match="'per_parameter', 'shared_buffer' or 'auto'"):
        CommPolicy("fused")
    with pytest.raises(ShardingError, match=r"hp_platform\.Link"):
        CommPolicy("auto", 3.0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.small = nn.Linear(128, 128)
        self.norm = nn.LayerNorm(128)
        self.frozen = nn.Linear(128, 128).requires_grad_(False)
        self.large = nn.Linear(128, 1024)

    def forward(self, x):
        return self.large(self.frozen(self.norm(self.small(x))))


def flat(world):
    return init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))


def given_link(threshold):
    return CommPolicy("auto", Link(1e-6, threshold / 32 * 1e6))


@pytest.mark.ranks
def test_auto_is_seen_in_the_ledger_in_layouts_and_in_the_explanation():
    def body(rank):
        model = fully_shard(Net(), mesh=flat(2), comm_policy=given_link(100_000))
        placements = {name: p.placements[0] for name, p in model.named_parameters()}
        assert placements["large.weight"] == Shard(0)
        alone = {name for name, p in placements.items() if not isinstance(p, RaggedShard)}
        assert alone == {"large.weight"}
        with ledger() as log:
            model(torch.ones(2, 128)).sum().backward()
        # Trainable and frozen parameters do not share: frozen gradients are not sent.
        counts = Counter((r.operation, r.origin.phase) for r in log.records)
        assert counts == {
            ("all_gather", "agreement"): 1,
            ("all_gather", "forward"): 3,
            ("reduce_scatter", "backward"): 2,
        }
        text = explain(model)
        assert "auto: alone from 100,000 bytes (32 times the given latency of 1 us" in text
        assert "3 all-gathers and reduce-scatters over dp_shard (2 ranks, " in text
        unnamed = fully_shard(nn.Linear(2, 2, bias=False), mesh=init_device_mesh("cpu", (2,)))
        assert unnamed.weight.layout.abstract_mesh.axis_names == ("axis0",)
        assert "root: 1 parameter, 1 all-gather and reduce-scatter over axis0 (" in explain(unnamed)
        assert text.count("together") == 2
        assert text.count("alone  ") == 1
        assert "large.weight (1024, 128) Shard(dim=0)" in text
        return text

    assert len(set(run_ranks(body, 2))) == 1


@pytest.mark.ranks
def test_a_measured_link_is_the_same_on_all_ranks_and_measured_once_a_group():
    def body(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        with ledger() as log:
            link = DataMesh.of(mesh).link()
        calls = len(log.records)
        with ledger() as log:
            assert DataMesh.of(mesh).link() == link
            model = fully_shard(Net(), mesh=mesh, comm_policy="auto")
        assert calls > 0
        assert not any(r.origin.phase == "calibration" for r in log.records)
        assert "measured latency" in explain(model)
        # Without a mesh every call makes one, over the same group.
        world = DataMesh.of(None).link()
        with ledger() as log:
            assert DataMesh.of(None).link() == world
        assert not log.records
        return link

    assert len(set(run_ranks(body, 4))) == 1


@pytest.mark.ranks
def test_ranks_that_would_decide_differently_are_stopped():
    def body(rank):
        policy = given_link(100_000 if rank == 0 else 10)
        with pytest.raises(AgreementError, match="travel together"):
            fully_shard(Net(), mesh=flat(2), comm_policy=policy)

    run_ranks(body, 2)


@pytest.mark.ranks
def test_no_transfer_of_an_ordinary_model_is_unaligned():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(256, bias=False)
            self.up, self.down = nn.Linear(256, 640, bias=False), nn.Linear(640, 256, bias=False)

        def forward(self, x):
            return x + self.down(torch.relu(self.up(self.norm(x))))

    class Lm(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(100, 256)
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.head = nn.Linear(256, 100)

        def forward(self, ids):
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    def body(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        for policy in ("per_parameter", "shared_buffer", given_link(300_000)):
            model = Lm()
            for block in model.blocks:
                fully_shard(block, mesh=mesh, comm_policy=policy)
            fully_shard(model, mesh=mesh, comm_policy=policy)
            for _ in range(2):
                with ledger() as log:
                    model(torch.arange(8).view(2, 4)).square().mean().backward()
                # Alone, a bias of 100 elements cannot be cut into aligned chunks.
                wrong = [r for r in log.records if not r.aligned and r.bytes != 400]
                assert not wrong, (policy, wrong)
                if policy == "shared_buffer":
                    assert all(r.aligned for r in log.records)

    run_ranks(body, 4)


@pytest.mark.ranks
def test_shards_in_one_buffer_keep_one_type():
    def body(rank):
        model = fully_shard(nn.Linear(4, 4), mesh=flat(2), comm_policy="shared_buffer")
        double = DTensor.of_layout(model.weight.to_local().detach().double(), model.weight.layout)
        model.weight = nn.Parameter(double)
        with pytest.raises(ShardingError, match=r"share a buffer and must keep one type"):
            model(torch.ones(1, 4))
        model = fully_shard(nn.Linear(4, 4), mesh=flat(2), comm_policy="shared_buffer")
        before = model.weight.full_tensor()
        model.to(torch.float64)
        out = model(torch.ones(1, 4, dtype=torch.float64))
        out.sum().backward()
        assert torch.equal(model.weight.full_tensor(), before.double())
        assert model.weight.grad.full_tensor().equal(torch.ones(4, 4, dtype=torch.float64))

    run_ranks(body, 2)
