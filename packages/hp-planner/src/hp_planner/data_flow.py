"""Which of a module's parts a part is fed by, read from the source of the forward.

A part is an attribute that the forward calls, `self.name(...)`. What an expression is made of is
followed through the variables that the forward assigns. What depends on a condition adds an unknown
part, `UNKNOWN`, to those that are there in any case; a part that is called more than once is not
told.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from attrs import field, frozen

from hp_planner.methods import forward_tree, own_attribute

Parts = frozenset[str]
Feeds = tuple[tuple[str, Parts], ...]
UNKNOWN = "?"


def feeds(cls: type) -> Feeds:
    """For every part that the forward of `cls` calls once, the parts in what it is called with.

    Nothing where there is no source.
    """
    tree = forward_tree(cls)
    if tree is None:
        return ()
    flow = _Flow()
    flow.run(tree.body, {})
    names = [name for name, _ in flow.calls]
    return tuple(((name, parts) for name, parts in flow.calls if names.count(name) == 1))


Made = dict[str, Parts]


@frozen
class _Flow:
    """Calls of parts, each with the parts in its arguments, in the order of the source."""

    calls: list[tuple[str, Parts]] = field(factory=list)

    def run(self, body: list[ast.stmt], made: Made) -> Made:
        """What every variable is made of after these statements."""
        for statement in body:
            blocks = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
            if isinstance(statement, ast.With):
                made = self.run(statement.body, made)
            elif any(blocks):
                made = _agreed([made] + [self.run(block, dict(made)) for block in blocks if block])
            else:
                self._note(statement, made)
                made = made | {name: _parts(value, made) for name, value in _assigned(statement)}
        return made

    def _note(self, statement: ast.stmt, made: Made) -> None:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and (name := own_attribute(node.func)):
                given = (*node.args, *(keyword.value for keyword in node.keywords))
                self.calls.append((name, Parts().union(*(_parts(each, made) for each in given))))


def _agreed(ways: list[Made]) -> Made:
    """Variables that are the same whichever way was taken; the others are unknown."""
    names = {name for way in ways for name in way}
    first = ways[0]
    same = {name for name in names if all(way.get(name) == first.get(name) for way in ways)}
    made = {name: Parts.intersection(*(way.get(name, Parts()) for way in ways)) for name in names}
    return {name: made[name] if name in same else made[name] | {UNKNOWN} for name in names}


def _assigned(statement: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            for node in ast.walk(target):
                if isinstance(node, ast.Name) and statement.value is not None:
                    yield node.id, statement.value


def _parts(expression: ast.expr, made: Made) -> Parts:
    """The parts that an expression calls, or that its variables come from."""
    found: set[str] = set()
    for node in ast.walk(expression):
        if isinstance(node, ast.Call) and (name := own_attribute(node.func)):
            found.add(name)
        if isinstance(node, ast.Name):
            found |= made.get(node.id, Parts())
    return frozenset(found)
