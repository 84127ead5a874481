"""Layout rules of torch's operators, written as axis patterns (decision D4)."""

from hp_dtensor.rules.engine import OperatorError, Pattern, derive, parse
from hp_dtensor.rules.recipe import Call, Operand, Recipe, Rule
from hp_dtensor.rules.table import rule_for

__all__ = [
    "Call",
    "Operand",
    "OperatorError",
    "Pattern",
    "Recipe",
    "Rule",
    "derive",
    "parse",
    "rule_for",
]
