"""Stops all ranks, before anything else is communicated, when they disagree."""

from __future__ import annotations

import ctypes
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
    dataclass or attrs instances, nested to any depth. Tensors, NumPy arrays and bytes are compared
    by content, everything else by `repr`, which must be complete and free of addresses.

    Args:
        name: what the value is, for the message.

    Raises:
        AgreementError: on every rank alike; names the ranks that differ from most others, the
            first differing item, and what they hold there. Also where a value cannot be
            compared, because its `repr` shows an address or fails.
    """
    items, problems = _examined(name, value)
    origin = Origin("hp_platform", name, "agreement")
    own = (_digest(*items), problems[:1])
    answers: list[tuple[bytes, list[str]]] = gather_objects(own, axis, origin=origin)
    if all(answer == answers[0] for answer in answers) and not answers[0][1]:
        return
    for rank, (_, found) in zip(axis.ranks, answers):
        if found:
            raise AgreementError(
                f"rank {rank} cannot compare {name} with others: {found[0]}; give the object a "
                "__repr__ that shows its content, or leave it out"
            )
    raise AgreementError(_difference(name, items, [digest for digest, _ in answers], axis, origin))


def _examined(name: str, value: object) -> tuple[list[tuple[str, str]], list[str]]:
    """The items of `value`, and what stands against comparing them; raises nothing.

    A rank that raised here would leave the others waiting for it.
    """
    items: list[tuple[str, str]] = []
    try:
        items.extend(_items(name, value))
    except Exception as error:
        place = items[-1][0] if items else "its beginning"
        account = f"{type(error).__name__}: {error}"[:_SHOWN]
        return items, [f"looking at it raised {account} (after {place[:_SHOWN]})"]
    shown = ((path, text[:_SHOWN]) for path, text in items if _ADDRESS.search(text))
    return items, [f"{path} is {text}, which is an address" for path, text in shown]


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
        yield path, f"{len(value)} bytes with SHA-256 {_hash(value)}"
    elif isinstance(value, Mapping):
        yield path, type(value).__name__
        named = ((_text(key), item) for key, item in value.items())
        for key, item in sorted(named, key=lambda pair: pair[0]):
            yield from _items(f"{path}[{key}]", item)
    elif isinstance(value, Set):
        yield path, _text(value)
    elif hasattr(value, "__array_interface__"):  # a NumPy array's repr leaves out the middle
        yield path, _array_text(value)
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


def _text(value: object) -> str:
    """The `repr`, but of a set in an order that is the same in every process."""
    if isinstance(value, Set):
        return f"{type(value).__name__} [{', '.join(sorted(map(_text, value)))}]"
    if type(value) is tuple:
        return f"({', '.join(map(_text, value))})"
    return repr(value)


def _array_text(value: Any) -> str:
    content = repr(value.tolist()).encode() if value.dtype.hasobject else value.tobytes()
    return f"{value.dtype} array of shape {value.shape} with SHA-256 {_hash(content)}"


def _fields(value: Any) -> list[str]:
    """Names of the fields of a dataclass or attrs instance that take part in comparisons."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [field.name for field in dataclasses.fields(value) if field.compare]
    # attrs is not imported: hp-platform needs torch only.
    attributes = getattr(type(value), "__attrs_attrs__", ())
    return [attribute.name for attribute in attributes if attribute.eq]


def _tensor_text(tensor: torch.Tensor) -> str:
    about = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
    if tensor.is_meta:
        return f"{about} without content"
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        raise TypeError(f"a {tensor.layout} tensor, {about}, has no plain content; densify it")
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
    shown = f" {plain.tolist()}" if plain.numel() <= 4 else ""
    # Not through numpy, which torch does not require.
    memory = (ctypes.c_ubyte * plain.nbytes).from_address(plain.data_ptr()) if plain.nbytes else b""
    return f"{about}{shown} with SHA-256 {_hash(memory)}"


def _hash(content: Any) -> str:
    return hashlib.sha256(content).hexdigest()


def _digest(*items: tuple[str, str]) -> bytes:
    digest = hashlib.sha256()
    for path, text in items:
        for part in (path, text):
            content = part.encode(errors="backslashreplace")
            # Lengths keep "ab", "c" and "a", "bc" apart.
            digest.update(len(content).to_bytes(8, "little") + content)
    return digest.digest()
