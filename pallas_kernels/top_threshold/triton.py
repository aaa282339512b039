"""Pallas Triton form of top_threshold: one launch a pass over the logits.

A program sums its part of a row for every threshold that the pass tries. The parts are added, and
the next thresholds chosen, at the start of the next pass, by each of its programs for itself.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Float

from pallas_kernels.argmax.reference import key_value, sort_key
from pallas_kernels.top_threshold.reference import LOWEST, advance, weights_of

# Columns of a program, how many of them it has in registers at once, and bits that a pass finds:
# the fastest on an H200 at 8 rows of 151,936 among those in benchmarks/h200/top_threshold.log.
BLOCK, TILE, BITS, NUM_WARPS = 2048, 256, 3, 4


def _pass_kernel(
    logits_ref, largest_ref, least_ref, known_ref, total_ref, known_out_ref, total_out_ref,
    *, block, tile, bits, num_columns, num_parts, shift, last_shift, measure,
):  # fmt: skip
    part, row = pl.program_id(0), pl.program_id(1)
    digit = jnp.arange(2**bits, dtype=jnp.int32)
    known = known_ref[row]
    if last_shift is not None:
        index = jnp.arange(pl.next_power_of_2(num_parts), dtype=jnp.int32)[:, None]
        totals = plt.load(total_ref.at[row, index, digit[None]], mask=index < num_parts, other=0.0)
        is_enough = (jnp.sum(totals, axis=0) >= least_ref[row]) & (digit > 0)
        num_enough = jnp.sum(is_enough.astype(jnp.int32))
        known = known + (num_enough << last_shift)
    plt.store(known_out_ref.at[row], known, mask=part == 0)
    tried = known + (digit << shift)
    largest = largest_ref[row]

    def body(step, sums):
        column = part * block + step * tile + jnp.arange(tile, dtype=jnp.int32)
        logits = plt.load(logits_ref.at[row, column], mask=column < num_columns, other=-jnp.inf)
        weight = weights_of(logits, largest, measure)
        weight = jnp.where(column < num_columns, weight, 0.0)
        is_kept = sort_key(logits)[:, None] >= tried[None]
        return sums + jnp.where(is_kept, weight[:, None], 0.0)

    zeros = jnp.zeros((tile, 2**bits), jnp.float32)
    sums = jax.lax.fori_loop(0, block // tile, body, zeros)
    total_out_ref[row, part, :] = jnp.sum(sums, axis=0)


def top_threshold(
    logits: Float[Array, "R V"],
    least: Float[Array, "R"],
    largest: Float[Array, "R"],
    *,
    measure: str,
    interpret: bool = False,
    block: int = BLOCK,
    tile: int = TILE,
    bits: int = BITS,
    num_warps: int = NUM_WARPS,
) -> Float[Array, "R"]:
    """Find the threshold, as ``pallas_kernels.top_threshold``."""
    num_rows, num_columns = logits.shape
    block = min(block, max(tile, pl.next_power_of_2(num_columns)))
    num_parts = pl.cdiv(num_columns, block)
    shapes = ((num_rows,), jnp.int32), ((num_rows, num_parts, 2**bits), jnp.float32)
    known, totals = jnp.full(shapes[0][0], LOWEST, jnp.int32), jnp.zeros(*shapes[1])
    # The last pass may overlap the one before: what was too much there is too much again.
    shifts = [*range(32 - bits, 0, -bits), 0]
    last_shift = None
    for shift in shifts:
        kernel = partial(
            _pass_kernel, block=block, tile=tile, bits=bits, num_columns=num_columns,
            num_parts=num_parts, shift=shift, last_shift=last_shift, measure=measure,
        )  # fmt: skip
        known, totals = pl.pallas_call(
            kernel,
            out_shape=[jax.ShapeDtypeStruct(*shape) for shape in shapes],
            grid=(num_parts, num_rows),
            compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=1),
            interpret=interpret,
        )(logits, largest, least, known, totals)
        if last_shift is None and measure == "mass":
            # The first pass's lowest threshold keeps everything.
            least = least * jnp.sum(totals[:, :, 0], axis=1)
        last_shift = shift
    is_enough = jnp.sum(totals, axis=1)[:, 1:] >= least[:, None]
    return key_value(advance(known, is_enough, 0))
