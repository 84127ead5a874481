"""Mixed precision and offload policies, with the meaning they have in PyTorch's FSDP2."""

from __future__ import annotations

import torch
from attrs import fields, frozen

from hp_fsdp.errors import NotAvailableError, ShardingError


@frozen
class MixedPrecisionPolicy:
    """Element types of computation, reduction and outputs.

    Sharded parameters, and with them gradients and optimizer state, keep the type the parameter
    had when it was sharded (fp32 master weights, usually).

    Attributes:
        param_dtype: type of the gathered parameters, of the all-gather and of the computation;
            None keeps the parameter's own.
        reduce_dtype: type in which gradients are reduced, and accumulated while
            `set_requires_gradient_sync(False)` holds; None reduces in the type of the computation.
        output_dtype: floating-point outputs of `forward` are cast to it; None leaves them.
        cast_forward_inputs: whether floating-point inputs of `forward` are cast to `param_dtype`.

    Raises:
        ShardingError: a type is not a floating-point type.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __attrs_post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (
                isinstance(dtype, torch.dtype) and dtype.is_floating_point
            ):
                raise ShardingError(
                    f"MixedPrecisionPolicy.{name} must be a floating-point torch.dtype or None, "
                    f"found {dtype!r}"
                )

    def computes_in(self, own: torch.dtype) -> torch.dtype:
        """Type of the gathered form of a parameter whose own type is `own`."""
        if self.param_dtype is None or not own.is_floating_point:
            return own
        return self.param_dtype

    def reduces_in(self, own: torch.dtype) -> torch.dtype:
        """Type in which the gradient of such a parameter is reduced."""
        return self.reduce_dtype or self.computes_in(own)


@frozen
class OffloadPolicy:
    """Where shards live between uses. This base policy leaves them on the device."""


@frozen
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, gradients and optimizer state in host memory. Not available in this version.

    Raises:
        NotAvailableError: always, when made.
    """

    pin_memory: bool = True

    def __attrs_post_init__(self) -> None:
        raise NotAvailableError(
            f"CPUOffloadPolicy({fields(type(self)).pin_memory.name}={self.pin_memory}) is not "
            "available in this version of hp_fsdp; leave offload_policy at OffloadPolicy()"
        )
