"""What `torch.utils._pytree`, a private module of PyTorch, is relied upon for."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import pytest
import torch

from hp_dtensor.contracts import has_tensor, map_tensors

Pair = namedtuple("Pair", ["first", "second"])


@pytest.mark.parametrize(
    "nest",
    [
        lambda t: t,
        lambda t: [1, (t, None)],
        lambda t: {"a": {"b": t}, "c": "text"},
        lambda t: OrderedDict(a=t),
        lambda t: Pair(t, [t]),
        lambda t: pytest.importorskip("transformers.modeling_outputs").BaseModelOutput(
            last_hidden_state=t, hidden_states=(t, t)
        ),
    ],
)
def test_tensors_are_found_and_replaced_in_nests_whose_kinds_stay(nest: object) -> None:
    assert callable(nest)
    before, after = torch.zeros(2), torch.ones(2)
    given = nest(before)
    found = map_tensors(lambda tensor: tensor + 1, given)
    assert has_tensor(given)
    assert type(found) is type(given)
    assert str(found) == str(nest(after))
    assert str(given) == str(nest(before))
    assert not has_tensor(nest(None))
