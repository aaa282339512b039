"""XLA form of verify_greedy, and its specification."""

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels.argmax.reference import best, sort_key


def verify_greedy(
    draft_tokens: Int[Array, "B C M"],
    num_draft: Int[Array, "B C"],
    values: Float[Array, "B T Q"],
    indices: Int[Array, "B T Q"],
    *,
    candidate_rows: tuple[tuple[int, ...], ...],
) -> tuple[Int[Array, "B T"], Int[Array, "B"], Int[Array, "B"]]:
    """Accept the longest confirmed prefix, as ``pallas_kernels.verify_greedy``."""
    batch, _, num_draft_tokens = draft_tokens.shape
    target_tokens = best(sort_key(values), indices)[1]
    if num_draft_tokens == 0:
        return target_tokens, jnp.zeros(batch, jnp.int32), jnp.zeros(batch, jnp.int32)
    # The row before draft j is column j; the last column only serves the bonus token.
    target = target_tokens[:, np.asarray(candidate_rows, np.int32)[:, :-1]]
    offset = jnp.arange(num_draft_tokens, dtype=jnp.int32)[None, None]
    agrees = (draft_tokens == target) & (draft_tokens >= 0) & (offset < num_draft[..., None])
    # The first disagreement ends the prefix.
    accepted = jnp.min(jnp.where(agrees, num_draft_tokens, offset), axis=-1)
    candidate = jnp.arange(accepted.shape[1], dtype=jnp.int32)[None]
    num_accepted, best_candidate = best(accepted, candidate)
    return target_tokens, num_accepted, best_candidate
