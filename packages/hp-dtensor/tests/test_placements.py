"""Placements are values: immutable, equal by content, and convertible to PyTorch's."""

import copy
import pickle

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor import placement_types as torch_placements
from torch.distributed.tensor.placement_types import Placement

from hp_dtensor.placements import (
    RaggedShard,
    SectionedShard,
    StridedShard,
    default_grad_placement,
    describe,
    normalize_placement,
    sharded_dims,
    to_torch_placement,
)

OURS = [StridedShard(0, 2), SectionedShard(1, (4, 2, 2)), RaggedShard((0,), (3, 0, 1))]


@pytest.mark.parametrize("placement", OURS, ids=str)
def test_a_placement_equals_its_copies_and_nothing_else(placement: Placement) -> None:
    for twin in (copy.deepcopy(placement), pickle.loads(pickle.dumps(placement))):
        assert twin == placement
        assert hash(twin) == hash(placement)
    for other in [*OURS, Shard(0), Replicate(), Partial()]:
        assert (placement == other) == (placement is other)


@pytest.mark.parametrize("placement", OURS, ids=str)
def test_a_placement_cannot_be_changed(placement: Placement) -> None:
    with pytest.raises(AttributeError, match="immutable"):
        placement.dim = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("placement", OURS, ids=str)
def test_repr_makes_an_equal_placement(placement: Placement) -> None:
    assert eval(repr(placement)) == placement


def test_placements_are_of_pytorchs_public_class_and_no_kind_of_theirs() -> None:
    for placement in OURS:
        assert isinstance(placement, Placement)
        assert not placement.is_replicate()
        assert not placement.is_partial()


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        (Shard(0), "S(0)"),
        (StridedShard(0, 2), "SS(0,2)"),
        (SectionedShard(0, [4, 2, 2]), "Sec(0,[4,2,2])"),
        (RaggedShard([0], [3, 0, 1]), "Rag([0],[3,0,1])"),
        (Replicate(), "R"),
        (Partial("avg"), "P(avg)"),
        ((Shard(1), Replicate()), "(S(1), R)"),
    ],
)
def test_describe_is_short(placement: object, text: str) -> None:
    assert describe(placement) == text


def test_negative_dims_are_normalised() -> None:
    assert normalize_placement(Shard(-1), 3) == Shard(2)
    assert normalize_placement(StridedShard(-2, 4), 3) == StridedShard(1, 4)
    assert normalize_placement(SectionedShard(-1, (1, 2)), 2) == SectionedShard(1, (1, 2))


@pytest.mark.parametrize("placement", [Shard(2), Shard(-3), StridedShard(2, 2)])
def test_a_dim_out_of_range_is_named(placement: Placement) -> None:
    with pytest.raises(ValueError, match=r"names dim -?\d, but the tensor has 2 dims"):
        normalize_placement(placement, 2)


def test_pytorchs_private_strided_shard_is_read_as_ours_and_back() -> None:
    # A guard: this name is private in PyTorch, and a version without it must be noticed here.
    theirs = torch_placements._StridedShard(-1, split_factor=3)
    ours = normalize_placement(theirs, 2)
    assert ours == StridedShard(1, 3)
    assert to_torch_placement(ours) == torch_placements._StridedShard(1, split_factor=3)


@pytest.mark.parametrize("placement", [SectionedShard(0, (1, 1)), RaggedShard((0,), (1, 0))])
def test_what_pytorch_lacks_is_not_converted(placement: Placement) -> None:
    with pytest.raises(ValueError, match="PyTorch has no placement"):
        to_torch_placement(placement)


def test_unknown_placements_and_reductions_are_refused() -> None:
    with pytest.raises(TypeError, match="not a supported placement"):
        normalize_placement(Placement(), 1)
    with pytest.raises(ValueError, match="product"):
        normalize_placement(Partial("product"), 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: StridedShard(0, 0),
        lambda: SectionedShard(0, ()),
        lambda: SectionedShard(0, (3, -1)),
        lambda: RaggedShard((1, 2), (1, 1)),
        lambda: RaggedShard((0,), (0, 0)),
        lambda: RaggedShard((0,), (2, -1)),
    ],
)
def test_impossible_parameters_are_refused(make: object) -> None:
    with pytest.raises(ValueError, match="found"):
        make()  # type: ignore[operator]


def test_a_gradient_is_sharded_like_its_value_and_else_replicated() -> None:
    assert default_grad_placement(Shard(1)) == Shard(1)
    assert default_grad_placement(Partial()) == Replicate()
    assert default_grad_placement(Replicate()) == Replicate()


def test_sharded_dims() -> None:
    assert sharded_dims(RaggedShard((0, 1), (1, 0))) == (0, 1)
    assert sharded_dims(SectionedShard(2, (1,))) == (2,)
    assert sharded_dims(Partial()) == ()
