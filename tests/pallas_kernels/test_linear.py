"""The products against float64 forms in NumPy."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import linear_residual, pre_norm, rms_linear, rms_swiglu
from pallas_kernels.linear import reference, triton
from pallas_kernels.linear.cases import CASES, Case

EPS = 1e-6
SMALL = [case for case in CASES if not case.is_benchmark]
BENCHMARK = [case for case in CASES if case.is_benchmark]
CHECKED_COLUMNS = 512
# One inner axis in many parts, whatever the table says.
SPLIT = triton.Tiling(block_n=64, block_k=32, num_warps=4, num_stages=2, num_programs=512)
WHOLE = triton.Tiling(block_n=64, block_k=32, num_warps=4, num_stages=2)
by_name = partial(pytest.mark.parametrize, "case", ids=lambda case: f"{case.op}-{case.name}")


@cache
def compiled(case, implementation):
    """Compile a case's op."""
    op = partial(getattr(pallas_kernels, case.op), implementation=implementation)
    return jax.jit(partial(op, **case.settings()))


def run(case, implementation, arrays):
    """Return the op's result; of linear_residual the sum, the scaled sum and its squares."""
    result = compiled(case, implementation)(*arrays)
    if case.op == "linear_residual":
        np.testing.assert_array_equal(result.norm_weight, arrays[3])
        return result.x, result.scaled, result.sum_squares
    return (result,)


def device_arrays(case, seed=0):
    """Put a case's arrays on the device."""
    return jax.tree.map(jnp.asarray, case.arrays(seed))


def columns_of(case):
    """Return which columns to compare: every one where there are few, the last one always."""
    count = min(case.num_columns, CHECKED_COLUMNS)
    return np.linspace(0, case.num_columns - 1, count).astype(int)


def wide(array):
    """Return an array in float64."""
    return np.asarray(array).astype(np.float64)


def oracle(case, arrays):
    """Compute the columns of columns_of in float64."""
    columns = columns_of(case)
    if case.op == "linear_residual":
        x, weight, residual, norm_weight = arrays
        y = wide(residual[:, columns]) + wide(x) @ wide(weight[:, columns])
        return y, y * wide(norm_weight[columns])
    rows, weight = arrays
    x = wide(rows.x)
    x = x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + EPS) * wide(rows.norm_weight)
    if case.op == "rms_linear":
        return (x @ wide(weight[columns].T if case.transposed else weight[:, columns]),)
    gate, up = (x @ wide(weight[:, half, columns]) for half in (0, 1))
    return (gate / (1 + np.exp(-gate)) * up,)


def distance(actual, expected):
    """Return the relative norm of a difference."""
    actual, expected = wide(actual), wide(expected)
    assert actual.shape == expected.shape
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


def check(case, implementation, seed):
    """Compare a form with the oracle, and with the XLA form where that rounds."""
    arrays, columns = device_arrays(case, seed), columns_of(case)
    actual, xla = run(case, implementation, arrays), run(case, "xla", arrays)
    for x, plain, exact in zip(actual, xla, oracle(case, arrays), strict=False):
        assert x.shape == (case.num_rows, case.num_columns)
        assert x.dtype == (case.out_dtype or case.dtype)
        error = distance(x[:, columns], exact)
        assert error <= (1e-5 if case.dtype == "float32" else 1e-2)
        if case.dtype != "float32":
            assert error <= 1.2 * distance(plain[:, columns], exact)
    if case.op == "linear_residual":
        y, scaled, squares = actual
        np.testing.assert_array_equal(scaled, y * arrays[3][None])
        assert squares.dtype == jnp.float32
        np.testing.assert_allclose(wide(squares).sum(1), (wide(y) ** 2).sum(1), rtol=1e-5)


@by_name(argvalues=SMALL)
def test_cases_match_the_oracle(case):
    """Both forms: check compares the XLA form with itself only where it is the form under test."""
    for seed, implementation in enumerate(("interpret", "xla")):
        check(case, implementation, seed)


@pytest.mark.gpu
@by_name(argvalues=CASES)
def test_cases_match_the_oracle_on_a_gpu(case):
    check(case, "triton", 2)


def first_rows(arrays, num_rows, case):
    """Return a case of fewer rows, and its arrays."""
    total = case.num_rows
    cut = partial(jax.tree.map, lambda x: x[:num_rows])
    if case.op == "linear_residual":
        x, weight, residual, norm_weight = arrays
        arrays = cut(x), weight, cut(residual), norm_weight
    else:
        rows, weight = arrays
        arrays = rows._replace(**cut(dict(zip(rows._fields, rows, strict=True))))
        arrays = arrays._replace(norm_weight=rows.norm_weight), weight
    assert num_rows <= total
    return replace(case, num_rows=num_rows), arrays
