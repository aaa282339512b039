"""Lookahead decoding: guess n-grams by Jacobi iteration while verifying earlier guesses."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.drafters import ngram_pool
from jaxspec.drafters.ngram_pool import NgramPool
from jaxspec.drafters.protocol import Leaf, Outcome, Proposal, current_tokens
from jaxspec.layout import BlockLayout, check_count, check_num_rows
from pallas_kernels.dispatch import Implementation


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LookaheadState:
    """Window and pool of each row.

    Attributes:
      window: i32[B, N-1, W] guesses; level l, column i stands l + i positions after the current
        token, which is level 0, column 0 itself.
      pool: the n-grams seen so far.
      num_steps: i32[B] steps taken: the window needs N - 2 of them to fill with real guesses.
    """

    window: Leaf
    pool: NgramPool
    num_steps: Leaf


@dataclasses.dataclass(frozen=True)
class Lookahead:
    """Verify up to G n-grams of a pool that start with the current token, and refine a window.

    One forward does both. The window's N - 1 levels of W columns are a Jacobi iteration: the
    guess after the last level of a column completes an n-gram, which goes to the pool. So do the
    n-grams of the prompt and of the text as it grows. A step emits up to N tokens.

    Source: Fu et al. 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead
    Decoding". Ours starts with all levels filled with random prompt tokens (and harvests only
    once they are real guesses), counts a fully accepted n-gram's bonus token, and keeps K/V
    of the accepted candidate only.

    Attributes:
      window_size: columns of the window (W), >= 1.
      ngram_size: tokens of an n-gram (N), the current token included, >= 2.
      num_candidates: n-grams verified a step (G), >= 0; with 0 nothing is ever accepted.
      pool_size: n-grams kept per row; the least recently seen are forgotten first.
      kernels: implementation of the pool, None = the call's.
    """

    window_size: int = 7
    ngram_size: int = 5
    num_candidates: int = 7
    pool_size: int = 4096
    kernels: Implementation | None = None

    def __post_init__(self) -> None:
        least = {"window_size": 1, "ngram_size": 2, "num_candidates": 0, "pool_size": 1}
        for name, minimum in least.items():
            check_count(name, getattr(self, name), minimum)
        check_num_rows((self.ngram_size - 1) * (self.window_size + self.num_candidates))

    @property
    def layout(self) -> BlockLayout:
        """Return (N-1)(W+G) rows: the window level by level, then the candidates."""
        return _layout(self.window_size, self.ngram_size, self.num_candidates)

    def init(self, tokens: jax.Array, length: jax.Array, key: jax.Array) -> LookaheadState:
        """Return a window of random prompt tokens and a pool of the prompt's n-grams."""
        shape = (self.ngram_size - 1, self.window_size)

        def random_window(key: jax.Array, row: jax.Array, length: jax.Array) -> jax.Array:
            return row[jax.random.randint(key, shape, 0, jnp.maximum(length, 1))]

        window = jax.vmap(random_window)(key, tokens, length)
        return LookaheadState(
            window=window.at[:, 0, 0].set(current_tokens(tokens, length)),
            pool=ngram_pool.from_text(
                tokens, length, ngram_size=self.ngram_size, pool_size=self.pool_size
            ),
            num_steps=jnp.zeros_like(length),
        )

    def propose(self, state: LookaheadState, tokens: jax.Array, length: jax.Array) -> Proposal:
        """Return the window and the most recent n-grams that start with the current token."""
        batch_size = tokens.shape[0]
        window = state.window.reshape(batch_size, -1)
        if not self.num_candidates:
            return Proposal(window, jnp.zeros((batch_size, 1), jnp.int32))
        grams, num_draft = ngram_pool.lookup(
            state.pool,
            current_tokens(tokens, length),
            num_candidates=self.num_candidates,
            kernels=self.kernels,
        )
        block_tokens = jnp.concatenate([window, grams.reshape(batch_size, -1)], axis=1)
        return Proposal(block_tokens, num_draft)

    def update(
        self, state: LookaheadState, outcome: Outcome, tokens: jax.Array, length: jax.Array
    ) -> LookaheadState:
        """Return the window moved on by one level and the pool with what the step showed."""
        batch_size = length.shape[0]
        num_levels, num_columns = self.ngram_size - 1, self.window_size
        is_active = outcome.num_emitted > 0
        first_guess_row = (num_levels - 1) * num_columns
        # Guesses are plain argmax even where tokens are sampled: they are only proposals.
        guesses = outcome.greedy_tokens[:, first_guess_row : first_guess_row + num_columns]
        harvest = jnp.concatenate([state.window, guesses[:, None]], axis=1).swapaxes(1, 2)
        is_harvest = (state.num_steps >= num_levels - 1) & is_active
        text_grams, is_text_gram = self._emitted_grams(outcome, tokens, length)
        # What follows reads the old window from here only: so it is overwritten without a copy.
        grams = jax.lax.optimization_barrier(jnp.concatenate([harvest, text_grams], axis=1))
        is_harvest = jnp.broadcast_to(is_harvest[:, None], (batch_size, num_columns))
        is_gram = jnp.concatenate([is_harvest, is_text_gram], axis=1)
        pool = ngram_pool.insert(state.pool, grams, is_gram, kernels=self.kernels)
        columns = grams[:, :num_columns].swapaxes(1, 2)
        window = columns[:, 1:].at[:, 0, 0].set(current_tokens(tokens, length))
        return LookaheadState(
            window=jnp.where(is_active[:, None, None], window, columns[:, :-1]),
            pool=pool,
            num_steps=state.num_steps + is_active.astype(jnp.int32),
        )

    def _emitted_grams(
        self, outcome: Outcome, tokens: jax.Array, length: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the n-grams that end at each token of this step, oldest first."""
        offset = jnp.arange(self.ngram_size)
        end = (length - outcome.num_emitted)[:, None] + offset[None]
        start = end - (self.ngram_size - 1)
        is_gram = (offset[None] < outcome.num_emitted[:, None]) & (start >= 0)
        return ngram_pool.grams_at(tokens, start, self.ngram_size), is_gram


@functools.lru_cache(maxsize=64)
def _layout(window_size: int, ngram_size: int, num_candidates: int) -> BlockLayout:
    num_levels = ngram_size - 1
    level, column = np.divmod(np.arange(num_levels * window_size), window_size)
    candidate, draft = np.divmod(np.arange(num_candidates * num_levels), num_levels)
    num_window, num_rows = len(level), len(level) + len(candidate)
    mask = np.zeros((num_rows, num_rows), dtype=np.bool_)
    # A guess sees level 0 up to its column, and its own column up to its level.
    mask[:num_window, :num_window] = ((level[None] == 0) & (column[None] <= column[:, None])) | (
        (column[None] == column[:, None]) & (level[None] <= level[:, None])
    )
    # A candidate's draft sees the current token and the drafts before it.
    mask[num_window:, 0] = True
    mask[num_window:, num_window:] = (candidate[None] == candidate[:, None]) & (
        draft[None] <= draft[:, None]
    )
    candidate_rows = [
        [0, *range(start, start + num_levels)] for start in range(num_window, num_rows, num_levels)
    ]
    logit_rows = {0, *range(num_window - window_size, num_rows)}
    return BlockLayout.from_mask(
        depth=np.concatenate([level + column, draft + 1]).tolist(),
        mask=mask,
        candidate_rows=candidate_rows or [[0]],
        logit_rows=sorted(logit_rows),
    )
