"""What a drafter is, what it proposes, and what it is told of the outcome.

A drafter is a frozen, hashable dataclass: it shapes the compiled program. What it learns while
decoding lives in its state, any pytree of arrays with leading axis B.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import jax

from jaxspec.layout import BlockLayout

if TYPE_CHECKING:
    Leaf = jax.Array
else:
    # JAX rebuilds state classes with whatever stands for an array: a tracer, None, a shape. The
    # shape checks of the tests must not look at their fields.
    Leaf = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Proposal:
    """The rows to feed in one step.

    Attributes:
      block_tokens: i32[B, T], row 0 the current token; unused entries hold any id.
      num_draft: i32[B, C], draft tokens of each candidate that count; 0 never accepts.
    """

    block_tokens: Leaf
    num_draft: Leaf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the target model said of a proposal.

    Attributes:
      target_tokens: i32[B, T], the token picked after each row; -1 outside `logit_rows`.
      greedy_tokens: i32[B, T], the plain argmax after each row; -1 outside `logit_rows`.
      num_accepted: i32[B], draft tokens of the best candidate that equal the targets.
      best_candidate: i32[B], the candidate with most accepted tokens, the lowest on ties.
      num_emitted: i32[B], tokens appended to the text: `num_accepted + 1` clipped at the first
        EOS, the budget and the capacity; 0 for a finished row.
    """

    target_tokens: Leaf
    greedy_tokens: Leaf
    num_accepted: Leaf
    best_candidate: Leaf
    num_emitted: Leaf


@runtime_checkable
class Drafter(Protocol):
    """Proposes draft tokens from the text so far; imports neither model nor cache nor verify."""

    @property
    def layout(self) -> BlockLayout:
        """Return the static layout of every block this drafter proposes."""
        ...

    def init(self, tokens: jax.Array, length: jax.Array, key: jax.Array) -> Any:
        """Return the state for a fresh text.

        Args:
          tokens: i32[B, P] text buffer; only the first `length` of a row are known.
          length: i32[B] known tokens, the prompt.
          key: [B] typed random keys, one per row.
        """
        ...

    def propose(self, state: Any, tokens: jax.Array, length: jax.Array) -> Proposal:
        """Return the next block; its row 0 is the current token `tokens[b, length[b] - 1]`."""
        ...

    def update(self, state: Any, outcome: Outcome, tokens: jax.Array, length: jax.Array) -> Any:
        """Return the state after a step; `tokens` and `length` include what it emitted."""
        ...


def current_tokens(tokens: jax.Array, length: jax.Array) -> jax.Array:
    """Return i32[B], the newest known token of each row."""
    index = jax.numpy.maximum(length - 1, 0)[:, None]
    return jax.numpy.take_along_axis(tokens, index, axis=1)[:, 0]
