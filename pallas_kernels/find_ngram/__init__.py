"""Prompt lookup: find the text's last n-gram earlier in the text, draft what followed it."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int

from pallas_kernels.dispatch import Implementation, dispatch


def find_ngram(
    tokens: Int[Array, "B P"],
    length: Int[Array, "B"],
    *,
    ngram_size: int,
    num_draft_tokens: int,
    min_ngram_size: int | None = None,
    match: str = "last",
    implementation: Implementation | None = None,
) -> tuple[Int[Array, "B M"], Int[Array, "B"]]:
    """Draft the tokens that followed an earlier occurrence of the text's suffix.

    The longest suffix of ``min_ngram_size`` to ``ngram_size`` tokens that occurs earlier wins;
    among equals the first or the last occurrence. An occurrence needs one known token after it
    and may overlap the suffix. A draft that reaches the end of the text copies on over its own
    output, so a match always gives M tokens.

    Args:
        tokens: Text of each row, i32. Entries at or past ``length`` have no effect.
        length: Known tokens of each row, 0 to P, i32.
        ngram_size: Longest suffix to look for, in tokens.
        num_draft_tokens: M, tokens to draft.
        min_ngram_size: Shortest suffix to look for; None means ``ngram_size``.
        match: "first" (oldest) or "last" (most recent) of the longest occurrences.
        implementation: Form to run, see ``pallas_kernels``.

    Returns:
        Draft tokens, -1 where there is no match, and the number of them: M or 0.

    Raises:
        ValueError: The arrays are not i32 or differ in rows, a size is below 1, the sizes are
            out of order, ``match`` is unknown, or text and n-gram are too long for 32-bit scores.

    Source: prompt lookup decoding (Saxena, 2023) and the find_ngram kernels of Mirage's
    speculative decoding. Those match one fixed length and the first occurrence, and stop at the
    end of the text.
    """
    if min_ngram_size is None:
        min_ngram_size = ngram_size
    for name, array in (("tokens", tokens), ("length", length)):
        if array.dtype != jnp.int32:
            raise ValueError(f"{name} has dtype {array.dtype}, not int32")
    if tokens.shape[0] != length.shape[0]:
        raise ValueError(f"tokens has {tokens.shape[0]} rows but length has {length.shape[0]}")
    _validate(tokens.shape[1], ngram_size, num_draft_tokens, min_ngram_size, match)
    return dispatch(
        __name__,
        "find_ngram",
        implementation,
        tokens,
        length,
        ngram_size=min(ngram_size, tokens.shape[1]),
        num_draft_tokens=num_draft_tokens,
        min_ngram_size=min_ngram_size,
        match=match,
    )


def _validate(
    capacity: int, ngram_size: int, num_draft_tokens: int, min_ngram_size: int, match: str
) -> None:
    if capacity < 1:
        raise ValueError(f"tokens has a capacity of {capacity} tokens, at least 1 is needed")
    if num_draft_tokens < 1:
        raise ValueError(f"num_draft_tokens={num_draft_tokens} is less than 1")
    if min_ngram_size < 1:
        raise ValueError(f"min_ngram_size={min_ngram_size} is less than 1")
    if min_ngram_size > ngram_size:
        raise ValueError(f"min_ngram_size={min_ngram_size} is greater than ngram_size={ngram_size}")
    if match not in ("first", "last"):
        raise ValueError(f"match={match!r} is not one of ('first', 'last')")
    # A score is (match length) * P + (position), below (ngram_size + 1) * P.
    if (min(ngram_size, capacity) + 1) * capacity > 2**31 - 1:
        raise ValueError(
            f"ngram_size={ngram_size} with a capacity of {capacity} tokens overflows 32-bit scores"
        )
