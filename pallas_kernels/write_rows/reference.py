"""XLA form of write_rows, and its specification: one scatter per cache."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int


def write_rows(
    caches: tuple[Float[Array, "B K S H"], ...],
    rows: tuple[Float[Array, "B K T H"], ...],
    slots: Int[Array, "B W"],
    row_index: Int[Array, "B W"] | None,
) -> tuple[Float[Array, "B K S H"], ...]:
    """Scatter rows to their slots, as ``pallas_kernels.write_rows``.

    A scatter and not `dynamic_update_slice`, which would clamp its start at the end of the cache
    and overwrite live slots.
    """
    capacity = caches[0].shape[2]
    # A scatter takes negative indices to count from the end.
    slots = jnp.where(slots < 0, capacity, slots)
    batch = jnp.arange(slots.shape[0])[:, None]

    def write(cache: Float[Array, "B K S H"], new: Float[Array, "B K T H"]) -> Array:
        if row_index is not None:
            new = jnp.take_along_axis(new, row_index[:, None, :, None], axis=2, mode="clip")
        new = new.swapaxes(1, 2).astype(cache.dtype)
        return cache.at[batch, :, slots].set(new, mode="drop")

    return tuple(map(write, caches, rows))
