"""Sharded Muon equals dense Muon: any mesh, placement, shape and view, by Hypothesis."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from hp_dtensor import (
    Layout,
    RaggedShard,
    Replicate,
    SectionedShard,
    Shard,
    StridedShard,
    attach_layout,
)
from hp_muon import MatrixView, Muon
from hp_muon.reference import DenseMuon
from hp_platform.testing import run_ranks

MESHES = {2: [(2,)], 4: [(4,), (2, 2)]}
NAMES = ("dp", "tp")


PATTERNS = {
    2: [("(h r) c -> h r c", 0), ("r (h c) -> h r c", 1), ("(r h) c -> h r c", 0)],
    3: [("e (h r) c -> e h r c", 1), ("(e h) r c -> e r (h c)", 0), ("e r c -> e c r", None)],
}


def draw_view(draw, shape):
    """A view that splits, joins or turns dims, where they divide; None for the last two dims."""
    heads = draw(st.sampled_from([1, 2, 3]))
    if draw(st.booleans()):
        return None
    pattern, dim = draw(st.sampled_from(PATTERNS[len(shape)]))
    if dim is None:
        return MatrixView(pattern)
    return MatrixView(pattern, h=heads) if shape[dim] % heads == 0 else None


def draw_placements(draw, shape, sizes):
    dims = range(len(shape))
    kinds = st.sampled_from(["replicate", "shard", "shard", "strided", "sectioned", "ragged"])
    placements = []
    for axis, size in enumerate(sizes):
        kind, dim = draw(kinds), draw(st.sampled_from(list(dims)))
        last = axis == len(sizes) - 1
        if kind == "shard":
            placements.append(Shard(dim))
        elif kind == "strided":
            following = sizes[axis + 1] if not last else draw(st.integers(1, 3))
            placements.append(StridedShard(dim, following))
            if not last:
                placements.append(Shard(dim))
                break
        elif kind == "sectioned":
            first = draw(st.integers(0, shape[dim]))
            placements.append(SectionedShard(dim, (first, shape[dim] - first)))
        elif kind == "ragged":
            if draw(st.booleans()):
                owner = draw(st.integers(0, size - 1))
                units = [int(i == owner) for i in range(size)]
                flat = draw(st.integers(1, len(shape)))
                placements.append(RaggedShard(tuple(range(flat)), units))
            else:
                cuts = sorted(draw(st.integers(0, shape[0])) for _ in range(size - 1))
                edges = [0, *cuts, shape[0]]
                placements.append(RaggedShard((0,), [b - a for a, b in pairwise(edges)]))
        else:
            placements.append(Replicate())
    return tuple(placements)


@st.composite
def parameters(draw, sizes):
    """Shape, placements and view of one parameter; placements that do not fit become Replicate."""
    leading = draw(st.lists(st.integers(1, 5), max_size=1))
    plane = st.integers(1, 9) if not leading else st.integers(2, 9)
    shape = (*leading, draw(plane), draw(plane))
    view = draw_view(draw, shape)
    placements = draw_placements(draw, shape, sizes)
    try:
        Layout(dict(zip(NAMES, sizes)), placements, shape)
    except ValueError:
        placements = (Replicate(),) * len(sizes)
    return shape, placements, view


@st.composite
def cases(draw, world_size):
    sizes = draw(st.sampled_from(MESHES[world_size]))
    return {
        "sizes": sizes,
        "parameters": draw(st.lists(parameters(sizes), min_size=1, max_size=4)),
        "seed": draw(st.integers(0, 10**6)),
        "deduplicate_replicas": draw(st.booleans()),
        "nesterov": draw(st.booleans()),
        "scale": draw(st.sampled_from(["match_rms_adamw", "jordan"])),
        "coefficients": draw(st.sampled_from(["quintic", "asym5"])),
        "missing": draw(st.integers(0, 3)),
    }


def run_case(case, mesh):
    generator = torch.Generator().manual_seed(case["seed"])

    def random(shape):
        return torch.randn(shape, generator=generator)

    layouts = [Layout(mesh, placements, shape) for shape, placements, _ in case["parameters"]]
    dense = [torch.nn.Parameter(random(layout.shape)) for layout in layouts]
    mine = []
    for full, layout in zip(dense, layouts):
        local = full.detach().reshape(-1)[layout.owned_indices()].view(layout.local_shape())
        mine.append(attach_layout(torch.nn.Parameter(local.clone()), layout))
    views = {f"p{i}": view for i, (_, _, view) in enumerate(case["parameters"]) if view}
    arguments = {key: case[key] for key in ("nesterov", "scale", "coefficients")}
    arguments["ns_dtype"] = torch.float32
    optimizer = Muon(
        [(f"p{i}", p) for i, p in enumerate(mine)],
        lr=0.1,
        views=views,
        deduplicate_replicas=case["deduplicate_replicas"],
        **arguments,
    )
    reference = DenseMuon(dense, lr=0.1, views=[v for *_, v in case["parameters"]], **arguments)
    for step in range(3):
        for index, (full, local, layout) in enumerate(zip(dense, mine, layouts)):
            absent = step == 1 and index == case["missing"]
            full.grad = None if absent else random(layout.shape)
            local.grad = None
            if not absent:
                flat = full.grad.reshape(-1)[layout.owned_indices()]
                local.grad = flat.view(layout.local_shape()).clone()
        optimizer.step()
        reference.step()
    worst = 0.0
    for full, local, layout in zip(dense, mine, layouts):
        expected = full.detach().reshape(-1)[layout.owned_indices()].view(layout.local_shape())
        if local.numel():
            worst = max(worst, float((local.detach() - expected).abs().max()))
    return worst


def run_cases(batch, world_size):
    def body():
        meshes = {
            sizes: init_device_mesh("cpu", sizes, mesh_dim_names=NAMES[: len(sizes)])
            for sizes in MESHES[world_size]
        }
        worst = []
        for case in batch:
            try:
                worst.append(run_case(case, meshes[case["sizes"]]))
            except Exception as error:
                raise AssertionError(f"{case}") from error
        return worst

    return run_ranks(body, world_size, timeout=120)


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 4])
@settings(
    deadline=None,
    max_examples=3,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],  # shrinking would start a group per attempt
)
@given(data=st.data())
def test_sharded_equals_dense(world_size, data):
    batch = [data.draw(cases(world_size)) for _ in range(25)]
    for worst in run_cases(batch, world_size):
        for case, error in zip(batch, worst):
            assert error < 1e-5, case
            assert math.isfinite(error)
