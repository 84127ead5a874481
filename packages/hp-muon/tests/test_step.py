"""What a step communicates and computes, from the ledger and by count."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from hp_dtensor import Layout, Replicate, Shard, attach_layout
from hp_muon import Muon, MuonError, newton_schulz
from hp_platform import Tier, Topology, ledger
from hp_platform.testing import run_ranks

SHAPES = [(8, 6), (8, 6), (6, 12), (5, 5), (3, 4, 6)]


def local_parameters(mesh, placements, shapes=SHAPES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    found = []
    for shape in shapes:
        layout = Layout(mesh, placements, shape)
        full = torch.randn(shape, generator=generator).reshape(-1)
        local = full[layout.owned_indices()].view(layout.local_shape())
        found.append(attach_layout(torch.nn.Parameter(local.clone()), layout))
    return found


def set_gradients(parameters, seed=1):
    for index, parameter in enumerate(parameters):
        layout = parameter._hp_layout
        generator = torch.Generator().manual_seed(seed + index)
        full = torch.randn(layout.shape, generator=generator).reshape(-1)
        parameter.grad = full[layout.owned_indices()].view(layout.local_shape()).clone()


def counting(log):
    def orthogonalize(matrices):
        log.extend(tuple(matrix.flatten().tolist()) for matrix in matrices)
        return newton_schulz(matrices)

    return orthogonalize


@pytest.mark.ranks
def test_experts_sharded_on_the_expert_dim_are_stepped_without_any_collective():
    stack = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[0.0, 1.0], [1.0, 0.0]]])
    expected = torch.tensor([[[-0.6807, 0.8255], [0.7413, 0.2594]], [[0.0, 1.1081], [1.1081, 0.0]]])

    def body(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        results = []
        for dim in (0, 1):
            layout = Layout(mesh, [Shard(dim)], stack.shape)
            local = torch.zeros(layout.local_shape())
            parameter = attach_layout(torch.nn.Parameter(local), layout)
            parameter.grad = stack.chunk(2, dim)[rank].clone()
            optimizer = Muon(
                [parameter], lr=1.0, weight_decay=0.0, scale="none", momentum=0.0,
                coefficients="quintic", ns_dtype=torch.float32,
            )  # fmt: skip
            with ledger() as log:
                optimizer.step()
            wanted = -expected.chunk(2, dim)[rank]
            torch.testing.assert_close(parameter.detach(), wanted, atol=1e-4, rtol=0)
            results.append(len(log.records))
        return results

    for on_experts, on_rows in run_ranks(body, 2):
        assert on_experts == 0
        assert on_rows > 0


@pytest.mark.ranks
def test_rows_sharded_over_ranks_give_the_known_values_of_the_whole_matrix():
    gradient = torch.arange(1.0, 9).reshape(4, 2)
    expected = [[-0.44707, 0.51241], [-0.1074, 0.4079], [0.23227, 0.3034], [0.57194, 0.1989]]

    def body(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        layout = Layout(mesh, [Shard(0)], gradient.shape)
        parameter = attach_layout(torch.nn.Parameter(torch.zeros(2, 2)), layout)
        parameter.grad = gradient.chunk(2)[rank].clone()
        Muon(
            [parameter], lr=1.0, weight_decay=0.0, scale="none", momentum=0.0,
            coefficients="quintic", ns_dtype=torch.float32,
        ).step()  # fmt: skip
        wanted = -torch.tensor(expected).chunk(2)[rank]
        torch.testing.assert_close(parameter.detach(), wanted, atol=1e-4, rtol=0)

    run_ranks(body, 2)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("hosts", "copies"), [(["a"] * 4, 1), (["a", "a", "b", "b"], 2), (["a", "b", "c", "d"], 2)]
)
def test_each_matrix_is_orthogonalized_once_per_shard_group_and_subgroup(hosts, copies):
    def body():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        parameters = local_parameters(mesh, [Replicate(), Shard(0)])
        seen = []
        optimizer = Muon(
            parameters, orthogonalize=counting(seen), topology=Topology.from_hosts(hosts)
        )
        set_gradients(parameters)
        optimizer.step()
        return seen

    seen = [matrix for rank in run_ranks(body, 4) for matrix in rank]
    matrices = 4 + 3
    assert len(set(seen)) == matrices
    assert all(seen.count(matrix) == copies for matrix in set(seen))


@pytest.mark.ranks
def test_no_optimizer_bytes_cross_hosts_and_replicas_stay_bitwise_equal():
    topology = Topology.from_hosts(["a", "a", "a", "a", "b", "b", "b", "b"])

    def body():
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("replicate", "shard"))
        parameters = local_parameters(mesh, [Replicate(), Shard(0)])
        optimizer = Muon(parameters, topology=topology)
        with ledger() as log:
            for seed in range(2):
                set_gradients(parameters, seed)
                optimizer.step()
        slow = [r for r in log.records if r.tier is Tier.SLOW]
        held = sum("momentum_buffer" in state for state in optimizer.state.values())
        return [str(r) for r in slow], [p.detach().clone() for p in parameters], held

    results = run_ranks(body, 8)
    assert [slow for slow, *_ in results] == [[]] * 8
    for rank in range(2, 8):
        for mine, other in zip(results[rank][1], results[rank % 2][1]):
            assert torch.equal(mine, other)
    # Of the two replicas on a host, one holds each momentum: every shard once a host.
    assert [sum(results[r][2] for r in range(s, s + 4, 2)) for s in (0, 1, 4, 5)] == [5] * 4


@pytest.mark.ranks
def test_a_batch_is_gathered_in_one_collective_per_axis_and_relayed_axis_by_axis():
    def body():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parameters = local_parameters(mesh, [Shard(0), Shard(1)], [(8, 6)] * 8)
        optimizer = Muon(parameters)
        set_gradients(parameters)
        optimizer.step()
        with ledger() as log:
            optimizer.step()
        return [(r.operation, r.axis, r.aligned) for r in log.records]

    for records in run_ranks(body, 4):
        # Whether gradients are finite; the gather; the relay.
        assert records == [
            ("all_reduce", "dp", True),
            ("all_reduce", "tp", True),
            ("all_gather", "tp", True),
            ("all_gather", "dp", True),
            *[("broadcast", "tp", True)] * 2,
            *[("broadcast", "dp", True)] * 2,
        ]


@pytest.mark.ranks
def test_at_most_one_relay_is_in_flight_and_all_have_landed_at_the_end():
    def body():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        parameters = local_parameters(mesh, [Shard(0)], [(8, n) for n in range(2, 8)])
        optimizer = Muon(parameters)
        set_gradients(parameters)
        optimizer.step()
        with ledger() as log:
            optimizer.step()
        flying, most = set(), 0
        for kind, index in log.events:
            record = log.records[index] if isinstance(index, int) else None
            if record is None or record.operation != "broadcast":
                continue
            if kind == "issue":
                flying.add(record.origin.name)
            elif kind == "wait":
                flying.discard(record.origin.name)
            most = max(most, len(flying))
        return len({r.origin.name for r in log.records if r.operation == "broadcast"}), most, flying

    for batches, most, flying in run_ranks(body, 2):
        assert batches == 6
        assert most == 1
        assert flying == set()


@pytest.mark.ranks
def test_gradients_missing_on_some_ranks_count_as_zero_without_a_hang():
    def body(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        arguments = {"lr": 0.1, "ns_dtype": torch.float32}
        partly = local_parameters(mesh, [Shard(0)])
        zeroed = local_parameters(mesh, [Shard(0)])
        first, second = Muon(partly, **arguments), Muon(zeroed, **arguments)
        for step in range(3):
            for parameters in (partly, zeroed):
                set_gradients(parameters, step)
            for index, without in ((0, 0), (3, 1)):
                if step == 1 and rank == without:
                    partly[index].grad = None
                    zeroed[index].grad.zero_()
            first.step()
            second.step()
        for mine, other in zip(partly, zeroed):
            torch.testing.assert_close(mine, other)

    run_ranks(body, 2)


@pytest.mark.ranks
def test_a_rank_with_whole_matrices_decides_for_itself_whether_they_are_stepped():
    def body(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        (experts,) = local_parameters(mesh, [Shard(0)], [(4, 3, 5)])
        before = experts.detach().clone()
        optimizer = Muon([experts])
        set_gradients([experts])
        if rank == 0:
            experts.grad = None
        with ledger() as log:
            optimizer.step()
        return torch.equal(experts, before), len(log.records)

    assert run_ranks(body, 2) == [(True, 0), (False, 0)]


@pytest.mark.ranks
def test_gradients_missing_everywhere_leave_parameter_and_momentum_alone():
    def body():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        parameters = local_parameters(mesh, [Replicate(), Shard(0)])
        optimizer = Muon(parameters)
        set_gradients(parameters)
        optimizer.step()
        before = [p.detach().clone() for p in parameters]
        momenta = optimizer.state_dict()["state"]
        momenta = {i: s["momentum_buffer"].to_local().clone() for i, s in momenta.items()}
        set_gradients(parameters, 7)
        parameters[2].grad = None
        optimizer.step()
        after = optimizer.state_dict()["state"]
        assert torch.equal(parameters[2], before[2])
        assert torch.equal(after[2]["momentum_buffer"].to_local(), momenta[2])
        assert not torch.equal(parameters[1], before[1])
        leaves_a_lost_one_alone(mesh)

    def leaves_a_lost_one_alone(mesh):
        """What an earlier step found not to be finite is not found again in one without it."""
        parameters = local_parameters(mesh, [Replicate(), Shard(0)], [(8, 6)] * 4)
        optimizer = Muon(parameters)
        set_gradients(parameters)
        optimizer.step()
        held = optimizer.state[parameters[1]].get("momentum_buffer")
        if held is not None:
            held.fill_(torch.inf)
        with pytest.raises(MuonError, match="was not finite"):
            optimizer.step()
        parameters[1].grad = None
        optimizer.step()

    run_ranks(body, 4)


@pytest.mark.ranks
def test_ranks_with_different_plans_stop_before_the_first_exchange():
    def body(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        parameters = local_parameters(mesh, [Shard(0)])
        optimizer = Muon(parameters, ns_steps=5 - rank)
        set_gradients(parameters)
        with pytest.raises(Exception, match="disagree about the Muon step plan"):
            optimizer.step()

    run_ranks(body, 2)
