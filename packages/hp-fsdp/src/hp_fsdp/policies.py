"""Policies: mixed precision and offload as in PyTorch's FSDP2, and how parameters travel."""

from __future__ import annotations

import torch
from attrs import frozen

from hp_fsdp.errors import ShardingError
from hp_platform.links import Link


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
    """Shards, gradients and optimizer state in host memory; see `hp_fsdp.offload`.

    Attributes:
        pin_memory: whether that memory is page-locked, so that copies overlap with computation.
    """

    pin_memory: bool = True


PER_PARAMETER, SHARED_BUFFER, AUTO = "per_parameter", "shared_buffer", "auto"
_ALONE_FROM = 32
"""`auto` sends a parameter alone if its transfer takes at least this many times the latency: a
collective of its own costs it 3% at most."""


@frozen
class CommPolicy:
    """Which parameters of a unit travel alone over the shard axis, and which together.

    Attributes:
        choice: "per_parameter": all alone. "shared_buffer": all of a unit together, as far as
            they have the same type and are all trainable or all frozen. "auto": together what is
            small against the link's latency.
        link: latency and bandwidth of the shard axis for "auto"; None measures them.

    Raises:
        ShardingError: the choice is none of the three, or `link` is not a `hp_platform.Link`.
    """

    choice: str = PER_PARAMETER
    link: Link | None = None

    def __attrs_post_init__(self) -> None:
        if self.choice not in (PER_PARAMETER, SHARED_BUFFER, AUTO):
            raise ShardingError(
                f"comm_policy must be {PER_PARAMETER!r}, {SHARED_BUFFER!r} or {AUTO!r}, found "
                f"{self.choice!r}"
            )
        if self.link is not None and not isinstance(self.link, Link):
            raise ShardingError(
                f"CommPolicy.link must be a hp_platform.Link or None, found {self.link!r}"
            )

    @classmethod
    def of(cls, value: object) -> CommPolicy:
        """`value` itself, or the policy of that name."""
        return value if isinstance(value, CommPolicy) else cls(str(value))

    @property
    def needs_link(self) -> bool:
        """Whether the decision depends on a link that has to be measured."""
        return self.choice == AUTO and self.link is None

    def shares(self, nbytes: int, link: Link | None) -> bool:
        """Whether a parameter of `nbytes`, gathered, travels with others."""
        if self.choice != AUTO:
            return self.choice == SHARED_BUFFER
        link = self.link or link
        assert link is not None
        return nbytes < _ALONE_FROM * link.latency * link.bandwidth

    def describe(self, link: Link | None) -> str:
        """The policy and what it follows from, for `explain`."""
        link = self.link or link
        if self.choice != AUTO or link is None:
            return self.choice
        source = "given" if self.link is not None else "measured"
        threshold = _ALONE_FROM * link.latency * link.bandwidth
        return (
            f"auto: alone from {threshold:,.0f} bytes ({_ALONE_FROM} times the {source} latency of "
            f"{link.latency * 1e6:.0f} us at {link.bandwidth / 1e9:.2f} GB/s)"
        )
