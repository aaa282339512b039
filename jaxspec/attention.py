"""Attention of a block of rows over the live part of the cache and over the block itself."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.cache import KeyValue
from jaxspec.layout import BlockLayout


def attend(
    query: Float[Array, "B T K G H"],
    num_cached: Int[Array, "B"],
    layout: BlockLayout,
    *,
    cache: KeyValue | None,
    block: KeyValue,
) -> Float[Array, "B T K G H"]:
    """Return softmax attention with float32 scores, scaled by 1 / sqrt(H).

    Every row sees the first `num_cached` slots of the cache, and the rows of the block that the
    layout's mask says. Other slots change nothing, whatever finite number they hold: their weight
    is exactly 0. The cache starts as zeros and only ever holds keys and values of the model.

    Args:
      query: rotated queries, G heads for each of the K key-value heads.
      num_cached: live slots per row of the batch.
      layout: the block's layout.
      cache: one layer's `[B, K, S, H]` keys and values, or None.
      block: the block's own `[B, K, T, H]` keys and values.
    """
    batch_size, num_rows, kv_heads, groups, head_dim = query.shape
    # One matrix of G * T query rows per kv head: both products then run without a transposed
    # copy of the cache.
    rows = query.transpose(0, 2, 3, 1, 4).reshape(batch_size, kv_heads, -1, head_dim)
    mask = jnp.broadcast_to(jnp.asarray(layout.mask)[None], (batch_size, num_rows, num_rows))
    parts = [(_scores(rows, block[0], mask), block[1])]
    if cache is not None:
        is_live = jnp.arange(cache[0].shape[2])[None, None] < num_cached[:, None, None]
        parts.append((_scores(rows, cache[0], is_live), cache[1]))
    # One softmax over both parts, without a joint array of scores.
    best = functools.reduce(
        jnp.maximum, [jnp.max(scores, axis=-1, keepdims=True) for scores, _ in parts]
    )
    weights = [jnp.exp(scores - best) for scores, _ in parts]
    total = functools.reduce(jnp.add, [jnp.sum(part, axis=-1, keepdims=True) for part in weights])
    sums = [
        _weighted_sum(part.astype(query.dtype), value)
        for part, (_, value) in zip(weights, parts, strict=True)
    ]
    out = functools.reduce(jnp.add, sums) / total
    out = out.astype(query.dtype).reshape(batch_size, kv_heads, groups, num_rows, head_dim)
    return out.transpose(0, 3, 1, 2, 4)


def _precision(x: jax.Array) -> jax.lax.Precision:
    is_float32 = x.dtype == jnp.float32
    return jax.lax.Precision.HIGHEST if is_float32 else jax.lax.Precision.DEFAULT


def _scores(
    rows: Float[Array, "B K GT H"], key: Float[Array, "B K S H"], visible: Bool[Array, "B #T S"]
) -> Float[Array, "B K GT S"]:
    scores = jnp.einsum(
        "BKQH,BKSH->BKQS",
        rows,
        key,
        precision=_precision(rows),
        preferred_element_type=jnp.float32,
    )
    scores = scores * (rows.shape[-1] ** -0.5)
    num_groups = rows.shape[2] // visible.shape[1] if visible.shape[1] > 1 else 1
    visible = jnp.tile(visible, (1, num_groups, 1))[:, None]
    return jnp.where(visible, scores, jnp.finfo(jnp.float32).min)


def _weighted_sum(
    weights: Float[Array, "B K GT S"], value: Float[Array, "B K S H"]
) -> Float[Array, "B K GT H"]:
    return jnp.einsum(
        "BKQS,BKSH->BKQH",
        weights,
        value,
        precision=_precision(value),
        preferred_element_type=jnp.float32,
    )
