"""Hypothesis strategies for meshes, shapes, shares and topologies.

They need Hypothesis, as the extra `hp-platform[testing]` brings it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from hp_platform.testing.simulator import Simulator
from hp_platform.topology import Topology

__all__ = [
    "distributed",
    "mesh_shapes",
    "shapes",
    "shares_of",
    "simulators",
    "topologies",
    "uneven_shares",
]


def mesh_shapes(max_world_size: int = 8, max_axes: int = 3) -> st.SearchStrategy[tuple[int, ...]]:
    """Mesh shapes, axes of size 1 included, with at most `max_world_size` ranks."""

    # Drawn axis by axis, so that nothing is thrown away.
    @st.composite
    def draw_shape(draw: st.DrawFn) -> tuple[int, ...]:
        sizes: list[int] = []
        for _ in range(draw(st.integers(1, max_axes))):
            sizes.append(draw(st.integers(1, max_world_size // math.prod(sizes))))
        return tuple(draw(st.permutations(sizes)))

    return draw_shape()


def simulators(max_world_size: int = 8, max_axes: int = 3) -> st.SearchStrategy[Simulator]:
    """Simulated meshes."""
    return mesh_shapes(max_world_size, max_axes).map(Simulator)


def shapes(
    min_dims: int = 1, max_dims: int = 3, max_size: int = 6, *, empty: bool = True
) -> st.SearchStrategy[tuple[int, ...]]:
    """Tensor shapes.

    Args:
        empty: whether dims of size 0 occur.
    """
    sizes = st.lists(st.integers(0 if empty else 1, max_size), min_size=min_dims, max_size=max_dims)
    return sizes.map(tuple)


def uneven_shares(size: int, max_rows: int = 5) -> st.SearchStrategy[tuple[int, ...]]:
    """Rows of each of `size` coordinates; any of them, or all, may be empty."""
    shares = st.lists(st.integers(0, max_rows), min_size=size, max_size=size)
    return shares.map(tuple)


def shares_of(rows: int, size: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Ways to divide `rows` rows between `size` coordinates, empty shares included."""
    cuts = st.lists(st.integers(0, rows), min_size=size - 1, max_size=size - 1).map(sorted)
    return cuts.map(
        lambda found: tuple(b - a for a, b in zip((0, *found), (*found, rows), strict=True))
    )


@st.composite
def distributed(
    draw: st.DrawFn, size: int, *, dtype: torch.dtype = torch.float32, max_rows: int = 5
) -> list[Tensor]:
    """The shares of `size` coordinates: tensors that differ in rows only, of small integers."""
    rows: Sequence[int] = draw(uneven_shares(size, max_rows))
    trailing = draw(shapes(0, 2, 3))
    seed = draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(-8, 9, (share, *trailing), generator=generator).to(dtype) for share in rows
    ]


@st.composite
def topologies(draw: st.DrawFn, max_ranks: int = 12) -> Topology:
    """Maps of ranks to hosts and, sometimes, super-nodes: regular, unequal and interleaved."""
    ranks = draw(st.integers(1, max_ranks))
    hosts = draw(st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks))
    if draw(st.booleans()):
        hosts = sorted(hosts)
    names = [f"host{host}" for host in hosts]
    if draw(st.booleans()):
        return Topology.from_hosts(names)
    return Topology.from_hosts(names, [f"super-node{host // 2}" for host in hosts])
