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
from pallas_kernels.linear import num_counters, triton
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
    result, counters = compiled(case, implementation)(*arrays)
    assert counters is None
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
        # XLA may skip the rounding of what it squares.
        rtol = 5e-3 if implementation == "xla" and case.dtype != "float32" else 1e-5
        np.testing.assert_allclose(wide(squares).sum(1), (wide(y) ** 2).sum(1), rtol=rtol)


@by_name(argvalues=SMALL)
def test_cases_match_the_oracle(case):
    for seed, implementation in enumerate(("interpret", "xla")):
        check(case, implementation, seed)


@pytest.mark.gpu
@by_name(argvalues=CASES)
def test_cases_match_the_oracle_on_a_gpu(case):
    check(case, "triton", 2)


def first_rows(arrays, num_rows):
    """Return a case's arrays cut to a few rows; weights stay whole."""
    if len(arrays) == 4:
        x, weight, residual, norm_weight = arrays
        return x[:num_rows], weight, residual[:num_rows], norm_weight
    rows, weight = arrays
    x, scaled, squares = (part[:num_rows] for part in (rows.x, rows.scaled, rows.sum_squares))
    return rows._replace(x=x, scaled=scaled, sum_squares=squares), weight


def check_row_bits(case, implementation, counts):
    """Run the same rows alone and with others, and compare bits."""
    arrays = device_arrays(case, 3)
    results = {}
    for num_rows in counts:
        fewer = replace(case, num_rows=num_rows)
        results[num_rows] = run(fewer, implementation, first_rows(arrays, num_rows))
    whole = results[max(counts)]
    for num_rows, result in results.items():
        for x, expected in zip(result, whole, strict=True):
            np.testing.assert_array_equal(x, expected[:num_rows])


@by_name(
    argvalues=[
        Case("rms_linear", "rows", 16, 131, 97, num_parts=3, dtype="float32"),
        Case("rms_linear", "head_rows", 16, 128, 97, True),
        Case("rms_linear", "split_rows", 16, 256, 96, dtype="float32"),
        Case("rms_swiglu", "split_rows", 16, 256, 96),
        Case("linear_residual", "split_rows", 16, 256, 96, dtype="float32"),
    ]
)
def test_a_row_has_the_same_bits_with_any_others(case):
    """Up to 16 rows: beyond, the products of the interpreter sum in another order."""
    check_row_bits(case, "interpret", (1, 5, 16))


@pytest.mark.gpu
@by_name(argvalues=[case for case in BENCHMARK if case.num_rows == 64])
def test_a_row_has_the_same_bits_on_a_gpu(case):
    check_row_bits(case, "triton", (1, 8, 16))


def test_tilings_fit_into_shared_memory():
    """All steps in flight, in bfloat16: a GPU's compiler refuses more than a program has."""
    tables = {"narrow swiglu": triton.NARROW_SWIGLU, **triton.TILINGS}
    for name, tilings in tables.items():
        for most, tiling in tilings.items():
            halves = 2 if "swiglu" in name else 1
            columns = halves * tiling.block_n + most
            num_bytes = columns * tiling.block_k * 2 * tiling.num_stages
            assert num_bytes <= 232448, (name, most)


@by_name(
    argvalues=[
        Case("linear_residual", "split", 5, 128, 96),
        Case("linear_residual", "split_f32", 20, 128, 97, dtype="float32"),
        Case("rms_linear", "split", 5, 128, 96, num_parts=3),
        Case("rms_linear", "split_f32", 20, 128, 97, dtype="float32"),
        Case("rms_linear", "head_split", 5, 128, 97, True),
        Case("rms_swiglu", "split", 5, 128, 96),
        Case("rms_swiglu", "split_f32", 20, 128, 97, dtype="float32"),
    ]
)
def test_a_split_inner_axis_gives_the_same_sums(case):
    check_splits(case, interpret=True)


@pytest.mark.gpu
@by_name(argvalues=[case for case in BENCHMARK if not case.transposed])
def test_a_split_inner_axis_gives_the_same_sums_on_a_gpu(case):
    check_splits(case, interpret=False)


def check_splits(case, interpret):
    """Compare split and whole products, and call again with the counters that came back."""
    arrays, count = device_arrays(case, 4), num_counters(case.num_columns)
    settings = case.settings()
    if case.op == "rms_linear":
        settings["out_dtype"] = case.dtype
    op = partial(getattr(triton, case.op), interpret=interpret, **settings)
    split, whole = (jax.jit(partial(op, tiling=tiling)) for tiling in (SPLIT, WHOLE))
    assert "atomic" in str(split.trace(*arrays, jnp.zeros(count, jnp.int32)).jaxpr)
    assert "atomic" not in str(whole.trace(*arrays).jaxpr)
    *expected, _ = whole(*arrays)
    counters = jnp.zeros(count, jnp.int32)
    for _ in range(2):
        *actual, counters = split(*arrays, counters)
        assert not np.asarray(counters).any()
        for x, y in zip(actual, expected, strict=True):
            assert distance(x, y) <= (1e-6 if case.dtype == "float32" else 2e-3)


@by_name(
    argvalues=[
        Case("rms_linear", "head_nan", 5, 131, 97, True, num_parts=3),
        Case("rms_linear", "split_nan", 5, 256, 97),
        Case("rms_swiglu", "nan", 5, 131, 97),
        Case("rms_swiglu", "split_nan", 5, 256, 97),
        Case("linear_residual", "split_nan", 5, 256, 96),
    ]
)
def test_a_nan_stays_in_its_row(implementation, case):
    arrays = case.arrays(5)
    expected = run(case, implementation, jax.tree.map(jnp.asarray, arrays))
    if case.op == "linear_residual":
        arrays[0][2, 7] = np.nan
    else:
        for part in (arrays[0].x, arrays[0].scaled):
            part[2, 7] = np.nan
        arrays[0].sum_squares[2, 0] = np.nan
    actual = run(case, implementation, jax.tree.map(jnp.asarray, arrays))
    for x, y in zip(actual, expected, strict=True):
        x, y = wide(x), wide(y)
        is_squares = x.shape != (case.num_rows, case.num_columns)
        assert np.isnan(x[2].sum() if is_squares else x[2]).all()
        np.testing.assert_array_equal(np.delete(x, 2, 0), np.delete(y, 2, 0))


def test_pre_norm_prepares_rows():
    x, norm_weight = (jnp.asarray(x) for x in Case("linear_residual", "", 3, 8, 97).arrays()[2:])
    rows = jax.jit(pre_norm)(x, norm_weight)
    np.testing.assert_array_equal(rows.x, x)
    np.testing.assert_array_equal(rows.scaled, x * norm_weight[None])
    assert rows.sum_squares.dtype == jnp.float32 and rows.sum_squares.shape[0] == 3
    np.testing.assert_allclose(rows.sum_squares.sum(1), (wide(x) ** 2).sum(1), rtol=1e-6)


def test_one_product_feeds_the_next(implementation):
    """The norm of linear_residual's result is the norm of its sum."""
    case = Case("linear_residual", "chain", 5, 64, 160, dtype="float32")
    rows, _ = compiled(case, implementation)(*device_arrays(case))
    weight = jnp.asarray(Case("rms_linear", "next", 5, 160, 97, dtype="float32").arrays()[1])
    following = jax.jit(partial(rms_linear, eps=EPS, implementation=implementation))
    expected, _ = jax.jit(partial(rms_linear, eps=EPS, implementation="xla"))(rows, weight)
    assert distance(following(rows, weight)[0], expected) <= 1e-5


def array(*shape, dtype=jnp.float32):
    """Make an array of zeros."""
    return jnp.zeros(shape, dtype)


def rows_of(num_rows, width, dtype=jnp.float32):
    """Make rows of zeros for a norm."""
    return pre_norm(array(num_rows, width, dtype=dtype), array(width, dtype=dtype))


CALLS = {
    "scale": lambda rows, dtype: rms_linear(
        rows_of(rows, 4, dtype), array(4, 6, dtype=dtype), eps=EPS, implementation="interpret"
    ),
    "head": lambda rows, dtype: rms_linear(
        rows_of(rows, 4, dtype),
        array(6, 4, dtype=dtype),
        eps=EPS,
        transposed=True,
        implementation="interpret",
    ),
    "swiglu": lambda rows, dtype: rms_swiglu(
        rows_of(rows, 4, dtype), array(4, 2, 6, dtype=dtype), eps=EPS, implementation="interpret"
    ),
    "residual": lambda rows, dtype: linear_residual(
        array(rows, 4, dtype=dtype),
        array(4, 6, dtype=dtype),
        array(rows, 6, dtype=dtype),
        array(6, dtype=dtype),
        implementation="interpret",
    ),
}


@pytest.mark.parametrize("kind, call", CALLS.items(), ids=CALLS)
def test_what_the_kernel_does_not_take_is_refused(kind, call):
    most = 64 if kind == "head" else 128
    with pytest.raises(NotImplementedError, match=f"{most + 1} rows are more than {most}"):
        call(most + 1, jnp.float32)
    with pytest.raises(NotImplementedError, match="dtype float16 are neither bfloat16 nor"):
        call(1, jnp.float16)


def test_a_weight_that_overflows_is_refused():
    weight = jax.ShapeDtypeStruct((2**11, 2**20), jnp.float32)
    run_large = partial(rms_linear, eps=EPS, implementation="interpret")
    with pytest.raises(NotImplementedError, match="a weight of 2147483648 entries"):
        jax.eval_shape(run_large, jax.eval_shape(partial(rows_of, 1, 2**11)), weight)


@pytest.mark.parametrize("num_rows, dtype", [(129, "float32"), (129, "bfloat16"), (3, "float16")])
def test_none_falls_back_to_xla(monkeypatch, num_rows, dtype):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for op in ("rms_linear", "rms_swiglu", "linear_residual"):
        case = Case(op, "fallback", num_rows, 64, 97, dtype=dtype)
        taken = replace(case, num_rows=3, dtype="float32")
        programs = [str(compiled(x, None).trace(*x.shapes()).jaxpr) for x in (case, taken)]
        assert ["pallas_call" in program for program in programs] == [False, True]


LINEAR = dict(rows=rows_of(3, 8), weight=array(8, 6), eps=EPS)
SWIGLU = dict(rows=rows_of(3, 8), weight=array(8, 2, 6), eps=EPS)
RESIDUAL = dict(x=array(3, 8), weight=array(8, 6), residual=array(3, 6), norm_weight=array(6))


@pytest.mark.parametrize(
    "op, arguments, change, message",
    [
        (
            rms_linear,
            LINEAR,
            dict(weight=array(7, 6)),
            r"shape \(7, 6\), expected 8 on axis 0 of 2",
        ),
        (
            rms_linear,
            LINEAR,
            dict(weight=array(8, 2, 6)),
            r"\(8, 2, 6\), expected 8 on axis 0 of 2",
        ),
        (rms_linear, LINEAR, dict(transposed=True), r"shape \(8, 6\), expected 8 on axis 1 of 2"),
        (
            rms_linear,
            LINEAR,
            dict(weight=array(8, 6, dtype=jnp.bfloat16)),
            "weight has dtype bfloat16 but the rows have float32",
        ),
        (
            rms_swiglu,
            SWIGLU,
            dict(weight=array(8, 6)),
            r"shape \(8, 6\), expected 8 on axis 0 of 3",
        ),
        (rms_swiglu, SWIGLU, dict(weight=array(7, 2, 6)), r"\(7, 2, 6\), expected 8 on axis 0"),
        (
            rms_swiglu,
            SWIGLU,
            dict(weight=array(8, 2, 6, dtype=jnp.float16)),
            "weight has dtype float16 but the rows have float32",
        ),
        (
            linear_residual,
            RESIDUAL,
            dict(weight=array(9, 6)),
            r"\(9, 6\), expected 8 on axis 0 of 2",
        ),
        (
            linear_residual,
            RESIDUAL,
            dict(x=array(3, 8, dtype=jnp.bfloat16)),
            "weight has dtype float32 but the rows have bfloat16",
        ),
        (
            linear_residual,
            RESIDUAL,
            dict(residual=array(3, 5)),
            r"residual \(3, 5\) and norm_weight \(6,\) are not \(3, 6\) and \(6,\)",
        ),
        (linear_residual, RESIDUAL, dict(residual=array(2, 6)), r"residual \(2, 6\) and"),
        (
            linear_residual,
            RESIDUAL,
            dict(norm_weight=RESIDUAL["norm_weight"].astype(jnp.bfloat16)),
            "norm_weight bfloat16, but the rows have float32",
        ),
        (linear_residual, RESIDUAL, dict(norm_weight=array(8)), r"norm_weight \(8,\) are not"),
        (linear_residual, RESIDUAL, dict(counters=array(9)), r"counters has .* float32, at least"),
        (
            linear_residual,
            RESIDUAL,
            dict(counters=array(4, 4, dtype=jnp.int32)),
            r"counters has shape \(4, 4\)",
        ),
        (
            linear_residual,
            RESIDUAL,
            dict(counters=array(0, dtype=jnp.int32)),
            r"counters has shape \(0,\) and dtype int32, at least \(1,\) and int32 are needed",
        ),
    ],
)
def test_bad_arguments_are_named(monkeypatch, op, arguments, change, message):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=message):
        op(**(arguments | change))
