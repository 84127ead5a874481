"""Folding the names of repeated layers."""

import pytest

from hp_planner.folding import fold, fold_names


def test_ranges_and_gaps_are_written_once():
    names = [f"layers.{i}.mlp" for i in (0, 1, 2, 5)]
    assert fold_names(names) == "layers.{0..2,5}.mlp"
    assert fold_names(["layers.3.mlp"]) == "layers.3.mlp"
    assert fold_names(["norm"]) == "norm"


def test_only_equal_keys_share_a_row():
    groups = fold(["a.0", "a.1", "b"], lambda name: name, lambda name: name == "a.1")
    assert [(text, len(members)) for text, members in groups] == [("a.0", 1), ("a.1", 1), ("b", 1)]


def test_names_that_differ_elsewhere_are_not_folded():
    with pytest.raises(ValueError, match="differ in numbers only"):
        fold_names(["a.0", "b.0"])
