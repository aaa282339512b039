"""The value from which on a row's largest logits are many enough, or probable enough."""

from typing import Literal

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from pallas_kernels.dispatch import Implementation, dispatch

Measure = Literal["count", "mass"]


def top_threshold(
    logits: Float[Array, "R V"],
    least: Float[Array, "R"],
    largest: Float[Array, "R"] | None = None,
    *,
    measure: Measure,
    implementation: Implementation | None = None,
) -> Float[Array, "R"]:
    """Find the largest threshold whose logits (logit >= threshold) come to at least `least`.

    Nothing is sorted, and there is no limit on how many logits stay. Logits that tie at the
    threshold all stay.

    Args:
        logits: Rows of logits, f32; -inf counts as the smallest value.
        least: With "count" a number of logits; with "mass" a share of the row's softmax.
        largest: The largest logit of each row, where that is known.
        measure: What logits come to.
        implementation: Form to run, see ``pallas_kernels``.

    Returns:
        A logit of the row, or -inf where all of them together are not enough. Forms agree exactly
        on counts; masses are sums in f32, whose order is up to the form.

    Raises:
        ValueError: The logits are not f32, or have no columns; or the measure has no such name.
    """
    if logits.dtype != jnp.float32:
        raise ValueError(f"logits has dtype {logits.dtype}, not float32")
    if logits.shape[-1] < 1:
        raise ValueError(f"logits of shape {logits.shape} has no columns")
    if measure not in ("count", "mass"):
        raise ValueError(f"measure={measure!r} is neither count nor mass")
    if largest is None:
        largest = jnp.max(logits, axis=1)
    return dispatch(
        __name__, "top_threshold", implementation, logits, least, largest, measure=measure
    )
