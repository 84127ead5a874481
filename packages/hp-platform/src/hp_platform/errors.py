"""The errors this project raises on purpose, all derived from `HPError`."""

from __future__ import annotations

from collections.abc import Mapping


class HPError(RuntimeError):
    """Base of every error the project's packages raise themselves."""


class CollectiveError(HPError, ValueError):
    """A collective was called with something it cannot take; nothing has been sent."""


class PeerError(HPError):
    """A collective that was issued correctly failed underneath, usually because a peer died."""


class TopologyError(HPError, ValueError):
    """Ranks, hosts or mesh axes are not arranged as the caller needs them."""


class AgreementError(HPError):
    """Ranks hold different values for something that must be equal on all of them."""


class RankFailure(HPError):  # noqa: N818  (the public name says what happened to whom)
    """Some ranks of `run_ranks` raised, died or did not finish in time.

    Attributes:
        reports: for each rank that has something to say, its traceback, exit status or the
            stack in which it was stuck.
        failed: the ranks that failed by themselves, in the order in which they were noticed;
            the others were stopped because of them.
    """

    def __init__(self, message: str, reports: Mapping[int, str], failed: tuple[int, ...]) -> None:
        self.reports = dict(reports)
        self.failed = failed
        blocks = [f"--- rank {rank} ---\n{text.rstrip()}" for rank, text in sorted(reports.items())]
        super().__init__("\n".join([message, *blocks]))
