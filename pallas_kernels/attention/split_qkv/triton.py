"""Pallas Triton form of splitting the projection of a block of many rows.

One launch norms and rotates queries and keys, and puts keys and values in the cache's order.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

# Rows of the block that a program takes, and its warps.
NUM_ROWS, NUM_WARPS = 32, 4


def _norm_rotate_halves(halves, weights, cos, sin, eps):
    """Norm and rotate heads given as two halves, and return them so.

    Rounds as the reference does.
    """
    dtype = halves[0].dtype
    width = 2 * halves[0].shape[1]

    def rounded(x):
        return x.astype(dtype).astype(jnp.float32)

    cos, sin, *halves = (part.astype(jnp.float32) for part in (cos, sin, *halves))
    squares = sum(jnp.sum(half * half, axis=1) for half in halves)
    scale = jax.lax.rsqrt(squares / width + eps)[:, None]
    low, high = (
        rounded(rounded(half * scale) * weight.astype(jnp.float32)[None])
        for half, weight in zip(halves, weights, strict=True)
    )
    low, high = (
        rounded(low * cos) - rounded(high * sin),
        rounded(high * cos) + rounded(low * sin),
    )
    return low.astype(dtype), high.astype(dtype)


def _split_qkv_kernel(
    qkv_ref, cos_ref, sin_ref, q_norm_ref, k_norm_ref, query_ref, key_ref, value_ref, *, rows, eps
):
    _, num_rows, kv_heads, heads, head_dim = qkv_ref.shape
    x = pl.program_id(1)
    batch = jax.lax.div(pl.program_id(2), jnp.int32(kv_heads))
    head = jax.lax.rem(pl.program_id(2), jnp.int32(kv_heads))
    row = (pl.program_id(0) * rows + jnp.arange(rows, dtype=jnp.int32))[:, None]
    mask = row < num_rows
    column = jnp.arange(head_dim // 2, dtype=jnp.int32)
    columns = (column, column + head_dim // 2)
    load = partial(plt.load, mask=mask, other=0)
    halves = [load(qkv_ref.at[batch, row, head, x, c[None]]) for c in columns]

    def turned(norm_ref):
        tables = [load(table.at[batch, row, column[None]]) for table in (cos_ref, sin_ref)]
        return _norm_rotate_halves(halves, [norm_ref[c] for c in columns], *tables, eps)

    def store(ref, index, parts):
        for c, part in zip(columns, parts, strict=True):
            plt.store(ref.at[*index, c[None]], part, mask=mask)

    @pl.when(x < heads - 2)
    def _():
        store(query_ref, (batch, row, head, x), turned(q_norm_ref))

    @pl.when(x == heads - 2)
    def _():
        store(key_ref, (batch, head, row), turned(k_norm_ref))

    @pl.when(x == heads - 1)
    def _():
        store(value_ref, (batch, head, row), halves)


def split_qkv(qkv, cos, sin, q_norm, k_norm, *, eps, interpret):
    """Return the block's queries and keys, normed and rotated, and its values."""
    batch_size, num_rows, kv_heads, heads, head_dim = qkv.shape
    rows = min(pl.next_power_of_2(num_rows), NUM_ROWS)
    kv = jax.ShapeDtypeStruct((batch_size, kv_heads, num_rows, head_dim), qkv.dtype)
    query_shape = (batch_size, num_rows, kv_heads, heads - 2, head_dim)
    return pl.pallas_call(
        partial(_split_qkv_kernel, rows=rows, eps=eps),
        out_shape=(jax.ShapeDtypeStruct(query_shape, qkv.dtype), kv, kv),
        grid=(pl.cdiv(num_rows, rows), heads, batch_size * kv_heads),
        compiler_params=plt.CompilerParams(num_warps=NUM_WARPS, num_stages=1),
        interpret=interpret,
    )(qkv, cos, sin, q_norm, k_norm)
