"""The same laws on the simulator, gloo and LocalTensorMode."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from hp_platform import MeshAxis, capabilities
from hp_platform.capabilities import GLOO, Uneven
from hp_platform.testing import Simulator, conformance, local_tensor, run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8)
MOVED_ONLY = (torch.bool, torch.float8_e4m3fn)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_the_simulator_obeys_every_law(world_size):
    for case in every_case(world_size, DTYPES):
        results = conformance.simulate(case)
        if results is not None:
            assert conformance.wrong_results(case, results) == []


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_gloo_obeys_every_law_in_every_form(world_size):
    assert run_conformance(world_size, DTYPES, FORMS) == []


@pytest.mark.ranks
def test_gloo_obeys_every_law_on_eight_ranks():
    assert run_conformance(8, (torch.bfloat16, torch.int8)) == []


@pytest.mark.slow
@pytest.mark.ranks
def test_gloo_obeys_every_law_in_every_form_and_type_on_eight_ranks():
    assert run_conformance(8, DTYPES, FORMS) == []


@pytest.mark.parametrize(
    ("world_size", "dtypes"),
    [
        (2, (torch.float32, torch.int8)),
        (3, (torch.bfloat16,)),
        (4, (torch.float32,)),
        pytest.param(8, (torch.int64,), marks=pytest.mark.slow),
    ],
)
def test_local_tensor_mode_agrees_where_it_can(world_size, dtypes):
    """Guards the private module, too: a change of its meaning shows here."""
    dist.init_process_group("fake", rank=0, world_size=world_size)
    run, reasons = 0, set()
    try:
        for case in conformance.cases(world_size, dtypes):
            try:
                results = local_tensor.run(case)
            except local_tensor.Unsupported as error:
                reasons.add(str(error))
                continue
            assert conformance.wrong_results(case, results) == []
            run += 1
    finally:
        dist.destroy_process_group()
    if not run:
        pytest.skip("; ".join(sorted(reasons)))
    # Even gathers, all-to-alls and reductions, and broadcasts from every root that is tried.
    roots = len({0, world_size // 2, world_size - 1})
    reductions = [6 if dtype.is_floating_point else 4 for dtype in dtypes]
    assert run == len(dtypes) * (2 + roots) + sum(reductions)
    assert "LocalTensorMode has no reduce" in reasons


def every_case(world_size, dtypes):
    yield from conformance.cases(world_size, dtypes)
    yield from conformance.large_cases(world_size, dtypes[0])
    yield from conformance.moving_cases(world_size, MOVED_ONLY)


@dataclasses.dataclass(frozen=True)
class Form:
    """One way in which gloo's collectives are made, and the operations for which it matters."""

    how: Uneven = Uneven.ROOTED
    scatter: Uneven | None = None
    direct: bool = GLOO.direct
    operations: tuple[str, ...] = conformance.OPERATIONS

    def choose(self):
        capabilities.TABLE["gloo"] = dataclasses.replace(
            GLOO,
            uneven_all_gather=self.how,
            uneven_reduce_scatter=self.scatter or self.how,
            direct=self.direct,
        )


USUAL = Form()
PADDED = Form(how=Uneven.PADDED, operations=("all_gather", "reduce_scatter"))
LISTED = Form(scatter=Uneven.LIST, operations=("reduce_scatter",))
STAGED = Form(direct=not GLOO.direct, operations=("all_gather", "reduce_scatter", "all_reduce"))
FORMS = (USUAL, PADDED, LISTED, STAGED)


def run_conformance(world_size, dtypes, forms=(USUAL,)):
    """Every violation that any rank sees."""

    def run():
        found = []
        for form in forms:
            form.choose()
            found += broken_laws(MeshAxis.of_group(), dtypes, form.operations)
        return found

    return [violation for found in run_ranks(run, world_size, timeout=280) for violation in found]


def broken_laws(axis, dtypes, operations):
    """The violations that this rank sees in cases of these operations."""
    found = []
    for case in every_case(axis.size, dtypes):
        if case.operation in operations:
            found += conformance.violations(case, axis)
    flight = [c for c in conformance.cases(axis.size, dtypes[:1]) if c.root == 0]
    flight = [case for case in flight if case.operation in operations]
    return found + conformance.overlapping_violations(flight, axis)


class Faulty(Simulator):
    """A simulator with one fault."""

    def __init__(self, mesh_shape, fault):
        super().__init__(mesh_shape)
        self.fault = fault

    def all_gather(self, tensors, axis, sizes=None):
        results = super().all_gather(tensors, axis, sizes)
        if self.fault == "swapped ranks":
            return [torch.cat(list(reversed(tensors))) for _ in results]
        if self.fault == "lost tail":
            return [result[:-1] for result in results]
        return results

    def reduce_scatter(self, tensors, axis, sizes=None, op="sum"):
        return super().reduce_scatter(tensors, axis, sizes, self._op(op))

    def all_reduce(self, tensors, axis, op="sum"):
        return super().all_reduce(tensors, axis, self._op(op))

    def reduce(self, tensors, axis, destination, op="sum"):
        wrong = self.fault == "wrong destination"
        return super().reduce(tensors, axis, 0 if wrong else destination, op)

    def broadcast(self, tensors, axis, source):
        return super().broadcast(tensors, axis, 0 if self.fault == "wrong source" else source)

    def all_to_all(self, tensors, axis, input_sizes=None, output_sizes=None):
        results = super().all_to_all(tensors, axis, input_sizes, output_sizes)
        return list(tensors) if self.fault == "nothing sent" else results

    def _op(self, op):
        return "sum" if self.fault == "no division" else op


@pytest.mark.parametrize(
    "fault",
    [
        "swapped ranks",
        "lost tail",
        "wrong destination",
        "wrong source",
        "nothing sent",
        "no division",
    ],
)
def test_a_fault_in_the_simulator_breaks_a_law(fault):
    found = []
    for case in conformance.cases(3, (torch.float32,)):
        results = conformance.simulate(case, Faulty((3,), fault))
        found += conformance.wrong_results(case, results) if results is not None else []
    assert found


def test_a_result_of_another_type_or_shape_is_wrong():
    case = conformance.Case("all_reduce", 2, torch.float32, (3, 3))
    right = [case.expected(rank) for rank in range(2)]
    assert conformance.wrong_results(case, right) == []
    (found,) = conformance.wrong_results(case, [right[0], right[1].double()])
    assert "on rank 1: the result is torch.float64 of shape (3, 3), expected torch.float32" in found
    assert len(conformance.wrong_results(case, [right[0][:2], right[1]])) == 1
