"""top_threshold against sorting."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import top_threshold
from pallas_kernels.top_threshold.cases import CASES

run = jax.jit(top_threshold, static_argnames=("measure", "implementation"))


def kept_by_sorting(row, least, measure):
    """Return the smallest number of the largest entries that is enough, 0 if all are not."""
    ordered = np.sort(row.astype(np.float64))[::-1]
    if measure == "count":
        total = np.arange(1, len(row) + 1, dtype=np.float64)
    else:
        share = np.exp(ordered - ordered[0])
        total = np.cumsum(share / share.sum())
    is_enough = total >= least
    return ordered[np.argmax(is_enough)] if is_enough.any() else -np.inf


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases_match_sorting(implementation, case):
    if implementation == "interpret" and case.num_rows * case.num_columns > 200_000:
        pytest.skip("too slow to interpret")
    logits, *rest = case.arrays()
    actual = run(logits, *rest, measure=case.measure, implementation=implementation)
    expected = [kept_by_sorting(row, case.least, case.measure) for row in logits]
    np.testing.assert_array_equal(actual, np.array(expected, np.float32))


@pytest.mark.parametrize("seed", range(4))
def test_counts_are_exact_at_every_place(implementation, seed):
    rng = np.random.default_rng(seed)
    values = [
        rng.standard_normal(200) * 10.0 ** rng.integers(-30, 30),
        rng.choice([-np.inf, -1.0, -0.0, 0.0, 1e-40, -1e-40, 3e38], 200),
        np.full(200, -np.inf),
        rng.integers(-2, 2, 200),
    ]
    logits = np.stack(values).astype(np.float32)
    for least in (1, 2, 7, 199, 200):
        wanted = np.full(4, least, np.float32)
        actual = np.asarray(run(logits, wanted, measure="count", implementation=implementation))
        np.testing.assert_array_equal(actual, -np.sort(-logits, axis=1)[:, least - 1])


def test_more_than_there_is_keeps_all(implementation):
    logits = np.arange(8, dtype=np.float32)[None]
    for least, measure in ((9.0, "count"), (1.1, "mass")):
        actual = run(logits, jnp.array([least]), measure=measure, implementation=implementation)
        assert actual.tolist() == [-np.inf]


def test_masses_are_right_within_rounding(implementation):
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(6, 3000)).astype(np.float32) * 3
    least = np.array([1e-6, 0.1, 0.5, 0.9, 0.99, 0.9999], np.float32)
    threshold = np.asarray(run(logits, least, measure="mass", implementation=implementation))
    wide = logits.astype(np.float64)
    share = np.exp(wide) / np.exp(wide).sum(1, keepdims=True)
    assert (np.where(wide >= threshold[:, None], share, 0).sum(1) >= least - 1e-6).all()
    assert (np.where(wide > threshold[:, None], share, 0).sum(1) <= least + 1e-6).all()


def test_a_row_does_not_depend_on_the_others(implementation):
    rng = np.random.default_rng(6)
    logits = rng.normal(size=(5, 5000)).astype(np.float32)
    least = np.full(5, 0.8, np.float32)
    whole = run(logits, least, measure="mass", implementation=implementation)
    alone = run(logits[2:3], least[2:3], measure="mass", implementation=implementation)
    assert whole[2] == alone[0]


@pytest.mark.parametrize(
    "function, message",
    [
        (partial(top_threshold, jnp.zeros((1, 0)), jnp.ones(1), measure="count"), "no columns"),
        (
            partial(top_threshold, jnp.zeros((1, 4), jnp.bfloat16), jnp.ones(1), measure="count"),
            "logits has dtype bfloat16, not float32",
        ),
    ],
)
def test_bad_arguments_are_named(function, message):
    with pytest.raises(ValueError, match=message):
        function()
