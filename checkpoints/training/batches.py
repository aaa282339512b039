"""Batches of training windows, some of them made to loop."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from checkpoints.training.steps import Batch


def windows(
    tokens: np.ndarray, *, length: int, batch_size: int, rng: np.random.Generator
) -> Iterator[np.ndarray]:
    """Yield batches i32[B, length] of windows for ever, every epoch in a new order and phase.

    Windows of an epoch overlap by one token, since the last one is only predicted.

    Raises:
      ValueError: the tokens do not fill one window.
    """
    stride = length - 1
    if len(tokens) < length + stride:
        raise ValueError(f"num_tokens={len(tokens)} is too short for windows of {length}")
    rows = np.arange(length)[None]
    pending = np.zeros(0, np.int64)
    while True:
        while len(pending) < batch_size:
            starts = np.arange(rng.integers(stride), len(tokens) - length + 1, stride)
            pending = np.concatenate([pending, rng.permutation(starts)])
        yield tokens[pending[:batch_size, None] + rows]
        pending = pending[batch_size:]


def with_loops(
    tokens: np.ndarray,
    *,
    num_rows: int,
    newlines: np.ndarray,
    rng: np.random.Generator,
    max_period: int = 48,
) -> Batch:
    """Return a batch whose first `num_rows` rows fall into a loop, to be unlearnt.

    Such a row is its window up to a random stretch, and then that stretch over and over. It is
    learnt up to the stretch's end; from the third repetition on its tokens are made unlikely.

    Args:
      tokens: i32[B, T+1] windows.
      num_rows: rows to turn into loops; 0 = none.
      newlines: ids that end a line; half of the stretches are whole lines.
      rng: source of randomness.
      max_period: longest stretch, in tokens.
    """
    tokens = tokens.copy()
    num, length = tokens.shape
    likelihood_end, penalty_start = np.full(num, length, np.int32), np.full(num, length, np.int32)
    for row in range(num_rows):
        start, period = _stretch(tokens[row], newlines, rng, min(max_period, length // 8))
        end = start + period
        index = np.arange(end, length)
        tokens[row, end:] = tokens[row, start + (index - start) % period]
        likelihood_end[row] = end
        penalty_start[row] = min(start + max(2 * period, period + 16), length)
    return Batch(*map(jnp.asarray, (tokens, likelihood_end, penalty_start)))


def _stretch(
    row: np.ndarray, newlines: np.ndarray, rng: np.random.Generator, max_period: int
) -> tuple[int, int]:
    """Return (start, period) of a random stretch in the first half of a row."""
    start = int(rng.integers(1, len(row) // 2))
    period = int(rng.integers(1, max_period + 1))
    if rng.random() < 0.5:
        return start, period
    ends = np.flatnonzero(np.isin(row[start : start + 2 * max_period], newlines)) + start + 1
    if len(ends) < 2:
        return start, period
    fitting = ends[(ends > ends[0]) & (ends <= ends[0] + max_period)]
    return (int(ends[0]), int(rng.choice(fitting) - ends[0])) if len(fitting) else (start, period)
