"""Writes the names of repeated layers once: `model.layers.{0..47}.mlp` (for tables and errors)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

T = TypeVar("T")


def split_numbers(name: str) -> tuple[str, tuple[int, ...]]:
    """A name's pattern, with `#` for every segment that is a number, and those numbers."""
    segments = name.split(".")
    numbers = tuple(int(segment) for segment in segments if segment.isdecimal())
    return ".".join("#" if segment.isdecimal() else segment for segment in segments), numbers


def _ranges(numbers: Iterable[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(first) if first == last else f"{first}..{last}" for first, last in runs]
    single = len(runs) == 1 and runs[0][0] == runs[0][1]
    return texts[0] if single else "{" + ",".join(texts) + "}"


def fold_names(names: Iterable[str]) -> str:
    """One text for names that differ only in numbered segments.

    Raises:
        ValueError: the names differ elsewhere.
    """
    parts = [split_numbers(name) for name in names]
    pattern = parts[0][0]
    if any(other != pattern for other, _ in parts):
        raise ValueError(f"names to fold must differ in numbers only, found {sorted(set(parts))}")
    columns = list(zip(*(numbers for _, numbers in parts)))
    ranges = iter([_ranges(column) for column in columns])
    return ".".join(next(ranges) if seg == "#" else seg for seg in pattern.split("."))


def fold(
    items: Iterable[T], name: Callable[[T], str], key: Callable[[T], Hashable]
) -> list[tuple[str, tuple[T, ...]]]:
    """Groups items whose names differ in numbers only and whose keys agree, in first-seen order."""
    groups: dict[tuple[str, Hashable], list[T]] = {}
    for item in items:
        groups.setdefault((split_numbers(name(item))[0], key(item)), []).append(item)
    return [(fold_names(name(i) for i in group), tuple(group)) for group in groups.values()]
