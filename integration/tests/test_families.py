"""Families of transformers under the planner's own plan, held to one process."""

import pytest

from hp_integration.families.configs import HEAVY, families
from hp_integration.families.judge import Result, Verdict, judge
from hp_integration.families.remedies import told
from hp_integration.families.table import table

pytestmark = pytest.mark.ranks

# One of every kind of block, cheap enough to run each time.
SOME = {
    "deepseek_v3": "latent attention and experts with a shared one",
    "gpt2": "weights stored [in, out], fused q, k and v, learned positions",
    "jamba": "state-space layers between attention",
    "phi3": "fused weights in sections",
    "starcoder2": "biases of output projections",
}


@pytest.mark.parametrize("family", SOME)
def test_a_family_of_each_kind_is_right_at_two_ranks(family):
    found = judge(family)
    assert found.verdict is Verdict.RIGHT, (found.note, found.error)


@pytest.mark.parametrize("family", ["olmo2", "qwen3_next"])
def test_whole_hidden_states_are_right_too(family):
    found = judge(family, sequence_parallel=False)
    assert found.verdict is Verdict.RIGHT, (found.note, found.error)


def test_four_ranks_with_two_key_value_heads_give_what_one_process_gives():
    assert judge("llama", {"tp": 4}).verdict is Verdict.RIGHT


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in families() if name not in HEAVY])
def test_no_family_is_wrong_in_silence(family):
    found = judge(family)
    assert found.verdict not in (Verdict.WRONG, Verdict.STOPPED), (found.note, found.error)
    if found.verdict is Verdict.REFUSED and "[random]" not in found.note:
        told = found.overridden
        assert told.verdict is Verdict.RIGHT, (told.note, told.error)


def test_the_first_remedy_is_read_as_a_user_types_it():
    assert told("override 'a.*.b' with {tp: R}: every rank computes all of it") == {
        "a.*.b": {"tp": "R"}
    }
    assert told("override 'a' with none and override 'b' with none") == {"a": "none", "b": "none"}
    assert told("pad it to 4, or override 'e' with none, or 'f' with {tp: R}") == {"e": "none"}
    assert told("plan again") == {}


def test_a_refused_family_is_right_with_what_its_refusal_names():
    result = judge("diffllama")
    assert result.verdict is Verdict.REFUSED
    assert result.overridden.verdict is Verdict.RIGHT


def test_the_table_has_a_row_for_each_family_and_counts_them():
    results = [
        Result("a", Verdict.RIGHT, error=1e-7, sharded=0.5),
        Result("b", Verdict.REFUSED, "b cannot be planned\n  [coverage] x\n  found a | b"),
    ]
    text = table(results, {"tp": 2})
    assert "2 families: 1 right, 1 refused." in text
    assert "| a | right | 1e-07 | 50% |  |" in text
    assert "| b | refused |  |  | [coverage] x found a \\| b |" in text
