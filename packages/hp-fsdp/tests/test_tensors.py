from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import torch

from hp_fsdp.tensors import map_tensors, tensors_in

Pair = namedtuple("Pair", "first second")


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


def nested():
    a, b, c, d = (torch.full((1,), float(i)) for i in range(4))
    return [a, {"x": (b, 1)}, Pair(c, "text"), Output(d), None], [a, b, c, d]


def test_tensors_are_found_in_every_container_in_order():
    value, expected = nested()
    assert [t.item() for t in tensors_in(value)] == [t.item() for t in expected]


def test_mapping_rebuilds_what_changes_and_keeps_what_does_not():
    value, _ = nested()
    assert map_tensors(lambda t: t, value) is value
    doubled = map_tensors(lambda t: t * 2, value)
    assert [t.item() for t in tensors_in(doubled)] == [0, 2, 4, 6]
    assert type(doubled[2]) is Pair
    assert type(doubled[3]) is Output
    assert value[0].item() == 0
    ordered = map_tensors(lambda t: t + 1, OrderedDict(a=torch.zeros(1)))
    assert type(ordered) is OrderedDict
