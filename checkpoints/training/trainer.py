"""The training run: the compiled step, the loop around it, its log; and the speed probe."""

from __future__ import annotations

import dataclasses
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from checkpoints.training import bpe, measure
from checkpoints.training.batches import windows, with_loops
from checkpoints.training.corpus import Corpus
from checkpoints.training.settings import Limits, Recipe
from checkpoints.training.steps import (
    AttentionName,
    Batch,
    StepConfig,
    TrainState,
    evaluate_step,
    learning_rate,
    train_step,
)

EVALUATION_ROWS = 32


@dataclasses.dataclass
class Data:
    """The tokenized corpus."""

    tokenizer: Tokenizer
    train: np.ndarray
    held_out: np.ndarray
    corpus: Corpus


def choose_step(
    recipe: Recipe, names: Sequence[AttentionName], say: Callable[[str], None] = print
) -> tuple[StepConfig, Any]:
    """Return (settings, compiled step) of the first attention that compiles and runs.

    The evaluation is compiled too, so that it does not interrupt the training.

    Args:
      recipe: gives the shapes.
      names: attention implementations to try in order.
      say: takes lines of progress.
    """
    graph, state = recipe.init()
    num_rows, length = recipe.batch_size, recipe.sequence_length + 1
    full = jnp.full(num_rows, length, jnp.int32)
    batch = Batch(jnp.zeros((num_rows, length), jnp.int32), full, full)
    rate, key = jnp.float32(0), _dropout_key(recipe.seed)
    for name in names:
        config = dataclasses.replace(recipe.step, attention=name)
        try:
            begin = time.monotonic()
            step = train_step.lower(graph, state, batch, rate, key, config=config).compile()
            jax.block_until_ready(step(state, batch, rate, key))
            rows = batch.tokens[:EVALUATION_ROWS]
            jax.block_until_ready(evaluate_step(graph, state.params, rows, config=config))
            say(f"attention {name}: compiled and run in {time.monotonic() - begin:.1f} s")
            return config, step
        except Exception as error:  # A missing or old cuDNN shows in many ways.
            if name == names[-1]:
                raise
            say(f"attention {name} is not available: {str(error).splitlines()[0][:200]}")
    raise ValueError("names is empty")


def _dropout_key(seed: int) -> jax.Array:
    # The default generator is slow at the hundreds of millions of numbers of a step.
    return jax.random.key(seed, impl="rbg")


@dataclasses.dataclass
class Trainer:
    """One training run: state, compiled step and what has been logged."""

    recipe: Recipe
    limits: Limits
    data: Data
    graph: Any
    state: TrainState
    step: Any
    config: StepConfig
    say: Callable[[str], None] = print
    log: list[dict[str, float]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self._newlines = bpe.newline_ids(self.data.tokenizer)
        self._byte_counts = bpe.token_bytes(self.data.tokenizer)

    def run(self) -> dict[str, float]:
        """Train until the limit and return the figures of the training."""
        begin = time.monotonic()
        lagging: deque[dict[str, jax.Array]] = deque()
        checks = deque([0.25, 0.5, 0.75])
        key = _dropout_key(self.recipe.seed)
        num_done, last_said = 0, begin
        rng = np.random.default_rng(self.recipe.seed)
        for tokens in self._windows(rng):
            progress = self.limits.progress(begin, num_done)
            if progress >= 1:
                break
            lagging.append(self._one_step(tokens, progress, num_done, rng, key))
            num_done += 1
            if len(lagging) > 2:
                # Two steps ahead of the device and no more: progress is read off the clock.
                done = jax.block_until_ready(lagging.popleft())
                if time.monotonic() - last_said > 10 or num_done == 20:
                    last_said = time.monotonic()
                    self._say_progress(done, progress, num_done, last_said - begin)
            if checks and progress >= checks[0]:
                checks.popleft()
                self.log.append({"step": num_done, "progress": progress} | self.evaluate())
        last = jax.block_until_ready(lagging.pop()) if lagging else {}
        seconds = time.monotonic() - begin
        num_tokens = num_done * self.recipe.batch_size * self.recipe.sequence_length
        return {
            "num_steps": num_done,
            "num_tokens": num_tokens,
            "epochs": num_tokens / len(self.data.train),
            "train_seconds": seconds,
            "tokens_per_second": num_tokens / seconds,
            "last_loss": float(last["loss"]) if last else float("nan"),
        }

    def _windows(self, rng: np.random.Generator) -> Iterator[np.ndarray]:
        length = self.recipe.sequence_length + 1
        return windows(self.data.train, length=length, batch_size=self.recipe.batch_size, rng=rng)

    def _one_step(
        self,
        tokens: np.ndarray,
        progress: float,
        num_done: int,
        rng: np.random.Generator,
        key: jax.Array,
    ) -> dict[str, jax.Array]:
        recipe = self.recipe
        num_rows = recipe.loop_rows if progress >= recipe.loop_start else 0
        batch = with_loops(tokens, num_rows=num_rows, newlines=self._newlines, rng=rng)
        rate = learning_rate(
            progress, num_done, peak=recipe.peak_learning_rate, warmup_steps=recipe.warmup_steps
        )
        key = jax.random.fold_in(key, num_done)
        self.state, figures = self.step(self.state, batch, jnp.float32(rate), key)
        return figures

    def _say_progress(
        self, figures: dict[str, jax.Array], progress: float, num_done: int, seconds: float
    ) -> None:
        num_tokens = num_done * self.recipe.batch_size * self.recipe.sequence_length
        row = {
            "step": num_done,
            "progress": progress,
            "loss": float(figures["loss"]),
            "grad_norm": float(figures["grad_norm"]),
            "tokens_per_second": num_tokens / seconds,
        }
        self.log.append(row)
        self.say(" ".join(f"{name} {value:.4g}" for name, value in row.items()))

    def evaluate(self) -> dict[str, float]:
        """Return the held-out loss of the weights as they are now."""
        recipe = self.recipe

        def log_likelihoods(rows: np.ndarray) -> jax.Array:
            tokens = jnp.asarray(rows)
            return evaluate_step(self.graph, self.state.params, tokens, config=self.config)

        figures = measure.held_out_loss(
            log_likelihoods,
            self.data.held_out,
            self._byte_counts,
            length=recipe.sequence_length + 1,
            batch_size=min(recipe.batch_size, EVALUATION_ROWS),
        )
        figures = {f"held_out_{name}": value for name, value in figures.items()}
        self.say(" ".join(f"{name} {value:.4f}" for name, value in figures.items()))
        return figures


def probe(
    recipe: Recipe,
    *,
    attention: Sequence[AttentionName],
    batch_sizes: Sequence[int],
    num_steps: int = 20,
    say: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Return the speed of the step for each attention and batch size, on random tokens."""
    results: list[dict[str, Any]] = []
    for name in attention:
        for batch_size in batch_sizes:
            sized = dataclasses.replace(recipe, batch_size=batch_size)
            row: dict[str, Any] = {"attention": name, "batch_size": batch_size}
            try:
                row |= _probe_one(sized, name, num_steps, say)
            except Exception as error:  # What does not run here is a result too.
                row["error"] = str(error).splitlines()[0][:200]
            say(json.dumps(row))
            results.append(row)
    return results


def _probe_one(
    recipe: Recipe, name: AttentionName, num_steps: int, say: Callable[[str], None]
) -> dict[str, Any]:
    config, step = choose_step(recipe, (name,), say)
    graph, state = recipe.init()
    rng = np.random.default_rng(0)
    shape = (recipe.batch_size, recipe.sequence_length + 1)
    tokens = rng.integers(0, recipe.vocab_size, shape, dtype=np.int32)
    batch = with_loops(tokens, num_rows=0, newlines=np.zeros(1, np.int32), rng=rng)
    key, rate = _dropout_key(0), jnp.float32(1e-4)
    rows = batch.tokens[:EVALUATION_ROWS]
    likelihoods = evaluate_step(graph, state.params, rows, config=config)
    jax.block_until_ready(step(state, batch, rate, key))
    begin = time.monotonic()
    for _ in range(num_steps):
        state, figures = step(state, batch, rate, key)
    jax.block_until_ready(figures)
    seconds = (time.monotonic() - begin) / num_steps
    memory = jax.local_devices()[0].memory_stats() or {}
    return {
        "ms_per_step": 1e3 * seconds,
        "tokens_per_second": recipe.batch_size * recipe.sequence_length / seconds,
        "peak_memory_gb": memory.get("peak_bytes_in_use", 0) / 1e9,
        # The same for every implementation, up to rounding.
        "mean_log_likelihood": float(jnp.mean(likelihoods)),
        "last_log_likelihood": float(jnp.mean(likelihoods[:, -1])),
    }
