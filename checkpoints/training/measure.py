"""What a trained model is worth: held-out loss, loops in greedy text, prompt-lookup acceptance."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import numpy as np


def held_out_loss(
    log_likelihoods: Callable[[np.ndarray], jax.Array],
    tokens: np.ndarray,
    byte_counts: np.ndarray,
    *,
    length: int,
    batch_size: int,
) -> dict[str, float]:
    """Return nats per token and bits per byte over consecutive windows of the tokens.

    Args:
      log_likelihoods: of the last `length - 1` tokens of each of `batch_size` windows.
      tokens: the held-out text; what does not fill a window is left out.
      byte_counts: text bytes of every id.
      length: tokens of a window; each sees no more than its own beginning.
      batch_size: rows of one call.
    """
    starts = np.arange(0, len(tokens) - length + 1, length - 1)
    rows = tokens[starts[:, None] + np.arange(length)[None]]
    total, num_tokens, num_bytes = 0.0, 0, 0
    for first in range(0, len(rows), batch_size):
        batch = rows[first : first + batch_size]
        padded = np.concatenate([batch, np.repeat(rows[:1], batch_size - len(batch), axis=0)])
        total -= float(np.sum(np.asarray(log_likelihoods(padded))[: len(batch)], dtype=np.float64))
        num_tokens += batch[:, 1:].size
        num_bytes += int(byte_counts[batch[:, 1:]].sum())
    if not num_tokens:
        return {"num_tokens": 0, "nats_per_token": math.nan, "bits_per_byte": math.nan}
    return {
        "num_tokens": num_tokens,
        "nats_per_token": total / num_tokens,
        "bits_per_byte": total / math.log(2) / max(num_bytes, 1),
    }


def lookup_draft(text: np.ndarray, num_draft: int, max_ngram: int = 16) -> np.ndarray:
    """Return what prompt lookup drafts after `text`: the latest of the longest suffix matches.

    A draft copies on over its own output at the text's end, so a match gives `num_draft` tokens.
    """
    length = len(text)
    ends = np.arange(1, length)
    matching = np.zeros(len(ends), np.int64)
    is_equal = np.ones(len(ends), bool)
    for back in range(1, min(max_ngram, length - 1) + 1):
        is_equal &= (ends >= back) & (text[np.maximum(ends - back, 0)] == text[length - back])
        matching += is_equal
    if not matching.any():
        return np.zeros(0, text.dtype)
    end = int(ends[np.flatnonzero(matching == matching.max())[-1]])
    return text[end + np.arange(num_draft) % (length - end)]


def lookup_accepted_length(
    prompt: Sequence[int], output: Sequence[int], *, num_draft: int = 7, max_ngram: int = 16
) -> float:
    """Return the tokens per step that prompt lookup would have needed for a known output."""
    text = np.asarray([*prompt, *output], np.int64)
    position, num_steps = len(prompt), 0
    while position < len(text):
        draft = lookup_draft(text[:position], num_draft, max_ngram)
        target = text[position : position + len(draft)]
        wrong = np.flatnonzero(draft[: len(target)] != target)
        accepted = int(wrong[0]) if len(wrong) else len(target)
        position += accepted + 1
        num_steps += 1
    return (min(position, len(text)) - len(prompt)) / max(num_steps, 1)
