"""Which parameters go to Muon: by role, from global shapes, counted and overridable."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from hp_dtensor import AbstractMesh, Layout, Replicate, Shard, attach_layout
from hp_muon import MuonError, split_parameters
from hp_muon.split import Role, choose


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(4, 16, 8))
        self.down_proj = nn.Parameter(torch.zeros(4, 8, 16))
        self.per_expert_scale = nn.Parameter(torch.zeros(4, 1, 8))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(4, 16))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(8, 8)
        self.gate = nn.Linear(8, 4, bias=False)
        self.experts = Experts()
        self.norm = nn.LayerNorm(8)
        self.conv1d = nn.Conv1d(8, 8, 3, groups=8)
        self.A_log = nn.Parameter(torch.zeros(8, 4))
        self.recurrent_gate_weight = nn.Parameter(torch.zeros(2, 4, 4))


class Model(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(32, 8)
        self.layers = nn.ModuleList([Layer()])
        self.lm_head = nn.Linear(8, 32, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight


ON_MUON = [
    "layers.0.q_proj.weight",
    "layers.0.gate.weight",
    "layers.0.experts.gate_up_proj",
    "layers.0.experts.down_proj",
]


def names(group):
    return [name for name, _ in group["params"]]


@pytest.mark.parametrize("tied", [True, False])
def test_matrices_go_to_muon_and_everything_else_to_adamw(tied):
    model = Model(tied=tied)
    muon, adamw = split_parameters(model, lr=0.1, adamw_lr=0.01)
    assert sorted(names(muon)) == sorted(ON_MUON)
    assert sorted(names(muon) + names(adamw)) == sorted(n for n, _ in model.named_parameters())
    assert (muon["lr"], muon["use_muon"]) == (0.1, True)
    assert (adamw["lr"], adamw["use_muon"]) == (0.01, False)


def test_every_parameter_has_a_role():
    roles = {choice.name: choice.role for choice in choose(Model())}
    assert roles["embed_tokens.weight"] is Role.EMBEDDING
    assert roles["lm_head.weight"] is Role.HEAD
    assert roles["layers.0.gate.weight"] is Role.ROUTER
    assert roles["layers.0.experts.down_proj"] is Role.EXPERTS
    assert roles["layers.0.experts.gate_up_proj_bias"] is Role.VECTOR
    assert roles["layers.0.experts.per_expert_scale"] is Role.OTHER
    assert roles["layers.0.norm.weight"] is Role.NORM
    assert roles["layers.0.conv1d.weight"] is Role.CONVOLUTION
    assert roles["layers.0.A_log"] is Role.ELEMENTWISE
    assert roles["layers.0.recurrent_gate_weight"] is Role.OTHER


def test_the_counts_are_logged(caplog):
    with caplog.at_level(logging.INFO, logger="hp_muon"):
        split_parameters(Model())
    assert "Muon steps 4 parameters, AdamW" in caplog.text
    assert "Muon 2 expert stack" in caplog.text


def test_names_override_roles():
    muon, adamw = split_parameters(
        Model(), router="adamw", muon=["*recurrent_gate_weight"], adamw=["*.q_proj.weight"]
    )
    assert "layers.0.recurrent_gate_weight" in names(muon)
    assert {"layers.0.q_proj.weight", "layers.0.gate.weight"} <= set(names(adamw))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"muon": ["*.qkv"]}, "'\\*.qkv' matches no parameter"),
        ({"muon": ["*q_proj.weight"], "adamw": ["*q_proj*"]}, "named in both"),
        ({"muon": ["*norm.weight"]}, "holds no matrix"),
        ({"router": "sgd"}, "router must be"),
        ({"adamw": ["*"]}, "none of the"),
    ],
)
def test_what_cannot_be_split_is_refused(arguments, message):
    with pytest.raises(MuonError, match=message):
        split_parameters(Model(), **arguments)


def test_a_sharded_model_is_split_as_the_unsharded_one():
    model = Model()
    mesh = AbstractMesh(("dp", "tp"), (8, 1))
    for parameter in model.parameters():
        layout = Layout(mesh, [Shard(0), Replicate()], parameter.shape)
        # Rank 7 holds nothing of most of them: eligibility must not depend on that.
        parameter.data = torch.zeros(layout.local_shape((7, 0)))
        attach_layout(parameter, layout)
    assert sorted(names(split_parameters(model)[0])) == sorted(ON_MUON)


def test_a_module_called_output_is_a_head_only_at_the_top():
    model = nn.ModuleDict(
        {"mid": nn.ModuleDict({"output": nn.Linear(2, 2)}), "output": nn.Linear(2, 2)}
    )
    muon, _ = split_parameters(model)
    assert names(muon) == ["mid.output.weight"]
