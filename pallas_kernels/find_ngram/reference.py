"""XLA form of find_ngram, and its specification.

Each position e of the text is taken as the last token of a candidate match. Its match length is
the number of tokens, counted backwards, on which it agrees with the suffix. One i32 score per
position orders candidates by length, then by position; the best score is a plain maximum, so the
result depends on no order of evaluation.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int

NO_MATCH = -1


def find_ngram(
    tokens: Int[Array, "B P"],
    length: Int[Array, "B"],
    *,
    ngram_size: int,
    num_draft_tokens: int,
    min_ngram_size: int,
    match: str,
) -> tuple[Int[Array, "B M"], Int[Array, "B"]]:
    """Draft from the longest earlier match of the suffix, as ``pallas_kernels.find_ngram``."""
    capacity = tokens.shape[1]
    position = jnp.arange(capacity, dtype=jnp.int32)[None]
    match_length = _match_lengths(tokens, length, ngram_size)
    # The last known token ends the suffix itself: nothing follows it.
    valid = (position < length[:, None] - 1) & (match_length >= min_ngram_size)
    rank = position if match == "last" else capacity - 1 - position
    score = jnp.max(jnp.where(valid, match_length * capacity + rank, NO_MATCH), axis=1)

    found = score >= 0
    rank = jax.lax.rem(jnp.maximum(score, 0), jnp.int32(capacity))
    start = (rank if match == "last" else capacity - 1 - rank) + 1
    # Past the end of the text the draft repeats with the distance of the match as its period.
    period = jnp.maximum(length - start, 1)
    step = jnp.arange(num_draft_tokens, dtype=jnp.int32)[None]
    index = start[:, None] + jax.lax.rem(
        jnp.broadcast_to(step, (tokens.shape[0], num_draft_tokens)),
        jnp.broadcast_to(period[:, None], (tokens.shape[0], num_draft_tokens)),
    )
    draft = jnp.take_along_axis(tokens, index, axis=1, mode="clip")
    draft_tokens = jnp.where(found[:, None], draft, NO_MATCH)
    return draft_tokens, jnp.where(found, num_draft_tokens, 0).astype(jnp.int32)


def _match_lengths(
    tokens: Int[Array, "B P"], length: Int[Array, "B"], ngram_size: int
) -> Int[Array, "B P"]:
    """Count the tokens up to each position that agree with the end of the text.

    A match length is the smallest offset with a difference. Taking the minimum keeps every
    comparison independent, so that XLA fuses them all into one pass over the text.
    """
    capacity = tokens.shape[1]
    position = jnp.arange(capacity, dtype=jnp.int32)[None]
    offset = jnp.arange(ngram_size, dtype=jnp.int32)[None]
    suffix = jnp.take_along_axis(tokens, length[:, None] - 1 - offset, axis=1, mode="clip")
    padded = jnp.pad(tokens, ((0, 0), (ngram_size - 1, 0)))
    match_length = jnp.full(tokens.shape, ngram_size, jnp.int32)
    for j in range(ngram_size):
        shifted = padded[:, ngram_size - 1 - j : ngram_size - 1 - j + capacity]
        agrees = (shifted == suffix[:, j : j + 1]) & (position >= j)
        match_length = jnp.minimum(match_length, jnp.where(agrees, ngram_size, j))
    return match_length
