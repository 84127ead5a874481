"""Which parameters go to Muon: by role, from global shapes, counted and overridable."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

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
        ({"adamw": ["*"]}, "none is a matrix"),
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


class Unusual(nn.Module):
    """A model of transformers' interface; only it knows which of its matrices is the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(32, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8)])
        self.to_words = nn.Linear(8, 32)

    def get_output_embeddings(self) -> nn.Module:
        return self.to_words


class Plain(nn.Module):
    """Its head is one by its name and by its place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(32, 8)
        self.layers = nn.ModuleList([nn.ModuleDict({"output": nn.Linear(8, 8), "gate": Layer()})])
        self.head = nn.Linear(8, 32)


class Trained(nn.Module):
    """A user's own module around a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.loss = model, nn.CrossEntropyLoss()


def parts_in_wrappers(model: nn.Module) -> nn.Module:
    """Every child of the model is compiled, and what it holds is checkpointed."""
    for name, child in list(model.named_children()):
        for inner, module in list(child.named_children()):
            setattr(child, inner, checkpoint_wrapper(module))
        setattr(model, name, torch.compile(checkpoint_wrapper(child)))
    return model


WRAPPINGS = {
    "ddp": DistributedDataParallel,
    "data_parallel": nn.DataParallel,
    "compile": torch.compile,
    "checkpoint": checkpoint_wrapper,
    "compiled_ddp": lambda model: torch.compile(DistributedDataParallel(model)),
    "ddp_of_compiled": lambda model: DistributedDataParallel(torch.compile(model)),
    "parts": parts_in_wrappers,
    "everything": lambda m: torch.compile(DistributedDataParallel(parts_in_wrappers(m))),
}


@pytest.fixture
def process_group():
    """What DistributedDataParallel asks for; nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", [Model, Unusual, Plain])
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_a_model_in_wrappers_is_split_as_the_bare_one(kind, wrapping, process_group):
    model = kind()
    expected = choose(model)
    bare = dict(model.named_parameters())
    assert Role.HEAD in {choice.role for choice in expected}
    wrapped = WRAPPINGS[wrapping](model)
    assert choose(wrapped) == expected
    for group in split_parameters(wrapped):
        assert all(parameter is bare[name] for name, parameter in group["params"])


def test_a_module_around_a_model_does_not_hide_its_head():
    for kind in (Model, Unusual, Plain):
        around = torch.compile(Trained(torch.compile(kind())))
        found = [(f"model.{c.name}", c.role) for c in choose(kind())]
        assert [(c.name, c.role) for c in choose(around)] == found


def test_a_part_called_module_keeps_its_name():
    model = nn.ModuleDict({"a": nn.ModuleDict({"module": nn.Linear(2, 2)}), "b": nn.Linear(2, 2)})
    assert [c.name for c in choose(torch.compile(model))] == [
        n for n, _ in model.named_parameters()
    ]


def test_overrides_take_names_with_and_without_wrappers():
    model = torch.compile(Model())
    for name in ("layers.0.q_proj.weight", "_orig_mod.layers.0.q_proj.weight"):
        assert "layers.0.q_proj.weight" in names(split_parameters(model, adamw=[name])[1])


def test_a_model_that_does_not_know_its_head_and_one_with_several():
    class Several(Unusual):
        def get_output_embeddings(self):
            return nn.ModuleList([self.to_words])

    class Unknown(Model):
        def get_output_embeddings(self):
            raise NotImplementedError

    for kind, head in ((Several, "to_words.weight"), (Unknown, "lm_head.weight")):
        assert {c.name: c.role for c in choose(kind())}[head] is Role.HEAD


def test_a_module_called_output_is_a_head_only_at_the_top():
    model = nn.ModuleDict(
        {"mid": nn.ModuleDict({"output": nn.Linear(2, 2)}), "output": nn.Linear(2, 2)}
    )
    muon, _ = split_parameters(model)
    assert names(muon) == ["mid.output.weight"]
