"""Plans held to the dense model: logits and all gradients of one step on two ranks."""

import copy

import pytest
import torch
from planner_models import model
from torch.distributed.device_mesh import init_device_mesh

from hp_dtensor.dropouts import replace_dropouts
from hp_dtensor.layout import Layout
from hp_dtensor.parallelize import parallelize
from hp_dtensor.production import local_part
from hp_planner import plan
from hp_platform.testing import run_ranks

pytestmark = pytest.mark.ranks

CASES = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "whole": ("llama", {}, {"sequence_parallel": False}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}, {}),
    "qwen3": ("qwen3", {}, {}),
    "qwen3_moe with a dense layer": ("qwen3_moe", {"mlp_only_layers": [1]}, {}),
    "qwen3_moe whole": ("qwen3_moe", {}, {"sequence_parallel": False}),
    "qwen2_moe": ("qwen2_moe", {}, {}),
    "gpt2 with dropout": (
        "gpt2",
        {
            "resid_pdrop": 0.3,
            "embd_pdrop": 0.3,
            "attn_pdrop": 0.0,
            "n_embd": 64,
            "n_head": 4,
            "n_layer": 2,
        },
        {},
    ),
    "gemma2": ("gemma2", {}, {}),
    "overridden blocks": (
        "qwen3_moe",
        {},
        {"overrides": {"model.layers.0.mlp": "none", "model.layers.1": "none", "lm_head": "none"}},
    ),
    "fused projections left whole": (
        "phi3",
        {"resid_pdrop": 0.3},
        {"overrides": {"*.self_attn": "none", "*.mlp": "none"}},
    ),
}


def randomised(family, changes):
    """Weights far from their initial values, so that no term hides."""
    torch.manual_seed(0)
    made = model(family, device="cpu", **changes).train()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            noise = torch.randn_like(parameter)
            norm = "norm" in name and name.endswith("weight")
            parameter.copy_(1 + 0.2 * noise if norm else 0.15 * noise)
    return made


def step(made, ids):
    result = made(input_ids=ids, labels=ids, use_cache=False)
    result.loss.backward()
    return result


def error(found, wanted):
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-9))


def compare(family, changes, options):
    """The largest relative error of logits and gradients, over both ranks."""
    made = randomised(family, changes)
    found = plan(made, {"tp": 2}, **options)
    ids = torch.randint(0, 256, (2, 8), generator=torch.Generator().manual_seed(1))
    dense = copy.deepcopy(made)
    replace_dropouts(dense)
    wanted = step(dense, ids)
    gradients = {name: parameter.grad for name, parameter in dense.named_parameters()}

    def body(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        mine = parallelize(copy.deepcopy(made), found, mesh)
        result = step(mine, ids)
        errors = {"logits": error(result.logits, wanted.logits)}
        parameters = dict(mine.named_parameters())
        for spec in found.parameters:
            placements, _ = spec.contract.on(found.mesh)
            layout = Layout(found.mesh, placements, spec.shape)
            part = local_part(gradients[spec.name], layout, (rank,))
            errors[spec.name] = error(parameters[spec.name].grad, part)
        return max(errors.items(), key=lambda item: item[1])

    return max(run_ranks(body, 2, timeout=200), key=lambda worst: worst[1])


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_those_of_one_process(case):
    name, worst = compare(*CASES[case])
    assert worst < 1e-4, name
