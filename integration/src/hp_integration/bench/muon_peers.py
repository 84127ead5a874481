"""The sides of the Muon benchmark: ours, plain ones, and peers from the package index.

The peers are an optional extra, `pip install hp-integration[bench]`. They are run as they are, but
for three things that a CPU would hold against them: they are not compiled, since compiling takes
longer than the benchmark; where a CPU has no bfloat16 products they iterate in float32, as ours
does there; and kernels for GPUs, which some import without using them, need not be installed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hp_integration.bench.pairs import Step
from hp_muon import Muon, newton_schulz

Maker = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def ours(parameters: list[nn.Parameter]) -> Muon:
    return Muon(parameters, coefficients="quintic")


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Fused: it goes through the dispatch of DTensor once a step, not once an operator."""
    return torch.optim.AdamW(parameters, fused=True)


def torch_muon(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon(parameters)


class GatherAndRunEverywhere(torch.optim.Optimizer):
    """What sharded Muon is without a plan: every rank gathers and iterates every matrix."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            momentum = state.setdefault("momentum_buffer", torch.zeros_like(parameter))
            momentum.mul_(0.95).add_(parameter.grad)
            update = newton_schulz(momentum.full_tensor(), coefficients="quintic", gram=False)
            mesh = parameter.data.device_mesh
            shards, rank = mesh.size(-1), mesh.get_local_rank(mesh.ndim - 1)
            mine = update.float().chunk(shards, dim=0)[rank]
            parameter.data.to_local().mul_(1 - 0.002).sub_(mine, alpha=0.02)


def _muon_fsdp2(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    module = _import("muon_fsdp2")
    group = {"params": parameters, "use_muon": True}
    made: torch.optim.Optimizer = module.Muon([group])
    return made


def _dtensor_muon(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = _import("dtensor_muon").MuonForeach(
        _groups(parameters), orthogonalization_strategy="newton_schulz"
    )
    return made


def _muonium(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = _import("muonium").Muon(
        _groups(parameters), orthogonalization_strategy="newton_schulz", foreach=True
    )
    return made


def _groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Both flatten [experts, rows, cols] unless told not to."""
    return [{"params": parameters, "flatten": False}]


_PEERS: dict[str, Maker] = {
    "muon_fsdp2": _muon_fsdp2,
    "dtensor_muon": _dtensor_muon,
    "muonium": _muonium,
}


def installed(*names: str) -> dict[str, Maker]:
    """The peers of these module names that are installed."""
    return {name: _PEERS[name] for name in names if importlib.util.find_spec(name) is not None}


def stepper(optimizer: torch.optim.Optimizer) -> Step:
    """The optimizer's step; a peer's not compiled, and in float32 on a CPU without bfloat16."""
    if not type(optimizer).__module__.startswith(tuple(_PEERS)):
        return optimizer.step
    return functools.partial(_step_of_peer, optimizer.step, not _multiplies_bfloat16())


def _step_of_peer(step: Step, in_float32: bool) -> None:
    known = torch.Tensor.bfloat16
    if in_float32:
        torch.Tensor.bfloat16 = Tensor.float  # type: ignore[method-assign]
    try:
        with _uncompiled():
            step()
    finally:
        torch.Tensor.bfloat16 = known  # type: ignore[method-assign]


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """`torch.compile` leaves functions as they are."""
    known = torch.compile

    def leave(model: Any = None, **_: Any) -> Any:
        return model if model is not None else lambda function: function

    torch.compile = leave
    try:
        yield
    finally:
        torch.compile = known


def _multiplies_bfloat16() -> bool:
    able = torch.cpu.get_capabilities()
    return any(able.get(name, False) for name in ("avx512_bf16", "amx_bf16"))


def _import(name: str) -> Any:
    """The module, uncompiled, with a hollow triton where there is none."""
    absent = importlib.util.find_spec("triton") is None
    hollow = ("triton", "triton.language") if absent else ()
    sys.modules.update({module: MagicMock() for module in hollow})
    try:
        with _uncompiled():
            found = importlib.import_module(name)
    finally:
        for module in hollow:
            del sys.modules[module]
    _stay_on_cpu(name)
    return found


def _stay_on_cpu(package: str) -> None:
    """Two peers choose kernels for GPUs, and move tensors there, whatever the device."""
    inside = [module for name, module in sys.modules.items() if name.startswith(f"{package}.")]
    for module in inside:
        if hasattr(module, "_get_orthogonalization_fn"):
            choose = module._get_orthogonalization_fn
            module._get_orthogonalization_fn = lambda s, _, choose=choose: choose(s, False)  # type: ignore[attr-defined]
        if hasattr(module, "move_tensors_to_device"):
            module.move_tensors_to_device = lambda tensors, *_: tensors  # type: ignore[attr-defined]


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of state on this rank."""
    held = [v for state in optimizer.state.values() for v in state.values()]
    locals = [v.to_local() if isinstance(v, DTensor) else v for v in held if isinstance(v, Tensor)]
    return sum(t.numel() * t.element_size() for t in locals)
