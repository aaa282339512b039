"""Pallas Triton form of the products of a few rows with a large weight.

A program takes a block of columns and walks the inner axis with several blocks of the weight in
flight. The columns are the long side of each small product on the matrix units and the rows the
short one: calls of the same tiling, up to 16 rows in all say, give a row the same bits. Where a
product has too few columns to fill the GPU, its inner axis is split, and the program that is done
last adds the parts; how often it is split belongs to the tiling.
"""

import dataclasses
import functools
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Float, Int

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
    "scale": {
        16: Tiling(64, 128, 4, 6, 64),
        64: Tiling(64, 128, 4, 5, 64),
        128: Tiling(64, 128, 4, 4, 64),
    },
    "head": {16: Tiling(64, 128, 4, 4), 64: Tiling(128, 128, 8, 4)},
    "swiglu": {128: Tiling(128, 64, 8, 4)},
    "residual": {
        16: Tiling(64, 128, 4, 8, 64),
        64: Tiling(64, 128, 4, 5, 128),
        128: Tiling(64, 128, 4, 4, 128),
    },
}
# Gate and up with fewer columns than this, as small models and one device's part of a model have.
NARROW_COLUMNS = 64 * 128
NARROW_SWIGLU = {64: Tiling(64, 128, 4, 4, 64), 128: Tiling(64, 128, 4, 3, 64)}


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
    num_extra: int
    eps: float
    out_dtype: jax.typing.DTypeLike
    interpret: bool
    # In a kernel: the program's block of columns, and 0. They have to be asked for before a branch.
    column_block: jax.Array | int = 0
    zero: jax.Array | int = 0

    def located(self):
        """Return the plan of this program."""
        return dataclasses.replace(self, column_block=pl.program_id(0), zero=pl.program_id(2))

    def rows(self, part=0):
        """Return the slice of the block of rows, of an array `part` arrays below the first.

        The grid's last axis has one entry: its 0 makes the start a traced number, which may pass
        the end of an array (masks drop what is there), where a constant one is refused.
        """
        return pl.ds(self.zero * self.row_block + part * self.num_rows, self.row_block)

    def row_mask(self, *shape):
        """Return which entries of an array with the block of rows on axis 0 are real rows."""
        return jax.lax.broadcasted_iota(jnp.int32, shape, 0) < self.num_rows

    def mask(self):
        """Return which entries of a block of the result there are."""
        mask = self.row_mask(self.row_block, self.block_n)
        if self.num_columns % self.block_n == 0:
            return mask
        column = jax.lax.broadcasted_iota(jnp.int32, mask.shape, 1)
        return mask & (self.column_block * self.block_n + column < self.num_columns)

    def block(self, part=0):
        """Return the index of the program's block; `part` counts arrays one below another."""
        return self.rows(part), pl.ds(self.column_block * self.block_n, self.block_n)

    def load(self, ref, part=0, volatile=False):
        """Load the program's block, 0 past the ends."""
        return plt.load(ref.at[self.block(part)], mask=self.mask(), other=0, volatile=volatile)

    def store(self, ref, value, part=0):
        """Store the program's block."""
        plt.store(ref.at[self.block(part)], value, mask=self.mask())


def _sums(x_ref, w_ref, first, plan: _Plan):
    """Return [row_block, block_n] of x @ weight over the program's steps; two for gate and up."""
    start, rows = plan.column_block * plan.block_n, plan.rows()
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


def _start(refs, plan: _Plan):
    """Load what the end of the product needs, before it: the loads then cost no time."""
    if plan.kind == "residual":
        residual_ref, norm_ref, *_ = refs
        column = plan.column_block * plan.block_n + jnp.arange(plan.block_n, dtype=jnp.int32)
        norm = plt.load(norm_ref.at[column], mask=column < plan.num_columns, other=0)
        return plan.load(residual_ref), norm
    squares_ref, _ = refs
    part_block = pl.next_power_of_2(plan.num_parts)
    part = jax.lax.broadcasted_iota(jnp.int32, (plan.row_block, part_block), 1)
    mask = (part < plan.num_parts) & plan.row_mask(*part.shape)
    parts = pl.ds(plan.zero * part_block, part_block)  # traced, as the rows' start
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
        plt.store(squares_ref.at[plan.rows(), plan.column_block], squares, mask=mask)
        return
    scale = jax.lax.rsqrt(jnp.sum(loaded, axis=1) / plan.width + plan.eps)[:, None]
    values = [total * scale for total in sums]
    if plan.kind == "swiglu":
        gate, up = values
        values = [gate * jax.lax.logistic(gate) * up]
    plan.store(refs[-1], values[0].astype(plan.out_dtype))


def _whole_kernel(x_ref, w_ref, *refs, plan):
    plan = plan.located()
    loaded = _start(refs, plan)
    _finish(_sums(x_ref, w_ref, 0, plan), loaded, refs, plan)


def _split_kernel(x_ref, w_ref, *refs, plan):
    plan = plan.located()
    extra_refs, (_, *out_refs, part_ref, counter_ref) = (
        refs[: plan.num_extra],
        refs[plan.num_extra :],
    )
    refs = (*extra_refs, *out_refs)
    loaded, split = _start(refs, plan), pl.program_id(1)
    halves = _sums(x_ref, w_ref, split * plan.num_steps, plan)
    for half, total in enumerate(halves):
        plan.store(part_ref, total, split * len(halves) + half)
    # Every thread's stores come before the arrival.
    if not plan.interpret:
        plt.debug_barrier()
    num_arrived = plt.atomic_add(counter_ref, (plan.column_block,), jnp.int32(1))

    @pl.when(num_arrived == plan.num_splits - 1)
    def _():
        counter_ref[plan.column_block] = jnp.int32(0)
        # Volatile loads pass by L1, which does not see what other multiprocessors wrote.
        sums = []
        for half in range(len(halves)):
            places = range(half, plan.num_splits * len(halves), len(halves))
            first, *others = (plan.load(part_ref, place, volatile=True) for place in places)
            sums.append(sum(others, start=first))
        _finish(sums, loaded, refs, plan)


def _block(size: int, most: int) -> int:
    """Return the largest power of two up to `most` that divides `size`, `most` if that is tiny."""
    divisor = min(size & -size, most)
    return divisor if divisor >= 32 else min(most, max(pl.next_power_of_2(size), 16))


def _tiling(kind: str, num_rows: int, num_columns: int) -> Tiling:
    """Return the tiling of a product."""
    is_narrow = kind == "swiglu" and num_columns < NARROW_COLUMNS
    tilings = NARROW_SWIGLU if is_narrow else TILINGS[kind]
    return next(tiling for most, tiling in tilings.items() if num_rows <= most)


def _num_splits(num_blocks: int, num_steps: int, num_programs: int) -> int:
    """Return a power of two that divides the steps and makes enough programs."""
    splits = 1
    while splits * num_blocks < num_programs and num_steps % (2 * splits) == 0:
        splits *= 2
    return splits


def _run(
    kind,
    x,
    weight,
    extra,
    *,
    num_columns,
    eps=0.0,
    out_dtype,
    counters=None,
    tiling=None,
    interpret=False,
):
    """Launch one product.

    Args:
        kind: "scale", "head" (a transposed weight), "swiglu" or "residual".
        x: [R, K] rows.
        weight: 2-D; gate and up side by side for "swiglu".
        extra: What the end of the product needs.
        num_columns: Of the result.
        eps: Of the norm.
        out_dtype: Of the result.
        counters: Zeros for a product whose inner axis may be split; None makes them.
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
    tiling = tiling or _tiling(kind, num_rows, num_columns)
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
        num_extra=len(extra),
        eps=eps,
        out_dtype=out_dtype,
        interpret=interpret,
    )
    launch = partial(
        pl.pallas_call,
        compiler_params=plt.CompilerParams(num_warps=tiling.num_warps, num_stages=num_stages),
        interpret=interpret,
        name=f"_linear_{kind}_kernel",
    )
    block = jax.ShapeDtypeStruct((num_rows, num_columns), out_dtype)
    out_shape = [block]
    if kind == "residual":
        squares = jax.ShapeDtypeStruct((num_rows, num_blocks), jnp.float32)
        out_shape = [block, block, squares]
    if splits == 1:
        kernel, grid = partial(_whole_kernel, plan=plan), (num_blocks, 1, 1)
        return *launch(kernel, out_shape=out_shape, grid=grid)(x, weight, *extra), counters
    own = jnp.zeros((num_blocks,), jnp.int32) if counters is None else counters
    num_halves = 2 if kind == "swiglu" else 1
    parts = jax.ShapeDtypeStruct((splits * num_halves * num_rows, num_columns), jnp.float32)
    *out, _, own = launch(
        partial(_split_kernel, plan=plan),
        out_shape=[*out_shape, parts, jax.ShapeDtypeStruct(own.shape, jnp.int32)],
        grid=(num_blocks, splits, 1),
        input_output_aliases={2 + len(extra): len(out_shape) + 1},
    )(x, weight, *extra, own)
    return *out, None if counters is None else own


def rms_linear(
    rows,
    weight: Array,
    counters: Int[Array, "_"] | None = None,
    *,
    eps: float,
    transposed: bool,
    out_dtype: jax.typing.DTypeLike,
    interpret: bool = False,
    tiling: Tiling | None = None,
) -> tuple[Float[Array, "R N"], Int[Array, "_"] | None]:
    """Multiply normalised rows by a weight, as ``pallas_kernels.rms_linear``."""
    return _run(
        "head" if transposed else "scale",
        rows.scaled,
        weight,
        (rows.sum_squares,),
        num_columns=weight.shape[0 if transposed else 1],
        eps=eps,
        out_dtype=out_dtype,
        counters=counters,
        tiling=tiling,
        interpret=interpret,
    )


def rms_swiglu(
    rows,
    weight: Float[Array, "D 2 F"],
    counters: Int[Array, "_"] | None = None,
    *,
    eps: float,
    interpret: bool = False,
    tiling: Tiling | None = None,
) -> tuple[Float[Array, "R F"], Int[Array, "_"] | None]:
    """Return silu(gate) * up of normalised rows, as ``pallas_kernels.rms_swiglu``."""
    return _run(
        "swiglu",
        rows.scaled,
        weight.reshape(weight.shape[0], -1),
        (rows.sum_squares,),
        num_columns=weight.shape[2],
        eps=eps,
        out_dtype=rows.x.dtype,
        counters=counters,
        tiling=tiling,
        interpret=interpret,
    )


def linear_residual(
    x: Float[Array, "R K"],
    weight: Float[Array, "K D"],
    residual: Float[Array, "R D"],
    norm_weight: Float[Array, "D"],
    counters: Int[Array, "N"] | None = None,
    *,
    interpret: bool = False,
    tiling: Tiling | None = None,
) -> tuple[Float[Array, "R D"], Float[Array, "R D"], Float[Array, "R Q"], Int[Array, "N"] | None]:
    """Return the sum, it times the norm's weight, parts of its sum of squares, the counters."""
    return _run(
        "residual",
        x,
        weight,
        (residual, norm_weight),
        num_columns=weight.shape[1],
        out_dtype=x.dtype,
        counters=counters,
        tiling=tiling,
        interpret=interpret,
    )
