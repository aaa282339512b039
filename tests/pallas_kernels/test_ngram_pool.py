"""The n-gram pool's ops against a walk over the entries; forms give equal arrays."""

from functools import partial

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from pallas_kernels import insert_ngrams, lookup_ngrams
from pallas_kernels.ngram_pool.cases import CASES, Case
from tests.pallas_kernels.test_lowering import lowered_kernels


def insert(case, implementation, pool, new):
    """Run the insertion of a case."""
    function = jax.jit(partial(insert_ngrams, implementation=implementation))
    return jax.tree.map(np.asarray, function(*map(jnp.asarray, (*pool, *new))))


def insert_oracle(grams, seen, clock, new, is_new):
    """Drop copies, then put the latest of the kept ones at the least recently seen entry."""
    grams, seen, clock = grams.copy(), seen.copy(), clock.copy()
    for row in range(len(grams)):
        added = [tuple(gram) for gram in new[row][is_new[row]].tolist()]
        for entry, gram in enumerate(grams[row].tolist()):
            if tuple(gram) in added:
                seen[row, entry] = 0
        order = np.argsort(seen[row], kind="stable").tolist()
        done = set()
        for j in reversed(np.flatnonzero(is_new[row]).tolist()):
            gram = tuple(new[row, j].tolist())
            if gram in done or not order:
                continue
            done.add(gram)
            entry = order.pop(0)
            grams[row, entry], seen[row, entry] = gram, clock[row] + 1 + j
        clock[row] += new.shape[1] * is_new[row].any()
    return grams, seen, clock


def lookup_oracle(grams, seen, key, num_candidates):
    """Sort the entries of each key."""
    found = []
    for row in range(len(grams)):
        entries = np.flatnonzero((grams[row, :, 0] == key[row]) & (seen[row] > 0)).tolist()
        entries = sorted(entries, key=lambda entry: -seen[row, entry])[:num_candidates]
        found.append(grams[row, entries, 1:])
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_insertions_match_the_oracle(implementation, case):
    for seed in range(1 if case.is_benchmark else 3):
        pool, new = case.pool(seed), case.new(seed)
        actual = insert(case, implementation, pool, new)
        jax.tree.map(np.testing.assert_array_equal, actual, insert_oracle(*pool, *new))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_lookups_match_the_oracle(implementation, case):
    function = partial(lookup_ngrams, num_candidates=case.num_candidates)
    for seed in range(1 if case.is_benchmark else 3):
        grams, seen, _ = case.pool(seed)
        arrays = tuple(map(jnp.asarray, (grams, seen, case.key(seed))))
        found, num_tokens = jax.jit(partial(function, implementation=implementation))(*arrays)
        expected = lookup_oracle(grams, seen, case.key(seed), case.num_candidates)
        for row, rows in enumerate(expected):
            assert num_tokens[row].tolist() == [
                (case.ngram_size - 1) * (index < len(rows)) for index in range(case.num_candidates)
            ]
            np.testing.assert_array_equal(found[row, : len(rows)], rows)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_forms_look_up_equal_arrays(case):
    """Where no n-gram was found as well."""
    grams, seen, _ = case.pool()
    arrays = tuple(map(jnp.asarray, (grams, seen, case.key())))
    forms = [
        lookup_ngrams(*arrays, num_candidates=case.num_candidates, implementation=form)
        for form in ("xla", "interpret")
    ]
    jax.tree.map(np.testing.assert_array_equal, *forms)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases_lower_to_triton(case):
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*case.pool(), *case.new())]
    function = partial(insert_ngrams, implementation="triton")
    assert lowered_kernels(function, *arrays) == ["_insert_ngrams_kernel"]
    function = partial(lookup_ngrams, num_candidates=case.num_candidates, implementation="triton")
    assert lowered_kernels(function, *arrays[:3]) == ["_lookup_ngrams_kernel"]


def test_nothing_to_add_changes_nothing(implementation):
    case = Case("none", 3, 16, 3, 4, 2)
    pool, (new, is_new) = case.pool(), case.new()
    actual = insert(case, implementation, pool, (new, np.zeros_like(is_new)))
    jax.tree.map(np.testing.assert_array_equal, actual, pool)


def test_the_same_ngram_many_times_takes_one_entry(implementation):
    case = Case("same", 1, 8, 2, 5, 2)
    new = np.full((1, 5, 2), 7, np.int32)
    grams, seen, clock = insert(case, implementation, case.pool(), (new, np.ones((1, 5), bool)))
    assert (grams == 7).all(-1).sum() == 1
    assert seen.max() == clock[0] == case.pool()[2][0] + 5


def test_what_the_kernel_cannot_hold_is_refused():
    grams, seen = jnp.zeros((1, 16385, 2), jnp.int32), jnp.zeros((1, 16385), jnp.int32)
    key = jnp.zeros((1,), jnp.int32)
    with pytest.raises(NotImplementedError, match="a pool of 16385 n-grams"):
        lookup_ngrams(grams, seen, key, num_candidates=2, implementation="interpret")
    new, is_new = jnp.zeros((1, 129, 2), jnp.int32), jnp.ones((1, 129), bool)
    with pytest.raises(NotImplementedError, match="129 n-grams of 2 tokens are too many"):
        insert_ngrams(grams[:, :8], seen[:, :8], key, new, is_new, implementation="interpret")


def array(*shape, dtype=jnp.int32):
    """Make an array of zeros."""
    return jnp.zeros(shape, dtype)


LOOKUP = dict(grams=array(2, 8, 3), seen=array(2, 8), key=array(2), num_candidates=2)
INSERT = dict(
    grams=array(2, 8, 3),
    seen=array(2, 8),
    clock=array(2),
    new=array(2, 4, 3),
    is_new=array(2, 4, dtype=jnp.bool_),
)


@pytest.mark.parametrize(
    "function, arguments, change, message",
    [
        (lookup_ngrams, LOOKUP, dict(grams=array(2, 8, 3, dtype=jnp.int16)), "grams has dtype"),
        (lookup_ngrams, LOOKUP, dict(seen=array(2, 7)), r"seen has shape \(2, 7\), not \(2, 8\)"),
        (lookup_ngrams, LOOKUP, dict(key=array(3)), r"key has shape \(3,\), not \(2,\)"),
        (lookup_ngrams, LOOKUP, dict(num_candidates=0), "num_candidates=0 is less than 1"),
        (lookup_ngrams, LOOKUP, dict(grams=array(2, 8, 1)), "less than 2 tokens each"),
        (insert_ngrams, INSERT, dict(clock=array(2, dtype=jnp.int16)), "clock has dtype int16"),
        (insert_ngrams, INSERT, dict(new=array(2, 4, 3, dtype=jnp.int16)), "new has dtype int16"),
        (insert_ngrams, INSERT, dict(new=array(2, 4, 2)), r"new has shape \(2, 4, 2\) but grams"),
        (insert_ngrams, INSERT, dict(is_new=array(2, 5)), r"is_new has shape \(2, 5\) but new"),
    ],
)
def test_bad_arguments_are_named(monkeypatch, function, arguments, change, message):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=message):
        function(**(arguments | change))
