"""The argmax ops against a scan in Python's order: first NaN, largest value, lowest id."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from pallas_kernels import argmax, argmax_partial, argmax_reduce
from pallas_kernels.argmax.cases import CASES

NO_INDEX = 2**31 - 1
run = jax.jit(argmax, static_argnames=("num_valid", "implementation"))
run_partial = jax.jit(argmax_partial, static_argnames=("num_valid", "implementation"))
run_reduce = jax.jit(argmax_reduce, static_argnames=("implementation",))
FORMS = ["xla", "interpret", pytest.param("triton", marks=pytest.mark.gpu)]


def scan(row):
    """Return the id of the best of one row."""
    winner = 0
    for index, value in enumerate(row):
        if np.isnan(value):
            return index
        if value > row[winner]:
            winner = index
    return winner


def oracle(logits, num_valid=None):
    """Apply scan to every row."""
    return np.array([scan(row[:num_valid].tolist()) for row in np.asarray(logits, np.float32)])


def fast_oracle(logits, num_valid=None):
    """Let NumPy do the same: its argmax takes the first NaN and the first of equals."""
    return np.argmax(np.asarray(logits, np.float32)[:, :num_valid], axis=-1)


def special_logits(seed, num_rows, num_columns):
    """Draw rows of one kind each: many ties, NaN, infinities, all -inf, below -5e4, zeros."""
    rng = np.random.default_rng(seed)
    kinds = [
        [-1.0, 0.0, 2.0, 3.0],
        [1.0, 5.0, np.nan, -np.nan],
        [np.inf, -np.inf, 1.0],
        [-np.inf],
        [-6e4, -7e4, -3e38, -np.inf],
        [-0.0, 0.0],
        [-0.0, 0.0, -1.0, -1e-45],
        [1e-45, 0.0, -1e-45],
        [np.nan],
    ]
    return np.stack(
        [
            rng.choice(np.array(kinds[i % len(kinds)], np.float32), num_columns)
            for i in range(num_rows)
        ]
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases_match_the_oracle(implementation, case):
    logits = jnp.asarray(case.arrays()[0]).astype(case.dtype)
    actual = run(logits, implementation=implementation, **case.settings())
    np.testing.assert_array_equal(actual, fast_oracle(logits, case.num_valid))
    assert actual.dtype == jnp.int32


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from([jnp.float32, jnp.bfloat16]))
def test_special_values_match_the_oracle(form, seed, dtype):
    logits = jnp.asarray(special_logits(seed, 9, 97)).astype(dtype)
    np.testing.assert_array_equal(run(logits, implementation=form), oracle(logits))
    valid = run(logits, num_valid=41, implementation=form)
    np.testing.assert_array_equal(valid, oracle(logits, 41))


@pytest.mark.parametrize("num_columns, num_valid", [(97, 96), (1000, 3), (151936, 151669)])
def test_ids_past_num_valid_never_win(implementation, num_columns, num_valid):
    """Not even by NaN or infinity, and not even if all valid logits are -inf."""
    logits = np.full((3, num_columns), -np.inf, np.float32)
    logits[:, num_valid:] = np.array([[np.nan], [np.inf], [0.0]])
    logits[2, num_valid - 1] = -1e30
    actual = run(logits, num_valid=num_valid, implementation=implementation)
    assert actual.tolist() == [0, 0, num_valid - 1]


def test_partials_of_the_whole(implementation):
    """Parts cover the row in order, each with its own winner."""
    rng = np.random.default_rng(1)
    logits = rng.integers(-3, 3, (3, 5000)).astype(np.float32)
    values, indices = run_partial(logits, implementation=implementation)
    assert values.dtype == jnp.float32 and indices.dtype == jnp.int32
    assert values.shape == indices.shape
    block = 2048
    for part in range(values.shape[1]):
        columns = logits[:, part * block : (part + 1) * block]
        np.testing.assert_array_equal(indices[:, part], part * block + oracle(columns))
        np.testing.assert_array_equal(values[:, part], columns.max(1))


def test_forms_give_equal_partials():
    for seed, num_columns in ((0, 97), (1, 5000)):
        logits = special_logits(seed, 18, num_columns)
        for num_valid in (None, 60):
            forms = [
                run_partial(logits, num_valid=num_valid, index_offset=5, implementation=form)
                for form in ("xla", "interpret")
            ]
            jax.tree.map(np.testing.assert_array_equal, *forms)


@pytest.mark.parametrize("num_valid", [None, 1500, 500, 2])
@pytest.mark.parametrize("seed", range(3))
def test_shards_recombine_to_the_whole(implementation, seed, num_valid):
    """Ties across shards, and shards that hold no valid id at all."""
    logits = special_logits(seed, 18, 2000)
    partials = [
        run_partial(
            logits[:, start : start + 500],
            num_valid=num_valid,
            index_offset=jnp.int32(start),
            implementation=implementation,
        )
        for start in range(0, 2000, 500)
    ]
    for order in (partials, partials[::-1]):
        values, indices = (jnp.concatenate(x, axis=1) for x in zip(*order, strict=True))
        actual = run_reduce(values, indices, implementation=implementation)
        np.testing.assert_array_equal(actual, oracle(logits, num_valid))


def test_a_part_without_valid_ids_says_so(implementation):
    values, indices = run_partial(
        jnp.full((2, 8), jnp.nan), num_valid=8, index_offset=8, implementation=implementation
    )
    assert (np.asarray(values) == -np.inf).all()
    assert (np.asarray(indices) == NO_INDEX).all()


@pytest.mark.parametrize("form", FORMS[:2])
def test_runs_inside_shard_map(form):
    """Each device offsets its ids by a traced index; partials are gathered, then reduced."""
    logits = jnp.asarray(special_logits(4, 9, 8 * 50))
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:8]), ("model",))

    def pick(shard):
        offset = jax.lax.axis_index("model") * shard.shape[1]
        partials = argmax_partial(shard, num_valid=290, index_offset=offset, implementation=form)
        values, indices = jax.lax.all_gather(partials, "model", axis=1, tiled=True)
        return argmax_reduce(values, indices, implementation=form)

    spec = PartitionSpec(None, "model")
    mapped = jax.shard_map(
        pick, mesh=mesh, in_specs=(spec,), out_specs=PartitionSpec(), check_vma=False
    )
    np.testing.assert_array_equal(jax.jit(mapped)(logits), oracle(logits, 290))


def test_leading_axes_are_kept(implementation):
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 40), np.float32))
    actual = run(logits, implementation=implementation)
    np.testing.assert_array_equal(actual, np.argmax(logits, -1))
    assert run(logits[0, 0], implementation=implementation).shape == ()


@pytest.mark.parametrize(
    "function, message",
    [
        (partial(argmax, jnp.zeros((1, 4)), num_valid=5), "num_valid=5 is greater than the 4"),
        (partial(argmax, jnp.zeros((1, 4)), num_valid=0), "num_valid=0 is less than 1"),
        (partial(argmax_partial, jnp.zeros((1, 4)), num_valid=0), "num_valid=0 is less than 1"),
        (partial(argmax, jnp.zeros((1, 0))), "has no columns"),
        (
            partial(argmax, jnp.zeros((1, 4), jnp.float8_e5m2)),
            "logits has dtype float8_e5m2, not float32",
        ),
        (
            partial(argmax_reduce, jnp.zeros((1, 4), jnp.bfloat16), jnp.zeros((1, 4), jnp.int32)),
            "values has dtype bfloat16, not float32",
        ),
        (
            partial(argmax_reduce, jnp.zeros((1, 4)), jnp.zeros((1, 4), jnp.int16)),
            "indices has dtype int16, not int32",
        ),
        (
            partial(argmax_reduce, jnp.zeros((1, 0)), jnp.zeros((1, 0), jnp.int32)),
            "has no partial results",
        ),
    ],
)
def test_bad_arguments_are_named(function, message):
    with pytest.raises(ValueError, match=message):
        function()
