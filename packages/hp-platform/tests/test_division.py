"""Division in place: the same bits as torch's, whichever way is taken."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_platform.division import divide_

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64]
DIVISORS = st.one_of(
    st.integers(1, 4096), st.sampled_from([0.25, 3.5, 2.0**40, 2.0**-40, -2.0]), st.floats(0.1, 9e3)
)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(DTYPES), DIVISORS, st.integers(0, 9999))
def test_the_bits_are_those_of_a_division(dtype, divisor, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(64, generator=generator, dtype=torch.float64)
    # Down to numbers that are not normal, and to what is no number.
    scale = torch.logspace(-320, 300, 64, dtype=torch.float64)
    extremes = torch.tensor([0.0, -0.0, float("inf"), float("nan"), torch.finfo(dtype).tiny])
    found = torch.cat([values, values * scale, extremes.double()]).to(dtype)
    expected = found.clone() if divisor == 1 else found / divisor
    assert divide_(found, divisor) is found
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num()), divisor
    if not dtype.is_complex:
        assert torch.equal(found.signbit(), expected.signbit())
