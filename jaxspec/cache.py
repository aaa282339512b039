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
    """Write the K/V of the emitted tokens' rows to the slots from `num_cached` on.

    The cache so holds keys and values of the text and nothing else: what is not part of it, a
    rejected draft say, cannot reach later steps even if it is not finite. K was rotated for the
    row's position, which is its final one.

    Args:
      cache: the cache before this step.
      block: per layer the block's own K/V, `[B, K, T, H]`.
      layout: the block's layout.
      num_cached: live slots per row before this step; the current token goes to that slot.
      best_candidate: index of the candidate to commit.
      num_emitted: tokens emitted in this step: as many rows are written. That the writes depend
        on it orders them after every read of the cache, so they happen in place.
    """
    if layout.num_candidates > 1 or not layout.is_linear:
        candidate_rows = jnp.asarray(np.asarray(layout.candidate_rows, dtype=np.int32))
        rows = candidate_rows[best_candidate][:, None, :, None]
        block = jax.tree.map(
            lambda part: jnp.take_along_axis(part, rows, axis=2, mode="clip"), block
        )
    offset = jnp.arange(block[0][0].shape[2])[None]
    return write_rows(cache, block, num_cached, offset < num_emitted[:, None])


def write_rows(
    cache: KVCache, rows: KVCache, start: Int[Array, "B"], is_written: Bool[Array, "B T"]
) -> KVCache:
    """Write rows, `[B, K, T, H]` per layer, to the T slots from `start` on, where `is_written`.

    Slots past the end are dropped: a scatter and not `dynamic_update_slice`, which would clamp
    its start and overwrite live slots.
    """
    capacity, num_rows = cache[0][0].shape[2], rows[0][0].shape[2]
    slots = start[:, None] + jnp.arange(num_rows)[None]
    slots = jnp.where(is_written, slots, capacity)
    batch = jnp.arange(slots.shape[0])[:, None]

    def write(buffer: Float[Array, "B K S H"], new: Float[Array, "B K T H"]) -> Array:
        new = new.swapaxes(1, 2).astype(buffer.dtype)
        return buffer.at[batch, :, slots].set(new, mode="drop")

    return jax.tree.map(write, cache, rows)
