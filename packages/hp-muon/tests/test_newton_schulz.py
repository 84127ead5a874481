"""Newton-Schulz: laws, accuracy against the exact polar factor, and refusals."""

from __future__ import annotations

import platform
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_muon.coefficients import COEFFICIENTS
from hp_muon.errors import MuonError
from hp_muon.newton_schulz import newton_schulz, newton_schulz_operations, uses_gram

NAMES = sorted(COEFFICIENTS)
MODULE = sys.modules[newton_schulz.__module__]  # the package exports a function of its name


def polar_factor(matrix: torch.Tensor) -> torch.Tensor:
    u, _, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    return (u @ vh).float()


def relative_error(matrix: torch.Tensor, **arguments: object) -> float:
    exact = polar_factor(matrix)
    found = newton_schulz(matrix, **arguments).float()  # type: ignore[arg-type]
    return float((found - exact).norm() / exact.norm())


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(NAMES),
    st.lists(st.integers(1, 3), max_size=2),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(0, 10**6),
)
def test_a_batch_equals_its_matrices_one_by_one(name, leading, rows, cols, seed):
    batch = draw(*leading, rows, cols, seed=seed)
    together = newton_schulz(batch, coefficients=name)
    flat = batch.reshape(-1, rows, cols)
    alone = torch.stack([newton_schulz(m, coefficients=name) for m in flat]).reshape(batch.shape)
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(NAMES), st.integers(1, 9), st.integers(1, 9), st.integers(0, 10**6))
def test_the_transpose_gives_the_transpose(name, rows, cols, seed):
    matrix = draw(rows, cols, seed=seed)
    direct = newton_schulz(matrix, coefficients=name)
    turned = newton_schulz(matrix.mT.contiguous(), coefficients=name).mT
    torch.testing.assert_close(direct, turned, atol=1e-5, rtol=1e-4)


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(NAMES), st.floats(-3, 18), st.integers(0, 10**6))
def test_the_scale_of_a_matrix_does_not_matter(name, exponent, seed):
    matrix = draw(4, 6, seed=seed)
    scaled = newton_schulz(matrix * 10.0**exponent, coefficients=name)
    plain = newton_schulz(matrix, coefficients=name)
    torch.testing.assert_close(scaled, plain, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_gives_zero_also_beside_others(name, dtype):
    batch = torch.stack([torch.zeros(3, 5), draw(3, 5)])
    result = newton_schulz(batch, coefficients=name, dtype=dtype)
    assert result.dtype is dtype
    assert torch.equal(result[0], torch.zeros(3, 5, dtype=dtype))
    assert result[1].isfinite().all()
    assert result[1].norm() > 1


@pytest.mark.parametrize(
    ("name", "shape", "bound"),
    [
        ("quintic", (256, 256), 0.25),
        ("asym5", (256, 256), 0.10),
        ("polar_express", (256, 256), 0.13),
        ("quintic", (1024, 256), 0.20),
        ("asym5", (1024, 256), 0.03),
        ("polar_express", (1024, 256), 0.11),
    ],
)
def test_the_error_against_the_exact_polar_factor_is_bounded(name, shape, bound):
    matrix = draw(*shape)
    assert relative_error(matrix, coefficients=name) < bound
    assert relative_error(matrix, coefficients=name, dtype=torch.bfloat16) < bound + 0.03


@pytest.mark.parametrize("name", NAMES)
def test_singular_values_at_one_stay_finite_in_bfloat16(name):
    rank_one = torch.outer(draw(64), draw(48, seed=1))
    for matrix in (rank_one, torch.eye(1), torch.full((32, 32), 7.0)):
        result = newton_schulz(matrix, coefficients=name, dtype=torch.bfloat16).float()
        assert result.isfinite().all()
        assert torch.linalg.matrix_norm(result, 2) < 1.6


def test_entries_whose_squares_overflow_are_normalised():
    matrix = draw(4, 4) * 1e30
    torch.testing.assert_close(newton_schulz(matrix), newton_schulz(draw(4, 4)))


def test_the_legacy_quintic_gives_the_known_values():
    matrix = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
    expected = torch.tensor(
        [[-0.44707, 0.51241], [-0.1074, 0.4079], [0.23227, 0.3034], [0.57194, 0.1989]]
    )
    found = newton_schulz(matrix, steps=5, coefficients="quintic", eps=1e-7)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def test_own_triples_are_used_one_a_step():
    triples = COEFFICIENTS["asym5"].triples
    matrix = draw(5, 7)
    assert torch.equal(newton_schulz(matrix, coefficients=triples), newton_schulz(matrix))


def test_more_steps_than_a_tuned_set_holds_is_an_error():
    with pytest.raises(MuonError, match="tuned for 5 steps, found steps=6"):
        newton_schulz(draw(2, 2), steps=6, coefficients="asym5")
    assert newton_schulz(draw(2, 2), steps=12, coefficients="quintic").isfinite().all()
    assert newton_schulz(draw(2, 2), steps=12, coefficients="polar_express").isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "at least 1 step"),
        ({"coefficients": "septic"}, "unknown coefficients 'septic'"),
        ({"coefficients": [(1.0, 2.0)]}, "triples"),
        ({"eps": 0.0}, "eps"),
    ],
)
def test_what_cannot_be_iterated_is_refused(arguments, message):
    with pytest.raises(MuonError, match=message):
        newton_schulz(draw(2, 2), **arguments)


@pytest.mark.parametrize("tensor", [torch.ones(3), torch.ones(2, 2, dtype=torch.int64)])
def test_only_floating_point_matrices_are_taken(tensor):
    with pytest.raises(MuonError, match="floating-point matrices"):
        newton_schulz(tensor)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 2, 2)])
def test_empty_input_gives_empty_output(shape):
    assert newton_schulz(torch.empty(shape)).shape == shape


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the names are those of x86")
def test_pytorch_tells_by_these_names_whether_the_cpu_multiplies_bfloat16():
    assert {"avx512_bf16", "amx_bf16"} <= torch.cpu.get_capabilities().keys()


def test_the_operations_count_the_products_on_the_small_side():
    assert newton_schulz_operations(2, 3, 1, gram=False) == 4 * 4 * 3 + 2 * 8
    direct = newton_schulz_operations(3, 2, 5, gram=False)
    assert direct == 5 * newton_schulz_operations(2, 3, 1, gram=False)
    # Two runs form a Gram matrix and apply their product; squares 5; the rest three times three.
    assert newton_schulz_operations(2, 8, 5, gram=True) == 4 * (2 * 4 * 8) + 2 * 8 * (5 + 3 * 3)


@pytest.mark.parametrize("name", ["quintic", "asym5"])
@pytest.mark.parametrize("shape", [(24, 96), (96, 24), (3, 16, 40)])
def test_gram_space_gives_what_the_direct_iteration_gives(name, shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    direct = newton_schulz(matrices, coefficients=name, gram=False)
    in_gram = newton_schulz(matrices, coefficients=name, gram=True)
    torch.testing.assert_close(in_gram, direct, atol=2e-5, rtol=0)


def test_gram_space_is_as_accurate_as_the_direct_iteration_in_bfloat16():
    """The products themselves are rounded, as on a device that multiplies bfloat16."""
    matrix = torch.randn(64, 80, generator=torch.Generator().manual_seed(0))
    exact = polar_factor(matrix)

    def error(iterate, triples):
        x = (matrix / matrix.norm()).bfloat16()[None]
        work = MODULE._Workspace.of(x, 1, torch.bfloat16)
        result = iterate(x.clone(), triples, work)[0]
        return float((result.double() - exact).norm() / exact.norm())

    iterate, in_gram = MODULE._iterate, MODULE._iterate_gram
    for name in ("asym5", "quintic"):
        triples = COEFFICIENTS[name].steps(5)
        assert error(in_gram, triples) < error(iterate, triples) + 0.01
    # The reason why Polar Express is kept out of Gram space.
    triples = COEFFICIENTS["polar_express"].steps(5)
    assert error(in_gram, triples) > 1.3 * error(iterate, triples)


def test_gram_space_is_chosen_for_elongated_matrices_only():
    assert uses_gram(256, 1024, 5, "asym5")
    assert uses_gram(1024, 256, 5, "quintic")
    assert not uses_gram(256, 256, 5, "asym5")
    assert not uses_gram(256, 4096, 5, "polar_express")
    assert not uses_gram(256, 4096, 5, ((2.0, -1.5, 0.5),) * 5)


def test_gram_space_is_refused_where_it_is_useless():
    with pytest.raises(MuonError, match=r"polar_express.*lose accuracy in Gram space"):
        newton_schulz(torch.ones(2, 8), coefficients="polar_express", gram=True)


def test_many_small_matrices_are_iterated_in_several_chunks(monkeypatch):
    matrices = torch.randn(7, 6, 4, generator=torch.Generator().manual_seed(0))
    whole = newton_schulz(matrices)
    monkeypatch.setattr(MODULE, "_CPU_CHUNK_ELEMENTS", 3 * 24)
    torch.testing.assert_close(newton_schulz(matrices), whole, atol=1e-6, rtol=0)


def test_the_result_is_written_to_out():
    matrices, out = torch.randn(2, 5, 3), torch.empty(2, 5, 3, dtype=torch.bfloat16)
    assert newton_schulz(matrices, dtype=torch.bfloat16, out=out) is out
    assert torch.equal(out, newton_schulz(matrices, dtype=torch.bfloat16))
    with pytest.raises(MuonError, match="out must be a contiguous"):
        newton_schulz(matrices, out=out)
