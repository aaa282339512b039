"""Pallas Triton form of attention for a block of more than a few rows, of one decoding step.

A program takes query rows of all heads of a group and walks tiles of the keys that they see. The
keys are split among programs, and the last one to arrive combines their results. Tiles begin at
multiples of their size in the text, so that a row of a block that continues the text has the same
bits at any place in a block of this width (in a batch and a cache of the same size).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.attention.reference import mask_array, precision_of
from pallas_kernels.attention.tile import LOG2_E, Tiles, product

# Splits that are combined at a time.
COMBINED_SPLITS = 2


class _Block(NamedTuple):
    """Static arguments of a call."""

    row_tile: int
    key_tile: int
    num_splits: int
    has_mask: bool
    scale: float
    precision: jax.lax.Precision
    interpret: bool


def _wide_attention_kernel(
    query_ref,
    key_ref,
    value_ref,
    cache_key_ref,
    cache_value_ref,
    num_cached_ref,
    mask_ref,
    _,
    out_ref,
    best_ref,
    total_ref,
    part_ref,
    counter_ref,
    *,
    block,
):
    _, num_rows, kv_heads, groups, head_dim = query_ref.shape
    batch = jax.lax.div(pl.program_id(0), jnp.int32(kv_heads))
    head = jax.lax.rem(pl.program_id(0), jnp.int32(kv_heads))
    split, tile = pl.program_id(1), pl.program_id(2)
    unit = pl.program_id(0) * pl.num_programs(2) + tile
    num_cached = jnp.minimum(num_cached_ref[batch], cache_key_ref.shape[2])
    num_full = jax.lax.div(num_cached, jnp.int32(block.key_tile))
    cache, new = (cache_key_ref, cache_value_ref), (key_ref, value_ref)

    column = jnp.arange(head_dim, dtype=jnp.int32)[None]
    # Query rows are the block's rows, each with its G heads.
    query_row = tile * block.row_tile + jnp.arange(block.row_tile, dtype=jnp.int32)
    row = jax.lax.div(query_row, jnp.full_like(query_row, groups))[:, None]
    group = jax.lax.rem(query_row, jnp.full_like(query_row, groups))[:, None]
    query_index = (batch, row, head, group, column)
    is_query = row < num_rows

    def slots_of(key_tile):
        return key_tile * block.key_tile + jnp.arange(block.key_tile, dtype=jnp.int32)

    def load(refs, slot, mask=None):
        """Load keys and values, 0 where they are masked."""
        index, other = (batch, head, slot[:, None], column), None if mask is None else 0
        mask = None if mask is None else mask[:, None]
        return [plt.load(ref.at[index], mask=mask, other=other) for ref in refs]

    def accumulate(state, key, value, visible=None):
        """Add a tile of keys to a running softmax."""
        best, total, out = state
        scores = product(query, key, block.precision, (1, 1))
        if visible is not None:
            scores = jnp.where(visible, scores, -jnp.inf)
        new_best = jnp.maximum(best, jnp.max(scores, axis=1))
        # Rows that have seen no key yet.
        base = jnp.where(new_best == -jnp.inf, 0.0, new_best)
        # Scaled after the difference: nothing here can be contracted in two ways, so that full and
        # mixed tiles round alike.
        weights = jnp.exp2((scores - base[:, None]) * block.scale)
        decay = jnp.exp2((best - base) * block.scale)
        total = total * decay + jnp.sum(weights, axis=1)
        weights = weights.astype(value.dtype)
        out = out * decay[:, None] + product(weights, value, block.precision, (1, 0))
        return new_best, total, out

    def full_tile(i, state):
        """Add a tile of cached keys."""
        return accumulate(state, *load(cache, slots_of(split + i * block.num_splits)))

    def mixed_tile(carry):
        """Add a tile of the text with some of the block's keys."""
        i, state = carry
        slot = slots_of(i)
        is_cached = slot < num_cached
        key_row = slot - start
        is_row = (key_row >= 0) & (key_row < num_rows)
        cached, own = load(cache, slot, is_cached), load(new, key_row, is_row)
        key, value = (jnp.where(is_row[:, None], y, x) for x, y in zip(cached, own, strict=True))
        if block.has_mask:
            mask = is_query & is_row[None]
            visible = plt.load(mask_ref.at[row, key_row[None]], mask=mask, other=0) != 0
        else:
            visible = is_row[None] & (key_row[None] <= row)
        return i + block.num_splits, accumulate(state, key, value, is_cached[None] | visible)

    query = plt.load(query_ref.at[query_index], mask=is_query, other=0)
    state = (
        jnp.full((block.row_tile,), -jnp.inf, jnp.float32),
        jnp.zeros((block.row_tile,), jnp.float32),
        jnp.zeros((block.row_tile, head_dim), jnp.float32),
    )

    def store(total, out):
        # A row that sees no key has no weights either, and gives 0.
        total = jnp.where(total == 0, 1.0, total)
        out = (out / total[:, None]).astype(out_ref.dtype)
        plt.store(out_ref.at[query_index], out, mask=is_query)

    # Position of the block's first row: a block with a mask starts at a tile.
    start = num_cached
    if block.has_mask:
        start = pl.cdiv(num_cached, block.key_tile) * block.key_tile
    num_tiles = pl.cdiv(start + num_rows, block.key_tile)
    num_active = jnp.minimum(num_tiles, block.num_splits)

    def attend():
        num_mine = pl.cdiv(jnp.maximum(num_full - split, 0), block.num_splits)
        full = jax.lax.fori_loop(0, num_mine, full_tile, state)
        carry = (split + num_mine * block.num_splits, full)
        return jax.lax.while_loop(lambda carry: carry[0] < num_tiles, mixed_tile, carry)[1]

    if block.num_splits == 1:
        store(*attend()[1:])
        return

    # Volatile loads pass by L1, which does not see what other multiprocessors wrote.
    load_part = partial(plt.load, volatile=True)
    tile_row = jnp.arange(block.row_tile, dtype=jnp.int32)

    def combine():
        """Combine the splits' results, in the order of the splits."""
        index = (unit, jnp.arange(block.num_splits, dtype=jnp.int32)[:, None], tile_row[None])
        mask = index[1] < num_active
        bests = load_part(best_ref.at[index], mask=mask, other=-jnp.inf)
        totals = load_part(total_ref.at[index], mask=mask, other=0)
        best = jnp.max(bests, axis=0)
        best = jnp.where(best == -jnp.inf, 0.0, best)
        total = jnp.sum(totals * jnp.exp2((bests - best[None]) * block.scale), axis=0)

        def add(i, out):
            parts = []
            for k in range(COMBINED_SPLITS):
                index = (unit, i * COMBINED_SPLITS + k, tile_row)
                mask = jnp.broadcast_to(index[1] < num_active, tile_row.shape)
                own = load_part(best_ref.at[index], mask=mask, other=-jnp.inf)
                index = (*index[:2], tile_row[:, None], column)
                part = load_part(part_ref.at[index], mask=mask[:, None], other=0)
                parts.append((own, part))
            for own, part in parts:
                out = out + part * jnp.exp2((own - best) * block.scale)[:, None]
            return out

        zeros = jnp.zeros((block.row_tile, head_dim), jnp.float32)
        store(total, jax.lax.fori_loop(0, pl.cdiv(num_active, COMBINED_SPLITS), add, zeros))

    @pl.when(split < num_active)
    def _():
        best, total, out = attend()
        best_ref[unit, split, tile_row] = best
        total_ref[unit, split, tile_row] = total
        part_ref[unit, split, tile_row[:, None], column] = out
        # Every thread's stores come before the arrival.
        if not block.interpret:
            plt.debug_barrier()
        num_arrived = plt.atomic_add(counter_ref, (unit,), jnp.int32(1))

        @pl.when(num_arrived == num_active - 1)
        def _():
            counter_ref[unit] = jnp.int32(0)
            combine()


def wide_attention(
    query,
    key,
    value,
    cache_key,
    cache_value,
    num_cached,
    counters,
    *,
    mask: bytes | None,
    tiles: Tiles,
    num_splits: int,
    interpret: bool,
):
    """Attend to cache and block from queries and keys that are normed and rotated.

    Returns:
        The output, and the counters.
    """
    batch_size, num_rows, kv_heads, groups, head_dim = query.shape
    num_tiles = pl.cdiv(num_rows * groups, tiles.rows)
    block = _Block(
        row_tile=tiles.rows,
        key_tile=tiles.keys,
        num_splits=num_splits,
        has_mask=mask is not None,
        scale=head_dim**-0.5 * LOG2_E,
        precision=precision_of(query),
        interpret=interpret,
    )
    parts = (batch_size * kv_heads * num_tiles, num_splits, tiles.rows)
    parts = (1, 1, 1) if num_splits == 1 else parts
    out, *_, counters = pl.pallas_call(
        partial(_wide_attention_kernel, block=block),
        out_shape=(
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct(parts, jnp.float32),
            jax.ShapeDtypeStruct(parts, jnp.float32),
            jax.ShapeDtypeStruct((*parts, head_dim), jnp.float32),
            jax.ShapeDtypeStruct(counters.shape, jnp.int32),
        ),
        grid=(batch_size * kv_heads, num_splits, num_tiles),
        input_output_aliases={7: 4},
        compiler_params=plt.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
    )(
        query,
        key,
        value,
        cache_key,
        cache_value,
        num_cached,
        jnp.asarray(mask_array(num_rows, mask) if mask else [[0]], jnp.int8),
        counters,
    )
    return out, counters
