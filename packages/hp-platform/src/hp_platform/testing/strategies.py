"""Hypothesis strategies for mesh shapes and shares; needs the extra `hp-platform[testing]`."""

from __future__ import annotations

import math

from hypothesis import strategies as st


def mesh_shapes(max_world_size: int = 8, max_axes: int = 3) -> st.SearchStrategy[tuple[int, ...]]:
    """Mesh shapes, axes of size 1 included, with at most `max_world_size` ranks."""
    shapes = st.lists(st.integers(1, max_world_size), min_size=1, max_size=max_axes)
    return shapes.map(tuple).filter(lambda shape: math.prod(shape) <= max_world_size)


def uneven_shares(size: int, max_rows: int = 5) -> st.SearchStrategy[tuple[int, ...]]:
    """Rows of each of `size` coordinates; any of them, or all, may be empty."""
    shares = st.lists(st.integers(0, max_rows), min_size=size, max_size=size)
    return shares.map(tuple)
