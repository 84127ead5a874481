"""Dropout that a forward calls as a function, `F.dropout(x, p=self.rate)`, read from its source."""

from __future__ import annotations

import ast
from typing import Any

from hp_planner.methods import forward_methods, own_attribute

FUNCTIONS = frozenset(
    {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"}
    | {"dropout_", "alpha_dropout_", "feature_dropout", "native_dropout"}
)
LIBRARIES = frozenset({"F", "functional", "torch"})
DEFAULT_RATE = 0.5

# What the rate is read from: an attribute of the module, or the number that the code states.
Call = tuple[str, str | float]


def dropout_calls(cls: type) -> tuple[Call, ...]:
    """Function and rate of every dropout that the forward of `cls`, or a method of the module that
    it calls, calls by itself.

    A rate that is neither a number nor an attribute of the module, such as an argument, is left to
    whoever gives it. Nothing where there is no source.
    """
    trees = [method.tree for method in forward_methods(cls)]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    calls = [node for node in nodes if isinstance(node, ast.Call) and _name(node)]
    found = ((_name(call), _rate(call)) for call in calls)
    return tuple(dict.fromkeys((name, rate) for name, rate in found if rate is not None))


def called_rates(calls: tuple[Call, ...], module: object) -> tuple[tuple[str, float], ...]:
    """Rates above zero of these calls in this module, by attribute or by function."""
    found: dict[str, float] = {}
    for name, told in calls:
        value: Any = getattr(module, told, None) if isinstance(told, str) else told
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            found[told if isinstance(told, str) else f"{name}()"] = float(value)
    return tuple(found.items())


def _name(call: ast.Call) -> str:
    """The function of PyTorch that a call is to, empty if to anything else."""
    if isinstance(call.func, ast.Name):
        return call.func.id if call.func.id in FUNCTIONS else ""
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in FUNCTIONS:
        return ""
    library = call.func.value
    leaf = library.attr if isinstance(library, ast.Attribute) else getattr(library, "id", "")
    return call.func.attr if leaf in LIBRARIES else ""


def _rate(call: ast.Call) -> str | float | None:
    given = {word.arg: word.value for word in call.keywords}
    by_place = dict(enumerate(call.args))
    training = given.get("training", given.get("train", by_place.get(2)))
    if isinstance(training, ast.Constant) and training.value is False:
        return None
    rate = given.get("p", by_place.get(1))
    if rate is None:
        return DEFAULT_RATE
    if isinstance(rate, ast.Constant) and isinstance(rate.value, int | float):
        return float(rate.value)
    return own_attribute(rate) or None
