"""XLA form of top_threshold, and its specification: a search over the bits of the threshold."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels.argmax.reference import key_value, sort_key

# Bits of a key that a pass finds: it tries the 15 thresholds between those already known.
BITS = 4
LOWEST = -(2**31)


def weights_of(
    logits: Float[Array, "*shape"], largest: Float[Array, "..."], measure: str
) -> Float[Array, "*shape"]:
    """Return what each logit adds."""
    if measure == "count":
        return jnp.ones_like(logits)
    # A row of -inf has no mass.
    return jnp.where(logits == -jnp.inf, 0.0, jnp.exp(logits - largest))


def top_threshold(
    logits: Float[Array, "R V"],
    least: Float[Array, "R"],
    largest: Float[Array, "R"],
    *,
    measure: str,
) -> Float[Array, "R"]:
    """Find the threshold, as ``pallas_kernels.top_threshold``."""
    key = sort_key(logits)
    weight = weights_of(logits, largest[:, None], measure)
    if measure == "mass":
        least = least * jnp.sum(weight, axis=1)
    digit = jnp.arange(1, 2**BITS, dtype=jnp.int32)
    threshold = jnp.full(logits.shape[:1], LOWEST, jnp.int32)
    for shift in range(32 - BITS, -1, -BITS):
        tried = threshold[:, None] + jax.lax.shift_left(digit, jnp.full_like(digit, shift))[None]
        is_kept = key[:, None] >= tried[..., None]
        total = jnp.sum(jnp.where(is_kept, weight[:, None], 0.0), axis=-1)
        threshold = advance(threshold, total >= least[:, None], shift)
    return key_value(threshold)


def advance(threshold: Int[Array, "R"], is_enough: Array, shift: int) -> Int[Array, "R"]:
    """Raise the threshold to the largest one tried that is enough: enough there is enough below."""
    num_enough = jnp.sum(is_enough, axis=-1, dtype=jnp.int32)
    return threshold + jax.lax.shift_left(num_enough, jnp.full_like(num_enough, shift))
