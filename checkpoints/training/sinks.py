"""Sink tokens: found in the trained model, and their embedding rows replaced by the mean row.

The unlikelihood of loops asks for any token but the next one of the loop. One token that real text
hardly holds can serve everywhere: it costs no likelihood, so its row grows into the answer to every
loop, itself included, and greedy text that once meets a loop ends in a run of it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from checkpoints.training.steps import Batch, StepConfig, greedy_step
from jaxspec.model import Qwen3

# A sink's share of the predictions in loops, at least, and that share over its share of the text.
# Tokens that end a loop in earnest, such as ")])", reach the first but stay far below the second.
MIN_SHARE = 0.01
MIN_RATIO = 1e5
MAX_ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class Sink:
    """A token, its share of the predictions in loops and its share of the training text."""

    token_id: int
    share: float
    text_share: float


def find(
    graph: Any, params: Any, loops: Batch, counts: np.ndarray, *, config: StepConfig
) -> list[Sink]:
    """Return the tokens that the model predicts in loops out of all proportion to the text.

    Args:
      graph, params: the trained model.
      loops: windows that fall into loops; the penalised positions count.
      counts: i64[V], occurrences of every id in the training text.
      config: how to compute.
    """
    predicted = np.asarray(greedy_step(graph, params, loops.tokens, config=config))
    index = np.arange(1, predicted.shape[1] + 1)[None]
    in_loops = predicted[index >= np.asarray(loops.penalty_start)[:, None]]
    shares = np.bincount(in_loops, minlength=len(counts)) / max(len(in_loops), 1)
    text_shares = counts / counts.sum()
    is_sink = (shares >= MIN_SHARE) & (shares >= MIN_RATIO * text_shares)
    return [Sink(int(i), shares[i].item(), text_shares[i].item()) for i in np.flatnonzero(is_sink)]


def with_mean_rows(graph: Any, params: Any, token_ids: list[int]) -> Any:
    """Return parameters whose (tied) embedding rows of these ids are the mean of the others."""
    model: Qwen3 = nnx.merge(graph, params, copy=True)
    rows = model.embed_tokens[...]
    others = jnp.delete(rows, jnp.asarray(token_ids), axis=0)
    mean = jnp.mean(others, axis=0, dtype=jnp.float32).astype(rows.dtype)
    model.embed_tokens.set_value(rows.at[jnp.asarray(token_ids)].set(mean[None]))
    return nnx.state(model)


def repair(
    graph: Any, params: Any, loops: Batch, counts: np.ndarray, *, config: StepConfig
) -> tuple[Any, list[Sink]]:
    """Return (parameters without sinks, what was found); see `find`.

    Another token may take the place of the first, so that is done at most `MAX_ROUNDS` times.
    """
    found: dict[int, Sink] = {}
    for _ in range(MAX_ROUNDS):
        sinks = find(graph, params, loops, counts, config=config)
        new = {sink.token_id: sink for sink in sinks if sink.token_id not in found}
        if not new:
            break
        found |= new
        params = with_mean_rows(graph, params, list(found))
    return params, list(found.values())
