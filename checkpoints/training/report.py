"""The model card."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import flax
import jax

from checkpoints.training.corpus import Corpus, Source

if TYPE_CHECKING:
    from checkpoints.training.recipe import Recipe

_CARD = """---
license: apache-2.0
language: [code]
library_name: transformers
tags: [qwen3, python, tiny]
---
# qwen3-tiny-code

A Qwen3 of {params:.1f} M parameters, trained from nothing on Python source. It is a demo and a test
subject for speculative decoding, and no assistant: it continues Python text, often wrongly.

Architecture `Qwen3ForCausalLM`: {layers} layers, width {hidden}, {heads} query and {kv_heads}
key-value heads of {head_dim}, feed-forward {inner}, {vocab} ids, tied embeddings, bfloat16. The
tokenizer is byte-level BPE trained on the same text, with the special tokens and the chat template
of Qwen3 (Apache-2.0); the model saw no chats. Windows of {length} tokens were seen in training, so
longer texts are beyond it, whatever `max_position_embeddings` says. Files end with `<|endoftext|>`.

## Training
{training}

Reproduce (an NVIDIA GPU, the `train` extra): `python scripts/train_tiny.py --out DIR`. What comes
out depends on the packages installed and on the speed of the machine, since time is the limit.

## Evaluation
Held-out packages ({held_out}), never trained on: **{nats:.4f} nats per token, {bpb:.4f} bits per
byte** over {held_out_tokens} tokens, windows of {length}.

Greedy continuations of {num_new} tokens of the project's prompts. `periodic from`: token from which
the text repeats itself with a period of at most 32 tokens to its end (its length = never).
`accepted`: tokens per step that prompt lookup (7 draft tokens) needs for the text before that.

| prompt | prompt tokens | tokens | periodic from | accepted |
|---|---|---|---|---|
{samples}

## Data
Python files of packages that were installed on the training machine and of its standard library,
{num_files} files, {num_tokens} tokens. Only licences known to be permissive were used, by the
packages' own metadata. Left out: vendored copies, files that name another licence, generated files,
tables, repetitive files, duplicates and near duplicates; leading licence comments were cut off.
Files dropped: {dropped}.

| package | version | licence |
|---|---|---|
{sources}

## Training log
```json
{log}
```
"""


def model_card(recipe: Recipe, corpus: Corpus, num_tokens: int, summary: dict[str, Any]) -> str:
    """Return the README of the exported directory.

    Args:
      recipe: what was trained.
      corpus: on what.
      num_tokens: of the training text.
      summary: what `recipe.run` measured.
    """
    held_out = summary["held_out"]
    return _CARD.format(
        params=_num_parameters(recipe) / 1e6,
        layers=recipe.num_layers,
        hidden=recipe.hidden_size,
        heads=recipe.num_heads,
        kv_heads=recipe.num_kv_heads,
        head_dim=recipe.head_dim,
        inner=recipe.intermediate_size,
        vocab=recipe.vocab_size,
        length=recipe.sequence_length,
        training=_training(recipe, summary),
        held_out=", ".join(recipe.held_out),
        nats=held_out["held_out_nats_per_token"],
        bpb=held_out["held_out_bits_per_byte"],
        held_out_tokens=held_out["held_out_num_tokens"],
        num_new=recipe.num_new_tokens,
        samples=_samples(summary["samples"]),
        num_files=len(corpus.train),
        num_tokens=num_tokens,
        dropped=", ".join(f"{name} {count}" for name, count in corpus.dropped.most_common()),
        sources=_sources(corpus.sources, recipe.held_out),
        log="\n".join(json.dumps(_rounded(row)) for row in summary["log"]),
    )


def _num_parameters(recipe: Recipe) -> int:
    heads = (2 * recipe.num_heads + 2 * recipe.num_kv_heads) * recipe.head_dim
    per_layer = recipe.hidden_size * (heads + 3 * recipe.intermediate_size + 2)
    per_layer += 2 * recipe.head_dim
    embedding = recipe.vocab_size * recipe.hidden_size
    return recipe.num_layers * per_layer + embedding + recipe.hidden_size


def _training(recipe: Recipe, summary: dict[str, Any]) -> str:
    figures = summary["training"]
    device = jax.local_devices()[0].device_kind
    lines = [
        f"- {figures['num_tokens'] / 1e6:.1f} M tokens seen ({figures['epochs']:.2f} epochs) in "
        f"{figures['num_steps']} steps of {recipe.batch_size} x {recipe.sequence_length}, "
        f"{figures['train_seconds']:.0f} s at {figures['tokens_per_second'] / 1e6:.3f} M tokens/s "
        f"on one {device}; {summary['total_seconds']:.0f} s with data, tokenizer and evaluation.",
        f"- AdamW (0.9, 0.95), weight decay {recipe.step.weight_decay} on matrices, gradient norm "
        f"clipped at {recipe.step.max_grad_norm}, dropout {recipe.step.dropout}; learning rate "
        f"{recipe.peak_learning_rate} after {recipe.warmup_steps} steps, falling linearly to zero "
        "from 20 % of the time on. Float32 weights, "
        f"{recipe.step.compute_dtype} compute, {summary['attention']} attention.",
        f"- From {recipe.loop_start:.0%} on, {recipe.loop_rows} of {recipe.batch_size} windows are "
        "made to repeat a stretch of at most 48 tokens, and its third repetition on is unlearnt, "
        "against loops in greedy text.",
        sinks_line(summary["sinks"]),
        f"- jax {jax.__version__}, flax {flax.__version__}, seed {recipe.seed}; last training loss "
        f"{figures['last_loss']:.4f}.",
    ]
    return "\n".join(lines)


def sinks_line(found: Sequence[dict[str, Any]]) -> str:
    """Return the card's line on the sink tokens that `recipe.without_sinks` found."""
    if not found:
        return "- No rare token became a sink, a token that the model emits to leave any loop."
    tokens = ", ".join(
        f"{row['token_id']} ({json.dumps(row['text'])}, {row['share']:.1%} of the predictions in "
        f"loops, {row['text_share']:.1e} of the text)"
        for row in found
    )
    rows = (
        "row of 1 such token was" if len(found) == 1 else f"rows of {len(found)} such tokens were"
    )
    return (
        "- The unlikelihood loss turns rare tokens into sinks, which the model emits to leave any "
        f"loop, and then without end. The embedding {rows} replaced by the mean row after "
        f"training: {tokens}."
    )


def _samples(samples: Sequence[dict[str, Any]]) -> str:
    return "\n".join(
        f"| {row['id']} | {row['num_prompt_tokens']} | {row['num_tokens']} "
        f"| {row['first_periodic_position']} | {row['lookup_accepted_length']:.2f} |"
        for row in samples
    )


def _sources(sources: Sequence[Source], held_out: Sequence[str]) -> str:
    return "\n".join(
        f"| {source.name}{' (held out)' if source.name in held_out else ''} | {source.version} "
        f"| {source.licence} |"
        for source in sources
    )


def _rounded(row: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.5g}") for name, value in row.items()}
