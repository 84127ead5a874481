"""Assembles the packages into one training run.

Names load on first use, so that `python -m hp_integration.train` runs the module it names and a
part of the package, such as the data, can be used without the rest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hp_integration.errors import InputError
    from hp_integration.loss import vocabulary_cross_entropy
    from hp_integration.options import Options
    from hp_integration.train import Result, run
    from hp_integration.world import World, process_group

_EXPORTS = {
    "InputError": "errors",
    "Options": "options",
    "Result": "train",
    "World": "world",
    "process_group": "world",
    "run": "train",
    "vocabulary_cross_entropy": "loss",
}

__all__ = [
    "InputError",
    "Options",
    "Result",
    "World",
    "process_group",
    "run",
    "vocabulary_cross_entropy",
]


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'hp_integration' has no attribute {name!r}")
    return getattr(import_module(f"hp_integration.{_EXPORTS[name]}"), name)
