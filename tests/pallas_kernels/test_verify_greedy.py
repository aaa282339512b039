"""verify_greedy against loops over rows, candidates and drafts."""

from functools import partial

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from pallas_kernels import verify_greedy
from pallas_kernels.verify_greedy.cases import CASES, Case

LOOKAHEAD = Case("lookahead", 6, 7, 4, 56, 3)
LINEAR = Case("linear", 5, 1, 4, 5, 2, vocab_size=50)


def compiled(case, implementation):
    """Compile the op for a case."""
    return jax.jit(partial(verify_greedy, implementation=implementation, **case.settings()))


def target_of(values, indices):
    """Pick the best partial of one row: NaN first, then the largest, then the lowest id."""
    pairs = zip(values, indices, strict=True)
    return min((not np.isnan(v), 0.0 if np.isnan(v) else -v, i) for v, i in pairs)[2]


def oracle(draft_tokens, num_draft, values, indices, candidate_rows):
    """Walk every candidate of every batch row."""
    targets = np.zeros(values.shape[:2], np.int32)
    for b, t in np.ndindex(targets.shape):
        targets[b, t] = target_of(values[b, t].tolist(), indices[b, t].tolist())
    accepted, best = [], []
    for b, candidates in enumerate(draft_tokens):
        counts = []
        for c, drafts in enumerate(candidates):
            count = 0
            for j in range(num_draft[b, c]):
                if drafts[j] < 0 or drafts[j] != targets[b, candidate_rows[c][j]]:
                    break
                count += 1
            counts.append(count)
        accepted.append(max(counts))
        best.append(counts.index(max(counts)))
    return targets, np.array(accepted), np.array(best)


def check(case, implementation, arrays, function=None):
    """Compare a form with the oracle; return how many drafts were accepted."""
    function = function or compiled(case, implementation)
    actual = function(*map(jnp.asarray, arrays))
    expected = oracle(*arrays, case.candidate_rows())
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert all(x.dtype == jnp.int32 for x in actual)
    return np.asarray(actual[1])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases_match_the_oracle(implementation, case):
    function = compiled(case, implementation)
    for seed in range(4):
        check(case, implementation, case.arrays(seed), function)


def test_lookahead_accepts_every_count(implementation):
    function = compiled(LOOKAHEAD, implementation)
    seen = {
        int(count)
        for seed in range(30)
        for count in check(LOOKAHEAD, implementation, LOOKAHEAD.arrays(seed), function)
    }
    assert seen >= {1, 2, 3, 4}


def test_nan_partials_win(implementation):
    draft_tokens, num_draft, values, indices = LOOKAHEAD.arrays(5)
    values[np.random.default_rng(0).random(values.shape) < 0.3] = np.nan
    values[0, 0] = -np.inf
    check(LOOKAHEAD, implementation, (draft_tokens, num_draft, values, indices))


def linear_arrays():
    """Make drafts that the targets confirm to the last."""
    _, _, values, indices = LINEAR.arrays(2)
    indices[..., 1] = indices[..., 0]
    draft_tokens = indices[:, None, :-1, 0].copy()
    return draft_tokens, np.full((5, 1), 4, np.int32), values, indices


@pytest.mark.parametrize("wrong", [100, -1])
def test_a_wrong_draft_ends_the_prefix(implementation, wrong):
    draft_tokens, num_draft, values, indices = linear_arrays()
    for row in range(5):  # row 4 stays right
        draft_tokens[row, 0, row : row + 1] = wrong
    accepted = check(LINEAR, implementation, (draft_tokens, num_draft, values, indices))
    assert accepted.tolist() == [0, 1, 2, 3, 4]


def test_drafts_past_num_draft_never_count(implementation):
    draft_tokens, num_draft, values, indices = linear_arrays()
    num_draft[:, 0] = [0, 1, 2, 3, 4]
    accepted = check(LINEAR, implementation, (draft_tokens, num_draft, values, indices))
    assert accepted.tolist() == [0, 1, 2, 3, 4]


def test_padding_drafts_never_equal_padding_targets(implementation):
    draft_tokens, num_draft, values, indices = linear_arrays()
    indices[:] = -1
    draft_tokens[:] = -1
    accepted = check(LINEAR, implementation, (draft_tokens, num_draft, values, indices))
    assert accepted.tolist() == [0] * 5


def test_the_lowest_of_equal_candidates_wins(implementation):
    draft_tokens, num_draft, values, indices = LOOKAHEAD.arrays(0)
    num_draft[:] = 4
    indices[:] = 1
    draft_tokens[:] = 0
    draft_tokens[:, 3:6] = 1
    function = compiled(LOOKAHEAD, implementation)
    _, accepted, best = function(draft_tokens, num_draft, values, indices)
    assert accepted.tolist() == [4] * 6
    assert best.tolist() == [3] * 6


def test_rows_may_be_tuples(implementation):
    arrays = LINEAR.arrays(0)
    rows = tuple(map(tuple, LINEAR.candidate_rows().tolist()))
    arrays = tuple(map(jnp.asarray, arrays))
    actual = verify_greedy(*arrays, candidate_rows=rows, implementation=implementation)
    expected = compiled(LINEAR, implementation)(*arrays)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def array(shape, dtype=jnp.int32):
    """Make an array of zeros."""
    return jnp.zeros(shape, dtype)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(candidate_rows=((0, 1),)), r"candidate_rows has shape \(1, 2\), not \(1, 3\)"),
        (dict(candidate_rows=((0, 1, 3),)), "candidate_rows has rows 0 to 3, outside a block of 3"),
        (dict(candidate_rows=((0, 1, -1),)), "candidate_rows has rows -1 to 1"),
        (dict(draft_tokens=array((2, 1, 2), jnp.int16)), "draft_tokens has dtype int16, not int32"),
        (dict(num_draft=array((2, 1), jnp.int16)), "num_draft has dtype int16, not int32"),
        (dict(values=array((2, 3, 4), jnp.bfloat16)), "values has dtype bfloat16, not float32"),
        (dict(num_draft=array((2, 2))), r"num_draft has shape \(2, 2\), not \(2, 1\)"),
        (
            dict(draft_tokens=array((3, 1, 2)), num_draft=array((3, 1))),
            "values has 2 batch rows but draft_tokens has 3",
        ),
        (
            dict(indices=array((2, 3, 5))),
            r"values has shape \(2, 3, 4\) but indices has shape \(2, 3, 5\)",
        ),
        (
            dict(draft_tokens=array((2, 0, 2)), num_draft=array((2, 0))),
            r"draft_tokens of shape \(2, 0, 2\) has no candidates",
        ),
    ],
)
def test_bad_arguments_are_named(monkeypatch, change, message):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    arguments = dict(
        draft_tokens=array((2, 1, 2)),
        num_draft=array((2, 1)),
        values=array((2, 3, 4), jnp.float32),
        indices=array((2, 3, 4)),
        candidate_rows=((0, 1, 2),),
    )
    with pytest.raises(ValueError, match=message):
        verify_greedy(**(arguments | change))
