"""A pool of n-grams per row, in device arrays: a ring that forgets the least recently seen.

While the ring has not wrapped, a lookup gives exactly what a dictionary from first token to a
least-recently-used list of n-grams would.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxspec.drafters.protocol import Leaf

_EMPTY = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NgramPool:
    """N-grams of each row, oldest first from `head` around.

    Attributes:
      ring: i32[B, R, N] n-grams; the first token is the key, -1 where the entry is empty.
      head: i32[B] entry that is written next, 0..R-1.
    """

    ring: Leaf
    head: Leaf


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
      pool_size: R, entries per row.
    """
    batch_size, capacity = tokens.shape
    num_slots = min(pool_size, max(capacity - ngram_size + 1, 0))
    first = jnp.maximum(length - ngram_size + 1 - num_slots, 0)
    start = first[:, None] + jnp.arange(num_slots)[None]
    is_gram = start + ngram_size <= length[:, None]
    grams = grams_at(tokens, start, ngram_size)
    is_kept = is_gram & ~_has_later_copy(grams, is_gram)
    grams = jnp.where(is_kept[..., None], grams, _EMPTY)
    padding = ((0, 0), (0, pool_size - num_slots), (0, 0))
    ring = jnp.pad(grams, padding, constant_values=_EMPTY)
    num_grams = jnp.sum(is_gram, axis=1, dtype=jnp.int32)
    return NgramPool(ring=ring, head=jax.lax.rem(num_grams, jnp.int32(pool_size)))


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


def lookup(pool: NgramPool, key: jax.Array, *, num_candidates: int) -> tuple[jax.Array, jax.Array]:
    """Return the most recently seen n-grams that start with a key.

    Args:
      pool: the pool.
      key: i32[B] first tokens.
      num_candidates: G, n-grams to return.

    Returns:
      i32[B, G, N-1], the n-grams without the key, most recent first, and bool[B, G], which of
      them exist. Those that do not hold any id.
    """
    pool_size = pool.ring.shape[1]
    num_found = min(num_candidates, pool_size)
    # 1 for the oldest entry, the one that is written next, up to R for the newest.
    index = jnp.arange(pool_size)[None] - pool.head[:, None]
    recency = jnp.where(index < 0, index + pool_size, index) + 1
    is_match = pool.ring[..., 0] == key[:, None]
    best, entry = jax.lax.top_k(jnp.where(is_match, recency, 0), num_found)
    grams = jnp.take_along_axis(pool.ring, entry[..., None], axis=1, mode="clip")[..., 1:]
    padding = ((0, 0), (0, num_candidates - num_found))
    return jnp.pad(grams, (*padding, (0, 0))), jnp.pad(best > 0, padding)


def insert(pool: NgramPool, grams: jax.Array, is_gram: jax.Array) -> NgramPool:
    """Add n-grams as the most recently seen ones; copies seen before are dropped.

    Args:
      pool: the pool.
      grams: i32[B, n, N], oldest first; n is small.
      is_gram: bool[B, n], which of them to add.
    """
    pool_size, num_grams = pool.ring.shape[1], grams.shape[1]
    is_old_copy = jnp.any(
        jnp.all(pool.ring[:, :, None] == grams[:, None], axis=-1) & is_gram[:, None], axis=-1
    )
    ring = jnp.where(is_old_copy[..., None], _EMPTY, pool.ring)
    is_same = jnp.all(grams[:, :, None] == grams[:, None], axis=-1) & is_gram[:, None]
    is_later = jnp.arange(num_grams)[:, None] < jnp.arange(num_grams)[None]
    is_kept = is_gram & ~jnp.any(is_same & is_later[None], axis=-1)
    # Only the latest R fit; the others are older than all of these.
    rank_from_end = jnp.sum(is_kept[:, None] & is_later[None], axis=-1, dtype=jnp.int32)
    num_kept = jnp.sum(is_kept, axis=1, dtype=jnp.int32)
    slot = pool.head[:, None] + num_kept[:, None] - 1 - rank_from_end
    slot = jnp.where(is_kept & (rank_from_end < pool_size), jax.lax.rem(slot, pool_size), pool_size)
    rows = jnp.arange(grams.shape[0])[:, None]
    return NgramPool(
        ring=ring.at[rows, slot].set(grams, mode="drop"),
        head=jax.lax.rem(pool.head + num_kept, jnp.int32(pool_size)),
    )
