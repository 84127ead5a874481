"""Every rank of a mesh as a thread of this process: real DTensors, no process groups.

`run_lockstep` runs a body once per rank. Ranks meet in every collective: each lays down its tensor,
waits for the others of its group, and takes what the collective gives it. Autograd on the CPU runs
backward in the thread that called it, so a rank's backward meets the others' in the same way. A
rank that raises wakes those that wait for it.

Meant for checks of operator rules on meshes of several axes: no fork, no sockets, any mesh shape.
Collectives compute in coordinate order, so that results are the same in every run.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hp_platform import MeshAxis, Tier

__all__ = ["LockstepMesh", "run_lockstep"]

T = TypeVar("T")


class StoppedError(RuntimeError):
    """Raised in a rank that waits for others which will not come."""


class _Baton:
    """Lets one rank run at a time, each until it has to wait: no two threads ever compete."""

    def __init__(self, count: int) -> None:
        self.turns = [threading.Lock() for _ in range(count)]
        for turn in self.turns:
            turn.acquire()
        self.ready: deque[int] = deque(range(count))
        self.waiting: dict[int, str] = {}
        self.stopped: str | None = None

    def pass_on(self) -> None:
        """Gives the turn to the next rank that can run; nobody can if all wait for each other."""
        if not self.ready and self.waiting:
            places = ", ".join(f"rank {rank} in {at}" for rank, at in sorted(self.waiting.items()))
            self.stop(f"no rank can go on: {places}")
        if self.ready:
            self.turns[self.ready.popleft()].release()

    def wait(self, rank: int, place: str) -> None:
        self.waiting[rank] = place
        self.pass_on()
        self.turns[rank].acquire()
        self.waiting.pop(rank, None)
        if self.stopped is not None:
            raise StoppedError(self.stopped)

    def wake(self, ranks: Sequence[int]) -> None:
        self.ready.extend(ranks)

    def stop(self, why: str) -> None:
        """Every rank that waits raises."""
        if self.stopped is None:
            self.stopped = why
        self.ready.extend(rank for rank in self.waiting if rank not in self.ready)


class _Meeting:
    """Where the ranks of one group exchange what they laid down."""

    def __init__(self, ranks: tuple[int, ...], baton: _Baton) -> None:
        self.ranks, self.baton = ranks, baton
        self.slots: dict[int, tuple[str, Any]] = {}

    def exchange(self, own: int, operation: str, value: Any) -> list[Any]:
        """Everyone's value, by coordinate.

        Raises:
            StoppedError: another rank failed, is in another collective, or will never come.
        """
        slots = self.slots
        slots[own] = (operation, value)
        if len(slots) < len(self.ranks):
            self.baton.wait(self.ranks[own], operation)
        else:
            self.slots = {}
            self.baton.wake([rank for i, rank in enumerate(self.ranks) if i != own])
        found = {operation for operation, _ in slots.values()}
        if len(found) > 1:
            raise AssertionError(f"ranks {self.ranks} are in different collectives: {found}")
        return [slots[i][1] for i in range(len(self.ranks))]


class _Done:
    """A collective that has completed."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


_REDUCTIONS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}


def _reduce(tensors: Sequence[Tensor], options: Any) -> Tensor:
    kind = getattr(options.reduceOp, "op", options.reduceOp)
    combine = next(f for op, f in _REDUCTIONS.items() if op == kind)
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total = combine(total, tensor)
    return total


class LockstepGroup(dist.ProcessGroup):
    """One rank's end of a group of threads; what `hp_platform.collectives` calls."""

    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.own, self.meeting = rank, meeting

    def allreduce(self, tensors: list[Tensor], options: Any) -> _Done:  # type: ignore[override]
        everyone = self.meeting.exchange(self.own, "all-reduce", tensors[0].clone())
        tensors[0].copy_(_reduce(everyone, options))
        return _Done()

    def _allgather_base(self, output: Tensor, input: Tensor, options: Any = None) -> _Done:  # type: ignore[override]
        everyone = self.meeting.exchange(self.own, "all-gather", input.clone())
        output.view(-1).copy_(torch.cat([each.reshape(-1) for each in everyone]))
        return _Done()

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> _Done:  # type: ignore[override]
        everyone = self.meeting.exchange(self.own, "uneven all-gather", inputs[0].clone())
        for output, value in zip(outputs[0], everyone):
            output.copy_(value.view(output.shape))
        return _Done()

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, options: Any) -> _Done:  # type: ignore[override]
        everyone = self.meeting.exchange(self.own, "reduce-scatter", input.clone().view(-1))
        size = output.numel()
        parts = [each[self.own * size : (self.own + 1) * size] for each in everyone]
        output.view(-1).copy_(_reduce(parts, options))
        return _Done()

    def reduce_scatter(self, outputs: Any, inputs: Any, options: Any) -> _Done:  # type: ignore[override]
        everyone = self.meeting.exchange(
            self.own, "uneven reduce-scatter", [each.clone() for each in inputs[0]]
        )
        outputs[0].copy_(_reduce([each[self.own] for each in everyone], options))
        return _Done()

    # PyTorch 2.13 has new names for the two single-tensor forms.
    all_gather_single = _allgather_base  # type: ignore[assignment]
    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]

    def alltoall_base(  # type: ignore[override]
        self, output: Tensor, input: Tensor, output_sizes: Any, input_sizes: Any, options: Any
    ) -> _Done:
        everyone = self.meeting.exchange(self.own, "all-to-all", (input.clone(), list(input_sizes)))
        pieces = []
        for tensor, sizes in everyone:
            counts = sizes or [tensor.shape[0] // len(everyone)] * len(everyone)
            start = sum(counts[: self.own])
            pieces.append(tensor[start : start + counts[self.own]])
        output.copy_(torch.cat(pieces).view(output.shape))
        return _Done()

    all_to_all_single = alltoall_base  # type: ignore[assignment]


class LockstepMesh(DeviceMesh):
    """A mesh as one simulated rank sees it; equal to no other, as each rank has its own."""

    def __init__(self, names: Sequence[str], sizes: Sequence[int], rank: int) -> None:
        # DeviceMesh's own initialiser would make process groups.
        self._names, self._sizes, self.own_rank = tuple(names), tuple(sizes), rank
        self.ranks = torch.arange(math.prod(sizes)).view(tuple(sizes))
        found = (self.ranks == rank).nonzero()[0]
        self._place = tuple(int(each) for each in found)
        self._axes: dict[int, MeshAxis] = {}

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"LockstepMesh({dict(zip(self._names, self._sizes))}, rank {self.own_rank})"

    @property
    def ndim(self) -> int:
        return len(self._sizes)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._sizes

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        return self._names

    @property
    def mesh(self) -> Tensor:
        return self.ranks

    @property
    def device_type(self) -> str:
        return "cpu"

    def size(self, mesh_dim: int | None = None) -> int:
        return math.prod(self._sizes) if mesh_dim is None else self._sizes[mesh_dim]

    def get_coordinate(self) -> tuple[int, ...]:
        return self._place

    def __getitem__(self, names: str | tuple[str, ...]) -> LockstepMesh:
        """The axes `names` through this rank; the same object each time."""
        kept = (names,) if isinstance(names, str) else tuple(names)
        slices: dict[tuple[str, ...], LockstepMesh] = vars(self).setdefault("_slices", {})
        if kept not in slices:
            axes = [self._names.index(name) for name in kept]
            place = [slice(None) if i in axes else c for i, c in enumerate(self._place)]
            made = LockstepMesh(kept, [self._sizes[axis] for axis in axes], 0)
            made.ranks, made.own_rank = self.ranks[tuple(place)], self.own_rank
            made._place = tuple(self._place[axis] for axis in axes)
            own = vars(self)["_hp_axes"]
            vars(made)["_hp_axes"] = {i: own[axis] for i, axis in enumerate(axes)}
            slices[kept] = made
        return slices[kept]


def _axis_of(mesh: LockstepMesh, axis: int, meetings: dict[Any, _Meeting]) -> MeshAxis:
    name, size, place = mesh.mesh_dim_names[axis], mesh.shape[axis], mesh.get_coordinate()
    line = mesh.ranks[tuple(slice(None) if i == axis else c for i, c in enumerate(place))]
    ranks = tuple(int(rank) for rank in line)
    if size == 1:
        return MeshAxis(name, 1, 0, ranks, Tier.LOCAL, torch.device("cpu"))
    group = LockstepGroup(place[axis], size, meetings[axis, ranks])
    # The list forms of uneven collectives are the fewest meetings.
    return MeshAxis(
        name, size, place[axis], ranks, Tier.FAST, torch.device("cpu"), group, backend="nccl"
    )


def _meetings(sizes: Sequence[int], baton: _Baton) -> dict[Any, _Meeting]:
    ranks = torch.arange(math.prod(sizes)).view(tuple(sizes))
    return {
        (axis, tuple(line)): _Meeting(tuple(line), baton)
        for axis, size in enumerate(sizes)
        for line in ranks.movedim(axis, -1).reshape(-1, size).tolist()
    }


def run_lockstep(body: Callable[[LockstepMesh], T], mesh: dict[str, int]) -> list[T]:
    """What `body` returns on every rank of `mesh` (axis names and sizes), in rank order.

    Raises:
        Exception: what the first rank (in rank order) raised by itself; a rank that another's
            failure woke is not reported.
    """
    names, sizes = tuple(mesh), tuple(mesh.values())
    count = math.prod(sizes)
    baton = _Baton(count)
    meetings = _meetings(sizes, baton)
    results: list[Any] = [None] * count
    errors: list[BaseException | None] = [None] * count

    def rank(number: int) -> None:
        baton.turns[number].acquire()
        try:
            if baton.stopped is None:
                own = LockstepMesh(names, sizes, number)
                vars(own)["_hp_axes"] = {i: _axis_of(own, i, meetings) for i in range(len(sizes))}
                results[number] = body(own)
        except BaseException as error:
            errors[number] = error
            baton.stop(f"rank {number} raised {type(error).__name__}: {error}")
        baton.pass_on()

    threads = [threading.Thread(target=rank, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    baton.pass_on()
    for thread in threads:
        thread.join()
    raised = [error for error in errors if error is not None]
    if raised:
        raise ([error for error in raised if not was_stopped(error)] or raised)[0]
    return results


def was_stopped(error: BaseException | None) -> bool:
    """Whether a rank raised only because another one did."""
    while error is not None:
        if isinstance(error, StoppedError):
            return True
        error = error.__cause__ or error.__context__
    return False
