"""The KV cache: a tuple of one (key, value) pair per layer, slot = position.

Slots at or past the number of cached tokens are garbage by definition: masked, never read.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.config import Qwen3Config
from jaxspec.layout import BlockLayout

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
) -> KVCache:
    """Write the K/V of the best candidate's rows to the slots from `num_cached` on.

    All M + 1 rows are written, accepted or not: those past the accepted prefix lie beyond the
    new end and are overwritten before they can be read. K was rotated for the row's position,
    which is its final one.

    Args:
      cache: the cache before this step.
      block: per layer the block's own K/V, `[B, K, T, H]`.
      layout: the block's layout.
      num_cached: live slots per row before this step; the current token goes to that slot.
      best_candidate: index of the candidate to commit.
      num_emitted: tokens emitted in this step; rows that emitted none write nothing. That the
        writes depend on it orders them after every read of the cache, so they happen in place.
    """
    if layout.num_candidates > 1 or not layout.is_linear:
        candidate_rows = jnp.asarray(np.asarray(layout.candidate_rows, dtype=np.int32))
        rows = candidate_rows[best_candidate][:, None, :, None]
        block = jax.tree.map(
            lambda part: jnp.take_along_axis(part, rows, axis=2, mode="clip"), block
        )
    return append_rows(cache, block, jnp.where(num_emitted > 0, num_cached, cache[0][0].shape[2]))


def append_rows(cache: KVCache, rows: KVCache, start: Int[Array, "B"]) -> KVCache:
    """Write rows, `[B, K, T, H]` per layer, to the T slots from `start` on.

    Slots past the end are dropped: a scatter and not `dynamic_update_slice`, which would clamp
    its start and overwrite live slots.
    """
    num_rows = rows[0][0].shape[2]
    slots = start[:, None] + jnp.arange(num_rows)[None]
    batch = jnp.arange(slots.shape[0])[:, None]

    def write(buffer: Float[Array, "B K S H"], new: Float[Array, "B K T H"]) -> Array:
        new = new.swapaxes(1, 2).astype(buffer.dtype)
        return buffer.at[batch, :, slots].set(new, mode="drop", unique_indices=True)

    return jax.tree.map(write, cache, rows)
