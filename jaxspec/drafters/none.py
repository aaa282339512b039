"""Plain decoding: no drafts, one token a step."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxspec.drafters.protocol import Outcome, Proposal, current_tokens
from jaxspec.layout import BlockLayout, check_count


@dataclasses.dataclass(frozen=True)
class NoDraft:
    """Feed the current token alone.

    Attributes:
      num_padding_rows: rows fed besides, whose results are ignored. It makes the block as wide
        as a speculative one, so that both round alike in bfloat16; for tests only, since the
        rows cost time.
    """

    num_padding_rows: int = 0

    def __post_init__(self) -> None:
        check_count("num_padding_rows", self.num_padding_rows, 0)

    @property
    def layout(self) -> BlockLayout:
        """Return a chain of `1 + num_padding_rows` rows."""
        return BlockLayout.linear(1 + self.num_padding_rows)

    def init(self, tokens: jax.Array, length: jax.Array, key: jax.Array) -> tuple[()]:
        """Return the empty state."""
        del tokens, length, key
        return ()

    def propose(self, state: tuple[()], tokens: jax.Array, length: jax.Array) -> Proposal:
        """Return a block without drafts."""
        del state
        current = current_tokens(tokens, length)[:, None]
        return Proposal(
            block_tokens=jnp.tile(current, (1, 1 + self.num_padding_rows)),
            num_draft=jnp.zeros((tokens.shape[0], 1), jnp.int32),
        )

    def update(
        self, state: tuple[()], outcome: Outcome, tokens: jax.Array, length: jax.Array
    ) -> tuple[()]:
        """Return the empty state."""
        del outcome, tokens, length
        return state
