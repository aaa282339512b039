"""The KV cache: a tuple of one (key, value) pair per layer, slot = position.

Slots at or past the number of cached tokens are garbage by definition: masked, never read.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec.config import Qwen3Config
from jaxspec.layout import BlockLayout
from pallas_kernels import write_rows
from pallas_kernels.dispatch import Implementation

# S of a cache and T of a block's own rows meet in one signature, so the axis has no letter.
KeyValue = tuple[Float[Array, "B K _ H"], Float[Array, "B K _ H"]]
KVCache = tuple[KeyValue, ...]


def init_cache(
    config: Qwen3Config, *, batch_size: int, capacity: int, dtype: jax.typing.DTypeLike
) -> KVCache:
    """Return an empty cache of `capacity` slots (S) per row.

    Args:
      config: the model's shape.
      batch_size: B.
      capacity: S, in tokens.
      dtype: of keys and values; the model's activation dtype.

    Returns:
      L pairs of `[B, K, S, H]` arrays, keys after RoPE.
    """
    shape = (batch_size, config.num_key_value_heads, capacity, config.head_dim)
    return tuple(
        (jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_hidden_layers)
    )


def commit_block(
    cache: KVCache,
    block: KVCache,
    layout: BlockLayout,
    *,
    num_cached: Int[Array, "B"],
    best_candidate: Int[Array, "B"],
    num_emitted: Int[Array, "B"],
    kernels: Implementation | None = None,
) -> KVCache:
    """Write the K/V of the emitted tokens' rows to the slots from `num_cached` on.

    The cache so holds keys and values of the text and nothing else: what is not part of it, a
    rejected draft say, cannot reach later steps even if it is not finite. (Within its own step it
    can, where weights and values of a block are one product: 0 times NaN is NaN.) K was rotated
    for the row's position, which is its final one.

    Args:
      cache: the cache before this step.
      block: per layer the block's own K/V, `[B, K, T, H]`.
      layout: the block's layout.
      num_cached: live slots per row before this step; the current token goes to that slot.
      best_candidate: index of the candidate to commit.
      num_emitted: tokens emitted in this step: as many rows are written. That the writes depend
        on it orders them after every read of the cache, so they happen in place.
      kernels: kernel implementation, None = the best available.
    """
    rows = committed_rows(layout, best_candidate)
    is_written = jnp.arange(layout.num_draft_tokens + 1)[None] < num_emitted[:, None]
    return write_block(cache, block, num_cached, is_written, rows, kernels=kernels)


def committed_rows(
    layout: BlockLayout, best_candidate: Int[Array, "B"]
) -> Int[Array, "B W"] | None:
    """Return the rows of the best candidate, the current token's first; None = all, in order."""
    if layout.candidate_rows == (tuple(range(layout.num_rows)),):
        return None
    return jnp.asarray(np.asarray(layout.candidate_rows, dtype=np.int32))[best_candidate]


def write_block(
    cache: KVCache,
    block: KVCache,
    start: Int[Array, "B"],
    is_written: Bool[Array, "B W"],
    row_index: Int[Array, "B W"] | None = None,
    *,
    kernels: Implementation | None = None,
) -> KVCache:
    """Write W rows of a block to the slots from `start` on, where `is_written`.

    Args:
      cache: the cache.
      block: per layer the block's own K/V, `[B, K, T, H]`.
      start: slot of the first row; slots past the end are dropped.
      is_written: rows to write.
      row_index: rows of the block, None = its T rows in order.
      kernels: kernel implementation, None = the best available.
    """
    capacity = cache[0][0].shape[2]
    slots = start[:, None] + jnp.arange(is_written.shape[1])[None]
    slots = jnp.where(is_written, slots, capacity)
    arrays, tree = jax.tree.flatten(cache)
    rows = tuple(jax.tree.leaves(block))
    return jax.tree.unflatten(
        tree, write_rows(tuple(arrays), rows, slots, row_index, implementation=kernels)
    )
