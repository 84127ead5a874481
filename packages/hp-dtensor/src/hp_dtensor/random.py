"""Random numbers that belong to the global tensor (decision D11).

A value is a function of (seed, draw, global index), computed by the counter-based generator
Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11)
in ordinary int64 tensor arithmetic. So every layout of a tensor gets the same values, without
communication. Nothing is global: a `RandomState` is passed, or held by a `Dropout` module.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from hp_dtensor.dtensor import DTensor
from hp_dtensor.layout import Layout, layout_of
from hp_dtensor.rules.own_part import own_coordinate

__all__ = ["Dropout", "RandomState", "dropout", "normal_", "rand", "seed", "uniform_"]

_MASK = 0xFFFFFFFF
_PARITY = 0x1BD11BDA
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def threefry(key: tuple[int, int], low: Any, high: Any) -> tuple[Any, Any]:
    """Threefry-2x32, 20 rounds: two 32-bit words for a 64-bit counter, as integers or tensors."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    x, y = (low + keys[0]) & _MASK, (high + keys[1]) & _MASK
    for block in range(5):
        for rotation in _ROTATIONS[block % 2]:
            x = (x + y) & _MASK
            y = ((y << rotation) | (y >> (32 - rotation))) & _MASK
            y = y ^ x
        x = (x + keys[(block + 1) % 3]) & _MASK
        y = (y + keys[(block + 2) % 3] + block + 1) & _MASK
    return x, y


class RandomState:
    """A seed and the number of draws made: what the next draw depends on.

    Every rank holds an equal one and makes the same draws. Save it with `state_dict`.
    """

    def __init__(self, seed: int) -> None:
        self.seed = int(seed)
        self.draws = 0

    def next_key(self) -> tuple[int, int]:
        """The key of the next draw, counted."""
        word = self.seed % (1 << 64)
        draw, self.draws = self.draws, self.draws + 1
        return threefry((word & _MASK, word >> 32), draw & _MASK, draw >> 32)

    def state_dict(self) -> dict[str, int]:
        return {"seed": self.seed, "draws": self.draws}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seed, self.draws = int(state["seed"]), int(state["draws"])

    def __repr__(self) -> str:
        return f"RandomState(seed={self.seed}, draws={self.draws})"


def seed(value: int) -> RandomState:
    """A new state; nothing global is seeded."""
    return RandomState(value)


def _words(layout: Layout | None, local: Tensor, key: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Two 32-bit words for every element of a local tensor, by its global index."""
    if layout is None:
        index = torch.arange(local.numel(), dtype=torch.int64)
    else:
        index = layout.owned_indices(own_coordinate(layout))
    index = index.to(local.device)
    low, high = threefry(key, index & _MASK, index >> 32)
    return low.view(local.shape), high.view(local.shape)


def _unit(low: Tensor, high: Tensor) -> Tensor:
    """Float64 in [0, 1) with 53 random bits."""
    return ((low >> 5).double() * (1 << 26) + (high >> 6).double()) * 2.0**-53


def _placed(tensor: Tensor) -> tuple[Layout | None, Tensor]:
    if isinstance(tensor, DTensor):
        return tensor.layout, tensor.to_local()
    return layout_of(tensor), tensor


def rand(
    shape: Sequence[int],
    *,
    state: RandomState,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """Uniform in [0, 1): a DTensor on `device_mesh`, or a plain tensor without one.

    Raises:
        ValueError: only one of mesh and placements is given.
    """
    if (device_mesh is None) != (placements is None):
        raise ValueError("rand: give both device_mesh and placements, or neither")
    if device_mesh is None or placements is None:
        return uniform_(torch.empty(tuple(shape), dtype=dtype, device=device), state=state)
    layout = Layout(device_mesh, placements, shape)
    where = device if device is not None else device_mesh.device_type
    local = torch.empty(layout.local_shape(), dtype=dtype, device=where)
    return uniform_(DTensor.of_layout(local, layout), state=state)


def uniform_(tensor: Tensor, low: float = 0.0, high: float = 1.0, *, state: RandomState) -> Tensor:
    """Fills with values uniform in [low, high). Plain tensors may carry a layout, or be whole."""
    return _fill(tensor, state, lambda a, b: low + (high - low) * _rounded_down(tensor, a, b))


def _rounded_down(tensor: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """A unit value that stays below one in the tensor's dtype."""
    bits = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
    scale = float(1 << bits.get(tensor.dtype, 24))
    return torch.floor(_unit(low, high) * scale) / scale


def normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0, *, state: RandomState) -> Tensor:
    """Fills with normal values (Box-Muller in float64), the same for every layout."""

    def values(low: Tensor, high: Tensor) -> Tensor:
        radius = torch.sqrt(-2.0 * torch.log((low.double() + 1.0) * 2.0**-32))
        return mean + std * radius * torch.cos(high.double() * (2.0 * math.pi * 2.0**-32))

    return _fill(tensor, state, values)


def _fill(tensor: Tensor, state: RandomState, values: Any) -> Tensor:
    layout, local = _placed(tensor)
    if layout is not None and layout.partial_axes():
        raise ValueError(f"random values cannot fill a pending sum: {layout}; redistribute it")
    if not local.is_floating_point():
        raise TypeError(f"random values need a floating-point tensor, found {local.dtype}")
    with torch.no_grad():
        local.copy_(values(*_words(layout, local, state.next_key())))
    return tensor


def dropout(
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    *,
    state: RandomState,
    layout: Layout | None = None,
) -> Tensor:
    """Zeroes elements with probability `p` and scales the rest by `1 / (1 - p)`.

    Args:
        input: a DTensor, or a plain tensor.
        state: where the draw comes from; it counts the draw, in training only.
        layout: of a plain local tensor; without one it is taken as the whole tensor.

    Raises:
        ValueError: `p` is not in [0, 1].
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout: p must be in [0, 1], found {p}")
    if not training:
        return input
    key = state.next_key()
    if isinstance(input, DTensor):
        local, where = input.to_local(), input.layout
        return DTensor._of(_dropped(local, where, p, key), where)
    return _dropped(input, layout or layout_of(input), p, key)


def _dropped(local: Tensor, layout: Layout | None, p: float, key: tuple[int, int]) -> Tensor:
    low, _ = _words(layout, local, key)
    kept = low >= round(p * 2**32)
    scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
    return local * (kept.to(local.dtype) * scale)


class Dropout(nn.Module):
    """Dropout whose mask belongs to the global tensor; its state is part of the state dict.

    Args:
        p: probability of zeroing an element.
        seed: seed of this module's own state. Give every module another one.
    """

    def __init__(self, p: float = 0.5, *, seed: int = 0) -> None:
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"Dropout: p must be in [0, 1], found {p}")
        self.p = p
        self.state = RandomState(seed)

    def forward(self, input: Tensor) -> Tensor:
        return dropout(input, self.p, self.training, state=self.state)

    def get_extra_state(self) -> dict[str, int]:
        return self.state.state_dict()

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.state.load_state_dict(state)

    def extra_repr(self) -> str:
        return f"p={self.p}, seed={self.state.seed}"
