"""What a thread is doing at this moment, as far as collectives are concerned.

Found by looking at the thread's stack from outside, so that a collective costs nothing for it.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType

import torch

from hp_platform.axis import MeshAxis
from hp_platform.handle import Handle, issue
from hp_platform.records import Origin

_WAITS = (Handle.wait.__code__, Handle.wait_for_readers.__code__)
_ISSUE = issue.__code__
_OUTSIDE = (str(Path(torch.__file__).parent), threading.__file__)


def doing(thread: int) -> str:
    """What the thread with this identifier waits for, or else where it is."""
    frame = sys._current_frames().get(thread)
    return doing_in(frame) if frame is not None else "unknown"


def doing_in(frame: FrameType) -> str:
    """What the innermost call of a collective on this stack waits for, or else its place."""
    current: FrameType | None = frame
    while current is not None:
        values = current.f_locals
        if current.f_code in _WAITS:
            handle = values["self"]
            return f"waiting in {_call(handle._operation, handle._axis, handle._origin)}"
        if current.f_code is _ISSUE:
            return f"issuing {_call(values['operation'], values['axis'], values['origin'])}"
        current = current.f_back
    return _place(frame)


def _call(operation: str, axis: MeshAxis, origin: Origin) -> str:
    return f"{operation} on axis {axis.name} (ranks {list(axis.ranks)}), asked by {origin}"


def _place(frame: FrameType) -> str:
    """The innermost line that is not PyTorch's or the threading module's own."""
    current: FrameType | None = frame
    while current is not None and current.f_code.co_filename.startswith(_OUTSIDE):
        current = current.f_back
    shown = current or frame
    code = shown.f_code
    return f"at {code.co_filename}:{shown.f_lineno} in {code.co_name}"
