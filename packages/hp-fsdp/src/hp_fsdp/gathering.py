"""An all-gather of parameters, from its issue until no peer reads what this rank gave to it."""

from __future__ import annotations

from collections.abc import Callable

from attrs import define
from torch import Tensor

from hp_platform import Handle, MeshAxis, Origin, all_gather
from hp_platform.repeatable import repeatable_all_gather


@define(eq=False)
class Gathering:
    """The all-gathers of one bucket, of which one at a time is in flight or lends its part."""

    _in_flight: Handle[Tensor] | None = None
    _lent: Handle[Tensor] | None = None
    _again: Callable[[Origin], Handle[Tensor]] | None = None
    _part: Tensor | None = None

    def issue(self, part: Tensor, axis: MeshAxis, output: Tensor, origin: Origin) -> None:
        """After `take_back`: issues one."""
        self._in_flight = all_gather(
            part, axis, output=output, lends=_lends_in(origin.phase), origin=origin
        )

    def issue_again(self, part: Tensor, axis: MeshAxis, output: Tensor, origin: Origin) -> None:
        """As `issue`, of the same tensors at every step: they are checked once."""
        if not _lends_in(origin.phase):
            self.issue(part, axis, output, origin)
            return
        if self._again is None or self._part is not part:
            self._again = repeatable_all_gather(part, axis, output=output, lends=True)
            self._part = part
        self._in_flight = self._again(origin)

    def forget_tensors(self) -> None:
        """The output is replaced: the next call is checked anew."""
        self._again = self._part = None

    def wait(self) -> None:
        """Waits for the one in flight; peers may still read this rank's part."""
        handle, self._in_flight = self._in_flight, None
        assert handle is not None
        handle.wait()
        self._lent = handle

    def take_back(self) -> None:
        """Returns when no peer reads this rank's part any more; before that it must not change.

        Peers may wait for this rank to read theirs, whether or not it came to use what it gathers.
        """
        lent = self._lent or self._in_flight
        if lent is not None and lent.lends:
            lent.wait()
            lent.wait_for_readers()
        self._lent = None


def _lends_in(phase: str) -> bool:
    """Whether parts are lent to the all-gathers of a phase.

    Those of a pass are: they are taken back when it ends at the latest, and ranks may wait for them
    in any order, as who waits reads for others. A call of `unshard` has no end by which the program
    would leave the shards alone.
    """
    return phase != "unshard"
