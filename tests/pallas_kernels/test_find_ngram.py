"""find_ngram against a brute-force search written on Python lists."""

from functools import partial

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from pallas_kernels import find_ngram
from pallas_kernels.find_ngram import triton
from pallas_kernels.find_ngram.cases import CASES

STATIC = ("ngram_size", "num_draft_tokens", "min_ngram_size", "match", "implementation")
run = jax.jit(find_ngram, static_argnames=STATIC)


def search(text, ngram_size, num_draft_tokens, min_ngram_size, match):
    """Draft from one row's known tokens by trying every n-gram at every start."""
    for size in range(ngram_size, min_ngram_size - 1, -1):
        if size >= len(text):
            continue
        suffix = text[-size:]
        starts = [s for s in range(len(text) - size) if text[s : s + size] == suffix]
        if starts:
            source = starts[0 if match == "first" else -1] + size
            extended = list(text)
            for t in range(num_draft_tokens):
                extended.append(extended[source + t])
            return extended[len(text) :], num_draft_tokens
    return [-1] * num_draft_tokens, 0


def oracle(tokens, length, *, min_ngram_size=None, match="last", ngram_size, num_draft_tokens):
    """Apply search to every row."""
    smallest = ngram_size if min_ngram_size is None else min_ngram_size
    rows = [
        search(row[:n].tolist(), ngram_size, num_draft_tokens, smallest, match)
        for row, n in zip(tokens, length, strict=True)
    ]
    return np.array([r[0] for r in rows], np.int32), np.array([r[1] for r in rows], np.int32)


def check(function, tokens, length, **settings):
    """Compare a form with the oracle."""
    draft, num_draft = function(jnp.asarray(tokens), jnp.asarray(length), **settings)
    expected_draft, expected_num_draft = oracle(tokens, length, **settings)
    np.testing.assert_array_equal(num_draft, expected_num_draft)
    np.testing.assert_array_equal(draft, expected_draft)
    assert draft.dtype == num_draft.dtype == jnp.int32


def edge_lengths(rng, num_rows, capacity, ngram_size):
    """Draw lengths, the edges among them."""
    edges = [0, 1, ngram_size - 1, ngram_size, ngram_size + 1, capacity - 1, capacity]
    length = rng.integers(0, capacity + 1, num_rows)
    length[: 2 * len(edges)] = np.clip(edges + edges, 0, capacity)
    return length.astype(np.int32)


@pytest.mark.parametrize(
    "ngram_size, min_ngram_size, match, num_draft_tokens",
    [
        (1, 1, "last", 3),
        (3, 3, "first", 5),
        (3, 1, "last", 8),
        (5, 2, "first", 4),
        (16, 1, "last", 7),
    ],
)
def test_random_texts_match_the_oracle(
    implementation, ngram_size, min_ngram_size, match, num_draft_tokens
):
    rng = np.random.default_rng(ngram_size)
    settings = dict(ngram_size=ngram_size, min_ngram_size=min_ngram_size, match=match)
    settings["num_draft_tokens"] = num_draft_tokens
    function = partial(run, implementation=implementation)
    for _ in range(2):  # 5 settings of 2 batches of 1,000 rows
        # Three symbols, 0 among them: what padding holds is a real token as well.
        tokens = rng.integers(0, 3, (1000, 37), np.int32)
        length = edge_lengths(rng, 1000, 37, ngram_size)
        tokens[::2] = np.where(np.arange(37) < length[::2, None], tokens[::2], 0)
        check(function, tokens, length, **settings)


@pytest.mark.parametrize("match", ["first", "last"])
@pytest.mark.parametrize("interpret", [True, pytest.param(False, marks=pytest.mark.gpu)])
def test_small_chunks_match_the_oracle(interpret, match):
    """Chunks of 16 positions put many matches across a boundary."""
    rng = np.random.default_rng(7)
    tokens = rng.integers(0, 3, (200, 75), np.int32)
    settings = dict(ngram_size=5, min_ngram_size=2, num_draft_tokens=6, match=match)
    function = jax.jit(partial(triton.find_ngram, interpret=interpret, block=16, **settings))
    check(lambda *arrays, **_: function(*arrays), tokens, edge_lengths(rng, 200, 75, 5), **settings)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases_match_the_oracle(implementation, case):
    check(partial(run, implementation=implementation), *case.arrays(), **case.settings())


@pytest.mark.parametrize("capacity", [300, 4500])
@pytest.mark.parametrize("ngram_size, min_ngram_size", [(3, 3), (4, 2)])
def test_planted_matches_at_chunk_boundaries(implementation, capacity, ngram_size, min_ngram_size):
    starts = [*range(122, 132), *range(250, 260), 0, 1, 290]
    tokens = np.tile(np.arange(100, 100 + capacity, dtype=np.int32), (len(starts), 1))
    length = np.full(len(starts), capacity - 1, np.int32)
    for row, start in enumerate(starts):
        suffix = [1, 2, 3, 4][:ngram_size]
        tokens[row, start : start + ngram_size] = suffix
        tokens[row, capacity - 1 - ngram_size : capacity - 1] = suffix
    settings = dict(ngram_size=ngram_size, min_ngram_size=min_ngram_size, num_draft_tokens=5)
    check(partial(run, implementation=implementation), tokens, length, **settings)
    _, num_draft = run(tokens, length, implementation=implementation, **settings)
    assert (np.asarray(num_draft) == 5).all()


@pytest.mark.parametrize("match", ["first", "last"])
def test_equal_tokens_and_overlap(implementation, match):
    """Runs and short periods overlap the suffix itself."""
    tokens = np.full((6, 64), 7, np.int32)
    tokens[3:] = np.arange(64) % np.array([[2], [3], [5]])
    length = np.array([2, 9, 64, 64, 63, 30], np.int32)
    settings = dict(ngram_size=4, min_ngram_size=1, num_draft_tokens=6, match=match)
    check(partial(run, implementation=implementation), tokens, length, **settings)


@pytest.mark.parametrize(
    "text, ngram_size, num_draft_tokens, expected",
    [
        ([7, 7, 7], 1, 4, [7, 7, 7, 7]),
        ([1, 2, 3, 1, 2], 2, 5, [3, 1, 2, 3, 1]),
        ([1, 2, 3], 1, 2, [-1, -1]),
    ],
)
def test_examples(implementation, text, ngram_size, num_draft_tokens, expected):
    draft, num_draft = find_ngram(
        jnp.array([text], jnp.int32),
        jnp.array([len(text)], jnp.int32),
        ngram_size=ngram_size,
        num_draft_tokens=num_draft_tokens,
        implementation=implementation,
    )
    assert draft.tolist() == [expected]
    assert num_draft.tolist() == [0 if expected[0] == -1 else num_draft_tokens]


def test_nothing_past_length_matters(implementation):
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 3, (200, 37), np.int32)
    length = edge_lengths(rng, 200, 37, 3)
    settings = dict(ngram_size=3, min_ngram_size=1, num_draft_tokens=8)
    expected = run(tokens, length, implementation=implementation, **settings)
    known = np.arange(37) < length[:, None]
    for filler in (-1, 0, 2, 2**31 - 1):
        changed = np.where(known, tokens, np.int32(filler))
        actual = run(changed, length, implementation=implementation, **settings)
        jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_runs_inside_a_while_loop(implementation):
    """The text grows by its own drafts, as in the decode loop."""
    text = jnp.array([[1, 2, 3, 1, 2], [4, 4, 5, 4, 4]], jnp.int32)
    tokens = jnp.zeros((2, 24), jnp.int32).at[:, :5].set(text)

    def grow(state):
        tokens, length = state
        draft, num_draft = find_ngram(
            tokens, length, ngram_size=2, num_draft_tokens=3, implementation=implementation
        )
        slots = length[:, None] + jnp.arange(3)[None]
        tokens = tokens.at[jnp.arange(2)[:, None], slots].set(draft, mode="drop")
        return tokens, length + num_draft

    state = (tokens, jnp.array([5, 5], jnp.int32))
    tokens, length = jax.jit(
        lambda state: jax.lax.while_loop(lambda s: jnp.all(s[1] < 20), grow, state)
    )(state)
    assert length.tolist() == [20, 20]
    assert tokens[0, :20].tolist() == ([1, 2, 3] * 7)[:20]
    assert tokens[1, :20].tolist() == ([4, 4, 5] * 7)[:20]


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(ngram_size=0), "min_ngram_size=0 is less than 1"),
        (dict(min_ngram_size=4), "min_ngram_size=4 is greater than ngram_size=3"),
        (dict(num_draft_tokens=0), "num_draft_tokens=0 is less than 1"),
        (dict(match="best"), "match='best' is not one of"),
        (dict(implementation="cuda"), "implementation='cuda' is not one of"),
    ],
)
def test_bad_settings_are_named(monkeypatch, change, message):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    settings = dict(ngram_size=3, num_draft_tokens=2) | change
    with pytest.raises(ValueError, match=message):
        find_ngram(jnp.zeros((1, 8), jnp.int32), jnp.zeros((1,), jnp.int32), **settings)


@pytest.mark.parametrize(
    "tokens, length, message",
    [
        (jnp.zeros((1, 8), jnp.int16), jnp.zeros((1,), jnp.int32), "tokens has dtype int16"),
        (jnp.zeros((1, 8), jnp.int32), jnp.zeros((1,), jnp.int16), "length has dtype int16"),
        (jnp.zeros((2, 8), jnp.int32), jnp.zeros((1,), jnp.int32), "tokens has 2 rows but length"),
        (jnp.zeros((1, 0), jnp.int32), jnp.zeros((1,), jnp.int32), "capacity of 0 tokens"),
    ],
)
def test_bad_arrays_are_named(monkeypatch, tokens, length, message):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=message):
        find_ngram(tokens, length, ngram_size=3, num_draft_tokens=2)


def test_scores_that_overflow_are_refused():
    tokens = jax.ShapeDtypeStruct((1, 2**20), jnp.int32)
    length = jax.ShapeDtypeStruct((1,), jnp.int32)
    settings = dict(ngram_size=2048, num_draft_tokens=2)
    with pytest.raises(ValueError, match="ngram_size=2048 with a capacity of 1048576"):
        jax.eval_shape(partial(find_ngram, **settings), tokens, length)


def test_the_kernel_refuses_long_ngrams_and_none_falls_through(monkeypatch):
    tokens, length = jnp.zeros((1, 100), jnp.int32), jnp.full((1,), 100, jnp.int32)
    settings = dict(ngram_size=65, num_draft_tokens=2)
    with pytest.raises(NotImplementedError, match="ngram_size=65 is greater than 64"):
        find_ngram(tokens, length, implementation="triton", **settings)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    draft, _ = find_ngram(tokens, length, **settings)
    assert draft.tolist() == [[0, 0]]
