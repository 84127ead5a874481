"""Sharded Muon equals dense Muon: meshes of up to three axes, any placement, any view.

On simulated ranks, each is a thread that runs `muon_step` on its own plan, and collectives meet in
the Simulator. On gloo, the same draws go through the optimizer and real process groups, as our
DTensors, PyTorch's, and plain tensors that carry a layout.
"""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, example, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor as TorchDTensor

import hp_muon.relay
from hp_dtensor import AbstractMesh, DTensor, Layout, Replicate, Shard, attach_layout
from hp_dtensor.testing import layouts
from hp_muon import MatrixView, Muon, MuonError, newton_schulz
from hp_muon.channels import Channels
from hp_muon.plan_builder import build_plan
from hp_muon.reference import DenseMuon
from hp_muon.rules import accumulate
from hp_muon.state import local_tensor
from hp_muon.step import Hyperparameters, StepRun, Workspace, muon_step
from hp_muon.step_plan import Entry, Orthogonalization
from hp_platform import Topology
from hp_platform.testing import Simulator, run_ranks

SIZES = [(2,), (3,), (2, 2), (4, 1), (2, 3), (2, 2, 2), (3, 2, 2)]


class Meeting:
    """Where the ranks of one group exchange: the last to arrive computes for all."""

    def __init__(self, size):
        self.size, self.condition = size, threading.Condition()
        self.slots, self.results, self.round = {}, None, 0

    def exchange(self, rank, tensor, compute):
        with self.condition:
            mine = self.round
            self.slots[rank] = tensor.clone()
            if len(self.slots) == self.size:
                self.results = compute(
                    Simulator((self.size,)), list(map(self.slots.get, range(self.size)))
                )
                self.slots, self.round = {}, mine + 1
                self.condition.notify_all()
            elif not self.condition.wait_for(lambda: self.round > mine, timeout=200):
                raise TimeoutError("a rank waits for others that are elsewhere")
            return self.results[rank]


class Axis:
    def __init__(self, size, rank, meeting):
        self.size, self.rank, self.meeting = size, rank, meeting


class Done:
    def wait(self):
        return None


def all_gather(own, axis, *, output, sizes, origin):
    found = axis.meeting.exchange(axis.rank, own, lambda s, all: s.all_gather(all, 0, list(sizes)))
    output.copy_(found)
    return Done()


def broadcast(buffer, axis, *, source, origin):
    found = axis.meeting.exchange(axis.rank, buffer, lambda s, all: s.broadcast(all, 0, source))
    buffer.copy_(found)
    return Done()


class SimulatedChannels(Channels):
    def __init__(self, plan, coord, sizes, meetings):
        self.coord, self.sizes, self.meetings = coord, sizes, meetings
        super().__init__(plan, None)

    def _axis(self, domain, axis):
        return self._line(axis, tuple(range(self.sizes[axis])))

    def _subgroup(self, domain, replica):
        return self._line(replica.axis, replica.members)

    def _line(self, axis, members):
        others = tuple(c for a, c in enumerate(self.coord) if a != axis)
        with self.meetings["lock"]:
            meeting = self.meetings.setdefault((axis, members, others), Meeting(len(members)))
        return Axis(len(members), members.index(self.coord[axis]), meeting)


VIEWS = {
    2: [
        ("(h r) c -> h r c", "h", 0), ("r (h c) -> h r c", "h", 1), ("(r h) c -> h r c", "h", 0),
        ("(x r) c -> (x r) c", "x", 0), ("r (x c) -> r (x c)", "x", 1),
        ("(g x) c -> (g x) c", "x", 0),
    ],
    3: [
        ("e (h r) c -> e h r c", "h", 1), ("(e h) r c -> e r (h c)", "h", 0),
        ("e r c -> e c r", None, 0), ("e (x r) c -> e (x r) c", "x", 1),
        ("e r (c x) -> (e x) c r", "x", 2),
    ],
}  # fmt: skip


@st.composite
def views(draw, shape):
    """Views that split evenly or unevenly, join or turn dims, where they divide."""
    if len(shape) not in VIEWS or draw(st.booleans()):
        return None
    pattern, axis, dim = draw(st.sampled_from(VIEWS[len(shape)]))
    if axis is None:
        return MatrixView(pattern)
    if axis == "h":
        heads = draw(st.sampled_from([1, 2, 3]))
        return MatrixView(pattern, h=heads) if shape[dim] % heads == 0 else None
    pieces = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 1, 1)]))
    return MatrixView(pattern, x=pieces) if shape[dim] % sum(pieces) == 0 else None


@st.composite
def cases(draw, choices=tuple(SIZES)):
    sizes = draw(st.sampled_from(choices))
    mesh = AbstractMesh(("a", "b", "c")[: len(sizes)], sizes)
    parameters = []
    for _ in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 8), min_size=2, max_size=3)))
        layout = draw(layouts(mesh, shape, reductions=()))
        parameters.append((shape, layout, draw(views(shape))))
    per_host = draw(st.sampled_from([1, 2, 4, 12]))
    return {
        "mesh": mesh,
        "parameters": parameters,
        "hosts": [str(rank // per_host) for rank in range(math.prod(sizes))],
        "deduplicate": draw(st.booleans()),
        "nesterov": draw(st.booleans()),
        "normuon_beta2": draw(st.sampled_from([None, None, 0.9])),
        "missing": draw(st.integers(0, 4)),
        "tensor": draw(st.sampled_from(["plain", "ours", "pytorch"])),
        "max_batch_elements": draw(st.sampled_from([1, 100, 2**29])),
        "seed": draw(st.integers(0, 10**6)),
    }


def local_part(full, layout, coord):
    flat = full.detach().reshape(-1)[layout.owned_indices(coord)]
    return flat.view(layout.local_shape(coord)).clone()


def entries_of(case):
    how = Orthogonalization(5, "asym5", 1e-7, torch.float32, normuon_beta2=case["normuon_beta2"])
    found = []
    for index, (shape, layout, view) in enumerate(case["parameters"]):
        kinds = (view or MatrixView.default(len(shape))).kinds(shape)
        for kind, resolved in enumerate(kinds):
            found.append(
                Entry(
                    index,
                    f"p{index}",
                    layout,
                    resolved,
                    torch.float32,
                    torch.device("cpu"),
                    how,
                    kind,
                )
            )
    return found


def simulate(case, fulls, gradients):
    """Every rank's local tensors after the steps, and each orthogonalized matrix with its rank."""
    mesh, entries, meetings = case["mesh"], entries_of(case), {"lock": threading.Lock()}
    hyperparameters = dict.fromkeys(
        range(len(fulls)), Hyperparameters(0.1, 0.95, case["nesterov"], 0.1, "match_rms_adamw")
    )

    def rank(coord):
        plan = build_plan(
            entries,
            topology=Topology.from_hosts(case["hosts"]),
            deduplicate=case["deduplicate"],
            coordinate=coord,
            max_batch_elements=case["max_batch_elements"],
        )
        channels = SimulatedChannels(plan, coord, mesh.sizes, meetings)
        made = [layout for _, layout, _ in case["parameters"]]
        locals = {i: local_part(f, layout, coord) for i, (f, layout) in enumerate(zip(fulls, made))}
        momenta = {i: torch.zeros_like(locals[i]) for i in plan.owned}
        rows = {i: {} for i in plan.owned}
        counted = []

        def orthogonalize(matrices, batch, out):
            counted.append(matrices.shape[0])
            newton_schulz(matrices, out=out)

        for step in gradients:
            local = {
                i: None if g is None else local_part(g, made[i], coord) for i, g in enumerate(step)
            }
            run = StepRun(
                locals=locals, gradients=local, momenta=momenta, row_moments=rows,
                hyperparameters=hyperparameters, channels=channels.compiled,
                workspace=Workspace(), orthogonalize=orthogonalize, momentum_rule=accumulate,
                check_finite=True,
            )  # fmt: skip
            muon_step(plan, run)
        return locals, sum(counted), plan

    coords = list(product(*map(range, mesh.sizes)))
    with ThreadPoolExecutor(len(coords)) as pool:
        return dict(zip(coords, pool.map(rank, coords)))


def copies(case, layout):
    """How many times a matrix is orthogonalized: once a replica subgroup."""
    sizes, count = case["mesh"].sizes, 1
    ranks = torch.arange(math.prod(sizes)).view(sizes)
    for axis in layout.replicating_axes():
        line = ranks.movedim(axis, -1).reshape(-1, sizes[axis])[0].tolist()
        hosts = len({case["hosts"][rank] for rank in line})
        count *= hosts if case["deduplicate"] else sizes[axis]
    return count


@pytest.fixture
def simulated(monkeypatch):
    monkeypatch.setattr(hp_muon.relay, "all_gather", all_gather)
    monkeypatch.setattr(hp_muon.relay, "broadcast", broadcast)


def heads_cut_in_their_middle():
    """Rows of two kinds that alternate, in shards that hold neither whole periods nor one run."""
    mesh = AbstractMesh(("a", "b"), (2, 2))
    view = MatrixView("(g x) c -> (g x) c", x=(1, 2))
    layout = Layout(mesh, (Replicate(), Shard(0)), (15, 4))
    return {
        "mesh": mesh, "parameters": [((15, 4), layout, view)] * 3, "hosts": ["a"] * 4,
        "deduplicate": True, "nesterov": True, "normuon_beta2": 0.9, "missing": 1,
        "max_batch_elements": 2**29, "seed": 0, "tensor": "plain",
    }  # fmt: skip


@settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
@given(case=cases())
@example(case=heads_cut_in_their_middle())
def test_any_layout_gives_the_dense_result_with_each_matrix_orthogonalized_once(simulated, case):
    generator = torch.Generator().manual_seed(case["seed"])

    def random(shape):
        return torch.randn(shape, generator=generator)

    made = [layout for _, layout, _ in case["parameters"]]
    dense = [torch.nn.Parameter(random(layout.shape)) for layout in made]
    fulls = [parameter.detach().clone() for parameter in dense]
    steps = [
        [None if s == 1 and i == case["missing"] else random(p.shape) for i, p in enumerate(dense)]
        for s in range(3)
    ]
    try:
        found = simulate(case, fulls, steps)
    except MuonError as error:
        # Hosts that do not divide the replicas evenly are refused, see test_owners.
        assume("hosts" not in str(error))
        raise
    reference = DenseMuon(
        dense,
        lr=0.1,
        nesterov=case["nesterov"],
        normuon_beta2=case["normuon_beta2"],
        ns_dtype=torch.float32,
        views=[view for *_, view in case["parameters"]],
    )
    for step in steps:
        for parameter, gradient in zip(dense, step):
            parameter.grad = gradient
        reference.step()
    for coord, (locals, _, _) in found.items():
        for index, (parameter, layout) in enumerate(zip(dense, made)):
            expected = local_part(parameter, layout, coord)
            torch.testing.assert_close(locals[index], expected, atol=1e-5, rtol=1e-5)
    wanted = 0
    for index, (shape, layout, view) in enumerate(case["parameters"]):
        kinds = (view or MatrixView.default(len(shape))).kinds(shape)
        steps_taken = sum(step[index] is not None for step in steps)
        wanted += sum(k.count for k in kinds) * copies(case, layout) * steps_taken
    assert sum(count for _, count, _ in found.values()) == wanted
    assert len({plan.digest for *_, plan in found.values()}) == 1


def on_gloo(case, mesh):
    """The largest difference on this rank, and how many matrices it orthogonalized."""
    generator = torch.Generator().manual_seed(case["seed"])

    def random(shape):
        return torch.randn(shape, generator=generator)

    made = [Layout(mesh, layout.placements, layout.shape) for _, layout, _ in case["parameters"]]
    dense = [torch.nn.Parameter(random(layout.shape)) for layout in made]
    mine = [as_tensor(case, p, layout) for p, layout in zip(dense, made)]
    mine = [torch.nn.Parameter(t) for t in mine]
    for parameter, layout in zip(mine, made):
        if case["tensor"] == "plain":
            attach_layout(parameter, layout)
    count = []

    def orthogonalize(matrices):
        count.append(matrices.shape[0])
        return newton_schulz(matrices)

    views = [view for *_, view in case["parameters"]]
    same = {"nesterov": case["nesterov"], "normuon_beta2": case["normuon_beta2"]}
    optimizer = Muon(
        [(f"p{i}", p) for i, p in enumerate(mine)], lr=0.1, ns_dtype=torch.float32,
        views={f"p{i}": v or MatrixView.default(made[i].ndim) for i, v in enumerate(views)},
        deduplicate_replicas=case["deduplicate"], orthogonalize=orthogonalize,
        max_batch_elements=case["max_batch_elements"], **same,
    )  # fmt: skip
    reference = DenseMuon(dense, lr=0.1, ns_dtype=torch.float32, views=views, **same)
    for step in range(2):
        for index, (full, parameter, layout) in enumerate(zip(dense, mine, made)):
            full.grad = None if step and index == case["missing"] else random(layout.shape)
            parameter.grad = None if full.grad is None else as_tensor(case, full.grad, layout)
        optimizer.step()
        reference.step()
    worst = [0.0]
    for full, parameter, layout in zip(dense, mine, made):
        found, expected = local_tensor(parameter.detach()), local_part(full, layout, None)
        if expected.numel():
            worst.append(float((found - expected).abs().max()))
    return max(worst), sum(count)


def as_tensor(case, full, layout):
    """The full tensor in the case's kind of tensor; PyTorch's where it has such placements."""
    local = local_part(full, layout, None)
    if case["tensor"] == "ours":
        return DTensor.from_local(local, layout.mesh, layout.placements, shape=layout.shape)
    if case["tensor"] == "pytorch":
        stride = torch.empty(layout.shape, device="meta").stride()
        return TorchDTensor.from_local(
            local, layout.mesh, layout.placements, run_check=False, shape=layout.shape,
            stride=stride,
        )  # fmt: skip
    return local


def fits(case):
    plain = all(
        type(p) in (Shard, Replicate)
        for _, layout, _ in case["parameters"]
        for p in layout.placements
    )
    return case["tensor"] != "pytorch" or plain


@pytest.mark.ranks
@settings(
    deadline=None,
    max_examples=2,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],  # shrinking would start a group per attempt
)
@given(data=st.data())
def test_gloo_gives_the_dense_result_for_every_kind_of_tensor(data):
    sizes = [(4,), (2, 2), (2, 1, 2), (1, 4)]
    drawn = cases(sizes).map(lambda c: c if fits(c) else {**c, "tensor": "ours"})
    batch = [{**data.draw(drawn), "hosts": ["here"] * 4} for _ in range(25)]

    def body():
        names = ("a", "b", "c")
        meshes = {s: init_device_mesh("cpu", s, mesh_dim_names=names[: len(s)]) for s in sizes}
        found = []
        for case in batch:
            try:
                found.append(on_gloo(case, meshes[case["mesh"].sizes]))
            except Exception as error:
                raise AssertionError(f"{case}") from error
        return found

    results = zip(*run_ranks(body, 4, timeout=240))
    for case, ranks in zip(batch, results):
        assert all(worst < 1e-5 for worst, _ in ranks), case
        wanted = sum(
            kind.count * copies(case, layout) * (2 - (index == case["missing"]))
            for index, (shape, layout, view) in enumerate(case["parameters"])
            for kind in (view or MatrixView.default(len(shape))).kinds(shape)
        )
        assert sum(count for _, count in ranks) == wanted, case


def test_a_matrix_that_is_not_finite_is_named_by_every_rank_that_shares_it(simulated):
    mesh = AbstractMesh(("r", "dp"), (2, 2))
    shape = (4, 3)
    layout = Layout(mesh, (Replicate(), Shard(0)), shape)
    case = {
        "mesh": mesh, "parameters": [(shape, layout, None)] * 3, "hosts": ["a"] * 4,
        "deduplicate": True, "nesterov": True, "normuon_beta2": None, "max_batch_elements": 2**29,
    }  # fmt: skip
    fulls = [torch.ones(shape) for _ in range(3)]
    gradients = [torch.eye(4)[:, :3].clone() for _ in range(3)]
    gradients[1][3, 2] = torch.inf
    with pytest.raises(MuonError, match=r"1 parameters was not finite.*\['p1'\]"):
        simulate(case, fulls, [gradients])
