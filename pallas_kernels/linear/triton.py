"""Pallas Triton form of the products of a few rows with a large weight.

A program takes a block of columns and walks the inner axis with several blocks of the weight in
flight. The columns are the long side of each small product on the matrix units and the rows the
short one: calls of the same tiling, up to 16 rows in all say, give a row the same bits. Where a
weight has too few columns to fill the GPU, its inner axis is split, and a second kernel adds the
parts; how often it is split belongs to the tiling.
"""

import dataclasses
import functools
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Float

from pallas_kernels.device import require_hopper
from pallas_kernels.linear import MAX_HEAD_ROWS, MAX_ROWS


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a product is cut up.

    Attributes:
        block_n: Columns of a program.
        block_k: Inner entries of a step.
        num_warps: Warps of a program.
        num_stages: Steps whose loads are in flight.
        num_programs: As many programs keep the memory busy: where there are fewer blocks of
            columns, programs share the inner axis of a block.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    num_programs: int = 1


# By kind of product and most rows, the fastest of those tried on an H200 at the 8B shape: see
# benchmarks/h200.md.
TILINGS = {
    "scale": {16: Tiling(64, 128, 4, 6), 64: Tiling(64, 128, 4, 5), 128: Tiling(64, 128, 4, 4)},
    "head": {16: Tiling(64, 128, 4, 4), 64: Tiling(128, 128, 8, 4)},
    "swiglu": {128: Tiling(128, 64, 8, 4)},
    "residual": {
        16: Tiling(64, 128, 4, 8, 64),
        64: Tiling(64, 128, 4, 5, 128),
        128: Tiling(64, 128, 4, 4, 128),
    },
}
# Columns and rows of a program that adds the parts of a split product, and its warps.
COMBINE_BLOCK, COMBINE_ROWS, COMBINE_WARPS = 64, 32, 4


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Sizes of one call: rows and their block, columns, steps, and the tiling that fits them."""

    kind: str
    num_rows: int
    row_block: int
    width: int
    num_columns: int
    block_n: int
    block_k: int
    num_steps: int
    num_splits: int
    num_parts: int
    eps: float
    out_dtype: jax.typing.DTypeLike

    def rows(self, part=0):
        """Return the slice of the block of rows, of an array `part` arrays below the first.

        The grid's last axis counts blocks of rows, mostly one. It makes the start a traced number,
        which may pass the end of an array (masks drop what is there), where a constant one is
        refused.
        """
        return pl.ds(pl.program_id(2) * self.row_block + part * self.num_rows, self.row_block)

    def row_mask(self, *shape):
        """Return which entries of an array with the block of rows on axis 0 are real rows."""
        row = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
        if self.row_block < self.num_rows:
            row = pl.program_id(2) * self.row_block + row
        return row < self.num_rows

    def mask(self, block_n):
        """Return which entries of a block of the result there are."""
        mask = self.row_mask(self.row_block, block_n)
        if self.num_columns % block_n == 0:
            return mask
        column = jax.lax.broadcasted_iota(jnp.int32, mask.shape, 1)
        return mask & (pl.program_id(0) * block_n + column < self.num_columns)

    def load(self, ref, block_n, part=0):
        """Load the program's block, 0 past the ends; `part` counts arrays one below another."""
        columns = pl.ds(pl.program_id(0) * block_n, block_n)
        return plt.load(ref.at[self.rows(part), columns], mask=self.mask(block_n), other=0)

    def store(self, ref, value, part=0):
        """Store the program's block."""
        block_n = value.shape[1]
        columns = pl.ds(pl.program_id(0) * block_n, block_n)
        plt.store(ref.at[self.rows(part), columns], value, mask=self.mask(block_n))


def _sums(x_ref, w_ref, first, plan: _Plan):
    """Return [row_block, block_n] of x @ weight over the program's steps; two for gate and up."""
    start, rows = pl.program_id(0) * plan.block_n, plan.rows()
    halves = [0, w_ref.shape[1] // 2] if plan.kind == "swiglu" else [0]
    row_mask = plan.row_mask(plan.row_block, plan.block_k)
    transposed = plan.kind == "head"
    shape = (plan.block_n, plan.block_k) if transposed else (plan.block_k, plan.block_n)
    column_axis, inner_axis = (0, 1) if transposed else (1, 0)
    precision = jax.lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None
    contract = (((inner_axis,), (1,)), ((), ()))

    def load_weight(inner, half):
        index = [None, None]
        index[inner_axis] = pl.ds(inner, plan.block_k)
        index[column_axis] = pl.ds(start + half, plan.block_n)
        ref = w_ref.at[tuple(index)]
        ends = ((column_axis, start, plan.num_columns), (inner_axis, inner, plan.width))
        masks = [
            begin + jax.lax.broadcasted_iota(jnp.int32, shape, axis) < size
            for axis, begin, size in ends
            if size % shape[axis]
        ]
        return (
            plt.load(ref, mask=functools.reduce(jnp.logical_and, masks), other=0)
            if masks
            else ref[...]
        )

    def body(step, sums):
        inner = (first + step) * plan.block_k
        mask = row_mask
        if plan.width % plan.block_k:
            mask = mask & (inner + jax.lax.broadcasted_iota(jnp.int32, mask.shape, 1) < plan.width)
        x = plt.load(x_ref.at[rows, pl.ds(inner, plan.block_k)], mask=mask, other=0)
        return [
            total
            + jax.lax.dot_general(
                load_weight(inner, half),
                x,
                contract,
                precision=precision,
                preferred_element_type=jnp.float32,
            )
            for total, half in zip(sums, halves, strict=True)
        ]

    zeros = [jnp.zeros((plan.block_n, plan.row_block), jnp.float32) for _ in halves]
    return [total.T for total in jax.lax.fori_loop(0, plan.num_steps, body, zeros)]


def _start(refs, block_n, plan: _Plan):
    """Load what the end of the product needs, before it: the loads then cost no time."""
    if plan.kind == "residual":
        residual_ref, norm_ref, *_ = refs
        column = pl.program_id(0) * block_n + jnp.arange(block_n, dtype=jnp.int32)
        norm = plt.load(norm_ref.at[column], mask=column < plan.num_columns, other=0)
        return plan.load(residual_ref, block_n), norm
    squares_ref, _ = refs
    part_block = pl.next_power_of_2(plan.num_parts)
    part = jax.lax.broadcasted_iota(jnp.int32, (plan.row_block, part_block), 1)
    mask = (part < plan.num_parts) & plan.row_mask(*part.shape)
    parts = pl.ds(pl.program_id(1) * part_block, part_block)  # 0, and traced as the rows' start
    return plt.load(squares_ref.at[plan.rows(), parts], mask=mask, other=0.0)


def _finish(sums, loaded, refs, plan: _Plan):
    """Turn the sums of a block of columns into what the op returns."""
    if plan.kind == "residual":
        residual, norm = loaded
        y_ref, scaled_ref, squares_ref = refs[2:]
        dtype = y_ref.dtype
        product = sums[0].astype(dtype).astype(jnp.float32)
        y = (residual.astype(jnp.float32) + product).astype(dtype)
        plan.store(y_ref, y)
        plan.store(scaled_ref, y * norm[None])
        # Past the last column both parts of the sum are 0.
        squares = jnp.sum(jnp.square(y.astype(jnp.float32)), axis=1)
        mask = plan.row_mask(plan.row_block)
        plt.store(squares_ref.at[plan.rows(), pl.program_id(0)], squares, mask=mask)
        return
    scale = jax.lax.rsqrt(jnp.sum(loaded, axis=1) / plan.width + plan.eps)[:, None]
    values = [total * scale for total in sums]
    if plan.kind == "swiglu":
        gate, up = values
        values = [gate * jax.lax.logistic(gate) * up]
    plan.store(refs[-1], values[0].astype(plan.out_dtype))


def _whole_kernel(x_ref, w_ref, *refs, plan):
    loaded = _start(refs, plan.block_n, plan)
    _finish(_sums(x_ref, w_ref, 0, plan), loaded, refs, plan)


def _part_kernel(x_ref, w_ref, part_ref, *, plan):
    split = pl.program_id(1)
    sums = _sums(x_ref, w_ref, split * plan.num_steps, plan)
    for index, total in enumerate(sums):
        plan.store(part_ref, total, split * len(sums) + index)


def _combine_kernel(part_ref, *refs, block_n, plan):
    loaded = _start(refs, block_n, plan)
    num_sums = 2 if plan.kind == "swiglu" else 1
    parts = [
        [plan.load(part_ref, block_n, split * num_sums + index) for split in range(plan.num_splits)]
        for index in range(num_sums)
    ]
    sums = [sum(others, start=first) for first, *others in parts]
    _finish(sums, loaded, refs, plan)


def _block(size: int, most: int) -> int:
    """Return the largest power of two up to `most` that divides `size`, `most` if that is tiny."""
    divisor = min(size & -size, most)
    return divisor if divisor >= 32 else min(most, max(pl.next_power_of_2(size), 16))


def _num_splits(num_blocks: int, num_steps: int, num_programs: int) -> int:
    """Return a power of two that divides the steps and makes enough programs."""
    splits = 1
    while splits * num_blocks < num_programs and num_steps % (2 * splits) == 0:
        splits *= 2
    return splits


def _run(kind, x, weight, extra, *, num_columns, eps=0.0, out_dtype, tiling=None, interpret=False):
    """Launch one product.

    Args:
        kind: "scale", "head" (a transposed weight), "swiglu" or "residual".
        x: [R, K] rows.
        weight: 2-D; gate and up side by side for "swiglu".
        extra: What the end of the product needs.
        num_columns: Of the result.
        eps: Of the norm.
        out_dtype: Of the result.
        tiling: Overrides the table's.
        interpret: Whether to interpret the kernels.
    """
    require_hopper(interpret)
    num_rows, inner = x.shape
    most = MAX_HEAD_ROWS if kind == "head" else MAX_ROWS
    if num_rows > most:
        raise NotImplementedError(f"{num_rows} rows are more than {most}")
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"rows of dtype {x.dtype} are neither bfloat16 nor float32")
    if weight.size > 2**31 - 1:
        raise NotImplementedError(f"a weight of {weight.size} entries needs 64-bit indices")
    tiling = tiling or next(t for most, t in TILINGS[kind].items() if num_rows <= most)
    block_n = _block(num_columns, tiling.block_n)
    # Float32 blocks are twice as large; they serve exactness, not speed.
    block_k = _block(inner, tiling.block_k * 2 // x.dtype.itemsize)
    num_stages = tiling.num_stages if x.dtype == jnp.bfloat16 else 2
    num_blocks, num_steps = pl.cdiv(num_columns, block_n), pl.cdiv(inner, block_k)
    splits = _num_splits(num_blocks, num_steps, tiling.num_programs)
    plan = _Plan(
        kind=kind,
        num_rows=num_rows,
        # Sixteen rows are the fewest that Hopper's matrix instructions are used for.
        row_block=max(pl.next_power_of_2(num_rows), 16),
        width=inner,
        num_columns=num_columns,
        block_n=block_n,
        block_k=block_k,
        num_steps=num_steps // splits,
        num_splits=splits,
        num_parts=extra[0].shape[-1],
        eps=eps,
        out_dtype=out_dtype,
    )
    params = plt.CompilerParams(num_warps=tiling.num_warps, num_stages=num_stages)
    if splits == 1:
        return pl.pallas_call(
            partial(_whole_kernel, plan=plan),
            out_shape=_out_shape(plan, block_n),
            grid=(num_blocks, 1, 1),
            compiler_params=params,
            interpret=interpret,
            name=f"_linear_{kind}_kernel",
        )(x, weight, *extra)
    num_sums = 2 if kind == "swiglu" else 1
    parts = pl.pallas_call(
        partial(_part_kernel, plan=plan),
        out_shape=jax.ShapeDtypeStruct((splits * num_sums * num_rows, num_columns), jnp.float32),
        grid=(num_blocks, splits, 1),
        compiler_params=params,
        interpret=interpret,
        name=f"_linear_{kind}_part_kernel",
    )(x, weight)
    block_n = _block(num_columns, COMBINE_BLOCK)
    plan = dataclasses.replace(plan, row_block=min(plan.row_block, COMBINE_ROWS))
    return pl.pallas_call(
        partial(_combine_kernel, block_n=block_n, plan=plan),
        out_shape=_out_shape(plan, block_n),
        grid=(pl.cdiv(num_columns, block_n), 1, pl.cdiv(num_rows, plan.row_block)),
        compiler_params=plt.CompilerParams(num_warps=COMBINE_WARPS, num_stages=1),
        interpret=interpret,
        name=f"_linear_{kind}_combine_kernel",
    )(parts, *extra)


def _out_shape(plan: _Plan, block_n: int):
    block = jax.ShapeDtypeStruct((plan.num_rows, plan.num_columns), plan.out_dtype)
    if plan.kind != "residual":
        return block
    num_parts = pl.cdiv(plan.num_columns, block_n)
    return block, block, jax.ShapeDtypeStruct((plan.num_rows, num_parts), jnp.float32)


def rms_linear(
    rows,
    weight: Array,
    *,
    eps: float,
    transposed: bool,
    out_dtype: jax.typing.DTypeLike,
    interpret: bool = False,
    tiling: Tiling | None = None,
) -> Float[Array, "R N"]:
    """Multiply normalised rows by a weight, as ``pallas_kernels.rms_linear``."""
    return _run(
        "head" if transposed else "scale",
        rows.scaled,
        weight,
        (rows.sum_squares,),
        num_columns=weight.shape[0 if transposed else 1],
        eps=eps,
        out_dtype=out_dtype,
        tiling=tiling,
        interpret=interpret,
    )


def rms_swiglu(
    rows,
    weight: Float[Array, "D 2 F"],
    *,
    eps: float,
    interpret: bool = False,
    tiling: Tiling | None = None,
) -> Float[Array, "R F"]:
    """Return silu(gate) * up of normalised rows, as ``pallas_kernels.rms_swiglu``."""
    return _run(
        "swiglu",
        rows.scaled,
        weight.reshape(weight.shape[0], -1),
        (rows.sum_squares,),
        num_columns=weight.shape[2],
        eps=eps,
        out_dtype=rows.x.dtype,
        tiling=tiling,
        interpret=interpret,
    )


def linear_residual(
    x: Float[Array, "R K"],
    weight: Float[Array, "K D"],
    residual: Float[Array, "R D"],
    norm_weight: Float[Array, "D"],
    *,
    interpret: bool = False,
    tiling: Tiling | None = None,
) -> tuple[Float[Array, "R D"], Float[Array, "R D"], Float[Array, "R Q"]]:
    """Return the sum, the sum times the norm's weight, and parts of its sum of squares."""
    return _run(
        "residual",
        x,
        weight,
        (residual, norm_weight),
        num_columns=weight.shape[1],
        out_dtype=x.dtype,
        tiling=tiling,
        interpret=interpret,
    )
