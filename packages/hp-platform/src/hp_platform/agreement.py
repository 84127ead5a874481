"""Stops all ranks, before anything else is communicated, when they disagree."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import torch

from hp_platform.axis import MeshAxis
from hp_platform.collectives import gather_objects
from hp_platform.errors import AgreementError
from hp_platform.records import Origin

_SHOWN = 200
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]+")
_ABSENT = "nothing"


def agree(name: str, value: object, axis: MeshAxis) -> None:
    """Checks that every rank on `axis` holds the same `value`; all must make this call.

    Digests are compared; only when they differ do the ranks exchange more, to find the first
    item that does. Items are found in mappings (whatever their order), sequences, sets and
    dataclass or attrs instances, nested to any depth. Tensors and bytes are compared by content,
    everything else by `repr`, which must be complete and free of addresses.

    Args:
        name: what the value is, for the message.

    Raises:
        AgreementError: on every rank alike; names the ranks that differ from most others, the
            first differing item, and what they hold there. Also where a value cannot be
            compared, because its `repr` shows an address.
    """
    items = list(_items(name, value))
    origin = Origin("hp_platform", name, "agreement")
    problems = [f"{path} is {text}" for path, text in items if _ADDRESS.search(text)]
    own = (_digest(*items), problems[:1])
    answers: list[tuple[bytes, list[str]]] = gather_objects(own, axis, origin=origin)
    if all(answer == answers[0] for answer in answers) and not answers[0][1]:
        return
    for rank, (_, found) in zip(axis.ranks, answers):
        if found:
            raise AgreementError(
                f"rank {rank} cannot compare {name} with others: {found[0][:_SHOWN]}, which is "
                "an address; give the object a __repr__ that shows its content"
            )
    raise AgreementError(_difference(name, items, [digest for digest, _ in answers], axis, origin))


def _difference(
    name: str,
    items: Sequence[tuple[str, str]],
    digests: Sequence[bytes],
    axis: MeshAxis,
    origin: Origin,
) -> str:
    """What differs, and where; every rank gives the same answer."""
    # The value of most ranks; among equals the one met first, on every rank alike.
    usual = max(dict.fromkeys(digests), key=digests.count)
    reference = digests.index(usual)
    listed: list[dict[str, bytes]] = gather_objects(
        {path: _digest((path, text))[:8] for path, text in items}, axis, origin=origin
    )
    different = [rank for rank, digest in enumerate(digests) if digest != usual]
    first = _first_difference(listed[reference], [listed[rank] for rank in different])
    texts = gather_objects(dict(items).get(first, _ABSENT)[:_SHOWN], axis, origin=origin)
    count = sum(
        any(listed[rank].get(path) != digest for rank in different)
        for path, digest in listed[reference].items()
    )
    found = "; ".join(f"rank {axis.ranks[rank]}: {texts[rank]}" for rank in different)
    place = "" if first == name else f" at {first}"
    more = f" ({count} items differ in all)" if count > 1 else ""
    return (
        f"ranks on mesh axis {axis.name!r} disagree about {name}{place}: expected "
        f"{texts[reference]}, found {found}{more}. All ranks must be started with the same "
        "arguments and files"
    )


def _first_difference(reference: Mapping[str, bytes], others: Sequence[Mapping[str, bytes]]) -> str:
    """The first path, in the reference's order, that some other lacks or holds differently."""
    for path, digest in reference.items():
        if any(other.get(path) != digest for other in others):
            return path
    return next(path for other in others for path in other if path not in reference)


def _items(path: str, value: object) -> Iterator[tuple[str, str]]:
    """Every item of `value` with its path, and every container's kind."""
    if isinstance(value, torch.Tensor):
        yield path, _tensor_text(value)
    elif isinstance(value, bytes | bytearray | memoryview):
        yield path, f"{len(value)} bytes with SHA-256 {hashlib.sha256(value).hexdigest()}"
    elif isinstance(value, Mapping):
        yield path, type(value).__name__
        for key, item in sorted(value.items(), key=lambda pair: repr(pair[0])):
            yield from _items(f"{path}[{key!r}]", item)
    elif isinstance(value, Set):
        yield path, f"{type(value).__name__} {sorted(map(repr, value))}"
    elif isinstance(value, Sequence) and not isinstance(value, str | range):
        yield path, type(value).__name__
        for index, item in enumerate(value):
            yield from _items(f"{path}[{index}]", item)
    elif fields := _fields(value):
        yield path, type(value).__name__
        for field in fields:
            yield from _items(f"{path}.{field}", getattr(value, field))
    else:
        yield path, repr(value)


def _fields(value: Any) -> list[str]:
    """Names of the fields of a dataclass or attrs instance that take part in comparisons."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [field.name for field in dataclasses.fields(value) if field.compare]
    # attrs is not imported: hp-platform needs torch only.
    attributes = getattr(type(value), "__attrs_attrs__", ())
    return [attribute.name for attribute in attributes if attribute.eq]


def _tensor_text(tensor: torch.Tensor) -> str:
    if tensor.is_meta:
        return f"{tensor.dtype} of shape {tuple(tensor.shape)} without content"
    plain = tensor.detach().cpu().contiguous().view(-1)
    content = bytes(plain.view(torch.uint8).tolist()) if plain.numel() else b""
    digest = hashlib.sha256(content).hexdigest()
    shown = f" {plain.tolist()}" if plain.numel() <= 4 else ""
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}{shown} with SHA-256 {digest}"


def _digest(*items: tuple[str, str]) -> bytes:
    digest = hashlib.sha256()
    for path, text in items:
        for part in (path, text):
            content = part.encode(errors="backslashreplace")
            # Lengths keep "ab", "c" and "a", "bc" apart.
            digest.update(len(content).to_bytes(8, "little") + content)
    return digest.digest()
