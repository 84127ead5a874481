"""Plans written by hand for models of transformers, whose code knows nothing of this package."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dtensor_block import PENDING, SUMMED, WHOLE, cut
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from hp_dtensor.equivalence import GradientReport, check_gradients
from hp_dtensor.mesh import AbstractMesh
from hp_dtensor.placements import SectionedShard
from hp_dtensor.plan import (
    BoundaryKind,
    BoundarySpec,
    BoundaryTensor,
    Contract,
    ParameterSpec,
    Region,
    RegionKind,
    ShardingPlan,
)
from hp_platform.testing import run_ranks

transformers = pytest.importorskip("transformers")

VOCABULARY, HIDDEN, INNER, EXPERT_INNER = 32, 16, 24, 16
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "attention_dropout": 0.0,
}


def make_model(family: str) -> nn.Module:
    torch.manual_seed(3)
    options: dict[str, Any] = dict(SIZES)
    if family == "Qwen3Moe":
        options |= {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": EXPERT_INNER,
            "norm_topk_prob": True,
        }
    config = getattr(transformers, f"{family}Config")(**options)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for parameter in model.parameters():
        # Larger than the library's initial values, so that every path matters.
        nn.init.normal_(parameter, std=0.3)
    return model


def plan_for(model: nn.Module, mesh: dict[str, int], sequence_parallel: bool) -> ShardingPlan:
    stream, norm = (cut(1), SUMMED) if sequence_parallel else (WHOLE, WHOLE)
    contracts = {
        "embed_tokens.weight": cut(0),
        "lm_head.weight": cut(0),
        "q_proj.weight": cut(0),
        "k_proj.weight": cut(0),
        "v_proj.weight": cut(0),
        "o_proj.weight": cut(1),
        "q_norm.weight": SUMMED,
        "k_norm.weight": SUMMED,
        "gate_proj.weight": cut(0),
        "up_proj.weight": cut(0),
        "down_proj.weight": cut(1),
        "mlp.gate.weight": SUMMED,
        "experts.gate_up_proj": Contract({"tp": SectionedShard(1, (EXPERT_INNER, EXPERT_INNER))}),
        "experts.down_proj": cut(2),
        "norm.weight": norm,
    }
    parameters = []
    for name, parameter in model.named_parameters():
        key = next(k for k in contracts if name.endswith(k))
        parameters.append(ParameterSpec(name, key, parameter.shape, contracts[key], ""))
    return ShardingPlan(
        model=type(model).__name__,
        mesh=AbstractMesh.of(mesh),
        model_axes=("tp",),
        parameters=parameters,
        boundaries=list(_boundaries(model, stream, sequence_parallel)),
    )


def _plain(*names: str) -> list[BoundaryTensor]:
    return [BoundaryTensor(n, WHOLE, WHOLE, plain=True, optional=True) for n in names]


def _boundaries(model: nn.Module, stream: Contract, sequence_parallel: bool) -> Any:
    to_head = SUMMED if sequence_parallel else WHOLE
    # Masks and positions stay plain until a layer: transformers mixes them with plain tensors.
    yield BoundarySpec("", BoundaryKind.MODEL, _plain("input_ids", "labels"))
    for name, module in model.named_modules():
        kind = type(module).__name__
        leaf = name.rpartition(".")[2]
        if leaf == "embed_tokens":
            yield BoundarySpec(
                name, BoundaryKind.EMBEDDING, _plain("input"), [BoundaryTensor("", WHOLE, PENDING)]
            )
        elif kind.endswith("DecoderLayer"):
            before = WHOLE if leaf == "0" else stream
            yield BoundarySpec(
                name,
                BoundaryKind.LAYER,
                [
                    BoundaryTensor("hidden_states", before, stream),
                    *_plain("position_embeddings", "attention_mask", "position_ids"),
                ],
                [BoundaryTensor("", stream, stream)],
            )
        elif leaf == "norm":
            yield BoundarySpec(
                name,
                BoundaryKind.NORM,
                [BoundaryTensor("hidden_states", stream, stream)],
                [BoundaryTensor("", to_head, stream)],
            )
        elif leaf.endswith("layernorm"):
            yield BoundarySpec(
                name,
                BoundaryKind.NORM,
                [BoundaryTensor("hidden_states", stream, stream)],
                [BoundaryTensor("", stream, stream)],
            )
        elif leaf == "self_attn":
            yield BoundarySpec(
                name,
                BoundaryKind.ATTENTION,
                [
                    BoundaryTensor("hidden_states", stream, SUMMED),
                    *_plain("position_embeddings", "attention_mask", "position_ids"),
                ],
                [BoundaryTensor("0", stream, PENDING)],
            )
        elif leaf == "mlp":
            argument = "hidden_states" if kind.endswith("SparseMoeBlock") else "x"
            yield BoundarySpec(
                name,
                BoundaryKind.MLP,
                [BoundaryTensor(argument, stream, SUMMED)],
                [BoundaryTensor("", stream, PENDING)],
            )
        elif leaf == "experts":
            names = ("hidden_states", "top_k_index", "top_k_weights")
            yield BoundarySpec(
                name,
                BoundaryKind.EXPERTS,
                [BoundaryTensor(each, SUMMED, SUMMED) for each in names],
                [BoundaryTensor("", PENDING, PENDING)],
                region=Region(RegionKind.OPAQUE, "experts are chosen by value"),
            )
        elif leaf == "lm_head":
            yield BoundarySpec(
                name,
                BoundaryKind.HEAD,
                [BoundaryTensor("input", to_head, SUMMED)],
                [BoundaryTensor("", WHOLE, cut(-1))],
            )


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    output: Any = model(**batch, use_cache=False)
    return output.loss


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, VOCABULARY, (2, 8), generator=generator)
    return {"input_ids": ids, "labels": ids}


def padded_batch() -> dict[str, Tensor]:
    """With a padding mask and positions of its own."""
    data = batch()
    mask = torch.ones_like(data["input_ids"])
    mask[0, -3:] = 0
    positions = torch.arange(8).expand(2, -1).contiguous()
    return {**data, "attention_mask": mask, "position_ids": positions}


def compared(
    family: str, mesh: dict[str, int], sequence_parallel: bool, data: dict[str, Tensor]
) -> GradientReport:
    plan = plan_for(make_model(family), mesh, sequence_parallel)

    def body() -> GradientReport:
        device_mesh = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        return check_gradients(lambda: make_model(family), plan, device_mesh, data, loss_of)

    reports = run_ranks(body, 2 * mesh.get("dp", 1))
    return reports[0]


@pytest.mark.ranks
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Qwen3Moe"])
def test_both_modes_compute_what_the_whole_model_does(family: str, sequence_parallel: bool) -> None:
    report = compared(family, {"tp": 2}, sequence_parallel, batch())
    report.raise_if_failed()
    assert len(report.gradients) > 30
    assert len(report.activations) > 20
    assert len(report.backward) > 20


@pytest.mark.ranks
def test_masks_and_positions_pass_through_a_model_in_both_modes() -> None:
    compared("Qwen3", {"tp": 2}, True, padded_batch()).raise_if_failed()
