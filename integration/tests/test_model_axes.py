"""Plans with expert and context axes, held to the dense model and to the ledger."""

import copy
import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM

import hp_planner
from hp_dtensor.dtensor import DTensor
from hp_dtensor.layout import Layout
from hp_dtensor.meta import validate_on_meta
from hp_dtensor.parallelize import parallelize
from hp_dtensor.plan import ShardingPlan
from hp_dtensor.production import local_part
from hp_integration.assemble import shard_over_data_axes
from hp_planner.cost import Workload, memory, messages
from hp_platform import ledger
from hp_platform.mesh import make_mesh
from hp_platform.testing import run_ranks

pytestmark = pytest.mark.ranks

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
BATCH, LENGTH = 2, 8

CASES: dict[str, tuple[str, dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "experts": ("qwen3_moe", {"ep": 2}, {}, {}),
    "experts, four ranks": ("qwen3_moe", {"ep": 4}, {}, {}),
    "experts beside shared ones": ("qwen2_moe", {"ep": 2}, {}, {}),
    "experts of mixtral": ("mixtral", {"ep": 2}, {}, {}),
    "experts with biases and tensors": ("gpt_oss", {"ep": 2, "tp": 2}, {"attn": "eager"}, {}),
    "experts and tensors": ("qwen3_moe", {"ep": 2, "tp": 2}, {}, {}),
    "experts and sequences": ("qwen3_moe", {"ep": 2, "cp": 2}, {}, {}),
    "a block of experts left whole": (
        "qwen3_moe",
        {"ep": 2},
        {},
        {"overrides": {"model.layers.0.mlp": "none"}},
    ),
    "sequences": ("qwen3", {"cp": 2}, {}, {}),
    "sequences, four ranks, eager": ("llama", {"cp": 4}, {"attn": "eager"}, {}),
    "sequences and tensors": ("llama", {"cp": 2, "tp": 2}, {"attention_bias": True}, {}),
    "sequences and tensors that share heads": (
        "llama",
        {"cp": 2, "tp": 2},
        {"attention_bias": True, "num_key_value_heads": 1},
        {},
    ),
    "ranks with two heads of three between them": (
        "olmo2",
        {"tp": 2},
        {"num_attention_heads": 6, "num_key_value_heads": 3},
        {},
    ),
    "tensors before sequences": ("qwen3", {"tp": 2, "cp": 2}, {}, {}),
    "whole hidden states over tp": (
        "qwen3",
        {"cp": 2, "tp": 2},
        {},
        {"sequence_parallel": False},
    ),
    "sliding windows and soft caps": (
        "gemma2",
        {"cp": 2},
        {"attn": "eager", "sliding_window": 3},
        {},
    ),
    "an attention left whole": (
        "qwen3",
        {"cp": 2},
        {},
        {"overrides": {"model.layers.0.self_attn": "none"}},
    ),
}


def model(family: str, changes: dict[str, Any]) -> nn.Module:
    """Weights far from their initial values, so that no term hides."""
    known = AutoConfig.for_model(family).to_dict()
    changes = dict(changes)
    implementation = changes.pop("attn", "sdpa")
    sizes = {name: value for name, value in SIZES.items() if name in known}
    config = AutoConfig.for_model(family, **{**sizes, **changes})
    torch.manual_seed(0)
    made: nn.Module = AutoModelForCausalLM.from_config(
        config, attn_implementation=implementation, experts_implementation="eager"
    )
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            noise = torch.randn_like(parameter)
            norm = "norm" in name and name.endswith("weight")
            parameter.copy_(1 + 0.2 * noise if norm else 0.15 * noise)
    return made.train()


def step(made: nn.Module, padded: bool) -> Any:
    ids = torch.randint(0, 256, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    labels = ids.masked_fill(mask == 0, -100) if padded else ids
    given = {"attention_mask": mask} if padded else {}
    result = made(input_ids=ids, labels=labels, use_cache=False, **given)
    result.loss.backward()
    return result


def error(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.detach(), wanted.detach()
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-9))


def worst(made: nn.Module, found: ShardingPlan, padded: bool) -> tuple[str, float]:
    """The largest relative error of logits and gradients, over all ranks and both modes.

    The contracts that stand for regions where nothing has values are the same ones.
    """
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    report = validate_on_meta(made, found, {"input_ids": ids, "labels": ids, "use_cache": False})
    assert report.unreached == ()
    dense = copy.deepcopy(made)
    wanted = step(dense, padded)
    gradients = {name: parameter.grad for name, parameter in dense.named_parameters()}

    def errors(mesh: Any, mode: Any) -> dict[str, float]:
        mine = parallelize(copy.deepcopy(made), found, mesh, mode=mode)
        result = step(mine, padded)
        rows = torch.ones(BATCH, LENGTH, dtype=torch.bool)
        rows[0, :3] = not padded  # what a padded position predicts is nobody's business
        logits = whole(result.logits)
        size = {f"logits, {mode}": error(logits[rows], wanted.logits[rows])}
        own = dict(mine.named_parameters())
        for spec in found.parameters:
            placements, _ = spec.contract.on(found.mesh)
            layout = Layout(found.mesh, placements, spec.shape)
            part = local_part(gradients[spec.name], layout, tuple(mesh.get_coordinate()))
            gradient = own[spec.name].grad
            gradient = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            size[f"{spec.name}, {mode}"] = math.inf if gradient is None else error(gradient, part)
        return size

    def body(rank: int) -> tuple[str, float]:
        mesh = init_device_mesh("cpu", found.mesh.shape, mesh_dim_names=found.mesh.axis_names)
        found_here = errors(mesh, "production") | errors(mesh, "validate")
        return max(found_here.items(), key=lambda item: item[1])

    return max(run_ranks(body, found.mesh.world_size, timeout=240), key=lambda item: item[1])


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# Run each time; the others add axes and options that these cover one by one.
SOME = {
    "experts beside shared ones",
    "experts with biases and tensors",
    "sequences and tensors that share heads",
    "sliding windows and soft caps",
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in SOME else [pytest.mark.slow]) for c in CASES]
)
def test_logits_and_gradients_are_those_of_one_process(case: str) -> None:
    family, mesh, changes, options = CASES[case]
    made = model(family, changes)
    name, size = worst(made, hp_planner.plan(made, mesh, **options), padded=False)
    assert size < 1e-4, name


def test_padding_is_masked_on_every_part_of_the_sequence() -> None:
    made = model("qwen3", {})
    name, size = worst(made, hp_planner.plan(made, {"cp": 2}), padded=True)
    assert size < 1e-4, name


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("qwen3_moe", {"ep": 2, "tp": 2}),
        pytest.param("llama", {"cp": 2, "tp": 2}, marks=pytest.mark.slow),
        ("qwen3_moe", {"ep": 2, "cp": 2}),
    ],
)
def test_the_planners_bytes_are_those_of_the_ledger(family: str, mesh: dict[str, int]) -> None:
    """Message by message, by axis, operation and size; routing is made even for this."""
    made = model(family, {"num_experts_per_tok": 4} if "moe" in family else {})
    found = hp_planner.plan(made, mesh)
    workload = Workload(BATCH, LENGTH, element_size=4, experts_per_token=4)
    wanted = Counter(
        (message.axis, message.operation, message.bytes)
        for message in messages(found, workload)
        if message.phase != "settlement"
    )

    def body(rank: int) -> Counter[tuple[str, str, int]]:
        device_mesh = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        mine = parallelize(copy.deepcopy(made), found, device_mesh)
        with ledger() as log:
            step(mine, padded=False)
        return Counter(
            (record.axis, record.operation, record.bytes)
            for record in log.records
            if record.origin.name != "gradient settlement"
        )

    for recorded in run_ranks(body, 4, timeout=240):
        assert recorded == wanted


def test_all_but_experts_are_cut_over_the_expert_axis_too() -> None:
    """Gradients of the mean of equal batches; what is held is what the plan's costs say."""
    made, mesh = model("qwen3_moe", {}), {"dp_shard": 2, "ep": 2}
    found = hp_planner.plan(made, mesh)
    dense = copy.deepcopy(made)
    step(dense, padded=False)

    def body(rank: int) -> tuple[int, set[tuple[str, str]]]:
        mine = parallelize(copy.deepcopy(made), found, make_mesh(mesh))
        shard_over_data_axes(mine, found, make_mesh(mesh))
        with ledger() as log:
            step(mine, padded=False)
        for name, parameter in mine.named_parameters():
            wanted = dense.get_parameter(name).grad
            assert wanted is not None
            assert error(parameter.grad.full_tensor(), wanted) < 1e-4, name  # type: ignore[union-attr]
        held = sum(p.to_local().numel() for p in mine.parameters())  # type: ignore[attr-defined]
        return held * 4, {(r.axis, r.operation) for r in log.records if "reduce" in r.operation}

    wanted = memory(found, Workload(BATCH, LENGTH, element_size=4)).parameters
    scattered = {("dp_shard", "reduce_scatter"), ("dp_shard_ep", "reduce_scatter")}
    assert run_ranks(body, 4, timeout=240) == [(wanted, scattered)] * 4
