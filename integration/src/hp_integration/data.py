"""Text as token batches: the sources of Python's standard library, or any folder of text.

A batch is a pure function of (seed, step, global batch size), and a data-parallel rank takes its
rows of it. So every mesh sees the same global batch at a step, and a resumed run needs only the
step to find its place again.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import torch
from attrs import field, frozen
from torch import Tensor

from hp_integration.errors import InputError

# Installed packages and the interpreter's own tests differ between installations.
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
_HELD_OUT_EVERY = 20  # one file in twenty, or the last twentieth of the text
_SEPARATOR = b"\n"


@frozen
class Batch:
    """`targets[b, s]` is the token after `inputs[b, s]`; both [batch, sequence], int64."""

    inputs: Tensor
    targets: Tensor


@frozen(eq=False)
class Corpus:
    """Token ids of the training text and of the held-out text.

    Attributes:
        name: where the text came from, for a person to read.
        train, held_out: 1-D integer tensors.
        vocabulary: number of token ids; 256 for bytes.
        digest: of both texts; equal on every rank of a run.
    """

    name: str
    train: Tensor
    held_out: Tensor
    vocabulary: int
    digest: str = field(init=False)

    @digest.default
    def _digest(self) -> str:
        sha = hashlib.sha256()
        for tokens in (self.train, self.held_out):
            sha.update(tokens.numpy().tobytes())
        return sha.hexdigest()[:16]

    def require(self, sequence_length: int) -> None:
        """Checks that a sequence and its next token fit into both parts.

        Raises:
            InputError: the text is too short.
        """
        for part, tokens in (("training", self.train), ("held-out", self.held_out)):
            if len(tokens) <= sequence_length:
                raise InputError(
                    f"{self.name}: the {part} text has {len(tokens)} tokens, a sequence needs "
                    f"{sequence_length + 1}; give more text or a shorter --seq-len"
                )


def load_corpus(folder: Path | None = None, tokenizer: Path | None = None) -> Corpus:
    """Reads the text (bytes, or tokens of a tokenizers JSON file) and holds a part of it out.

    Raises:
        InputError: the folder or the tokenizer file cannot be read, or holds no text.
    """
    if folder is None:
        name, files = "the Python standard library's sources", library_sources()
    else:
        name, files = f"text in {folder}", text_files(folder)
    train, held_out = split_held_out([_read(path) for path in files])
    if tokenizer is None:
        return Corpus(name, _bytes_to_ids(train), _bytes_to_ids(held_out), vocabulary=256)
    encode, vocabulary = _load_tokenizer(tokenizer)
    return Corpus(name, encode(train), encode(held_out), vocabulary)


def library_sources() -> list[Path]:
    """The `.py` files of the running Python's standard library, in sorted order."""
    root = Path(sysconfig.get_path("stdlib"))
    return [
        path
        for path in sorted(root.rglob("*.py"))
        if not _NOT_LIBRARY.intersection(path.relative_to(root).parts)
    ]


def text_files(folder: Path) -> list[Path]:
    """Every visible file below `folder`, in sorted order.

    Raises:
        InputError: the folder does not exist or holds no file.
    """
    if not folder.is_dir():
        raise InputError(f"--data {folder}: no such folder")
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    if not files:
        raise InputError(f"--data {folder}: the folder holds no file")
    return files


def split_held_out(documents: list[bytes]) -> tuple[bytes, bytes]:
    """Training and held-out text: every twentieth document, or the end of a few documents."""
    if len(documents) < _HELD_OUT_EVERY:
        text = _SEPARATOR.join(documents)
        cut = len(text) - len(text) // _HELD_OUT_EVERY
        return text[:cut], text[cut:]
    last = _HELD_OUT_EVERY - 1
    train = (text for i, text in enumerate(documents) if i % _HELD_OUT_EVERY != last)
    return _SEPARATOR.join(train), _SEPARATOR.join(documents[last::_HELD_OUT_EVERY])


def global_batch(
    corpus: Corpus, *, seed: int, step: int, batch_size: int, sequence_length: int
) -> Batch:
    """`batch_size` sequences at random places of the training text, the same on every rank."""
    generator = torch.Generator().manual_seed(mixed_seed(seed, step))
    last = len(corpus.train) - sequence_length
    starts = torch.randint(last, (batch_size,), generator=generator)
    return _windows(corpus.train, starts, sequence_length)


def evaluation_batch(
    corpus: Corpus, *, index: int, count: int, batch_size: int, sequence_length: int
) -> Batch:
    """The `index`-th of `count` batches, spread evenly over the held-out text."""
    last = len(corpus.held_out) - sequence_length - 1
    places = torch.linspace(0, last, count * batch_size, dtype=torch.float64).round().long()
    starts = places[index * batch_size : (index + 1) * batch_size]
    return _windows(corpus.held_out, starts, sequence_length)


def rank_slice(batch: Batch, *, rank: int, ranks: int) -> Batch:
    """The rows that data-parallel rank `rank` of `ranks` trains on."""
    rows = len(batch.inputs) // ranks
    cut = slice(rank * rows, (rank + 1) * rows)
    return Batch(batch.inputs[cut], batch.targets[cut])


def frequency_loss(targets: Iterable[Tensor], vocabulary: int) -> float:
    """Cross-entropy (nats a token) of predicting every token by its frequency in `targets`.

    The frequencies are those of the very text that is predicted, so no model that looks at token
    frequencies alone does better.
    """
    counts = torch.zeros(vocabulary, dtype=torch.float64)
    for part in targets:
        counts += torch.bincount(part.flatten(), minlength=vocabulary)
    shares = counts[counts > 0] / counts.sum()
    return -float((shares * shares.log()).sum())


def mixed_seed(*parts: int) -> int:
    """A generator seed that differs wherever `parts` differ, for example in (seed, step)."""
    text = ":".join(map(str, parts))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _windows(tokens: Tensor, starts: Tensor, length: int) -> Batch:
    rows = tokens[starts[:, None] + torch.arange(length + 1)].long()
    return Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None


def _bytes_to_ids(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0).byte()


class _Encoder:
    """A tokenizers JSON file as a function from bytes to ids."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        if not path.is_file():
            raise InputError(f"--tokenizer {path}: no such file")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            reason = " ".join(str(error).split())
            raise InputError(f"--tokenizer {path}: not a tokenizers JSON file: {reason}") from None

    @property
    def vocabulary(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def __call__(self, text: bytes) -> Tensor:
        lines = text.decode("utf-8", errors="replace").splitlines(keepends=True)
        encodings = self._tokenizer.encode_batch(lines, add_special_tokens=False)
        return torch.tensor([i for line in encodings for i in line.ids], dtype=torch.int32)


def _load_tokenizer(path: Path) -> tuple[_Encoder, int]:
    encoder = _Encoder(path)
    return encoder, encoder.vocabulary
