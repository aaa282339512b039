"""Small random models and drafters with a known fate, for the tests of the loop."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec import BlockLayout, Qwen3, Qwen3Config
from jaxspec.drafters import Outcome, Proposal
from jaxspec.drafters.protocol import current_tokens

CONFIG = Qwen3Config(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    max_position_embeddings=2048,
)


@functools.cache
def random_model(seed: int = 0, **overrides: object) -> Qwen3:
    """Return a float32 model whose logits spread widely, so that near ties are rare."""
    config = dataclasses.replace(CONFIG, **overrides)
    model = Qwen3(config, rngs=nnx.Rngs(seed))
    graph, params = nnx.split(model)
    params = jax.tree.map(lambda w: w * 6 if w.ndim > 1 else w, params)
    return nnx.merge(graph, params)


def random_prompts(lengths: tuple[int, ...], seed: int = 0, vocab_size: int = 97) -> list:
    """Return prompts that repeat themselves in part, so that lookups hit."""
    rng = np.random.default_rng(seed)
    prompts = []
    for length in lengths:
        pattern = rng.integers(0, vocab_size, max(length // 2, 1))
        prompts.append(np.resize(pattern, length).tolist())
    return prompts


score_logits = jax.jit(
    lambda model, tokens, layout: model(
        tokens, jnp.zeros(tokens.shape[0], jnp.int32), None, layout
    )[0],
    static_argnums=2,
)


def smallest_gap(model: Qwen3, prompt: list[int], output: list[int]) -> float:
    """Return the smallest gap between the two best logits on the way through `output`."""
    tokens = jnp.asarray([prompt + output], jnp.int32)
    logits = score_logits(model, tokens, BlockLayout.linear(tokens.shape[1]))[
        0, len(prompt) - 1 : -1
    ]
    num_valid = model.config.num_valid_tokens or model.config.vocab_size
    top = jax.lax.top_k(logits[:, :num_valid], 2)[0]
    return float(jnp.min(top[:, 0] - top[:, 1]))


@dataclasses.dataclass(frozen=True)
class ScriptedDraft:
    """Drafts from a fixed text: `script[b]` is what row b's whole text should become.

    `wrong_at` replaces the draft token at that index by an id that the model never picks.
    """

    script: tuple[tuple[int, ...], ...]
    num_draft_tokens: int
    wrong_at: int | None = None
    wrong_id: int = 96

    @property
    def layout(self) -> BlockLayout:
        return BlockLayout.linear(1 + self.num_draft_tokens)

    def init(self, tokens, length, key):
        return ()

    def propose(self, state, tokens, length):
        width = max(map(len, self.script)) + self.num_draft_tokens + 1
        script = np.full((len(self.script), width), -1, np.int32)
        for row, text in zip(script, self.script, strict=True):
            row[: len(text)] = text
        index = length[:, None] + jnp.arange(self.num_draft_tokens)[None]
        draft = jnp.take_along_axis(jnp.asarray(script), jnp.minimum(index, width - 1), axis=1)
        if self.wrong_at is not None:
            draft = draft.at[:, self.wrong_at].set(self.wrong_id)
        block = jnp.concatenate([current_tokens(tokens, length)[:, None], draft], axis=1)
        return Proposal(
            block_tokens=block,
            num_draft=jnp.full((tokens.shape[0], 1), self.num_draft_tokens, jnp.int32),
        )

    def update(self, state, outcome: Outcome, tokens, length):
        return ()
