"""Agreement between ranks."""

import enum
import time
from dataclasses import dataclass, field

import attrs
import pytest
import torch

from hp_platform import AgreementError, MeshAxis, agree, ledger
from hp_platform.testing import run_ranks

pytestmark = pytest.mark.ranks


@dataclass(frozen=True)
class Plan:
    """A dataclass whose last field does not count."""

    layers: tuple[int, ...]
    note: str = field(default="", compare=False)


@attrs.frozen
class Unit:
    """An attrs class."""

    path: str
    shares: list[int]


class Colour(enum.Enum):
    """An enumeration: its repr is complete."""

    RED = 1


class Opaque:
    """Without a repr of its own."""


def same(rank):
    """Values that agree though they are made differently."""
    order = [("a", 1), ("b", [2, {"c": None}])]
    return [
        {"digest": 1},
        b"bytes",
        dict(order if rank else reversed(order)),
        {3, 1, 2} if rank else {2, 1, 3},
        Plan((1, 2), note=str(rank)),
        Unit("layers.0", [1]),
        torch.arange(10_000),
        [Colour.RED, torch.float32, 0.1, None, range(3)],
        [],
    ]


def message(name, value, axis):
    with pytest.raises(AgreementError) as caught:
        agree(name, value, axis)
    return str(caught.value)


def test_equal_values_pass_and_cost_one_exchange():
    def body(rank):
        axis = MeshAxis.of_group(name="dp")
        with ledger() as log:
            for index, value in enumerate(same(rank)):
                agree(f"value {index}", value, axis)
        return len(log.records) // len(same(rank))

    # Lengths and values make two entries.
    assert run_ranks(body, 2) == [2, 2]


def test_the_ranks_that_differ_and_the_first_different_item_are_named_on_every_rank():
    big = torch.zeros(10_000)
    pairs = [
        ("learning rate", 0.2, 0.1),
        ("plan", {"b": 2, "a": [1, {"c": 3}]}, {"b": 0, "a": [1, {"c": 4}]}),
        ("plan", {"a": 1}, {"a": 1, "b": 2}),
        ("plan", [1, 2], [1]),
        ("plan", Plan((1, 2)), Plan((1, 3))),
        ("units", [Unit("layers.0", [1])], [Unit("layers.1", [1])]),
        ("weights", {"w": big}, {"w": big.index_fill(0, torch.tensor([5_000]), 1.0)}),
        ("file", b"one", b"two"),
        ("kind", [1], (1,)),
        ("text", ["ab", "c"], ["a", "bc"]),
    ]

    def body(rank):
        axis = MeshAxis.of_group(name="dp")
        return [message(name, other if rank == 1 else usual, axis) for name, usual, other in pairs]

    found = run_ranks(body, 3)
    assert found == [found[0]] * 3
    rate, nested, longer, shorter, plan, units, weights, file, kind, text = found[0]
    assert "mesh axis 'dp' disagree about learning rate: expected 0.2, found rank 1: 0.1" in rate
    assert (
        "plan at plan['a'][1]['c']: expected 3, found rank 1: 4 (2 items differ in all)" in nested
    )
    assert "plan at plan['b']: expected nothing, found rank 1: 2" in longer
    assert "plan at plan[1]: expected 2, found rank 1: nothing" in shorter
    assert "plan at plan.layers[1]: expected 2, found rank 1: 3" in plan
    assert "units at units[0].path: expected 'layers.0', found rank 1: 'layers.1'" in units
    assert "weights at weights['w']: expected torch.float32 of shape (10000,)" in weights
    assert "file: expected 3 bytes with SHA-256 " in file
    assert "kind: expected list, found rank 1: tuple" in kind
    assert "text at text[0]: expected 'ab', found rank 1: 'a'" in text


def test_global_ranks_are_named_where_the_group_is_a_part_of_the_world():
    def body(rank):
        group = torch.distributed.new_group([1, 3])
        if rank not in (1, 3):
            return None
        return message("step", rank, MeshAxis.of_group(group, "half"))

    found = run_ranks(body, 4)
    assert "expected 1, found rank 3: 3" in found[1] == found[3]


def test_thousands_of_items_are_compared_soon():
    def body(rank):
        value = {f"layers.{i}": {"shape": [i, i], "kind": "linear"} for i in range(3_000)}
        axis = MeshAxis.of_group()
        agree("plan", value, axis)
        if rank:
            value["layers.2999"]["shape"][1] = 0
        start = time.process_time()
        return message("plan", value, axis), time.process_time() - start

    for text, seconds in run_ranks(body, 2):
        assert "plan['layers.2999']['shape'][1]: expected 2999, found rank 1: 0" in text
        assert seconds < 20


def test_a_value_whose_repr_is_an_address_is_refused_on_every_rank():
    """Even on ranks whose own value could be compared: all must stop together."""

    def body(rank):
        return message("hooks", [Opaque()] if rank == 1 else [1], MeshAxis.of_group())

    found = run_ranks(body, 2)
    assert found == [found[0]] * 2
    assert "rank 1 cannot compare hooks with others: hooks[0] is <" in found[0]
    assert "__repr__" in found[0]


@pytest.mark.ranks
def test_one_rank_that_cannot_look_at_its_value_stops_all():
    class Broken:
        def __repr__(self):
            raise ValueError("no repr")

    nested = []
    nested.append(nested)

    def body(rank):
        axis = MeshAxis.of_group()
        found = message("plan", {"a": 1, "b": Broken() if rank else 2}, axis)
        return found, message("plan", nested if rank else [], axis)

    for broken, endless in run_ranks(body, 2):
        assert (
            "rank 1 cannot compare plan with others: looking at it raised ValueError: no" in broken
        )
        assert "(after plan['a'])" in broken
        assert "raised RecursionError" in endless


@pytest.mark.ranks
def test_values_of_every_kind_agree_with_themselves_and_with_nothing_near_them():
    """Pairs of equal values that are built in different orders, then near misses."""

    def array(values):
        class Array:  # what of a NumPy array is looked at
            __array_interface__ = {}  # noqa: RUF012
            dtype, shape = torch.int64, (len(values),)
            tolist, tobytes = (lambda self: values), (lambda self: bytes(values))

            def __repr__(self):
                return "array([0, ..., 0])"

        Array.dtype = type("Dtype", (), {"hasobject": False, "__str__": lambda self: "int64"})()
        return Array()

    conjugate = torch.tensor([1 + 2j]).conj()
    equal = [
        (float("nan"), float("nan")),
        ({3, 1, 2}, {2, 3, 1}),
        # Sets inside, whose own order depends on how they were filled.
        ({frozenset([0, 8])}, {frozenset([8, 0])}),
        ({(frozenset([0, 8]), 1): "a"}, {(frozenset([8, 0]), 1): "a"}),
        ({1: "a", "b": 2, None: 3, (1,): 4}, {(1,): 4, None: 3, "b": 2, 1: "a"}),
        (conjugate, torch.tensor([1 - 2j])),
        (torch.ones(2, 3).t(), torch.ones(3, 2)),
        (torch.ones(0), torch.zeros(0)),
        (torch.ones(3).to(torch.float8_e4m3fn), torch.ones(3).to(torch.float8_e4m3fn)),
        (array([0, 1]), array([0, 1])),
    ]
    different = [
        (0.0, -0.0),
        (1, True),
        ({1: "a"}, {"1": "a"}),
        ([1, 2], (1, 2)),
        ({1}, frozenset({1})),
        (torch.ones(2), torch.ones(2, 1)),
        (torch.ones(2), torch.ones(2).int()),
        (array([0, 1]), array([1, 0])),
        (array([0, 1]), array([0, 1, 0])),
    ]

    def body(rank):
        axis = MeshAxis.of_group()
        for pair in equal:
            agree("value", pair[rank], axis)
        return [message("value", pair[rank], axis) for pair in different]

    for unlike in run_ranks(body, 2):
        assert all("disagree about value" in text for text in unlike)


@pytest.mark.ranks
def test_tensors_without_plain_content_are_refused_on_every_rank():
    def body():
        return message("plan", [torch.ones(2).to_sparse()], MeshAxis.of_group())

    for text in run_ranks(body, 2):
        assert "raised TypeError: a torch.sparse_coo tensor" in text
