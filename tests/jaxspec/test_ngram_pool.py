"""The pool of n-grams against a dictionary of least-recently-used lists."""

from __future__ import annotations

from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafters import ngram_pool


class Oracle:
    """N-grams, the least recently seen first and forgotten beyond `size`."""

    def __init__(self, size: int = 10**9) -> None:
        self.size = size
        self.grams: OrderedDict = OrderedDict()

    def insert(self, gram: tuple[int, ...]) -> None:
        self.grams.pop(gram, None)
        self.grams[gram] = None
        while len(self.grams) > self.size:
            self.grams.popitem(last=False)

    def lookup(self, key: int, limit: int) -> list[tuple[int, ...]]:
        return [gram[1:] for gram in reversed(self.grams) if gram[0] == key][:limit]


insert = jax.jit(ngram_pool.insert)
lookup = jax.jit(ngram_pool.lookup, static_argnames="num_candidates")
from_text = jax.jit(ngram_pool.from_text, static_argnames=("ngram_size", "pool_size"))


def found(pool, row, key, num_candidates):
    keys = jnp.full(pool.clock.shape, key, jnp.int32)
    grams, num_tokens = lookup(pool, keys, num_candidates=num_candidates)
    return [
        tuple(gram) for gram in np.asarray(grams)[row][np.asarray(num_tokens)[row] > 0].tolist()
    ]


@pytest.mark.parametrize("ngram_size, pool_size", [(2, 125), (4, 125), (3, 9), (2, 4)])
def test_random_streams_equal_the_oracle(ngram_size, pool_size):
    # 100 rows a size are 100 streams.
    rng = np.random.default_rng(ngram_size)
    num_rows, num_inserts, num_grams, num_symbols = 100, 25, 5, 3
    # A small pool is full most of the time, and sees again what it holds.
    pool = from_text(
        jnp.zeros((num_rows, 8), jnp.int32),
        jnp.zeros((num_rows,), jnp.int32),
        ngram_size=ngram_size,
        pool_size=pool_size,
    )
    oracles = [Oracle(pool_size) for _ in range(num_rows)]
    for _ in range(num_inserts):
        grams = rng.integers(0, num_symbols, (num_rows, num_grams, ngram_size)).astype(np.int32)
        is_gram = rng.random((num_rows, num_grams)) < 0.7
        pool = insert(pool, jnp.asarray(grams), jnp.asarray(is_gram))
        for oracle, row_grams, row_is in zip(oracles, grams, is_gram, strict=True):
            for gram in row_grams[row_is]:
                oracle.insert(tuple(gram.tolist()))
        for key in range(num_symbols):
            for limit in (1, 4):
                grams, num_tokens = lookup(
                    pool, jnp.full((num_rows,), key, jnp.int32), num_candidates=limit
                )
                for row, oracle in enumerate(oracles):
                    kept = np.asarray(grams)[row][np.asarray(num_tokens)[row] > 0]
                    assert [tuple(g) for g in kept.tolist()] == oracle.lookup(key, limit)


@pytest.mark.parametrize("length", [0, 1, 2, 3, 7, 30, 40])
@pytest.mark.parametrize("ngram_size", [2, 3])
def test_the_prompt_seeds_the_pool(length, ngram_size):
    rng = np.random.default_rng(length)
    tokens = rng.integers(0, 3, (2, 40)).astype(np.int32)
    lengths = jnp.asarray([length, 40], jnp.int32)
    pool = from_text(jnp.asarray(tokens), lengths, ngram_size=ngram_size, pool_size=64)
    for row, row_length in enumerate([length, 40]):
        oracle = Oracle()
        for start in range(row_length - ngram_size + 1):
            oracle.insert(tuple(tokens[row, start : start + ngram_size].tolist()))
        for key in range(3):
            assert found(pool, row, key, 16) == oracle.lookup(key, 16)


def test_a_full_pool_forgets_the_oldest_only():
    grams = [(i, i + 100) for i in range(10)]
    pool = from_text(
        jnp.zeros((1, 4), jnp.int32), jnp.zeros((1,), jnp.int32), ngram_size=2, pool_size=6
    )
    for start in range(0, 10, 2):
        new = jnp.asarray([grams[start : start + 2]], jnp.int32)
        pool = insert(pool, new, jnp.ones((1, 2), bool))
    kept = [key for key in range(10) if found(pool, 0, key, 4)]
    assert kept == [4, 5, 6, 7, 8, 9]


def test_a_long_prompt_keeps_its_end():
    tokens = jnp.arange(50, dtype=jnp.int32)[None]
    pool = from_text(tokens, jnp.asarray([45], jnp.int32), ngram_size=2, pool_size=8)
    assert [key for key in range(50) if found(pool, 0, key, 4)] == list(range(36, 44))


def test_more_new_grams_than_the_pool_holds():
    pool = from_text(
        jnp.zeros((1, 4), jnp.int32), jnp.zeros((1,), jnp.int32), ngram_size=2, pool_size=3
    )
    new = jnp.asarray([[(i, i) for i in range(5)]], jnp.int32)
    pool = insert(pool, new, jnp.ones((1, 5), bool))
    assert [key for key in range(5) if found(pool, 0, key, 2)] == [2, 3, 4]
    assert found(pool, 0, 4, 2) == [(4,)]


def test_nothing_to_add_changes_nothing():
    tokens = jnp.asarray([[1, 2, 1, 2, 3]], jnp.int32)
    pool = from_text(tokens, jnp.asarray([5], jnp.int32), ngram_size=2, pool_size=16)
    same = insert(pool, jnp.ones((1, 3, 2), jnp.int32), jnp.zeros((1, 3), bool))
    for key in range(4):
        assert found(same, 0, key, 8) == found(pool, 0, key, 8)
