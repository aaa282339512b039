"""Pallas Triton form of attention for a block of many rows.

Two launches. The first norms and rotates the block's queries and keys. In the second a program
takes some query rows and walks tiles of the keys that they see.

A wide block is one of a decoding step: a program has all heads of a group, the keys are split among
programs, and the last one to arrive combines their results. Tiles begin at multiples of their size
in the text, so that a row of a block that continues the text has the same bits at any place in a
block of this width. In prefill there are enough rows to keep a GPU busy without splits: a program
has one head, and the block's keys have tiles of their own, of which most need no mask.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.attention.reference import mask_array, precision_of
from pallas_kernels.attention.tile import LOG2_E, Tiles, norm_rotate_halves, product

# Rows of the block that a program of the first launch takes, and its warps.
SPLIT_ROWS, SPLIT_WARPS = 32, 4
# Splits that are combined at a time.
COMBINED_SPLITS = 2


class _Block(NamedTuple):
    """Static arguments of a call."""

    row_tile: int
    key_tile: int
    num_splits: int
    is_prefill: bool
    has_mask: bool
    scale: float
    precision: jax.lax.Precision
    interpret: bool


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
        return norm_rotate_halves(halves, [norm_ref[c] for c in columns], *tables, eps)

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


def _split_qkv(qkv, cos, sin, q_norm, k_norm, *, eps, interpret):
    """Return the block's queries and keys, normed and rotated, and its values."""
    batch_size, num_rows, kv_heads, heads, head_dim = qkv.shape
    rows = min(pl.next_power_of_2(num_rows), SPLIT_ROWS)
    kv = jax.ShapeDtypeStruct((batch_size, kv_heads, num_rows, head_dim), qkv.dtype)
    query_shape = (batch_size, num_rows, kv_heads, heads - 2, head_dim)
    return pl.pallas_call(
        partial(_split_qkv_kernel, rows=rows, eps=eps),
        out_shape=(jax.ShapeDtypeStruct(query_shape, qkv.dtype), kv, kv),
        grid=(pl.cdiv(num_rows, rows), heads, batch_size * kv_heads),
        compiler_params=plt.CompilerParams(num_warps=SPLIT_WARPS, num_stages=1),
        interpret=interpret,
    )(qkv, cos, sin, q_norm, k_norm)


def _long_attention_kernel(
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
    first_head = pl.program_id(0) * (1 if block.is_prefill else groups)
    batch = jax.lax.div(first_head, jnp.int32(kv_heads * groups))
    head = jax.lax.rem(jax.lax.div(first_head, jnp.int32(groups)), jnp.int32(kv_heads))
    split = pl.program_id(1)
    # The last rows see most keys: start with them.
    tile = pl.num_programs(2) - 1 - pl.program_id(2)
    unit = pl.program_id(0) * pl.num_programs(2) + tile
    num_cached = jnp.minimum(num_cached_ref[batch], cache_key_ref.shape[2])
    num_full = jax.lax.div(num_cached, jnp.int32(block.key_tile))
    cache, new = (cache_key_ref, cache_value_ref), (key_ref, value_ref)

    column = jnp.arange(head_dim, dtype=jnp.int32)[None]
    query_row = tile * block.row_tile + jnp.arange(block.row_tile, dtype=jnp.int32)
    if block.is_prefill:
        row, group = query_row[:, None], jax.lax.rem(first_head, jnp.int32(groups))
    else:
        # The block's rows, each with its G heads.
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
        if block.is_prefill:
            # Every row sees a key of its first tile: no maximum stays -inf. It is a scaled one.
            new_best = jnp.maximum(best, jnp.max(scores, axis=1) * block.scale)
            weights = jnp.exp2(scores * block.scale - new_best[:, None])
            decay = jnp.exp2(best - new_best)
        else:
            new_best = jnp.maximum(best, jnp.max(scores, axis=1))
            # Rows that have seen no key yet.
            base = jnp.where(new_best == -jnp.inf, 0.0, new_best)
            # Scaled after the difference: nothing here can be contracted in two ways, so that all
            # kinds of tiles round alike.
            weights = jnp.exp2((scores - base[:, None]) * block.scale)
            decay = jnp.exp2((best - base) * block.scale)
        total = total * decay + jnp.sum(weights, axis=1)
        weights = weights.astype(value.dtype)
        out = out * decay[:, None] + product(weights, value, block.precision, (1, 0))
        return new_best, total, out

    def full_tile(i, state, refs, first=0, stride=1):
        """Add a tile that every row sees whole."""
        return accumulate(state, *load(refs, slots_of(first + i * stride)))

    def last_cached_tile(i, state):
        """Add the tile where the cache ends."""
        is_cached = slots_of(i) < num_cached
        return accumulate(state, *load(cache, slots_of(i), is_cached), is_cached[None])

    def causal_tile(i, state):
        """Add a tile of the block with its diagonal."""
        slot = slots_of(i)
        is_row = slot < num_rows
        visible = is_row[None] & (slot[None] <= row)
        return accumulate(state, *load(new, slot, is_row), visible)

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

    if block.is_prefill:
        state = jax.lax.fori_loop(0, num_full, partial(full_tile, refs=cache), state)
        num_tiles = pl.cdiv(num_cached, block.key_tile)
        state = jax.lax.fori_loop(num_full, num_tiles, last_cached_tile, state)
        num_full = jax.lax.div(tile * block.row_tile + 1, jnp.int32(block.key_tile))
        state = jax.lax.fori_loop(0, num_full, partial(full_tile, refs=new), state)
        num_tiles = pl.cdiv(jnp.minimum((tile + 1) * block.row_tile, num_rows), block.key_tile)
        _, total, out = jax.lax.fori_loop(num_full, num_tiles, causal_tile, state)
        store(total, out)
        return

    # Position of the block's first row: a block with a mask starts at a tile.
    start = num_cached
    if block.has_mask:
        start = pl.cdiv(num_cached, block.key_tile) * block.key_tile
    num_tiles = pl.cdiv(start + num_rows, block.key_tile)
    num_active = jnp.minimum(num_tiles, block.num_splits)

    def attend():
        step = partial(full_tile, refs=cache, first=split, stride=block.num_splits)
        num_mine = pl.cdiv(jnp.maximum(num_full - split, 0), block.num_splits)
        full = jax.lax.fori_loop(0, num_mine, step, state)
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


def long_attention(
    qkv,
    cos,
    sin,
    q_norm,
    k_norm,
    cache_key,
    cache_value,
    num_cached,
    counters,
    *,
    mask: bytes | None,
    eps: float,
    tiles: Tiles,
    num_splits: int,
    is_prefill: bool,
    interpret: bool,
):
    """Attend to cache and block, as ``pallas_kernels.block_attention``; counters are not None."""
    query, key, value = _split_qkv(qkv, cos, sin, q_norm, k_norm, eps=eps, interpret=interpret)
    batch_size, num_rows, kv_heads, groups, head_dim = query.shape
    # Query heads of a program.
    packed = 1 if is_prefill else groups
    num_tiles = pl.cdiv(num_rows * packed, tiles.rows)
    block = _Block(
        row_tile=tiles.rows,
        key_tile=tiles.keys,
        num_splits=num_splits,
        is_prefill=is_prefill,
        has_mask=mask is not None,
        scale=head_dim**-0.5 * LOG2_E,
        precision=precision_of(query),
        interpret=interpret,
    )
    parts = (batch_size * kv_heads * num_tiles, num_splits, tiles.rows)
    parts = (1, 1, 1) if num_splits == 1 else parts
    out, *_, counters = pl.pallas_call(
        partial(_long_attention_kernel, block=block),
        out_shape=(
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct(parts, jnp.float32),
            jax.ShapeDtypeStruct(parts, jnp.float32),
            jax.ShapeDtypeStruct((*parts, head_dim), jnp.float32),
            jax.ShapeDtypeStruct(counters.shape, jnp.int32),
        ),
        grid=(batch_size * kv_heads * groups // packed, num_splits, num_tiles),
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
    return out, key, value, counters
