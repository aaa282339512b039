"""Train the demo model from nothing to a Hugging Face directory, within a limit on time."""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer

import checkpoints
from checkpoints.training import bpe, corpus, measure, report, sinks
from checkpoints.training.batches import windows, with_loops
from checkpoints.training.settings import Limits, Recipe
from checkpoints.training.steps import AttentionName, TrainState, cast
from checkpoints.training.trainer import EVALUATION_ROWS, Data, Trainer, choose_step
from jaxspec import GenerateConfig, Qwen3, generate
from jaxspec.evaluation import Prompt
from jaxspec.stats import first_periodic_position


def prepare_data(recipe: Recipe, say: Callable[[str], None] = print) -> Data:
    """Collect the source files, train the tokenizer and encode everything."""
    sources = corpus.installed_sources(recipe.sources)
    texts = corpus.collect(
        sources, held_out=recipe.held_out, max_bytes=recipe.max_bytes, seed=recipe.seed
    )
    num_chars = sum(len(document.text) for document in texts.train)
    say(f"corpus: {len(texts.sources)} sources, {len(texts.train)} files, {num_chars / 1e6:.1f} MB")
    say(f"dropped: {dict(texts.dropped)}")
    sample, size = [], 0
    for document in texts.train:
        sample.append(document.text)
        size += len(document.text)
        if size > recipe.bpe_bytes:
            break
    tokenizer = bpe.train_tokenizer(sample, vocab_size=recipe.vocab_size)
    say(f"tokenizer: {tokenizer.get_vocab_size()} ids from {size / 1e6:.1f} MB")
    train = bpe.encode(tokenizer, [document.text for document in texts.train])
    held_out = bpe.encode(tokenizer, [document.text for document in texts.held_out])
    say(f"tokens: {len(train)} to train on, {len(held_out)} held out")
    return Data(tokenizer, train, held_out, texts)


def sample(
    recipe: Recipe, model: Qwen3, tokenizer: Tokenizer, prompts: Sequence[Prompt]
) -> list[dict[str, Any]]:
    """Continue the prompts greedily and measure loops and prompt-lookup acceptance.

    Acceptance is counted up to the first loop, since in a loop every draft is right.
    """
    if not prompts:
        return []
    ids = [tokenizer.encode(p.text, add_special_tokens=False).ids for p in prompts]
    config = GenerateConfig(max_new_tokens=recipe.num_new_tokens, kernels="xla")
    outputs = generate(model, ids, config).token_ids
    results = []
    for named, prompt, output in zip(prompts, ids, outputs, strict=True):
        first = first_periodic_position(output)
        accepted = measure.lookup_accepted_length(prompt, output[: max(first, 1)])
        results.append(
            {
                "id": named.id,
                "num_prompt_tokens": len(prompt),
                "num_tokens": len(output),
                "first_periodic_position": first,
                "lookup_accepted_length": accepted,
                "text": tokenizer.decode(output, skip_special_tokens=False),
            }
        )
    return results


def without_sinks(trainer: Trainer) -> tuple[TrainState, list[dict[str, Any]]]:
    """Return the training's state with sink tokens repaired, and a summary of each of them."""
    recipe, data = trainer.recipe, trainer.data
    rng = np.random.default_rng(recipe.seed)
    num_rows = min(recipe.batch_size, EVALUATION_ROWS)
    length = recipe.sequence_length + 1
    tokens = next(windows(data.train, length=length, batch_size=num_rows, rng=rng))
    newlines = bpe.newline_ids(data.tokenizer)
    loops = with_loops(tokens, num_rows=num_rows, newlines=newlines, rng=rng)
    counts = np.bincount(data.train, minlength=recipe.vocab_size)
    state, config = trainer.state, trainer.config
    params, found = sinks.repair(trainer.graph, state.params, loops, counts, config=config)
    decode = data.tokenizer.decode
    summary = [dataclasses.asdict(s) | {"text": decode([s.token_id])} for s in found]
    return dataclasses.replace(state, params=params), summary


def trained_model(trainer: Trainer) -> Qwen3:
    """Return the model as it is exported: bfloat16, with its end-of-text ids."""
    vocab = trainer.data.tokenizer.get_vocab()
    model = nnx.merge(trainer.graph, cast(trainer.state.params, jnp.bfloat16))
    model.config = trainer.recipe.model_config((vocab[bpe.END_OF_TURN], vocab[bpe.END_OF_TEXT]))
    return model


def export(trainer: Trainer, directory: Path) -> None:
    """Write weights (bfloat16), configuration and tokenizer."""
    recipe = trainer.recipe
    checkpoints.save(trained_model(trainer), directory, max_shard_bytes=recipe.max_shard_bytes)
    bpe.save_tokenizer(trainer.data.tokenizer, directory, max_length=recipe.max_position_embeddings)


def run(
    recipe: Recipe,
    directory: Path,
    *,
    limits: Limits,
    prompts: Sequence[Prompt] = (),
    attention: Sequence[AttentionName] = ("xla",),
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Train, repair, export, evaluate and describe the model; return what the card holds.

    The weights are written before anything is measured but their sinks.

    Args:
      recipe: what to train.
      directory: where the checkpoint goes; must not exist or be empty.
      limits: when to stop.
      prompts: to continue greedily after the training.
      attention: implementations to try in order.
      say: takes lines of progress.
    """
    if directory.exists() and any(directory.iterdir()):
        raise FileExistsError(f"{directory}: exists and is not empty")
    trainer = _prepare(recipe, limits, attention, say)
    _rehearse(trainer, prompts)
    say(f"rehearsed after {time.monotonic() - limits.start:.1f} s")
    summary: dict[str, Any] = {"training": trainer.run()}
    trainer.state, summary["sinks"] = without_sinks(trainer)
    say(f"sinks: {json.dumps(summary['sinks'])}")
    export(trainer, directory)
    say(f"exported after {time.monotonic() - limits.start:.1f} s")
    summary |= {"held_out": trainer.evaluate(), "log": trainer.log}
    summary["attention"] = trainer.config.attention
    summary["samples"] = _samples(trainer, prompts)
    summary["total_seconds"] = time.monotonic() - limits.start
    data = trainer.data
    card = report.model_card(recipe, data.corpus, len(data.train), summary)
    (directory / "README.md").write_text(card, encoding="utf-8")
    return summary


def _prepare(
    recipe: Recipe,
    limits: Limits,
    attention: Sequence[AttentionName],
    say: Callable[[str], None],
) -> Trainer:
    with ThreadPoolExecutor(1) as pool:
        # The step compiles while the corpus is read: neither needs the other.
        compiling = pool.submit(choose_step, recipe, attention, say)
        data = prepare_data(recipe, say)
        config, step = compiling.result()
    say(f"ready to train after {time.monotonic() - limits.start:.1f} s")
    graph, state = recipe.init()
    return Trainer(recipe, limits, data, graph, state, step, config, say)


def _rehearse(trainer: Trainer, prompts: Sequence[Prompt]) -> None:
    """Do once, before the training, all that comes after it: failures and compilation come early.

    The first evaluation has already happened where the step was compiled.
    """
    without_sinks(trainer)
    with tempfile.TemporaryDirectory() as directory:
        export(trainer, Path(directory) / "model")
    _samples(trainer, prompts)


def _samples(trainer: Trainer, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    graph, params = nnx.split(trained_model(trainer))
    # CPUs compute in float32, with the same weights.
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    model = nnx.merge(graph, cast(params, dtype))
    try:
        return sample(trainer.recipe, model, trainer.data.tokenizer, prompts)
    except Exception:  # The trained model is worth more than its samples.
        trainer.say(traceback.format_exc())
        return []
