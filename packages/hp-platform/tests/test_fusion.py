"""Several tensors, one message."""

import pytest
import torch

from hp_platform import BufferLayout, CollectiveError, MeshAxis, all_reduce_fused, fusion, ledger
from hp_platform.testing import run_ranks


@pytest.mark.ranks
def test_many_tensors_are_reduced_by_one_message():
    def run(rank):
        axis = MeshAxis.of_group(name="dp")
        apart = [torch.full(shape, rank + 1.0) for shape in ((2, 3), (), (5,), (0,))]
        layout = BufferLayout.of([3, 4], torch.float32)
        gapped = layout.views(layout.allocate("cpu"), [(3,), (2, 2)])
        for view in gapped:
            view.fill_(rank + 1.0)
        found = []
        for tensors in (apart, gapped):
            with ledger() as log:
                handle = all_reduce_fused(tensors, axis, op="avg")
                assert not handle.done
                results = handle.wait()
            assert all(result is tensor for result, tensor in zip(results, tensors, strict=True))
            found.append([bool((tensor == 1.5).all()) for tensor in tensors])
            assert [(r.operation, r.aligned) for r in log.records] == [("all_reduce", True)]
        assert all_reduce_fused([], axis).wait() == []
        return found

    assert run_ranks(run, 2) == [[[True] * 4, [True] * 2]] * 2


@pytest.mark.ranks
def test_views_without_a_gap_are_reduced_where_they_lie_and_nothing_beside_them():
    def run(rank):
        axis = MeshAxis.of_group(name="dp")
        buffer = torch.full((12,), rank + 1.0)
        views = [buffer[1:4], buffer[4:8].view(2, 2), buffer[8:11]]
        fusion.BufferLayout = None  # a packed buffer would need it
        with ledger() as log:
            all_reduce_fused(views, axis).wait()
        return buffer.tolist(), [r.bytes for r in log.records]

    for rank, found in enumerate(run_ranks(run, 2)):
        assert found == ([rank + 1.0] + [3.0] * 10 + [rank + 1.0], [40])


@pytest.mark.ranks
def test_mixed_types_and_bad_tensors_are_refused():
    def run():
        axis = MeshAxis.of_group(name="dp")
        with pytest.raises(CollectiveError, match=r"bfloat16, torch.float32; make one call for"):
            all_reduce_fused([torch.ones(2), torch.ones(2).bfloat16()], axis)
        with pytest.raises(CollectiveError, match="not contiguous"):
            all_reduce_fused([torch.ones(2), torch.ones(2, 2).t()], axis)
        with pytest.raises(CollectiveError, match="op 'mean' is unknown"):
            all_reduce_fused([torch.ones(2)], axis, op="mean")

    run_ranks(run, 2)
