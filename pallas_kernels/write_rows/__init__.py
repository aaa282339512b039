"""Scatter of a block's rows into many caches of one shape, in one launch."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels.dispatch import Implementation, dispatch


def write_rows(
    caches: tuple[Float[Array, "B K S H"], ...],
    rows: tuple[Float[Array, "B K T H"], ...],
    slots: Int[Array, "B W"],
    row_index: Int[Array, "B W"] | None = None,
    *,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B K S H"], ...]:
    """Write row ``row_index[b, j]`` of every array to slot ``slots[b, j]`` of its cache.

    The caches are updated in place where the caller needs their old contents no more. What else
    reads them is ordered before the writes only by a dependence of ``slots`` on it.

    Args:
        caches: Arrays of one shape and dtype, such as the keys and values of all layers.
        rows: As many arrays of rows, one shape, cast to the caches' dtype.
        slots: Where to write, i32; rows whose slot is negative or S or more are dropped. The
            others of one b differ.
        row_index: Rows to write, i32, clipped to 0 to T - 1; None means row j to slot j.
        implementation: Form to run, see ``pallas_kernels``.

    Returns:
        The caches after the writes.

    Raises:
        ValueError: The caches or the rows are none, differ in number, shape or dtype, the
            indices are not i32, or there are other than T slots without a ``row_index``.
    """
    _validate(caches, rows, slots, row_index)
    return dispatch(__name__, "write_rows", implementation, caches, rows, slots, row_index)


def _validate(
    caches: tuple[Array, ...], rows: tuple[Array, ...], slots: Array, row_index: Array | None
) -> None:
    if not caches or len(caches) != len(rows):
        raise ValueError(f"there are {len(caches)} caches and {len(rows)} arrays of rows")
    for name, arrays in (("caches", caches), ("rows", rows)):
        kinds = {(array.shape, str(array.dtype)) for array in arrays}
        if len(kinds) > 1:
            raise ValueError(f"{name} differ in shape or dtype: {sorted(kinds)}")
    batch, kv_heads, _, head_dim = caches[0].shape
    num_rows = rows[0].shape[2]
    if rows[0].shape != (batch, kv_heads, num_rows, head_dim):
        raise ValueError(f"rows of shape {rows[0].shape} do not fit caches of {caches[0].shape}")
    for name, array in (("slots", slots), ("row_index", row_index)):
        if array is not None and array.dtype != jnp.int32:
            raise ValueError(f"{name} has dtype {array.dtype}, not int32")
        if array is not None and (array.shape[0] != batch or array.shape != slots.shape):
            raise ValueError(
                f"{name} has shape {array.shape}, slots {slots.shape} for {batch} batch rows"
            )
    if row_index is None and slots.shape[1] != num_rows:
        raise ValueError(f"there are {slots.shape[1]} slots for {num_rows} rows")
