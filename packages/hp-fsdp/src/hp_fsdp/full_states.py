"""PyTorch's functions for model and optimizer states, taught what our shards are.

`torch.distributed.checkpoint.state_dict` asks `isinstance(value, torch.distributed.tensor.DTensor)`
before it gathers or cuts a value, and passes over everything else: `full_state_dict=True` would
return shards without a word, and full optimizer states would be loaded uncut. It has no hook, so
the functions it calls are wrapped: they see to `hp_dtensor.DTensor` entries and leave the rest to
the original. So is the one that makes the state of an optimizer without any. States without such
entries are not touched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict as functions
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor

from hp_dtensor.dtensor import DTensor, distribute_tensor
from hp_fsdp.errors import NotAvailableError

_KNOWS = "_hp_fsdp_knows_shards"


def install() -> None:
    """Wraps the functions, once a process.

    Raises:
        NotAvailableError: this PyTorch does not have them, so that full states would be wrong.
    """
    for name, wrapped in _WRAPPERS.items():
        original = getattr(functions, name, None)
        if original is None:
            raise NotAvailableError(
                f"torch.distributed.checkpoint.state_dict of PyTorch {torch.__version__} has no "
                f"{name}, so that its full_state_dict=True would return shards; use PyTorch 2.13, "
                "with which this version of hp_fsdp was tested"
            )
        if not hasattr(original, _KNOWS):
            known = functools.wraps(original)(wrapped(original))
            setattr(known, _KNOWS, True)
            setattr(functions, name, known)


def gathered(value: Any) -> Any:
    """`value` with every shard in its dicts, lists and tuples replaced by the full tensor.

    Every rank of the shards' meshes must call it.
    """
    if isinstance(value, DTensor):
        return value.detach().full_tensor()
    if isinstance(value, dict):
        return {key: gathered(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(gathered(item) for item in value)
    return value


def like(value: Tensor, shard: DTensor) -> DTensor:
    """`value`, a full tensor or PyTorch's DTensor, laid out as `shard` is.

    A PyTorch DTensor that is placed alike is taken over as it is; one placed otherwise is
    gathered, for which every rank of its mesh must make the call.
    """
    if isinstance(value, DTensor):
        return value
    if isinstance(value, TorchDTensor):
        local = value.to_local().detach()
        same = value.device_mesh == shard.device_mesh and value.placements == shard.placements
        if same and value.shape == shard.shape and local.shape == shard.to_local().shape:
            return DTensor.of_layout(local, shard.layout)
        value = value.full_tensor()
    mesh = shard.device_mesh
    assert isinstance(mesh, DeviceMesh)
    cut = distribute_tensor(value.detach(), mesh, shard.placements).to_local()
    return DTensor.of_layout(cut, shard.layout)


def _gathering(original: Callable[..., Any]) -> Callable[..., Any]:
    def gather_state_dict(state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        return original(gathered(state_dict), *args, **kwargs)

    return gather_state_dict


def _cutting(original: Callable[..., Any]) -> Callable[..., Any]:
    """For functions that put full values in place of the local ones."""

    def fill_local_state(full: Any, local: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        shards = {key: value for key, value in local.items() if isinstance(value, DTensor)}
        result = original(full, local, *args, **kwargs)
        for key, shard in shards.items():
            value = local.get(key)
            if isinstance(value, Tensor) and not isinstance(value, DTensor):
                local[key] = like(value, shard)
        return result

    return fill_local_state


def _uncounted(original: Callable[..., Any]) -> Callable[..., Any]:
    """For the function that makes an optimizer's state by a step with gradients of zero.

    Such a step is not one of training: counted, it would shrink the first real one of Adam.
    """

    def init_optim_state(optimizer: torch.optim.Optimizer) -> None:
        had_none = not optimizer.state
        original(optimizer)
        if not had_none:
            return
        for parameter, state in optimizer.state.items():
            if isinstance(parameter, DTensor) and "step" in state:
                step = state["step"]
                state["step"] = step.zero_() if isinstance(step, Tensor) else 0

    return init_optim_state


_WRAPPERS = {
    "_init_optim_state": _uncounted,
    "_gather_state_dict": _gathering,
    "_distribute_state_dict": _cutting,
    "_broadcast_state_dict": _cutting,
}
