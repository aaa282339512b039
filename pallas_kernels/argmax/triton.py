"""Pallas Triton form of the argmax ops: one program per part of a row, then one per row."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Float, Int

from pallas_kernels.argmax.reference import (
    INVALID_INDEX,
    INVALID_KEY,
    block_size,
    key_value,
    sort_key,
)

# Warps of a program by the columns of its part, fastest on an H200; 1 for parts that are small.
NUM_WARPS = {2048: 4, 4096: 2}
REDUCE_NUM_WARPS = 1


def best(key, index):
    """Reduce the last axis to the largest key and the lowest index that has it, as a kernel can."""
    best_key = jnp.max(key, axis=-1)
    best_index = jnp.min(jnp.where(key == best_key[..., None], index, INVALID_INDEX), axis=-1)
    return best_key, jnp.where(best_key == INVALID_KEY, INVALID_INDEX, best_index)


def _argmax_partial_kernel(
    logits_ref, offset_ref, value_ref, index_ref, *, block, num_columns, num_valid
):
    part, row = pl.program_id(0), pl.program_id(1)
    column = part * block + jnp.arange(block, dtype=jnp.int32)
    index = offset_ref[0] + column
    valid = column < num_columns
    # An invalid id is not even loaded.
    if num_valid is not None:
        valid = valid & (index < num_valid)
    logits = plt.load(logits_ref.at[row, column], mask=valid, other=0)
    best_key, best_index = best(jnp.where(valid, sort_key(logits), INVALID_KEY), index)
    value_ref[row, part] = key_value(best_key)
    index_ref[row, part] = best_index


def _argmax_reduce_kernel(value_ref, index_ref, out_ref, *, num_parts):
    row = pl.program_id(0)
    part = jnp.arange(pl.next_power_of_2(num_parts), dtype=jnp.int32)
    mask = part < num_parts
    value = plt.load(value_ref.at[row, part], mask=mask, other=0)
    index = plt.load(index_ref.at[row, part], mask=mask, other=INVALID_INDEX)
    out_ref[row] = best(jnp.where(mask, sort_key(value), INVALID_KEY), index)[1]


def argmax_partial(
    logits: Float[Array, "R V"],
    index_offset: Int[Array, ""],
    *,
    num_valid: int | None,
    interpret: bool = False,
    block: int | None = None,
    num_warps: int | None = None,
) -> tuple[Float[Array, "R Q"], Int[Array, "R Q"]]:
    """Find the best id of each part of every row, as ``pallas_kernels.argmax_partial``."""
    num_rows, num_columns = logits.shape
    block = block or block_size(num_rows, num_columns)
    num_parts = pl.cdiv(num_columns, block)
    num_warps = num_warps or NUM_WARPS.get(block, 1)
    return pl.pallas_call(
        partial(_argmax_partial_kernel, block=block, num_columns=num_columns, num_valid=num_valid),
        out_shape=(
            jax.ShapeDtypeStruct((num_rows, num_parts), jnp.float32),
            jax.ShapeDtypeStruct((num_rows, num_parts), jnp.int32),
        ),
        grid=(num_parts, num_rows),
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
    )(logits, index_offset.reshape(1))


def argmax_reduce(
    values: Float[Array, "R Q"],
    indices: Int[Array, "R Q"],
    *,
    interpret: bool = False,
    num_warps: int = REDUCE_NUM_WARPS,
) -> Int[Array, "R"]:
    """Pick the id of the best partial result, as ``pallas_kernels.argmax_reduce``."""
    num_rows, num_parts = values.shape
    return pl.pallas_call(
        partial(_argmax_reduce_kernel, num_parts=num_parts),
        out_shape=jax.ShapeDtypeStruct((num_rows,), jnp.int32),
        grid=(num_rows,),
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
    )(values, indices)


def argmax(
    logits: Float[Array, "R V"],
    *,
    num_valid: int | None,
    interpret: bool = False,
    block: int | None = None,
    num_warps: int | None = None,
) -> Int[Array, "R"]:
    """Pick the best id of each row, as ``pallas_kernels.argmax``."""
    values, indices = argmax_partial(
        logits,
        jnp.zeros((), jnp.int32),
        num_valid=num_valid,
        interpret=interpret,
        block=block,
        num_warps=num_warps,
    )
    if values.shape[1] == 1:
        return indices[:, 0]
    return argmax_reduce(values, indices, interpret=interpret)
