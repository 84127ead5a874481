"""Batches are a pure function of (seed, step, global batch); the held-out text stays apart."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hp_integration.data import (
    Corpus,
    evaluation_batch,
    frequency_loss,
    global_batch,
    library_sources,
    load_corpus,
    rank_slice,
    split_held_out,
)
from hp_integration.errors import InputError


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus("numbers", torch.arange(1000), torch.arange(1000, 1200), vocabulary=1200)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "b.txt").write_text("second file\n" * 30)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.md").write_text("first file\n" * 30)
    (tmp_path / ".hidden").write_text("never read")
    return tmp_path


def test_a_batch_depends_on_seed_and_step_only(corpus: Corpus) -> None:
    same = [
        global_batch(corpus, seed=3, step=7, batch_size=4, sequence_length=16) for _ in range(2)
    ]
    torch.rand(5)  # the global generator has no part in it
    assert torch.equal(same[0].inputs, same[1].inputs)
    for seed, step in ((3, 8), (4, 7), (37, 3)):
        other = global_batch(corpus, seed=seed, step=step, batch_size=4, sequence_length=16)
        assert not torch.equal(same[0].inputs, other.inputs)


def test_a_target_is_the_next_token(corpus: Corpus) -> None:
    batch = global_batch(corpus, seed=0, step=0, batch_size=4, sequence_length=16)
    assert torch.equal(batch.targets, batch.inputs + 1)
    assert batch.inputs.shape == (4, 16)


@given(ranks=st.sampled_from([1, 2, 3, 4, 6]), step=st.integers(0, 10**6))
def test_the_ranks_slices_put_together_are_the_global_batch(ranks: int, step: int) -> None:
    corpus = Corpus("numbers", torch.arange(500), torch.arange(100), vocabulary=500)
    batch = global_batch(corpus, seed=1, step=step, batch_size=12, sequence_length=8)
    parts = [rank_slice(batch, rank=rank, ranks=ranks) for rank in range(ranks)]
    assert torch.equal(torch.cat([part.inputs for part in parts]), batch.inputs)
    assert torch.equal(torch.cat([part.targets for part in parts]), batch.targets)


def test_batches_reach_the_whole_training_text_and_nothing_beyond() -> None:
    corpus = Corpus("numbers", torch.arange(20), torch.arange(20), vocabulary=20)
    batches = [
        global_batch(corpus, seed=0, step=step, batch_size=8, sequence_length=4)
        for step in range(50)
    ]
    seen = torch.cat([torch.cat([b.inputs, b.targets]) for b in batches]).unique()
    assert torch.equal(seen, torch.arange(20))


def test_evaluation_batches_are_fixed_and_spread_over_the_held_out_text(corpus: Corpus) -> None:
    batches = [
        evaluation_batch(corpus, index=i, count=3, batch_size=2, sequence_length=16)
        for i in range(3)
    ]
    first, last = batches[0].inputs[0], batches[-1].targets[-1]
    assert first[0] == 1000
    assert last[-1] == 1199
    assert all(bool((batch.inputs >= 1000).all()) for batch in batches)


def test_the_frequency_loss_is_the_entropy_of_the_text() -> None:
    assert frequency_loss([torch.tensor([0, 1, 2, 3])], 10) == pytest.approx(math.log(4))
    assert frequency_loss([torch.tensor([5, 5]), torch.tensor([5])], 10) == 0
    parts = [torch.tensor([0, 0, 1]), torch.tensor([0])]
    expected = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert frequency_loss(parts, 2) == pytest.approx(expected)


def test_every_twentieth_document_is_held_out() -> None:
    train, held_out = split_held_out([b"%d" % i for i in range(40)])
    assert held_out == b"19\n39"
    assert b"19" not in train.split(b"\n")
    assert len(train.split(b"\n")) == 38


def test_of_a_few_documents_the_end_is_held_out() -> None:
    train, held_out = split_held_out([b"x" * 100, b"y" * 99])
    assert len(held_out) == 10
    assert train + held_out == b"x" * 100 + b"\n" + b"y" * 99


def test_the_default_text_is_the_standard_library_without_installed_packages() -> None:
    sources = library_sources()
    assert sources == sorted(sources)
    assert any(path.name == "argparse.py" for path in sources)
    assert not any("site-packages" in path.parts or "test" in path.parts for path in sources)


def test_a_folder_is_read_in_sorted_order_without_hidden_files(folder: Path) -> None:
    corpus = load_corpus(folder)
    text = bytes(corpus.train.tolist()) + bytes(corpus.held_out.tolist())
    assert text == b"first file\n" * 30 + b"\n" + b"second file\n" * 30
    assert corpus.vocabulary == 256


def test_the_digest_tells_texts_apart(folder: Path) -> None:
    before = load_corpus(folder).digest
    assert load_corpus(folder).digest == before
    (folder / "b.txt").write_text("third file\n" * 30)
    assert load_corpus(folder).digest != before


def test_a_tokenizer_file_gives_its_own_ids_and_vocabulary(folder: Path, tmp_path: Path) -> None:
    vocabulary = {"[UNK]": 0, "file": 1, "first": 2, "second": 3}
    path = tmp_path / ".tokenizer.json"
    path.write_text(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "normalizer": None,
                "pre_tokenizer": {"type": "Whitespace"},
                "post_processor": None,
                "decoder": None,
                "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
            }
        )
    )
    corpus = load_corpus(folder, tokenizer=path)
    assert corpus.vocabulary == 4
    assert corpus.train[:4].tolist() == [2, 1, 2, 1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: load_corpus(p / "missing"), "no such folder"),
        (lambda p: load_corpus(p), "holds no file"),
        (lambda p: load_corpus(None, tokenizer=p / "t.json"), "no such file"),
    ],
)
def test_what_cannot_be_read_is_one_line(make: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message) as caught:
        make(tmp_path)  # type: ignore[operator]
    assert "\n" not in str(caught.value)


def test_a_text_shorter_than_a_sequence_is_refused(corpus: Corpus) -> None:
    corpus.require(199)
    with pytest.raises(InputError, match="held-out text has 200 tokens"):
        corpus.require(200)
