"""Types what a refusal says, as a user would: every violation's first remedy, until a plan stands.

A remedy reads `override 'NAME' with VALUE`, perhaps `and override 'NAME' with VALUE`; what comes
after `, or` are other ways.
"""

from __future__ import annotations

import re
from typing import Any

import yaml
from torch import nn

import hp_planner
from hp_planner import LintError

ONE = r"override '([^']+)' with (\{[^}]*\}|none)"
ROUNDS = 6


def told(remedy: str) -> dict[str, Any]:
    """The overrides that a remedy tells first; none if it tells no override."""
    start = re.search(ONE, remedy)
    if start is None:
        return {}
    first = remedy[start.start() :].split(", or ")[0].split(" if ")[0]
    return {key: yaml.safe_load(value) for key, value in re.findall(ONE, first)}


def follow(model: nn.Module, mesh: dict[str, int]) -> dict[str, Any]:
    """Overrides with which the model can be planned, all taken from what refusals say.

    Raises:
        LintError: what it says to type does not lead to a plan.
        PlanError: what it says to type is not accepted.
    """
    overrides: dict[str, Any] = {}
    for _ in range(ROUNDS):
        try:
            hp_planner.plan(model, mesh, overrides=overrides)
        except LintError as error:
            new = {
                k: v for violation in error.violations for k, v in told(violation.remedy).items()
            }
            if new.items() <= overrides.items():
                raise
            overrides |= new
        else:
            break
    return overrides
