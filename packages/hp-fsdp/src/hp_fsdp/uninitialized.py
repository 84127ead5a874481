"""Buffers that `to_empty` has left without values after a start on the meta device.

A checkpoint does not fill buffers that are not persistent, so a forward would compute with
whatever the memory held. `to_empty` is noticed, and the first forward after it looks whether
somebody has filled the buffer since.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hp_fsdp.errors import UsageError

_NOTED = "_hp_fsdp_uninitialized"
"""Attribute of a buffer whose values are undefined: the version it had when it was made."""


@contextmanager
def note_uninitialized_buffers(module: nn.Module) -> Iterator[bool]:
    """Buffers that leave the meta device meanwhile are marked, and filled with NaN if they can be.

    Gives whether there are buffers on the meta device: only they can arrive without values.
    """
    on_meta = [
        (child, name)
        for child in module.modules()
        for name, buffer in child._buffers.items()
        if buffer is not None and buffer.is_meta
    ]
    yield bool(on_meta)
    for child, name in on_meta:
        buffer = child._buffers[name]
        if buffer is not None and not buffer.is_meta and not hasattr(buffer, _NOTED):
            if buffer.is_floating_point():
                buffer.detach().fill_(torch.nan)
            setattr(buffer, _NOTED, buffer._version)


def refuse_uninitialized_buffers(root: nn.Module) -> None:
    """Checks all buffers below `root`; those found filled are not looked at again.

    Raises:
        UsageError: some have not been written to since `to_empty`; all are named.
    """
    found = []
    for path, child in root.named_modules():
        for name, buffer in child._buffers.items():
            if buffer is None or not hasattr(buffer, _NOTED):
                continue
            if _is_untouched(buffer):
                found.append(f"{path}.{name}" if path else name)
            else:
                delattr(buffer, _NOTED)
    if found:
        raise UsageError(
            f"buffers {found} hold no values: the model was made on the meta device, and "
            "to_empty() only reserves memory. A checkpoint does not fill buffers that are not "
            "persistent; set them before the first forward, for example in reset_parameters()"
        )


def _is_untouched(buffer: Tensor) -> bool:
    if buffer._version != getattr(buffer, _NOTED) or buffer.numel() == 0:
        return False
    # Writing through `.data` counts no version.
    return not buffer.is_floating_point() or bool(buffer.isnan().all())
