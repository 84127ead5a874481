"""Optimizers that hold a parameter which no longer, or only for a while, stands for a shard.

A parameter from before `fully_shard`, or the gathered form from between forward and backward,
never gets a gradient that an optimizer could use: its step would change nothing, silently.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hp_dtensor.dtensor import DTensor
from hp_fsdp.errors import UsageError
from hp_fsdp.param import SHARDED_MARK


def install() -> None:
    """Checks every optimizer before its step. The check keeps no state; calling it once is enough.

    PyTorch has no hook for the construction of an optimizer, which is when the mistake is made.
    """
    register_optimizer_step_pre_hook(refuse_what_is_no_shard)


def refuse_what_is_no_shard(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """A step pre-hook.

    Raises:
        UsageError: `optimizer` holds a parameter of a sharded module that is not its shard.
    """
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if getattr(parameter, SHARDED_MARK, False) and not isinstance(parameter, DTensor):
                raise UsageError(
                    f"{type(optimizer).__name__} holds, as parameter {position} of group {number}, "
                    f"a plain tensor of shape {tuple(parameter.shape)} that belongs to a module "
                    "under fully_shard but is not its shard, so this step would not train the "
                    "module. Expected the DTensor that module.parameters() gives outside forward "
                    "and backward: build the optimizer after fully_shard, and not between a "
                    "forward and its backward (module.reshard() ends that)"
                )
