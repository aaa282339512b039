"""Pallas Triton form of attention for a long block that continues the text.

Enough rows keep a GPU busy without splitting keys: a program takes rows of one query head and walks
the keys that they see, first those cached, then the block's own, of which most need no mask.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.attention.reference import precision_of
from pallas_kernels.attention.tile import LOG2_E, Tiles, product


def _prefill_kernel(
    query_ref,
    key_ref,
    value_ref,
    cache_key_ref,
    cache_value_ref,
    num_cached_ref,
    out_ref,
    *,
    tiles,
    precision,
):
    _, num_rows, kv_heads, groups, head_dim = query_ref.shape
    batch = jax.lax.div(pl.program_id(0), jnp.int32(kv_heads * groups))
    query_head = jax.lax.rem(pl.program_id(0), jnp.int32(kv_heads * groups))
    head = jax.lax.div(query_head, jnp.int32(groups))
    group = jax.lax.rem(query_head, jnp.int32(groups))
    # The last rows see most keys: start with them.
    tile = pl.num_programs(1) - 1 - pl.program_id(1)
    num_cached = jnp.minimum(num_cached_ref[batch], cache_key_ref.shape[2])
    cache, new = (cache_key_ref, cache_value_ref), (key_ref, value_ref)
    scale = head_dim**-0.5 * LOG2_E
    column = jnp.arange(head_dim, dtype=jnp.int32)[None]
    row = (tile * tiles.rows + jnp.arange(tiles.rows, dtype=jnp.int32))[:, None]
    query_index = (batch, row, head, group, column)
    query = plt.load(query_ref.at[query_index], mask=row < num_rows, other=0)

    def add_tile(i, state, refs, limit=None, is_causal=False):
        """Add a tile of keys; those from ``limit`` on are not there."""
        best, total, out = state
        slot = i * tiles.keys + jnp.arange(tiles.keys, dtype=jnp.int32)
        index = (batch, head, slot[:, None], column)
        mask = None if limit is None else (slot < limit)[:, None]
        other = None if limit is None else 0
        key, value = (plt.load(ref.at[index], mask=mask, other=other) for ref in refs)
        scores = product(query, key, precision, (1, 1))
        if limit is not None:
            visible = (slot < limit)[None]
            visible = visible & (slot[None] <= row) if is_causal else visible
            scores = jnp.where(visible, scores, -jnp.inf)
        new_best = jnp.maximum(best, jnp.max(scores, axis=1) * scale)
        weights = jnp.exp2(scores * scale - new_best[:, None])
        decay = jnp.exp2(best - new_best)
        total = total * decay + jnp.sum(weights, axis=1)
        weights = weights.astype(value.dtype)
        return new_best, total, out * decay[:, None] + product(weights, value, precision, (1, 0))

    state = (
        jnp.full((tiles.rows,), -jnp.inf, jnp.float32),
        jnp.zeros((tiles.rows,), jnp.float32),
        jnp.zeros((tiles.rows, head_dim), jnp.float32),
    )
    # The first tile shows every row a key, so that no maximum stays -inf.
    num_full = jax.lax.div(num_cached, jnp.int32(tiles.keys))
    state = jax.lax.fori_loop(0, num_full, partial(add_tile, refs=cache), state)
    num_tiles = pl.cdiv(num_cached, tiles.keys)
    step = partial(add_tile, refs=cache, limit=num_cached)
    state = jax.lax.fori_loop(num_full, num_tiles, step, state)
    num_seen = jax.lax.div(tile * tiles.rows, jnp.int32(tiles.keys))
    state = jax.lax.fori_loop(0, num_seen, partial(add_tile, refs=new), state)
    num_tiles = pl.cdiv(jnp.minimum((tile + 1) * tiles.rows, num_rows), tiles.keys)
    step = partial(add_tile, refs=new, limit=num_rows, is_causal=True)
    _, total, out = jax.lax.fori_loop(num_seen, num_tiles, step, state)
    out = (out / total[:, None]).astype(out_ref.dtype)
    plt.store(out_ref.at[query_index], out, mask=row < num_rows)


def prefill(query, key, value, cache_key, cache_value, num_cached, *, tiles: Tiles, interpret):
    """Attend to cache and block from queries and keys that are normed and rotated."""
    batch_size, num_rows, kv_heads, groups, _ = query.shape
    return pl.pallas_call(
        partial(_prefill_kernel, tiles=tiles, precision=precision_of(query)),
        out_shape=jax.ShapeDtypeStruct(query.shape, query.dtype),
        grid=(batch_size * kv_heads * groups, pl.cdiv(num_rows, tiles.rows)),
        compiler_params=plt.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
    )(query, key, value, cache_key, cache_value, num_cached)
