"""Host time of one Llama block, forward and backward, over two ranks of which none communicates.

PyTorch's `fake` group moves no data, and the block is small, so what is measured is the host's
work: our two modes, the same block written by hand, and PyTorch's native tensor parallelism.
Times are this process's CPU time, which other processes do not lengthen by running; sides take
turns in an order drawn anew each time, so that none always finds the caches as the same other
left them.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

import hp_planner
from hp_dtensor.dtensor import DTensor
from hp_dtensor.parallelize import parallelize
from hp_integration.bench.handwritten import HandwrittenBlock
from hp_integration.bench.pairs import Step, median_of_pairs
from hp_integration.bench.result import BenchResult, Row, Target
from hp_integration.models import abstract_model, build_model, model_config
from hp_platform.axis import MeshAxis

_RANKS, _BATCH, _SEQUENCE, _HIDDEN = 2, 1, 16, 64
_LAYER = "model.layers.1"  # the first layer's boundary slices the embedding; the others' do not


def run(quick: bool) -> BenchResult:
    """Milliseconds of a step; all sides interleaved in one process."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=_RANKS)
    try:
        mesh = init_device_mesh("cpu", (_RANKS,), mesh_dim_names=("tp",))
        makers: dict[str, Callable[[DeviceMesh], Step]] = {
            "production": lambda mesh: _ours(mesh, "production"),
            "validate": lambda mesh: _ours(mesh, "validate"),
            "handwritten": _handwritten,
            "native": _native,
        }
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            sides = {name: make(mesh) for name, make in makers.items()}
            times = _cpu_seconds(sides, repeats=300 if quick else 1000)
        finally:
            torch.set_num_threads(threads)
        application = _application_seconds(mesh)
    finally:
        dist.destroy_process_group()
    return _result(times, application)


def _cpu_seconds(
    sides: Mapping[str, Step], repeats: int, warmup: int = 20
) -> dict[str, list[float]]:
    """CPU seconds of every call of every side, after `warmup` calls that are not counted."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    turns, draw = list(sides), random.Random(0)
    gc.collect()
    gc.freeze()  # what all sides have made so far is not searched for garbage in one side's time
    try:
        for repeat in range(warmup + repeats):
            draw.shuffle(turns)
            for name in turns:
                start = time.process_time()
                sides[name]()
                end = time.process_time()
                if repeat >= warmup:
                    times[name].append(end - start)
    finally:
        gc.unfreeze()
    return times


def _result(times: Mapping[str, list[float]], application: float) -> BenchResult:
    def row(case: str, peer: str, title: str) -> Row:
        found = median_of_pairs({case: times[case], peer: times[peer]})
        return Row(case, 1e3 * found[case], title, 1e3 * found[peer], "ms")

    rows = [
        row("production", "handwritten", "written by hand"),
        row("production", "native", "native DTensor"),
        row("validate", "native", "native DTensor"),
    ]
    return BenchResult(
        "host-overhead",
        rows,
        [
            Target("production over written by hand", rows[0].ratio, 1.02),
            Target("production over native DTensor", rows[1].ratio, 1 / 2.5),
            Target("validate over native DTensor", rows[2].ratio, 1.0),
            Target("seconds to plan and apply 48 layers", application, 2.0),
        ],
    )


def _config(layers: int) -> Any:
    config = model_config("llama", vocabulary=256)
    config.hidden_size, config.intermediate_size = _HIDDEN, 2 * _HIDDEN
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 4, 2, 16
    config.num_hidden_layers = layers
    return config


def _positions() -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary embedding; any values do."""
    angles = torch.randn(_BATCH, _SEQUENCE, 16)
    return angles.cos(), angles.sin()


def _local_input() -> Tensor:
    return torch.randn(_BATCH, _SEQUENCE // _RANKS, _HIDDEN)


def _step(block: nn.Module, hidden: Tensor, positions: tuple[Any, Any]) -> Step:
    """Clears the gradients, and runs forward and backward."""
    held = [*block.parameters(), hidden]

    def step() -> None:
        for parameter in held:
            parameter.grad = None
        output = block(hidden, attention_mask=None, position_embeddings=positions)
        output = output[0] if isinstance(output, tuple) else output
        local = output.to_local() if hasattr(output, "to_local") else output
        local.sum().backward()

    return step


def _ours(mesh: DeviceMesh, mode: Any) -> Step:
    model = build_model(_config(2), seed=0)
    parallelize(model, hp_planner.plan(model, mesh), mesh, mode=mode)
    layer, hidden, positions = model.get_submodule(_LAYER), _local_input(), _positions()
    if mode == "production":
        return _step(layer, hidden.requires_grad_(), positions)
    shape = torch.Size((_BATCH, _SEQUENCE, _HIDDEN))
    wrapped = DTensor.from_local(hidden.requires_grad_(), mesh, [Shard(1)], shape=shape)
    spread = [DTensor.from_local(p, mesh, [Replicate()], shape=p.shape) for p in positions]
    return _step(layer, wrapped, (spread[0], spread[1]))


def _handwritten(mesh: DeviceMesh) -> Step:
    block = HandwrittenBlock(_config(2), MeshAxis.of_mesh(mesh, "tp"))
    return _step(block, _local_input().requires_grad_(), _positions())


def _native(mesh: DeviceMesh) -> Step:
    layer: nn.Module = build_model(_config(2), seed=0).get_submodule(_LAYER)
    gathered = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
    plan = {
        "input_layernorm": SequenceParallel(),
        "post_attention_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        "mlp": PrepareModuleInput(
            input_layouts=(gathered["input_layouts"],),
            desired_input_layouts=(gathered["desired_input_layouts"],),
        ),
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(layer, mesh, plan)
    from torch.distributed.tensor import DTensor as NativeDTensor

    hidden = NativeDTensor.from_local(_local_input().requires_grad_(), mesh, [Shard(1)])
    return _step(layer, hidden, _positions())


def _application_seconds(mesh: DeviceMesh) -> float:
    model = abstract_model(_config(48))
    start = time.perf_counter()
    parallelize(model, hp_planner.plan(model, mesh), mesh, mode="production")
    return time.perf_counter() - start
