"""Faults planted in this package for the time of a check: values, ranks, sums and keys."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from attrs import evolve
from torch import Tensor, nn

from hp_dtensor import dispatch, end_of_backward, production, steps, vocabulary
from hp_dtensor.cuts import Chunk, Run
from hp_dtensor.layout import Layout
from hp_dtensor.rules.recipe import Call, Recipe, Rule
from hp_dtensor.rules.table import rule_for
from hp_dtensor.transition import Transition


def wrong_reduction() -> AbstractContextManager[Any]:
    return mock.patch.object(steps.Step, "reduction", "avg")


def forgotten_adjoint() -> AbstractContextManager[Any]:
    """Gradients take the way of values."""
    return mock.patch.object(
        Transition, "adjoint", property(lambda self: Transition.compile(self.target, self.source))
    )


def swapped_ranks() -> AbstractContextManager[Any]:
    """What comes from coordinate 0 is put where coordinate 1's belongs."""
    right = steps.RankStep.unpack.fget

    def swapped(self: steps.RankStep) -> Callable[[Tensor], Tensor]:
        put = right(self)
        if self.kind is not steps.Kind.ALL_GATHER:
            return put  # type: ignore[no-any-return]
        return lambda received: put(torch.cat(received.chunk(2)[::-1]))

    return mock.patch.object(steps.RankStep, "unpack", property(swapped))


def swapped_parameters() -> AbstractContextManager[Any]:
    """A rank keeps the other rank's part of the parameters of production."""
    right = production.local_part

    def wrong(full: Tensor, layout: Layout, coordinate: tuple[int, ...]) -> Tensor:
        return right(full, layout, tuple(1 - each for each in coordinate))

    return mock.patch.object(production, "local_part", wrong)


def no_settlement() -> AbstractContextManager[Any]:
    return mock.patch.object(end_of_backward.EndOfBackward, "install", return_value=None)


def double_settlement() -> AbstractContextManager[Any]:
    right = end_of_backward.Settlement.run

    def twice(self: Any, gradients: Any, *rest: Any) -> None:
        right(self, gradients, *rest)
        right(self, gradients, *rest)

    return mock.patch.object(end_of_backward.Settlement, "run", twice)


def stale_key() -> AbstractContextManager[Any]:
    """Plain arguments do not count in the key of a plan."""
    right = dispatch._key

    def forgetful(value: Any, found: list[Tensor]) -> Any:
        key = right(value, found)
        if isinstance(key, tuple) and key and key[0] in (tuple, list):
            return tuple(
                part[:1] if isinstance(part, tuple) and part[:1] == (int,) else part for part in key
            )
        return key

    return mock.patch.object(dispatch, "_key", forgetful)


def wrong_rows() -> AbstractContextManager[Any]:
    """The embedding looks one row too far."""
    right = vocabulary.shard_vocabulary

    def shifted(module: nn.Embedding, layout: Layout, coordinate: tuple[int, ...]) -> Any:
        own = right(module, layout, coordinate)
        return evolve(own, start=own.start + 1, stop=own.stop + 1) if own.start else own

    return mock.patch.object(production, "shard_vocabulary", shifted)


def unmasked_rows() -> AbstractContextManager[Any]:
    """Rows of other ranks are not cleared."""

    def leave(self: Any, module: Any, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        return output

    return mock.patch.object(vocabulary.VocabularyRange, "leave", leave)


def no_reduction_in_production() -> AbstractContextManager[Any]:
    """Exits of production forget a step."""
    right = production.Exit.__call__

    def leave(self: Any, module: Any, args: Any, output: Any) -> Any:
        return output if "mlp" in self.origin.name else right(self, module, args, output)

    return mock.patch.object(production.Exit, "__call__", leave)


def wrong_order_of_cut() -> AbstractContextManager[Any]:
    right = Chunk.spans

    def wrong(self: Chunk, size: int, index: int) -> list[Run]:
        return right(self, size, (index + 1) % self.count)

    return mock.patch.object(Chunk, "spans", wrong)


def without_adjoints() -> AbstractContextManager[Any]:
    """Linear layers take replicated inputs as they are, whatever sees their outputs."""
    right = rule_for(nn.functional.linear)
    assert right is not None

    def derive(call: Call) -> Recipe | None:
        recipe = right.derive(call)
        return recipe and evolve(recipe, operands=None)

    wrong = Rule(right.name, derive, right.parameters)

    def chosen(function: Callable[..., Any]) -> Rule | None:
        found = rule_for(function)
        return wrong if found is right else found

    return mock.patch.object(dispatch, "rule_for", chosen)
