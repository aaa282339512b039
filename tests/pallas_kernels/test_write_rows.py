"""write_rows against a loop over caches, batch rows and slots."""

from functools import partial

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from pallas_kernels import write_rows
from pallas_kernels.write_rows.cases import CASES, Case
from tests.pallas_kernels.test_lowering import lowered_kernels

LINEAR = Case("linear", 3, 2, 2, 12, 16, 4)


def oracle(caches, rows, slots, row_index=None):
    """Write one row after the other."""
    written = [cache.copy() for cache in caches]
    for cache, new in zip(written, rows, strict=True):
        for (b, j), slot in np.ndenumerate(slots):
            if 0 <= slot < cache.shape[2]:
                cache[b, :, slot] = new[b, :, j if row_index is None else row_index[b, j]]
    return tuple(written)


def check(implementation, arrays):
    """Compare a form with the oracle, bit for bit."""
    function = jax.jit(partial(write_rows, implementation=implementation))
    actual = function(*jax.tree.map(jnp.asarray, arrays))
    jax.tree.map(np.testing.assert_array_equal, actual, oracle(*arrays))


@pytest.mark.parametrize(
    "case", [case for case in CASES if not case.is_benchmark], ids=lambda case: case.name
)
def test_cases_match_the_oracle(implementation, case):
    check(implementation, case.arrays())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases_lower_to_one_launch_per_128_caches(case):
    arrays = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), case.arrays())
    kernels = lowered_kernels(partial(write_rows, implementation="triton"), *arrays)
    assert kernels == ["_write_rows_kernel"] * -(-case.num_caches // 128)


def test_slots_outside_are_dropped(implementation):
    caches, rows, slots = LINEAR.arrays()
    slots[:] = [[-1, 12, 11, -12], [2**31 - 1, -(2**31), 0, 13]]
    check(implementation, (caches, rows, slots))


def test_row_indices_are_clipped(implementation):
    caches, rows, _ = LINEAR.arrays()
    slots = np.tile(np.arange(3, dtype=np.int32), (2, 1))
    row_index = np.tile(np.array([-5, 1, 99], np.int32), (2, 1))
    function = jax.jit(partial(write_rows, implementation=implementation))
    actual = function(*jax.tree.map(jnp.asarray, (caches, rows, slots, row_index)))
    expected = oracle(caches, rows, slots, np.clip(row_index, 0, 3))
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_what_is_not_finite_is_not_spread(implementation):
    caches, rows, slots = LINEAR.arrays()
    for new in rows:
        new[:, :, 1] = np.nan
    slots[:] = [[4, -1, 5, 6]]
    check(implementation, (caches, rows, slots))


def test_rows_are_cast(implementation):
    caches, rows, slots = LINEAR.arrays()
    caches = tuple(cache.astype(jnp.bfloat16) for cache in caches)
    actual = write_rows(
        *jax.tree.map(jnp.asarray, (caches, rows, slots)), implementation=implementation
    )
    rows = tuple(new.astype(jnp.bfloat16) for new in rows)
    jax.tree.map(np.testing.assert_array_equal, actual, oracle(caches, rows, slots))


def test_the_kernel_takes_only_powers_of_two():
    arrays = Case("odd_head", 1, 1, 1, 8, 24, 2).arrays()
    arrays = jax.tree.map(jnp.asarray, arrays)
    with pytest.raises(NotImplementedError, match="head width 24 is no power of two"):
        write_rows(*arrays, implementation="interpret")


def array(*shape, dtype=jnp.float32):
    """Make an array of zeros."""
    return jnp.zeros(shape, dtype)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(caches=()), "there are 0 caches and 1 arrays of rows"),
        (dict(caches=(array(2, 2, 8, 4),) * 2), "there are 2 caches and 1 arrays of rows"),
        (
            dict(caches=(array(2, 2, 8, 4), array(2, 2, 9, 4)), rows=(array(2, 2, 3, 4),) * 2),
            "caches differ in shape or dtype",
        ),
        (dict(rows=(array(2, 2, 3, 5),)), "do not fit caches"),
        (dict(slots=array(2, 3, dtype=jnp.int16)), "slots has dtype int16, not int32"),
        (dict(slots=array(2, 4, dtype=jnp.int32)), "there are 4 slots for 3 rows"),
        (dict(slots=array(1, 3, dtype=jnp.int32)), "slots has shape"),
        (dict(row_index=array(2, 2, dtype=jnp.int32)), "row_index has shape"),
        (dict(row_index=array(2, 3)), "row_index has dtype float32, not int32"),
    ],
)
def test_bad_arguments_are_named(monkeypatch, change, message):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    arguments = dict(
        caches=(array(2, 2, 8, 4),),
        rows=(array(2, 2, 3, 4),),
        slots=array(2, 3, dtype=jnp.int32),
    )
    with pytest.raises(ValueError, match=message):
        write_rows(**(arguments | change))
