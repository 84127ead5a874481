"""Agreement between ranks."""

import pytest

from hp_platform import AgreementError, MeshAxis, agree
from hp_platform.testing import run_ranks


@pytest.mark.ranks
def test_equal_values_pass_and_different_ones_are_named_on_every_rank():
    def body(rank):
        axis = MeshAxis.of_group(name="dp")
        agree("plan", {"digest": 1}, axis)
        agree("file", b"bytes", axis)
        with pytest.raises(AgreementError) as caught:
            agree("learning rate", 0.1 if rank == 1 else 0.2, axis)
        return str(caught.value)

    found = run_ranks(body, 3)
    assert found == [found[0]] * 3
    assert "disagree about learning rate: expected 0.2, found rank 1: 0.1" in found[0]
    assert "'dp'" in found[0]
