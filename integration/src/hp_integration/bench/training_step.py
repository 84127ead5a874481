"""The training step that the sharding benchmarks time: llama blocks, forward, backward, SGD."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as fully_shard_peer

import hp_fsdp
from hp_integration.bench.pairs import Step, interleaved
from hp_integration.data import Batch
from hp_integration.models import build_model, decoder_layers, model_config
from hp_integration.trainer import next_token_loss
from hp_platform.axis import MeshAxis

PEER = "FSDP2"
_LAYERS, _SEQUENCE, _VOCABULARY = 4, 64, 256


def make_step(hidden: int, mesh: DeviceMesh | None, *, ours: bool, layers: int = _LAYERS) -> Step:
    """One step of a model of `layers` llama blocks, every block a unit, and the root.

    Args:
        mesh: what to shard over; None leaves the model whole.
        ours: shard with hp_fsdp, `comm_policy="auto"`; otherwise with PyTorch's FSDP2.
    """
    model = _model(hidden, layers)
    if mesh is not None:
        for _, layer in decoder_layers(model):
            _shard(layer, mesh, ours)
        _shard(model, mesh, ours)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tokens = torch.randint(_VOCABULARY, (2, _SEQUENCE + 1))
    batch = Batch(tokens[:, :-1], tokens[:, 1:])

    def step() -> None:
        next_token_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def paired_seconds(
    hidden: int, mesh: DeviceMesh, repeats: int, *, warmup: int = 2
) -> dict[str, list[float]]:
    """Seconds of every step of both sides, interleaved."""
    sides = {
        "ours": make_step(hidden, mesh, ours=True),
        PEER: make_step(hidden, mesh, ours=False),
    }
    return interleaved(sides, repeats=repeats, warmup=warmup, axis=MeshAxis.of_group())


def _shard(module: nn.Module, mesh: DeviceMesh, ours: bool) -> None:
    if ours:
        hp_fsdp.fully_shard(module, mesh=mesh, comm_policy="auto")
    else:
        fully_shard_peer(module, mesh=mesh)


def _model(hidden: int, layers: int) -> nn.Module:
    config: Any = model_config("llama", vocabulary=_VOCABULARY)
    config.hidden_size, config.intermediate_size = hidden, 4 * hidden
    config.num_hidden_layers, config.head_dim = layers, hidden // config.num_attention_heads
    return build_model(config, seed=0)
