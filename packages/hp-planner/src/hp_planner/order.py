"""In which order the rows of a fused weight lie: the one fact that shapes cannot tell.

It comes from a data file, by the class that defines the forward, or from an override. A plan
carries a stated order in its parameters' reasons, so that it can be linted by itself.
"""

from __future__ import annotations

import re
from itertools import permutations

from attrs import frozen

PER_HEAD, PER_GROUP, INTERLEAVED = "per_head", "per_group", "interleaved"
QKV_ORDERS = (*("|".join(parts) for parts in permutations("qkv")), PER_HEAD, PER_GROUP)
KV_ORDERS = ("k|v", "v|k", PER_HEAD)
GATE_UP_ORDERS = ("gate|up", "up|gate", INTERLEAVED)
ORDERS = tuple(dict.fromkeys((*QKV_ORDERS, *KV_ORDERS, *GATE_UP_ORDERS)))

# Calls that take a fused result apart, or give heads a dim of their own.
SPLITTERS = frozenset(
    {"split", "chunk", "unbind", "narrow", "tensor_split", "select", "unflatten", "flatten"}
    | {"permute", "movedim", "squeeze", "view", "reshape", "shape", "size"}
)

_TOLD = re.compile(
    r"order (?P<name>\S+) by override '(?P<key>.*?)'"
    r"(?: names (?P<names>[\w,]+))?(?: divide (?P<divide>[\w,]+))?$"
)


@frozen
class Order:
    """How the rows of a fused weight lie, and what its forward does with them.

    Attributes:
        name: sections from first to last, `q|k|v` or `gate|up`; `per_head`: for every head its
            part of each; `per_group`: for every key/value head its query heads, its k, its v;
            `interleaved`: gate and up alternate.
        names: what the forward uses beside the names known for every block of the kind, vouched
            for as acting on each head, or feature, by itself.
        divide: integer attributes, own or of the config, by which the forward counts heads or
            features over all heads: divided by the number of ranks when the plan is applied.
        source: what in the code shows it, or the key of the override that states it.
    """

    name: str
    names: frozenset[str] = frozenset()
    divide: frozenset[str] = frozenset()
    source: str = ""

    @property
    def sections(self) -> tuple[str, ...]:
        """Names of the sections from first to last; empty where the parts are not contiguous."""
        return tuple(self.name.split("|")) if "|" in self.name else ()

    @property
    def known(self) -> frozenset[str]:
        """What the forward may use."""
        return self.names | self.divide

    def told(self) -> str:
        """As a plan carries it; `read_told` reads it."""
        text = f"order {self.name} by override {self.source!r}"
        for label, values in (("names", self.names), ("divide", self.divide)):
            text += f" {label} {','.join(sorted(values))}" if values else ""
        return text


def read_told(reason: str) -> Order | None:
    """The stated order at the end of a parameter's reason, or None."""
    found = _TOLD.search(reason)
    if found is None:
        return None
    names, divide = (
        frozenset((found[group] or "").split(",")) - {""} for group in ("names", "divide")
    )
    return Order(found["name"], names, divide, found["key"])
