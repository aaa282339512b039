"""XLA form of the n-gram pool's ops, and their specification."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int


def lookup_ngrams(
    grams: Int[Array, "B R N"],
    seen: Int[Array, "B R"],
    key: Int[Array, "B"],
    *,
    num_candidates: int,
) -> tuple[Int[Array, "B G D"], Int[Array, "B G"]]:
    """Find the latest n-grams of a key, as ``pallas_kernels.lookup_ngrams``."""
    num_found = min(num_candidates, seen.shape[1])
    is_match = grams[..., 0] == key[:, None]
    best, entry = jax.lax.top_k(jnp.where(is_match, seen, 0), num_found)
    found = jnp.take_along_axis(grams, entry[..., None], axis=1, mode="clip")[..., 1:]
    num_tokens = jnp.where(best > 0, found.shape[2], 0).astype(jnp.int32)
    padding = ((0, 0), (0, num_candidates - num_found))
    return jnp.pad(found, (*padding, (0, 0))), jnp.pad(num_tokens, padding)


def insert_ngrams(
    grams: Int[Array, "B R N"],
    seen: Int[Array, "B R"],
    clock: Int[Array, "B"],
    new: Int[Array, "B n N"],
    is_new: Bool[Array, "B n"],
) -> tuple[Int[Array, "B R N"], Int[Array, "B R"], Int[Array, "B"]]:
    """Add n-grams as the latest seen, as ``pallas_kernels.insert_ngrams``."""
    num_new, num_entries = new.shape[1], seen.shape[1]
    is_old_copy = jnp.any(
        jnp.all(grams[:, :, None] == new[:, None], axis=-1) & is_new[:, None], axis=-1
    )
    seen = jnp.where(is_old_copy, 0, seen)
    is_same = jnp.all(new[:, :, None] == new[:, None], axis=-1) & is_new[:, None]
    is_later = jnp.arange(num_new)[:, None] < jnp.arange(num_new)[None]
    is_kept = is_new & ~jnp.any(is_same & is_later[None], axis=-1)
    num_free = min(num_new, num_entries)
    _, free = jax.lax.top_k(-seen, num_free)
    rank = jnp.sum(is_kept[:, None] & is_later[None], axis=-1, dtype=jnp.int32)
    entry = jnp.take_along_axis(free, jnp.minimum(rank, num_free - 1), axis=1)
    entry = jnp.where(is_kept & (rank < num_free), entry, num_entries)
    now = clock[:, None] + 1 + jnp.arange(num_new)[None]
    rows = jnp.arange(grams.shape[0])[:, None]
    return (
        grams.at[rows, entry].set(new, mode="drop"),
        seen.at[rows, entry].set(now, mode="drop"),
        clock + jnp.where(jnp.any(is_new, axis=1), num_new, 0),
    )
