"""Which process this is, known without asking the system: asked at every collective.

A fork inherits handles and process groups with none of the threads and connections behind them.
"""

from __future__ import annotations

import os


class Process:
    """This process.

    Attributes:
        identity: an object that is another one in every process that is forked from this one.
    """

    identity = object()


def _become_another() -> None:
    Process.identity = object()


os.register_at_fork(after_in_child=_become_another)
