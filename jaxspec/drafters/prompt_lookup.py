"""Prompt lookup: draft what followed the last n-gram where it stood earlier in the text."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxspec.drafters.protocol import Outcome, Proposal, current_tokens
from jaxspec.layout import BlockLayout, check_count, check_num_rows
from pallas_kernels import find_ngram
from pallas_kernels.dispatch import Implementation


@dataclasses.dataclass(frozen=True)
class PromptLookup:
    """Copy the continuation of an earlier occurrence of the text's last tokens.

    The longest match wins, from `ngram_size` tokens down to `min_ngram_size`; among equally long
    ones the latest (`match="last"`) or the earliest. With long n-grams the latest accepts more.

    Source: Saxena 2023, "Prompt Lookup Decoding"; ours matches the longest n-gram first, takes
    the latest occurrence, and lets a draft copy on over its own output at the end of the text.

    Attributes:
      num_draft_tokens: tokens drafted after a match (M), >= 1; a step feeds M + 1 rows.
      ngram_size: longest suffix looked for, in tokens.
      min_ngram_size: shortest suffix looked for, in tokens.
      match: "last" or "first" occurrence among equally long matches.
      kernels: implementation of `find_ngram`, None = the call's.
    """

    num_draft_tokens: int = 7
    ngram_size: int = 16
    min_ngram_size: int = 1
    match: str = "last"
    kernels: Implementation | None = None

    def __post_init__(self) -> None:
        for name in ("num_draft_tokens", "min_ngram_size", "ngram_size"):
            check_count(name, getattr(self, name), 1)
        check_num_rows(1 + self.num_draft_tokens)
        if self.ngram_size < self.min_ngram_size:
            raise ValueError(
                f"ngram_size={self.ngram_size} is less than min_ngram_size={self.min_ngram_size}"
            )
        if self.match not in ("first", "last"):
            raise ValueError(f"match={self.match!r} is neither first nor last")

    @property
    def layout(self) -> BlockLayout:
        """Return a chain of M + 1 rows."""
        return BlockLayout.linear(1 + self.num_draft_tokens)

    def init(self, tokens: jax.Array, length: jax.Array, key: jax.Array) -> tuple[()]:
        """Return the empty state: the text is all there is to know."""
        del tokens, length, key
        return ()

    def propose(self, state: tuple[()], tokens: jax.Array, length: jax.Array) -> Proposal:
        """Return the current token and the continuation of the best match, if any."""
        del state
        draft_tokens, num_draft = find_ngram(
            tokens,
            length,
            ngram_size=self.ngram_size,
            num_draft_tokens=self.num_draft_tokens,
            min_ngram_size=self.min_ngram_size,
            match=self.match,
            implementation=self.kernels,
        )
        current = current_tokens(tokens, length)[:, None]
        block_tokens = jnp.concatenate([current, draft_tokens], axis=1)
        return Proposal(block_tokens=block_tokens, num_draft=num_draft[:, None])

    def update(
        self, state: tuple[()], outcome: Outcome, tokens: jax.Array, length: jax.Array
    ) -> tuple[()]:
        """Return the empty state."""
        del outcome, tokens, length
        return state
