"""A pool of n-grams per row, in device arrays, that forgets the least recently seen.

A lookup gives what a dictionary from first token to a least-recently-used list of n-grams would,
if the dictionary held `pool_size` n-grams in all and forgot the least recently seen of them.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxspec.drafters.protocol import Leaf
from pallas_kernels import insert_ngrams, lookup_ngrams
from pallas_kernels.dispatch import Implementation


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NgramPool:
    """N-grams of each row and when they were last seen.

    Attributes:
      grams: i32[B, R, N] n-grams, in no order; the first token is the key.
      seen: i32[B, R] when: larger is more recent, 0 where the entry is empty.
      clock: i32[B] the largest `seen` so far.
    """

    grams: Leaf
    seen: Leaf
    clock: Leaf


def grams_at(tokens: jax.Array, start: jax.Array, ngram_size: int) -> jax.Array:
    """Return i32[B, n, N], the tokens from each `start` (i32[B, n]) on; starts are clipped."""
    index = start[..., None] + jnp.arange(ngram_size)[None, None]
    flat = jnp.take_along_axis(tokens, index.reshape(tokens.shape[0], -1), axis=1, mode="clip")
    return flat.reshape(index.shape)


def from_text(
    tokens: jax.Array, length: jax.Array, *, ngram_size: int, pool_size: int
) -> NgramPool:
    """Return a pool of the text's n-grams, the latest `pool_size` of them.

    Args:
      tokens: i32[B, P] text.
      length: i32[B] known tokens.
      ngram_size: N.
      pool_size: R, entries per row; the text's latest n-grams fill it.
    """
    batch_size, capacity = tokens.shape
    num_slots = min(pool_size, max(capacity - ngram_size + 1, 0))
    first = jnp.maximum(length - ngram_size + 1 - num_slots, 0)
    start = first[:, None] + jnp.arange(num_slots)[None]
    is_gram = start + ngram_size <= length[:, None]
    grams = grams_at(tokens, start, ngram_size)
    is_kept = is_gram & ~_has_later_copy(grams, is_gram)
    seen = jnp.where(is_kept, 1 + jnp.arange(num_slots)[None], 0)
    padding = ((0, 0), (0, pool_size - num_slots))
    return NgramPool(
        grams=jnp.pad(grams, (*padding, (0, 0))),
        seen=jnp.pad(seen, padding),
        clock=jnp.full((batch_size,), num_slots, jnp.int32),
    )


def _has_later_copy(grams: jax.Array, is_gram: jax.Array) -> jax.Array:
    """Return bool[B, n], whether an equal n-gram stands later; by sorting, n may be large."""
    position = jnp.broadcast_to(jnp.arange(grams.shape[1])[None], is_gram.shape)
    keys = [jnp.where(is_gram, grams[..., i], -1 - position) for i in range(grams.shape[2])]
    *keys, position = jax.lax.sort((*keys, position), num_keys=grams.shape[2], is_stable=True)
    is_same = jnp.ones_like(is_gram[:, 1:])
    for key in keys:
        is_same &= key[:, 1:] == key[:, :-1]
    is_same = jnp.pad(is_same, ((0, 0), (0, 1)))
    rows = jnp.arange(grams.shape[0])[:, None]
    return jnp.zeros_like(is_gram).at[rows, position].set(is_same, unique_indices=True)


def lookup(
    pool: NgramPool, key: jax.Array, *, num_candidates: int, kernels: Implementation | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return the most recently seen n-grams that start with a key.

    Args:
      pool: the pool.
      key: i32[B] first tokens.
      num_candidates: G, n-grams to return.
      kernels: implementation, None = the best available.

    Returns:
      i32[B, G, N-1], the n-grams without the key, most recent first, any ids where there is none;
      and i32[B, G], the tokens of each, 0 where there is none.
    """
    return lookup_ngrams(
        pool.grams, pool.seen, key, num_candidates=num_candidates, implementation=kernels
    )


def insert(
    pool: NgramPool, grams: jax.Array, is_gram: jax.Array, *, kernels: Implementation | None = None
) -> NgramPool:
    """Add n-grams as the most recently seen ones; copies seen before are dropped.

    Args:
      pool: the pool.
      grams: i32[B, n, N], oldest first; n is small.
      is_gram: bool[B, n], which of them to add.
      kernels: implementation, None = the best available.
    """
    return NgramPool(
        *insert_ngrams(pool.grams, pool.seen, pool.clock, grams, is_gram, implementation=kernels)
    )
