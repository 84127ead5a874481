"""Stops all ranks, before anything else is communicated, when they disagree."""

from __future__ import annotations

import hashlib

from hp_platform.axis import MeshAxis
from hp_platform.collectives import gather_objects
from hp_platform.errors import AgreementError
from hp_platform.ledger import Origin

_SHOWN = 200


def agree(name: str, value: object, axis: MeshAxis) -> None:
    """Checks that every rank on `axis` holds the same `value`; all must make this call.

    Digests are compared: of bytes as they are, of everything else as `repr` shows it. So the
    representation must be complete and must not depend on addresses or on a set's order.

    Args:
        name: what the value is, for the message.

    Raises:
        AgreementError: on every rank alike; names the ranks that differ from most others,
            and both values.
    """
    content = value if isinstance(value, bytes) else repr(value).encode()
    digest = hashlib.sha256(content).hexdigest()
    shown = digest if isinstance(value, bytes) else repr(value)[:_SHOWN]
    origin = Origin("hp_platform", name, "agreement")
    answers: list[tuple[str, str]] = gather_objects((digest, shown), axis, origin=origin)
    digests = [answer[0] for answer in answers]
    if len(set(digests)) == 1:
        return
    # The value of most ranks; among equals the one met first, on every rank alike.
    usual = max(dict.fromkeys(digests), key=digests.count)
    example = answers[digests.index(usual)][1]
    different = [
        f"rank {rank}: {text}" for rank, (found, text) in zip(axis.ranks, answers) if found != usual
    ]
    raise AgreementError(
        f"ranks on mesh axis {axis.name!r} disagree about {name}: expected {example}, found "
        f"{'; '.join(different)}. All ranks must be started with the same arguments and files"
    )
