"""Pallas Triton form of write_rows: one launch for all caches.

A scatter per cache costs a launch each, 72 in a model of 36 layers, for some kilobytes. Here
every program takes the same rows of a few caches; which ones is a branch, since arrays are
separate arguments.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Float, Int

# Caches of one launch: three pointers each, of at most 512 in CUDA's 4 KB of arguments.
MAX_CACHES = 128
# Caches of one program, whose loads are all in flight at once, and rows of one program.
GROUP = 8
TILE = 32
NUM_WARPS = 4


def _write_rows_kernel(*refs, num_caches, group, tile, num_written, has_row_index):
    # The first refs are the caches as inputs: the same memory as the outputs.
    row_refs = refs[num_caches : 2 * num_caches]
    cache_refs = refs[-num_caches:]
    slot_ref, *index_refs = refs[2 * num_caches : -num_caches]
    part, head = pl.program_id(0), pl.program_id(1)
    _, kv_heads, capacity, head_dim = cache_refs[0].shape
    num_rows = row_refs[0].shape[2]
    batch, head = jax.lax.div(head, jnp.int32(kv_heads)), jax.lax.rem(head, jnp.int32(kv_heads))
    j = pl.program_id(2) * tile + jnp.arange(tile, dtype=jnp.int32)
    slot = plt.load(slot_ref.at[batch, j], mask=j < num_written, other=-1)
    row = j
    if has_row_index:
        row = plt.load(index_refs[0].at[batch, j], mask=j < num_written, other=0)
        row = jnp.minimum(jnp.maximum(row, 0), num_rows - 1)
    row, slot = row[:, None], slot[:, None]
    column = jnp.arange(head_dim, dtype=jnp.int32)[None]
    mask = (slot >= 0) & (slot < capacity) & (column >= 0)
    # Interpreted, a masked store writes back what it finds, at -1 that of the last slot.
    slot = jnp.where(slot < 0, capacity, slot)

    def write(first):
        members = range(first, min(first + group, num_caches))
        values = [
            plt.load(row_refs[i].at[batch, head, row, column], mask=mask, other=0) for i in members
        ]
        for i, value in zip(members, values, strict=True):
            value = value.astype(cache_refs[i].dtype)
            plt.store(cache_refs[i].at[batch, head, slot, column], value, mask=mask)

    for index, first in enumerate(range(0, num_caches, group)):
        pl.when(part == index)(partial(write, first))


def write_rows(
    caches: tuple[Float[Array, "B K S H"], ...],
    rows: tuple[Float[Array, "B K T H"], ...],
    slots: Int[Array, "B W"],
    row_index: Int[Array, "B W"] | None,
    *,
    interpret: bool = False,
    group: int = GROUP,
    tile: int = TILE,
    num_warps: int = NUM_WARPS,
) -> tuple[Float[Array, "B K S H"], ...]:
    """Copy rows to their slots, as ``pallas_kernels.write_rows``.

    Raises:
        NotImplementedError: The head width is no power of two, or an array is so large that
            offsets overflow 32 bits.
    """
    batch, kv_heads, _, head_dim = caches[0].shape
    if head_dim != pl.next_power_of_2(head_dim):
        raise NotImplementedError(f"head width {head_dim} is no power of two")
    size = max(caches[0].size, rows[0].size)
    if size >= 2**31:
        raise NotImplementedError(f"an array of {size} elements overflows 32-bit offsets")
    num_written = slots.shape[1]
    tile = min(tile, pl.next_power_of_2(num_written))
    indices = (slots,) if row_index is None else (slots, row_index)
    written: list[Array] = []
    for start in range(0, len(caches), MAX_CACHES):
        targets = caches[start : start + MAX_CACHES]
        kernel = partial(
            _write_rows_kernel,
            num_caches=len(targets),
            group=group,
            tile=tile,
            num_written=num_written,
            has_row_index=row_index is not None,
        )
        written += pl.pallas_call(
            kernel,
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in targets],
            grid=(pl.cdiv(len(targets), group), batch * kv_heads, pl.cdiv(num_written, tile)),
            input_output_aliases={i: i for i in range(len(targets))},
            compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=1),
            interpret=interpret,
        )(*targets, *rows[start : start + MAX_CACHES], *indices)
    return tuple(written)
