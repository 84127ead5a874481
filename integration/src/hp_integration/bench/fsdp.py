"""One training step under hp_fsdp against PyTorch FSDP2, on a flat mesh."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as fully_shard_peer

import hp_fsdp
from hp_integration.bench.pairs import Step, interleaved, medians
from hp_integration.bench.result import BenchResult, Row, Target, geometric_mean
from hp_integration.data import Batch
from hp_integration.models import build_model, decoder_layers, model_config
from hp_integration.trainer import next_token_loss
from hp_platform.axis import MeshAxis
from hp_platform.testing import run_ranks

_LAYERS, _SEQUENCE, _VOCABULARY = 4, 64, 256
_QUICK = ((128, 2), (256, 2), (128, 4), (256, 4))
_FULL = (*_QUICK, (512, 2), (1024, 2), (512, 4))


def run(quick: bool) -> BenchResult:
    """Medians of interleaved steps: forward, backward, SGD, llama blocks of several sizes."""
    rows = []
    for hidden, ranks in _QUICK if quick else _FULL:
        repeats = 4 if quick else 9
        times = run_ranks(lambda h=hidden, n=repeats: _measure(h, n), ranks, timeout=300)[0]
        case = f"hidden={hidden} ranks={ranks}"
        rows.append(Row(case, times["ours"], "FSDP2", times["FSDP2"], "s"))
    ratios = [row.ratio for row in rows]
    return BenchResult(
        "fsdp",
        rows,
        [
            Target("geometric mean of step ratios", geometric_mean(ratios), 0.75),
            Target("largest step ratio", max(ratios), 0.95),
        ],
    )


def _measure(hidden: int, repeats: int) -> dict[str, float]:
    axis = MeshAxis.of_group()
    mesh = init_device_mesh("cpu", (axis.size,), mesh_dim_names=("dp_shard",))
    sides = {"ours": _step(hidden, mesh, ours=True), "FSDP2": _step(hidden, mesh, ours=False)}
    return medians(interleaved(sides, repeats=repeats, warmup=2, axis=axis))


def _step(hidden: int, mesh: DeviceMesh, *, ours: bool) -> Step:
    model = _model(hidden)
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


def _shard(module: nn.Module, mesh: DeviceMesh, ours: bool) -> None:
    if ours:
        hp_fsdp.fully_shard(module, mesh=mesh)
    else:
        fully_shard_peer(module, mesh=mesh)


def _model(hidden: int) -> nn.Module:
    config = model_config("llama", vocabulary=_VOCABULARY)
    config.hidden_size, config.intermediate_size = hidden, 4 * hidden
    config.num_hidden_layers, config.head_dim = _LAYERS, hidden // config.num_attention_heads
    return build_model(config, seed=0)
