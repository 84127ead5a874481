"""One plan in two modes, against the whole model in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dtensor_block import (
    HIDDEN,
    PENDING,
    SEQUENCE,
    SUMMED,
    WHOLE,
    Tiny,
    batch,
    cut,
    loss_of,
    tiny_plan,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hp_dtensor.contracts import ContractError, PlanError
from hp_dtensor.dtensor import DTensor
from hp_dtensor.layout import layout_of
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.parallelize import parallelize
from hp_dtensor.placements import Partial, Replicate, SectionedShard, Shard
from hp_dtensor.plan import (
    BoundaryKind,
    BoundarySpec,
    BoundaryTensor,
    Contract,
    ParameterSpec,
    ShardingPlan,
)
from hp_dtensor.production import local_part
from hp_platform import AgreementError, ledger
from hp_platform.testing import run_ranks

Step = tuple[float, dict[str, Tensor]]


def dense_step(**options: Any) -> Step:
    model = Tiny(**options)
    loss = loss_of(model, batch())
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def mesh_of(sizes: dict[str, int]) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def assert_equals_dense(model: nn.Module, loss: Tensor, dense: Step) -> None:
    """Loss and every gradient: this rank's part of the dense one."""
    torch.testing.assert_close(float(loss.detach()), dense[0], rtol=1e-5, atol=1e-6)
    for name, parameter in model.named_parameters():
        layout = layout_of(parameter)
        assert layout is not None, name
        expected = local_part(dense[1][name], layout, layout.coordinate())
        found = local(parameter.grad)
        torch.testing.assert_close(
            found, expected, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: n + m
        )


def run_step(
    sizes: dict[str, int], mode: str, sequence_parallel: bool, **options: Any
) -> list[Any]:
    dense = dense_step(**options)
    plan = tiny_plan(sizes, sequence_parallel=sequence_parallel, tied=bool(options.get("tied")))

    def body() -> list[Any]:
        model = parallelize(Tiny(**options), plan, mesh_of(sizes), mode=mode)  # type: ignore[arg-type]
        with ledger() as log:
            loss = loss_of(model, batch())
            loss.backward()
        assert_equals_dense(model, loss, dense)
        return [(r.operation, r.axis, r.bytes, str(r.origin)) for r in log.records]

    world = 1
    for size in sizes.values():
        world *= size
    return run_ranks(body, world)


@pytest.mark.ranks
@pytest.mark.parametrize("mode", ["production", "validate"])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_two_tensor_parallel_ranks_compute_what_one_process_does(
    mode: str, sequence_parallel: bool
) -> None:
    run_step({"tp": 2}, mode, sequence_parallel)


@pytest.mark.ranks
@pytest.mark.parametrize("mode", ["production", "validate"])
def test_data_axes_are_left_alone(mode: str) -> None:
    records = run_step({"dp_shard": 2, "tp": 2}, mode, True)
    assert {axis for rank in records for _, axis, _, _ in rank} == {"tp"}


@pytest.mark.ranks
def test_four_tensor_parallel_ranks_compute_what_one_process_does() -> None:
    run_step({"tp": 4}, "production", True)


@pytest.mark.ranks
@pytest.mark.parametrize("mode", ["production", "validate"])
def test_tied_parameters_stay_tied_and_a_padding_row_gets_no_gradient(mode: str) -> None:
    run_step({"tp": 2}, mode, True, tied=True, padding_idx=9)


@pytest.mark.ranks
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_both_modes_run_the_same_collectives(sequence_parallel: bool) -> None:
    production = run_step({"tp": 2}, "production", sequence_parallel)
    validate = run_step({"tp": 2}, "validate", sequence_parallel)
    assert production == validate
    assert len(production[0]) > 10


@pytest.mark.ranks
def test_production_parameters_are_plain_and_remember_their_layout_on_the_whole_mesh() -> None:
    sizes = {"dp_shard": 2, "tp": 2}

    def body() -> None:
        module = Tiny()
        held = dict(module.named_parameters())
        mesh = mesh_of(sizes)
        parallelize(module, tiny_plan(sizes), mesh)
        for name, parameter in module.named_parameters():
            assert type(parameter) is nn.Parameter
            assert parameter is held[name], "an optimizer built before would hold another object"
        query = layout_of(module.layers[0].attention.q.weight)
        assert query is not None
        assert query.mesh == mesh
        assert query.placements == (Replicate(), Shard(0))
        fused = layout_of(module.layers[0].mlp.gate_up)
        assert fused is not None
        assert fused.placements[1] == SectionedShard(0, (12, 12))
        norm = layout_of(module.norm.weight)
        assert norm is not None
        assert norm.grad_placements == (Replicate(), Partial())
        assert module.layers[0].attention.heads == 2

    run_ranks(body, 4)


@pytest.mark.ranks
def test_meta_parameters_become_meta_parts() -> None:
    def body() -> None:
        with torch.device("meta"):
            module = nn.Sequential(Tiny())[0]
        parallelize(module, tiny_plan({"tp": 2}), mesh_of({"tp": 2}))
        weight = module.layers[0].attention.q.weight
        assert weight.is_meta
        assert weight.shape == (HIDDEN // 2, HIDDEN)

    run_ranks(body, 2)


def test_parameters_that_lost_their_layouts_are_named_at_the_first_forward() -> None:
    with torch.device("meta"):
        module = Tiny()
    parallelize(module, tiny_plan({"tp": 1}), AbstractMesh.of({"tp": 1}))
    module.norm.to_empty(device="cpu")
    with pytest.raises(PlanError, match=r"\['norm.weight'\] have lost their layouts"):
        module(torch.zeros(1, 2, dtype=torch.int64))


@pytest.mark.ranks
def test_a_boundary_whose_contracts_agree_gets_no_hook() -> None:
    def body() -> None:
        module = parallelize(Tiny(), tiny_plan({"tp": 2}), mesh_of({"tp": 2}))
        assert not module.layers[0].first._forward_pre_hooks
        assert not module.layers[0].first._forward_hooks
        assert not module.layers[1]._forward_pre_hooks
        assert module.layers[0]._forward_pre_hooks

    run_ranks(body, 2)


def test_one_rank_installs_no_hook_at_all() -> None:
    module = parallelize(Tiny(), tiny_plan({"tp": 1}), AbstractMesh.of({"tp": 1}))
    loss = loss_of(module, batch())
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()]
    assert sum(hooks) == 0
    loss.backward()
    dense = dense_step()
    assert loss.item() == dense[0]
    assert all(torch.equal(p.grad, dense[1][n]) for n, p in module.named_parameters())


@pytest.mark.ranks
def test_the_sequence_length_may_change_from_step_to_step() -> None:
    def body() -> None:
        module = parallelize(Tiny(), tiny_plan({"tp": 2}), mesh_of({"tp": 2}))
        whole = Tiny()
        for length in (8, 4, 8, 6):
            data = batch(length)
            torch.testing.assert_close(loss_of(module, data), loss_of(whole, data))

    run_ranks(body, 2)


@pytest.mark.ranks
@pytest.mark.parametrize("mode", ["production", "validate"])
def test_a_sequence_that_cannot_be_cut_evenly_is_refused_alike_on_all_ranks(mode: str) -> None:
    def body() -> str:
        module = parallelize(Tiny(), tiny_plan({"tp": 2}), mesh_of({"tp": 2}), mode=mode)  # type: ignore[arg-type]
        with pytest.raises(ContractError) as error, ledger() as log:
            loss_of(module, batch(7))
        assert {str(r.origin) for r in log.records} <= {"hp_dtensor embed forward"}
        return str(error.value)

    first, second = run_ranks(body, 2)
    assert first == second
    assert "boundary layers.0, input 'x': S(1) over mesh axis 'tp' of size 2" in first
    assert "dim 1 of the global shape (2, 7, 8) has size 7; pad it to a multiple of 2" in first


@pytest.mark.ranks
@pytest.mark.parametrize("mode", ["production", "validate"])
def test_gradients_accumulated_over_passes_are_reduced_once_each(mode: str) -> None:
    dense = Tiny()
    for length in (8, 4, 6):
        loss_of(dense, batch(length)).backward()

    def body() -> None:
        module = parallelize(Tiny(), tiny_plan({"tp": 2}), mesh_of({"tp": 2}), mode=mode)  # type: ignore[arg-type]
        for length in (8, 4, 6):
            loss = loss_of(module, batch(length))
            loss.backward()
        grads = {n: p.grad for n, p in dense.named_parameters()}
        assert_equals_dense(module, loss, (float(loss.detach()), grads))

    run_ranks(body, 2)


@pytest.mark.ranks
def test_the_settlement_of_all_parameters_is_one_collective_a_pass() -> None:
    records = run_step({"tp": 2}, "production", True)
    settled = [each for each in records[0] if "settlement" in each[3]]
    assert len(settled) == 1


@pytest.mark.ranks
def test_ranks_with_different_plans_stop_before_anything_is_cut() -> None:
    def body(rank: int) -> None:
        module = Tiny()
        plan = tiny_plan({"tp": 2}, sequence_parallel=rank == 0)
        with pytest.raises(AgreementError, match="sharding plan"):
            parallelize(module, plan, mesh_of({"tp": 2}))
        assert module.head.weight.shape == (12, HIDDEN)

    run_ranks(body, 2)


@pytest.mark.ranks
def test_a_second_plan_is_refused() -> None:
    def body() -> None:
        mesh, plan = mesh_of({"tp": 2}), tiny_plan({"tp": 2})
        module = parallelize(Tiny(), plan, mesh)
        with pytest.raises(PlanError, match="is parallelized already"):
            parallelize(module, plan, mesh, mode="validate")
        with pytest.raises(PlanError, match="is distributed already"):
            parallelize(module.layers[0], plan, mesh)  # type: ignore[type-var]

    run_ranks(body, 2)


@pytest.mark.ranks
def test_ids_outside_the_vocabulary_fail_on_every_rank() -> None:
    def body() -> None:
        module = parallelize(Tiny(), tiny_plan({"tp": 2}), mesh_of({"tp": 2}))
        for bad in (-1, 12):
            with pytest.raises(IndexError):
                module(torch.full((2, SEQUENCE), bad))

    run_ranks(body, 2)


@pytest.mark.ranks
@pytest.mark.parametrize("mode", ["production", "validate"])
def test_the_vocabulary_of_an_embedding_may_be_cut_unevenly(mode: str) -> None:
    plan = ShardingPlan(
        model="Embedding",
        mesh=AbstractMesh.of({"tp": 4}),
        model_axes=("tp",),
        parameters=[ParameterSpec("weight", "embedding", (13, 3), cut(0), "")],
        boundaries=[
            BoundarySpec(
                "",
                BoundaryKind.EMBEDDING,
                inputs=[BoundaryTensor("input", WHOLE, WHOLE, plain=True)],
                outputs=[BoundaryTensor("", WHOLE, PENDING)],
            )
        ],
    )
    table = torch.arange(39.0).view(13, 3)
    ids = torch.tensor([[0, 12, 4], [12, 3, 7]])

    def body() -> None:
        module = parallelize(
            nn.Embedding.from_pretrained(table, freeze=False),
            plan,
            mesh_of({"tp": 4}),
            mode=mode,  # type: ignore[arg-type]
        )
        rows = module(ids)
        torch.testing.assert_close(local(rows), table[ids])
        rows.sum().backward()
        layout = layout_of(module.weight)
        assert layout is not None
        counts = torch.bincount(ids.flatten(), minlength=13).float()
        expected = local_part(counts.unsqueeze(1).expand(13, 3), layout, layout.coordinate())
        torch.testing.assert_close(local(module.weight.grad), expected)

    run_ranks(body, 4)


@pytest.mark.ranks
def test_both_modes_train_alike_bit_by_bit() -> None:
    def body() -> tuple[list[list[float]], list[list[float]]]:
        losses, norms = [], []
        for mode in ("production", "validate"):
            module = parallelize(Tiny(), tiny_plan({"tp": 2}), mesh_of({"tp": 2}), mode=mode)  # type: ignore[arg-type]
            optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
            losses.append([])
            norms.append([])
            for _ in range(8):
                optimizer.zero_grad()
                loss = loss_of(module, batch())
                loss.backward()
                optimizer.step()
                losses[-1].append(float(loss.detach()))
                norms[-1].append(
                    sum(float(local(p.grad).double().norm()) for p in module.parameters())
                )
        return losses, norms

    for losses, norms in run_ranks(body, 2):
        assert losses[0] == losses[1]
        assert norms[0] == norms[1]
        assert losses[0][-1] < losses[0][0]


@pytest.mark.ranks
@pytest.mark.parametrize("mode", ["production", "validate"])
def test_evaluation_without_gradients_gives_the_dense_values(mode: str) -> None:
    def body() -> None:
        module = parallelize(Tiny(), tiny_plan({"tp": 2}), mesh_of({"tp": 2}), mode=mode)  # type: ignore[arg-type]
        with torch.no_grad():
            found = module(batch()["ids"])["logits"]
            torch.testing.assert_close(local(found), Tiny()(batch()["ids"])["logits"])

    run_ranks(body, 2)


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4, bias=False)
        generator = torch.Generator().manual_seed(2)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.nn.functional.silu(self.up(x)))


@pytest.mark.ranks
@pytest.mark.parametrize("mode", ["production", "validate"])
def test_two_model_axes_cut_samples_and_features_at_once(mode: str) -> None:
    def over_both(placements: dict[str, Any]) -> Contract:
        return Contract(placements, {"cp": Partial()})

    plan = ShardingPlan(
        model="Perceptron",
        mesh=AbstractMesh.of({"cp": 2, "tp": 2}),
        model_axes=("cp", "tp"),
        parameters=[
            ParameterSpec("up.weight", "up", (8, 4), over_both({"tp": Shard(0)}), ""),
            ParameterSpec("up.bias", "up", (8,), over_both({"tp": Shard(0)}), ""),
            ParameterSpec("down.weight", "down", (4, 8), over_both({"tp": Shard(1)}), ""),
        ],
        boundaries=[
            BoundarySpec(
                "",
                BoundaryKind.MLP,
                inputs=[
                    BoundaryTensor(
                        "x", WHOLE, Contract({"cp": Shard(0)}, {"tp": Partial()}), plain=True
                    )
                ],
                outputs=[BoundaryTensor("", WHOLE, Contract({"cp": Shard(0), "tp": Partial()}))],
            )
        ],
    )
    x = torch.arange(24.0).view(6, 4) / 10
    whole = Perceptron()
    whole(x).square().sum().backward()
    grads = {name: parameter.grad for name, parameter in whole.named_parameters()}

    def body() -> None:
        sizes = {"cp": 2, "tp": 2}
        module = parallelize(Perceptron(), plan, mesh_of(sizes), mode=mode)  # type: ignore[arg-type]
        loss = module(x).square().sum()
        loss.backward()
        assert_equals_dense(module, loss, (float(whole(x).square().sum()), grads))  # type: ignore[arg-type]

    run_ranks(body, 4)


class KeyAndQuery(nn.Module):
    """A replicated weight used inside sharded heads."""

    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(2, 4, bias=False)
        self.wk = nn.Linear(2, 1, bias=False)
        self.wq.weight.data = torch.tensor([[1.0, 0], [0, 1], [1, 1], [2, 0]])
        self.wk.weight.data = torch.tensor([[1.0, 1]])

    def forward(self, x: Tensor) -> Tensor:
        return self.wq(x) * self.wk(x)


@pytest.mark.ranks
@pytest.mark.parametrize("mode", ["production", "validate"])
def test_a_replicated_weight_among_sharded_heads_gets_the_whole_gradient(mode: str) -> None:
    plan = ShardingPlan(
        model="KeyAndQuery",
        mesh=AbstractMesh.of({"tp": 2}),
        model_axes=("tp",),
        parameters=[
            ParameterSpec("wq.weight", "query", (4, 2), cut(0), ""),
            ParameterSpec("wk.weight", "key", (1, 2), SUMMED, ""),
        ],
        boundaries=[
            BoundarySpec(
                "",
                BoundaryKind.ATTENTION,
                inputs=[BoundaryTensor("x", WHOLE, SUMMED, plain=True)],
                outputs=[BoundaryTensor("", WHOLE, cut(-1))],
            )
        ],
    )

    def body() -> list[float]:
        module = parallelize(KeyAndQuery(), plan, mesh_of({"tp": 2}), mode=mode)  # type: ignore[arg-type]
        module(torch.tensor([[1.0, 2.0]])).sum().backward()
        return local(module.wk.weight.grad).flatten().tolist()

    assert run_ranks(body, 2) == [[8.0, 16.0], [8.0, 16.0]]
