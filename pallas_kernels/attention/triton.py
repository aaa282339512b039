"""Pallas Triton form of block_attention.

Blocks of a few rows are one launch: programs split the keys of a kv head among them
(flash-decoding), and the last one to arrive combines their partial results. Keys fall into tiles by
their position in the text, cached or not, and tiles into splits, so that of blocks that continue
the text a row's result has the same bits whatever block it is part of (in a batch of the same
size), and only tiles with live keys cost anything. Blocks of more rows are normed by ``split_qkv``;
then ``wide`` attends for those of a decoding step, ``prefill`` for prompts.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Float, Int

from pallas_kernels.attention.prefill.triton import prefill
from pallas_kernels.attention.reference import mask_array, precision_of
from pallas_kernels.attention.split_qkv.triton import split_qkv
from pallas_kernels.attention.tile import (
    LOG2_E,
    NARROW_ROWS,
    NORMED_ENTRIES,
    PREFILL_ROWS,
    Tiles,
    accumulate,
    norm_rotate,
    product,
    tiles_for,
)
from pallas_kernels.attention.wide.triton import wide_attention
from pallas_kernels.device import require_hopper

# Programs that fill the device once, and the most parts to split the keys of one into.
NUM_PROGRAMS, MAX_SPLITS = 128, 32
# Splits that are combined at a time.
COMBINED_SPLITS = 4


class _Block(NamedTuple):
    """Static arguments of a decoding call."""

    num_rows: int
    kv_heads: int
    groups: int
    head_dim: int
    row_tile: int
    key_tile: int
    num_splits: int
    has_mask: bool
    eps: float
    precision: jax.lax.Precision
    interpret: bool

    @property
    def scale(self) -> float:
        """Factor of the scores, for powers of two."""
        return self.head_dim**-0.5 * LOG2_E


def _attention_kernel(
    qkv_ref,
    cos_ref,
    sin_ref,
    q_norm_ref,
    k_norm_ref,
    cache_key_ref,
    cache_value_ref,
    num_cached_ref,
    mask_ref,
    _,
    out_ref,
    key_ref,
    value_ref,
    best_ref,
    total_ref,
    part_ref,
    counter_ref,
    *,
    block,
):
    tile, split, program = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    batch = jax.lax.div(program, jnp.int32(block.kv_heads))
    head = jax.lax.rem(program, jnp.int32(block.kv_heads))
    unit = program * pl.num_programs(0) + tile
    num_cached = jnp.minimum(num_cached_ref[batch], cache_key_ref.shape[2])
    num_full = jax.lax.div(num_cached, jnp.int32(block.key_tile))
    # Position of the block's first row: a block with a mask starts at a tile.
    start = num_cached
    if block.has_mask:
        start = pl.cdiv(num_cached, block.key_tile) * block.key_tile
    num_tiles = pl.cdiv(start + block.num_rows, block.key_tile)
    num_active = jnp.minimum(num_tiles, block.num_splits)

    column = jnp.arange(block.head_dim, dtype=jnp.int32)[None]
    half = block.head_dim // 2
    other = jnp.where(column < half, column + half, column - half)
    angle = jnp.where(column < half, column, column - half)

    def row_and_group(query_row):
        """Query rows are the block's rows, each with its G heads."""
        groups = jnp.full(query_row.shape, block.groups, jnp.int32)
        return jax.lax.div(query_row, groups), jax.lax.rem(query_row, groups)

    def load_heads(row, x, mask):
        """Load heads x of the block, the partners of their entries, cosines and sines."""
        heads = [
            plt.load(qkv_ref.at[batch, row, head, x, c], mask=mask, other=0)
            for c in (column, other)
        ]
        tables = (cos_ref, sin_ref)
        return heads + [plt.load(x.at[batch, row, angle], mask=mask, other=0) for x in tables]

    def attend():
        query_row = tile * block.row_tile + jnp.arange(block.row_tile, dtype=jnp.int32)
        row, group = row_and_group(query_row)
        is_query = row < block.num_rows
        parts = load_heads(row[:, None], group[:, None], is_query[:, None])

        def write_keys():
            """Norm and rotate the block's keys, and write them and their values."""
            num_rows = max(pl.next_power_of_2(block.num_rows), NORMED_ENTRIES // block.head_dim)
            row = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
            mask = row < block.num_rows
            key = norm_rotate(*load_heads(row, block.groups, mask), k_norm_ref, block.eps)
            index = (batch, row, head, block.groups + 1, column)
            value = plt.load(qkv_ref.at[index], mask=mask, other=0)
            for ref, part in ((key_ref, key), (value_ref, value)):
                plt.store(ref.at[batch, head, row, column], part, mask=mask)

        # Every program that reads the block's keys writes them first, all of them the same bits.
        # It does so at once, so that its loads wait for memory together with the queries'.
        num_mine = pl.cdiv(jnp.maximum(num_full - split, 0), block.num_splits)
        first = split + num_mine * block.num_splits

        def load_cached(key_tile):
            """Load what is cached of a tile, 0 elsewhere."""
            slot = key_tile * block.key_tile + jnp.arange(block.key_tile, dtype=jnp.int32)[:, None]
            refs = (cache_key_ref, cache_value_ref)
            index = (batch, head, slot, column)
            return [plt.load(ref.at[index], mask=slot < num_cached, other=0) for ref in refs]

        cached = load_cached(first)

        pl.when(first < num_tiles)(write_keys)

        query = norm_rotate(*parts, q_norm_ref, block.eps)
        if not block.interpret:
            plt.debug_barrier()

        def full_tile(i, state):
            """Add a tile of cached keys."""
            slot = (split + i * block.num_splits) * block.key_tile
            slot = (slot + jnp.arange(block.key_tile, dtype=jnp.int32))[:, None]
            key = cache_key_ref[batch, head, slot, column]
            value = cache_value_ref[batch, head, slot, column]
            scores = product(key, query, block.precision, (1, 1))
            return accumulate(state, scores, value, block.scale, block.precision)

        def mixed_tile(key_tile, cached, state):
            """Add a tile with keys of the block, read back from what was written."""
            slot = key_tile * block.key_tile + jnp.arange(block.key_tile, dtype=jnp.int32)
            slot = slot[:, None]
            is_cached = slot < num_cached
            key_row = slot - start
            is_row = (key_row >= 0) & (key_row < block.num_rows)
            index = (batch, head, key_row, column)
            key, value = (
                jnp.where(is_row, plt.load(ref.at[index], mask=is_row, other=0), part)
                for ref, part in zip((key_ref, value_ref), cached, strict=True)
            )
            if block.has_mask:
                mask = is_query[None] & is_row
                visible = plt.load(mask_ref.at[row[None], key_row], mask=mask, other=0) != 0
            else:
                visible = is_row & (key_row <= row[None])
            scores = product(key, query, block.precision, (1, 1))
            scores = jnp.where(is_cached | visible, scores, -jnp.inf)
            return accumulate(state, scores, value, block.scale, block.precision)

        state = (
            jnp.full((block.row_tile,), -jnp.inf, jnp.float32),
            jnp.zeros((block.key_tile, block.row_tile), jnp.float32),
            jnp.zeros((block.head_dim, block.row_tile), jnp.float32),
        )
        state = jax.lax.fori_loop(0, num_mine, full_tile, state)
        state = jax.lax.cond(
            first < num_tiles, partial(mixed_tile, first, cached), lambda state: state, state
        )

        def next_tile(carry):
            key_tile, state = carry
            state = mixed_tile(key_tile, load_cached(key_tile), state)
            return key_tile + block.num_splits, state

        carry = (first + block.num_splits, state)
        _, state = jax.lax.while_loop(lambda carry: carry[0] < num_tiles, next_tile, carry)
        best, total, out = state
        return query_row, best, jnp.sum(total, axis=0), out

    def write(query_row, total, out):
        row, group = row_and_group(query_row)
        # A row that sees no key has no weights either, and gives 0.
        total = jnp.where(total == 0, 1.0, total)
        out = (out / total[None]).astype(out_ref.dtype).T
        index = (batch, row[:, None], head, group[:, None], column)
        plt.store(out_ref.at[index], out, mask=(row < block.num_rows)[:, None])

    # Volatile loads pass by L1, which does not see what other multiprocessors wrote.
    load = partial(plt.load, volatile=True)

    def load_splits(i):
        """Load the results of a few splits; their loads wait for memory together."""
        tile_row = jnp.arange(block.row_tile, dtype=jnp.int32)
        parts = []
        for k in range(COMBINED_SPLITS):
            index = i * COMBINED_SPLITS + k
            mask = jnp.broadcast_to(index < num_active, tile_row.shape)
            best = load(best_ref.at[unit, index, tile_row], mask=mask, other=-jnp.inf)
            total = load(total_ref.at[unit, index, tile_row], mask=mask, other=0)
            index = (unit, index, column.reshape(-1, 1), tile_row[None])
            parts.append((best, total, load(part_ref.at[index], mask=mask[None], other=0)))
        return parts

    def combine(query_row):
        """Combine the splits' results, in the order of the splits."""
        tile_row = jnp.arange(block.row_tile, dtype=jnp.int32)
        index = (unit, jnp.arange(block.num_splits, dtype=jnp.int32)[:, None], tile_row[None])
        mask = index[1] < num_active
        bests = load(best_ref.at[index], mask=mask, other=-jnp.inf)
        first = load_splits(0)
        best = jnp.max(bests, axis=0)
        best = jnp.where(best == -jnp.inf, 0.0, best)

        def add(sums, parts):
            total, out = sums
            for own, own_total, part in parts:
                weight = jnp.exp2((own - best) * block.scale)
                total, out = total + own_total * weight, out + part * weight[None]
            return total, out

        zeros = jnp.zeros((block.head_dim, block.row_tile), jnp.float32)
        sums = add((jnp.zeros_like(best), zeros), first)
        num_rounds = pl.cdiv(num_active, COMBINED_SPLITS)
        step = lambda i, sums: add(sums, load_splits(i))  # noqa: E731
        write(query_row, *jax.lax.fori_loop(1, num_rounds, step, sums))

    @pl.when(split < num_active)
    def _():
        query_row, best, total, out = attend()

        @pl.when(num_active == 1)
        def _():
            write(query_row, total, out)

        @pl.when(num_active > 1)
        def _():
            tile_row = jnp.arange(block.row_tile, dtype=jnp.int32)
            best_ref[unit, split, tile_row] = best
            total_ref[unit, split, tile_row] = total
            part_ref[unit, split, column.reshape(-1, 1), tile_row[None]] = out
            # Every thread's stores come before the arrival.
            if not block.interpret:
                plt.debug_barrier()
            num_arrived = plt.atomic_add(counter_ref, (unit,), jnp.int32(1))

            @pl.when(num_arrived == num_active - 1)
            def _():
                counter_ref[unit] = jnp.int32(0)
                combine(query_row)


def block_attention(
    qkv: Float[Array, "B T K X H"],
    cos: Float[Array, "B T H2"],
    sin: Float[Array, "B T H2"],
    q_norm: Float[Array, "H"],
    k_norm: Float[Array, "H"],
    cache_key: Float[Array, "B K S H"] | None,
    cache_value: Float[Array, "B K S H"] | None,
    num_cached: Int[Array, "B"],
    counters: Int[Array, "N"] | None = None,
    *,
    mask: bytes | None,
    eps: float,
    interpret: bool = False,
    row_tile: int | None = None,
    key_tile: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
) -> tuple[
    Float[Array, "B T K G H"],
    Float[Array, "B K T H"],
    Float[Array, "B K T H"],
    Int[Array, "N"] | None,
]:
    """Attend to cache and block, as ``pallas_kernels.block_attention``.

    Raises:
        NotImplementedError: The head width is not 32, 64 or 128, or the GPU is older than Hopper.
    """
    require_hopper(interpret)
    batch_size, num_rows, kv_heads, heads, head_dim = qkv.shape
    if head_dim not in (32, 64, 128):
        raise NotImplementedError(f"a head width of {head_dim} is not 32, 64 or 128")
    if cache_key is None or cache_value is None:
        cache_key = cache_value = jnp.zeros((batch_size, kv_heads, 1, head_dim), qkv.dtype)
        num_cached = jnp.zeros_like(num_cached)
    num_query_rows = num_rows * (heads - 2)
    is_prefill = num_rows > PREFILL_ROWS and mask is None
    capacity = cache_key.shape[2]
    tiles = tiles_for(
        num_rows, num_query_rows, head_dim, capacity, qkv.dtype, is_prefill=is_prefill
    )
    tiles = Tiles(
        row_tile or tiles.rows,
        key_tile or tiles.keys,
        num_warps or tiles.num_warps,
        num_stages or tiles.num_stages,
    )
    num_tiles = pl.cdiv(num_query_rows, tiles.rows)
    num_units = batch_size * kv_heads * num_tiles
    # Not by the rows of a narrow block: the splits decide its bits.
    num_programs = num_units if num_rows > NARROW_ROWS else batch_size * kv_heads
    num_splits = min(max(NUM_PROGRAMS // num_programs, 1), MAX_SPLITS)
    num_splits = 1 << (num_splits.bit_length() - 1)
    own_counters = jnp.zeros((num_units,), jnp.int32) if counters is None else counters
    if num_rows > NARROW_ROWS:
        query, key, value = split_qkv(qkv, cos, sin, q_norm, k_norm, eps=eps, interpret=interpret)
        arrays = (query, key, value, cache_key, cache_value, num_cached)
        if is_prefill:
            return prefill(*arrays, tiles=tiles, interpret=interpret), key, value, counters
        out, own_counters = wide_attention(
            *arrays,
            own_counters,
            mask=mask,
            tiles=tiles,
            num_splits=num_splits,
            interpret=interpret,
        )
        return out, key, value, None if counters is None else own_counters
    block = _Block(
        num_rows=num_rows,
        kv_heads=kv_heads,
        groups=heads - 2,
        head_dim=head_dim,
        row_tile=tiles.rows,
        key_tile=tiles.keys,
        num_splits=num_splits,
        has_mask=mask is not None,
        eps=eps,
        precision=precision_of(qkv),
        interpret=interpret,
    )
    parts = (num_units, num_splits, tiles.rows)
    kv = jax.ShapeDtypeStruct((batch_size, kv_heads, num_rows, head_dim), qkv.dtype)
    out, key, value, *_, own_counters = pl.pallas_call(
        partial(_attention_kernel, block=block),
        out_shape=(
            jax.ShapeDtypeStruct((batch_size, num_rows, kv_heads, heads - 2, head_dim), qkv.dtype),
            kv,
            kv,
            jax.ShapeDtypeStruct(parts, jnp.float32),
            jax.ShapeDtypeStruct(parts, jnp.float32),
            jax.ShapeDtypeStruct((*parts[:2], head_dim, parts[2]), jnp.float32),
            jax.ShapeDtypeStruct(own_counters.shape, jnp.int32),
        ),
        grid=(num_tiles, num_splits, batch_size * kv_heads),
        input_output_aliases={9: 6},
        compiler_params=plt.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
    )(
        qkv,
        cos,
        sin,
        q_norm,
        k_norm,
        cache_key,
        cache_value,
        num_cached,
        jnp.asarray(mask_array(num_rows, mask) if mask else [[0]], jnp.int8),
        own_counters,
    )
    return out, key, value, None if counters is None else own_counters
