"""PyTorch's functions for model and optimizer states, taught what our shards are.

`torch.distributed.checkpoint` asks `isinstance(value, torch.distributed.tensor.DTensor)` before it
gathers, cuts or stages a value. Shards that PyTorch has no placement for answer no, and would be
taken for whole tensors: `full_state_dict=True` would return shards without a word. The others
answer yes, and would be replaced by PyTorch's own DTensors. There is no hook, so the functions that
ask are wrapped: they see to `hp_dtensor.DTensor` entries and leave the rest to the original. So is
the one that makes the state of an optimizer without any. States without such entries are not
touched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import _state_dict_utils as values
from torch.distributed.checkpoint import planner_helpers as planning
from torch.distributed.checkpoint import state_dict as functions
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.testing._comparison import TensorLikePair

from hp_dtensor.dtensor import DTensor, distribute_tensor
from hp_dtensor.torch_kind import as_torch_dtensor
from hp_fsdp.errors import NotAvailableError

_KNOWS = "_hp_fsdp_knows_shards"


def install() -> None:
    """Wraps the functions, once a process.

    Raises:
        NotAvailableError: this PyTorch does not have them, so that full states would be wrong.
    """
    for module, name, wrapped in _WRAPPERS:
        original = getattr(module, name, None)
        if original is None:
            raise NotAvailableError(
                f"{module.__name__} of PyTorch {torch.__version__} has no {name}, so that full "
                "states would be shards, or not become ours; use PyTorch 2.13, with which this "
                "version of hp_fsdp was tested"
            )
        if not hasattr(original, _KNOWS):
            known = functools.wraps(original)(wrapped(original))
            setattr(known, _KNOWS, True)
            setattr(module, name, known)


def like(value: Tensor, shard: DTensor, device: torch.device | None = None) -> DTensor:
    """`value`, a full tensor or PyTorch's DTensor, laid out as `shard` is.

    A full tensor is cut where it is; the part is moved to `device`, if there is one.

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
    cut = distribute_tensor(value.detach(), mesh, shard.layout.placements).to_local()
    return DTensor.of_layout(cut.to(device or cut.device), shard.layout)


def _cutting(original: Callable[..., Any]) -> Callable[..., Any]:
    """For the function by which every rank takes its part of the full values it has."""

    def fill_local_state(
        full: dict[str, Any], local: dict[str, Any], device: torch.device, *args: Any, **kwargs: Any
    ) -> Any:
        shards = _shards_in(local, full)
        result = original(_without(full, shards), local, device, *args, **kwargs)
        for key, shard in shards.items():
            value = full[key]
            local[key] = like(value, shard, device) if isinstance(value, Tensor) else value
        return result

    return fill_local_state


def _receiving(original: Callable[..., Any]) -> Callable[..., Any]:
    """For the function that sends the full values of `keys` from rank 0 to every rank."""

    def broadcast_tensors(
        full: dict[str, Any], local: dict[str, Any], keys: list[str], *args: Any, **kwargs: Any
    ) -> Any:
        shards = _shards_in(local, keys)
        for key in shards:
            local[key] = torch.empty(0)  # a plain tensor, which is replaced by the full one
        result = original(full, local, keys, *args, **kwargs)
        for key, shard in shards.items():
            local[key] = like(local[key], shard)
        return result

    return broadcast_tensors


def _keeping(original: Callable[..., Any]) -> Callable[..., Any]:
    """For the function around that one, which sends 0-dimensional values by itself."""

    def broadcast_state(full: Any, local: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        shards = _shards_in(local, local)
        result = original(full, local, *args, **kwargs)
        for key, shard in shards.items():
            value = local.get(key)
            if isinstance(value, Tensor) and not isinstance(value, DTensor):
                local[key] = like(value, shard)
        return result

    return broadcast_state


def _visiting_shards(original: Callable[..., Any]) -> Callable[..., Any]:
    """For a walk over a state that does one thing to PyTorch's DTensors and another to tensors.

    What it does to the first is right for any shard: they are gathered by their own methods, or
    copied and moved part by part.
    """

    def iterate(value: Any, sharded: Any, dtensor: Any, tensor: Any, **kwargs: Any) -> Any:
        return original(
            value, sharded, dtensor, dtensor if isinstance(value, DTensor) else tensor, **kwargs
        )

    return iterate


def _visiting_tensors(original: Callable[..., Any]) -> Callable[..., Any]:
    """For the walk that gives memory to what is on the meta device: ours stay ours."""

    def iterate(value: Any, dtensor: Any, sharded: Any, tensor: Any) -> Any:
        if isinstance(value, DTensor):
            return tensor(value)
        return original(value, dtensor, sharded, tensor)

    return iterate


def _staging(original: Callable[..., Any]) -> Callable[..., Any]:
    """For the copy that `async_save` takes of a tensor's memory, which is this rank's part here."""

    def offload_tensor(self: Any, value: Any, memo: dict[int, Any], **kwargs: Any) -> Any:
        if not isinstance(value, DTensor):
            return original(self, value, memo, **kwargs)
        local = original(self, value.to_local(), memo, **kwargs)
        memo[id(value)] = staged = DTensor.of_layout(local, value.layout)
        return staged

    return offload_tensor


def _comparing(original: Callable[..., Any]) -> Callable[..., Any]:
    """For `torch.testing`, which refuses a `layout` that is none of PyTorch's."""

    def to_tensor(self: Any, value: Any) -> Any:
        theirs = as_torch_dtensor(value) if isinstance(value, DTensor) else None
        return original(self, value if theirs is None else theirs)

    return to_tensor


def _shards_in(local: dict[str, Any], keys: Iterable[str]) -> dict[str, DTensor]:
    found = ((key, local.get(key)) for key in keys)
    return {key: value for key, value in found if isinstance(value, DTensor)}


def _without(full: dict[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    left_out = set(keys)
    return {key: value for key, value in full.items() if key not in left_out}


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


_WRAPPERS = (
    (functions, "_init_optim_state", _uncounted),
    (functions, "_distribute_state_dict", _cutting),
    (functions, "_broadcast_state_dict", _keeping),
    (values, "_broadcast_tensors", _receiving),
    (values, "_iterate_state_dict", _visiting_shards),
    (planning, "_iterate_state_dict", _visiting_tensors),
    (StateDictStager, "_offload_tensor", _staging),
    (TensorLikePair, "_to_tensor", _comparing),
)
