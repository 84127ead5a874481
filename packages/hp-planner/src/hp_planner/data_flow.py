"""Which of a module's parts a part is fed by, read from the source of the forward.

A part is an attribute that the forward calls, `self.name(...)`. What an expression is made of is
followed through the variables that the forward assigns and the methods of its own that it calls.
What depends on a condition adds an unknown part, `UNKNOWN`, to those that are there in any case; a
part that is called more than once is not told.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from attrs import field, frozen

from hp_planner.methods import Method, called_method, forward_method, own_attribute

Parts = frozenset[str]
Feeds = tuple[tuple[str, Parts], ...]
UNKNOWN = "?"


def feeds(cls: type) -> Feeds:
    """For every part that the forward of `cls` calls once, the parts in what it is called with.

    Methods of the module are followed where they are called. Nothing where there is no source.
    """
    method = forward_method(cls)
    if method is None:
        return ()
    flow = _Flow(cls, [(method, 0)])
    flow.run(method.tree.body, {})
    calls = list(flow.calls.values())
    names = [name for name, _ in calls]
    return tuple(((name, parts) for name, parts in calls if names.count(name) == 1))


Made = dict[str, Parts]


@frozen
class _Flow:
    """Calls of parts, each with the parts in its arguments, in the order of the source.

    Attributes:
        within: the methods that are read, each with the call that it is read for.
        calls: by place, with the calls that lead there; an expression is read more than once.
        returned: parts in what the innermost method returns.
    """

    cls: type
    within: list[tuple[Method, int]]
    calls: dict[tuple[int, ...], tuple[str, Parts]] = field(factory=dict)
    returned: list[set[str]] = field(factory=lambda: [set()])

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
                made = made | {name: self.parts(v, made) for name, v in _assigned(statement)}
                if isinstance(statement, ast.Return) and statement.value is not None:
                    self.returned[-1] |= self.parts(statement.value, made)
        return made

    def parts(self, expression: ast.expr, made: Made) -> Parts:
        """The parts that an expression calls, or that its variables come from."""
        found: set[str] = set()
        for node in ast.walk(expression):
            if isinstance(node, ast.Call):
                helper = called_method(self.cls, self.within[-1][0], node.func)
                if helper is not None:
                    found |= self._enter(helper, node, made)
                elif name := own_attribute(node.func):
                    found.add(name)
            if isinstance(node, ast.Name):
                found |= made.get(node.id, Parts())
        return frozenset(found)

    def _enter(self, helper: Method, call: ast.Call, made: Made) -> set[str]:
        if any(helper.tree is method.tree for method, _ in self.within):
            return {UNKNOWN}
        given = {name: self.parts(v, made) for name, v in zip(helper.parameters, call.args)}
        given |= {word.arg: self.parts(word.value, made) for word in call.keywords if word.arg}
        self.within.append((helper, id(call)))
        self.returned.append(set())
        self.run(helper.tree.body, given)
        self.within.pop()
        return self.returned.pop()

    def _note(self, statement: ast.stmt, made: Made) -> None:
        for node in ast.walk(statement):
            if not isinstance(node, ast.Call):
                continue
            helper = called_method(self.cls, self.within[-1][0], node.func)
            if helper is not None:
                self._enter(helper, node, made)
            elif name := own_attribute(node.func):
                given = (*node.args, *(keyword.value for keyword in node.keywords))
                place = (*(call for _, call in self.within), id(node))
                inside = Parts().union(*(self.parts(each, made) for each in given))
                self.calls[place] = name, inside


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
