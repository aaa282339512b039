"""What is trained and for how long."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax.numpy as jnp
from flax import nnx

from checkpoints.training.steps import StepConfig, TrainState, init_state
from jaxspec.config import Qwen3Config
from jaxspec.model import Qwen3


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything that decides what comes out, but for time.

    Attributes:
      hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim, vocab_size:
        the model's shape.
      max_position_embeddings: written to the checkpoint.
      sequence_length: tokens of a training window.
      batch_size: windows of a step.
      peak_learning_rate: AdamW's highest rate.
      warmup_steps: steps to reach it.
      step: what shapes the step's program.
      loop_rows: windows of a step that are turned into loops to unlearn.
      loop_start: share of the training after which that begins.
      sources: names of the distributions to read; None = all that are installed.
      held_out: names of those kept for evaluation.
      max_bytes: most training text; None = no limit.
      bpe_bytes: text that the tokenizer is trained on.
      num_new_tokens: length of the greedy samples.
      max_shard_bytes: of the exported weight files.
      seed: of everything random.
    """

    hidden_size: int = 320
    intermediate_size: int = 768
    num_layers: int = 8
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 64
    vocab_size: int = 8192
    max_position_embeddings: int = 4096
    sequence_length: int = 1024
    batch_size: int = 64
    peak_learning_rate: float = 3e-3
    warmup_steps: int = 100
    step: StepConfig = StepConfig()
    loop_rows: int = 4
    loop_start: float = 0.5
    sources: tuple[str, ...] | None = None
    held_out: tuple[str, ...] = ("jinja2", "rich", "werkzeug")
    max_bytes: int | None = None
    bpe_bytes: int = 50_000_000
    num_new_tokens: int = 256
    max_shard_bytes: int = 14_000_000
    seed: int = 0

    def model_config(self, eos_token_ids: tuple[int, ...] = ()) -> Qwen3Config:
        """Return the shape of the model."""
        return Qwen3Config(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rms_norm_eps=1e-6,
            rope_theta=1e6,
            max_position_embeddings=self.max_position_embeddings,
            tie_word_embeddings=True,
            eos_token_ids=eos_token_ids,
        )

    def init(self) -> tuple[Any, TrainState]:
        """Return the untrained model."""
        model = Qwen3(self.model_config(), dtype=jnp.float32, rngs=nnx.Rngs(self.seed))
        return init_state(model, self.step)


@dataclasses.dataclass(frozen=True)
class Limits:
    """When the training ends: at a time, or after a number of steps.

    Attributes:
      start: when the run began, `time.monotonic()`.
      minutes: for everything; what comes after the training has `reserve_seconds` of it.
      reserve_seconds: for evaluation and export.
      num_steps: if given, the training ends after so many steps, whatever the time.
      min_steps: done even where preparing the data took all the time.
    """

    start: float
    minutes: float = 8.0
    reserve_seconds: float = 25.0
    num_steps: int | None = None
    min_steps: int = 20

    def progress(self, begin: float, num_done: int) -> float:
        """Return the share of the training that is over; it ends at 1.

        Where time is the limit the learning rate follows the clock, so that it has fallen to zero
        when the time is up, however fast the steps were.
        """
        if self.num_steps is not None:
            return num_done / self.num_steps
        end = self.start + 60 * self.minutes - self.reserve_seconds
        share = (time.monotonic() - begin) / (end - begin) if end > begin else 1.0
        return share if num_done >= self.min_steps else min(share, num_done / self.min_steps)
