"""The training of the demo model: corpus filters, tokenizer, batches, steps, the whole run."""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

pytest.importorskip("optax")

import checkpoints
from checkpoints.training import batches, bpe, corpus, measure, recipe, report, sinks, steps
from checkpoints.training.settings import Limits, Recipe
from checkpoints.training.trainer import Data, Trainer
from jaxspec import BlockLayout, Qwen3
from jaxspec.evaluation import Prompt
from tests.helpers import load_with_transformers

SMALL = Recipe(
    hidden_size=48,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=512,
    max_position_embeddings=1024,
    sequence_length=64,
    batch_size=4,
    warmup_steps=5,
    step=steps.StepConfig(compute_dtype="float32"),
    loop_rows=1,
    sources=("click", "iniconfig"),
    held_out=("iniconfig",),
    max_bytes=100_000,
    num_new_tokens=8,
    max_shard_bytes=150_000,
)
TEXT = (
    "def f(self, a_b):\n    # it's  two\n\n\n        return x[0:12]  \n"
    "\treturn {'é': 'e\u0301 ﬁ'}\r\n"
)


@pytest.fixture(scope="module")
def tokenizer():
    texts = [path.read_text() for path in sorted(Path(bpe.__file__).parent.glob("*.py"))]
    return bpe.train_tokenizer(texts, vocab_size=512)


@pytest.mark.parametrize(
    ("expression", "licence", "classifiers", "is_permissive"),
    [
        ("MIT", None, (), True),
        ("BSD-3-Clause AND 0BSD AND MIT AND Zlib AND CC0-1.0", None, (), True),
        ("Apache-2.0 AND Apache-2.0 WITH LLVM-exception AND BSL-1.0", None, (), True),
        ("MIT OR AFL-2.1", None, (), True),
        ("MPL-2.0 AND MIT", None, (), False),
        ("LGPL-3.0-or-later", None, (), False),
        (None, "BSD 3-Clause License", (), True),
        (None, "Copyright someone\n\nPermission is hereby granted, free of charge, to", (), True),
        (None, "", ("License :: OSI Approved :: Apache Software License",), True),
        (None, "", ("License :: OSI Approved :: GNU General Public License v3 (GPLv3)",), False),
        (None, "", ("License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)",), False),
        (None, "", ("License :: Other/Proprietary License",), False),
        (None, "GPL", ("License :: OSI Approved :: MIT License",), False),
        (None, "NVIDIA Proprietary Software", (), False),
        (None, "MIT AND GPL-2.0", (), False),
        (None, "", (), False),
        (None, None, ("Programming Language :: Python",), False),
    ],
)
def test_licence_filter(expression, licence, classifiers, is_permissive):
    found = corpus.permissive_licence(expression, licence, classifiers)
    assert (found is not None) == is_permissive


def test_rejections():
    source = Path(measure.__file__).read_text()
    assert corpus.rejection(source) is None
    assert corpus.rejection("x = 1\n") == "size"
    assert corpus.rejection("# This file was automatically generated.\n" + source) == "generated"
    assert corpus.rejection("# SPDX: GNU General Public License\n" + source) == "licence"
    assert corpus.rejection(source + "X = '" + "ab " * 300 + "'\n") == "long lines"
    table = "".join(f"    ({i * 7919}, {i * 104729}, 'name'),\n" for i in range(200))
    assert corpus.rejection(f"TABLE = [\n{table}]\n") == "digits"
    assert corpus.rejection("names = {\n" + "    'straße': 'größe',\n" * 50 + "}\n") == "not ascii"
    assert corpus.rejection("def f(x):\n    return f(x)\n\n\n" * 200) == "repetitive"
    lines = "".join(f"case_{'abcdefgh'[i % 8]} = make_case()\n" for i in range(60))
    assert corpus.rejection(lines) == "repetitive"


def test_licence_comment_is_cut_and_copies_are_dropped():
    body = '"""Docs."""\n\nimport os\n'
    assert corpus.clean_text("# Copyright 2020 X\n# Licensed under Y\n\n" + body) == body
    assert corpus.clean_text("# A comment.\n" + body) == "# A comment.\n" + body
    assert corpus.clean_text("import os\r\n\r\n") == "import os\n"
    seen = corpus.SeenLines()
    lines = [f"a_line_of_this_file({i})" for i in range(10)]
    assert seen.admit("\n".join(lines))
    assert not seen.admit("\n".join(lines))
    assert not seen.admit("\n".join([*lines[:8], "another_line_of(1)", "another_line_of(2)"]))
    assert seen.admit("\n".join(lines[:6] + [f"another_line_of({i})" for i in range(4)]))


def test_tokenizer_round_trip(tokenizer):
    for text in (TEXT, Path(steps.__file__).read_text(), "", " ", "\n\n", "   x", "日本 <think>"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.get_vocab_size() == 512
    assert tokenizer.token_to_id(bpe.END_OF_TEXT) == 512 - 26
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode("def f():\n        return\n").ids]
    assert "        " in pieces and "\n" in pieces
    sizes = bpe.token_bytes(tokenizer)
    assert sizes[tokenizer.encode(TEXT).ids].sum() == len(TEXT.encode())
    assert sizes[tokenizer.token_to_id("<think>")] == 0
    newlines = set(bpe.newline_ids(tokenizer).tolist())
    assert tokenizer.encode("a\n").ids[-1] in newlines


def test_encode_separates_documents(tokenizer):
    ids = bpe.encode(tokenizer, ["a = 1\n", "b\n", "c\n"], chunk_size=2)
    ends = np.flatnonzero(ids == tokenizer.token_to_id(bpe.END_OF_TEXT))
    assert ids.dtype == np.int32 and len(ends) == 3 and ends[-1] == len(ids) - 1
    assert tokenizer.decode(ids[: ends[0]].tolist()) == "a = 1\n"


def test_tokenizer_loads_with_transformers(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    bpe.save_tokenizer(tokenizer, tmp_path, max_length=1024)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    loaded = AutoTokenizer.from_pretrained(str(tmp_path))
    assert loaded(TEXT).input_ids == tokenizer.encode(TEXT).ids
    assert loaded.decode(loaded(TEXT).input_ids) == TEXT
    assert loaded.eos_token == bpe.END_OF_TURN and len(loaded) == 512
    chat = [{"role": "user", "content": "hi"}]
    text = loaded.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_windows_cover_every_epoch():
    tokens = np.arange(1000, dtype=np.int32)
    rng = np.random.default_rng(0)
    stream = batches.windows(tokens, length=11, batch_size=7, rng=rng)
    rows = np.concatenate([next(stream) for _ in range(14)])
    assert rows.shape == (98, 11) and (np.diff(rows, axis=1) == 1).all()
    # One epoch has 98 or 99 windows, and no two of them predict the same token.
    assert len(np.unique(rows[:, 1:])) == rows[:, 1:].size
    with pytest.raises(ValueError, match="num_tokens=20 is too short for windows of 11"):
        next(batches.windows(tokens[:20], length=11, batch_size=1, rng=rng))


def test_loops_are_marked():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50, (32, 257), dtype=np.int32)
    batch = batches.with_loops(tokens, num_rows=24, newlines=np.asarray([3, 4]), rng=rng)
    out = np.asarray(batch.tokens)
    ends, starts = np.asarray(batch.likelihood_end), np.asarray(batch.penalty_start)
    np.testing.assert_array_equal(out[24:], tokens[24:])
    assert (ends[24:] == 257).all() and (starts[24:] == 257).all()
    for row in range(24):
        np.testing.assert_array_equal(out[row, : ends[row]], tokens[row, : ends[row]])
        tail = out[row, ends[row] :]
        periods = [p for p in range(1, 33) if (tail[p:] == tail[:-p]).all()]
        assert periods and starts[row] >= ends[row] + 16


def test_learning_rate_follows_progress():
    rate = lambda progress, step: steps.learning_rate(progress, step, peak=2.0, warmup_steps=10)  # noqa: E731
    assert rate(0.0, 0) == pytest.approx(0.2)
    assert rate(0.1, 10) == pytest.approx(2.0)
    assert rate(0.6, 100) == pytest.approx(1.0)
    assert rate(1.0, 100) == 0.0 and rate(1.5, 100) == 0.0


def test_progress_is_that_of_the_clock_or_of_the_steps():
    now = time.monotonic()
    assert Limits(now, num_steps=8).progress(now, 2) == 0.25
    limits = Limits(now - 60, minutes=3.0, reserve_seconds=20.0)
    assert limits.progress(now - 50, 1000) == pytest.approx(50 / 150, abs=0.05)
    # Late already: some steps are done all the same.
    late = Limits(now - 600, minutes=3.0)
    assert late.progress(now, 5) == 0.25 and late.progress(now, 20) == 1.0


def test_forward_equals_the_model():
    graph, state = SMALL.init()
    model: Qwen3 = nnx.merge(graph, state.params)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 512, (2, 48)), jnp.int32)
    targets = tokens[:, ::-1]

    @jax.jit
    def both(model: Qwen3) -> tuple[jax.Array, jax.Array]:
        logits, _ = model(tokens, jnp.zeros(2, jnp.int32), None, BlockLayout.linear(48))
        expected = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]
        return steps.log_likelihoods(model, steps.hidden_states(model, tokens), targets), expected

    np.testing.assert_allclose(*both(model), atol=1e-4)


def test_loss_learns_text_and_unlearns_loops():
    log_probs = jnp.log(jnp.asarray([[0.5, 0.25, 0.5, 0.9]]))
    batch = steps.Batch(jnp.zeros((1, 5), jnp.int32), jnp.asarray([3]), jnp.asarray([4]))
    objective, nll = steps.batch_loss(log_probs, batch)
    assert float(nll) == pytest.approx(-(np.log(0.5) + np.log(0.25)) / 2, rel=1e-5)
    assert float(objective - nll) == pytest.approx(-np.log(0.1) / 4, rel=1e-4)
    certain = steps.batch_loss(jnp.zeros((1, 4)), batch)[0]
    assert np.isfinite(float(certain))


def test_a_step_that_is_not_finite_changes_nothing():
    graph, state = dataclasses.replace(SMALL, num_layers=1).init()
    broken = dataclasses.replace(
        state, params=jax.tree.map(lambda w: w.at[(0,) * w.ndim].set(jnp.nan), state.params)
    )
    tokens = np.zeros((4, 65), np.int32)
    batch = batches.with_loops(
        tokens, num_rows=0, newlines=np.zeros(0), rng=np.random.default_rng(0)
    )
    key = jax.random.key(0, impl="rbg")
    new, _ = steps.train_step(graph, broken, batch, jnp.float32(1.0), key, config=SMALL.step)
    for left, right in zip(jax.tree.leaves(new), jax.tree.leaves(broken), strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize(
    ("text", "draft"),
    [
        ([7, 7, 7], [7, 7, 7, 7]),
        ([1, 2, 3, 1, 2], [3, 1, 2, 3]),
        ([1, 2, 9, 2, 8, 1, 2], [9, 2, 8, 1]),
        ([2, 9, 2, 8, 5, 2], [8, 5, 2, 8]),
        ([1, 2, 3], []),
        ([1], []),
    ],
)
def test_lookup_draft(text, draft):
    assert measure.lookup_draft(np.asarray(text), 4).tolist() == draft


def test_lookup_accepted_length():
    assert measure.lookup_accepted_length([1, 2, 3], [4, 5, 6]) == 1.0
    # One step finds nothing; the second accepts seven and adds one.
    assert measure.lookup_accepted_length([1, 2, 3], [1, *[2, 3, 1] * 2, 2, 3]) == 4.5


def _looped_model(sink: int | None):
    """Return (graph, parameters, loops, counts) of a random model and of text without `sink`.

    All rows share a direction, so that the model has a bias for a token to grow along.
    """
    graph, state = SMALL.init()
    model: Qwen3 = nnx.merge(graph, state.params)
    rows = np.asarray(model.embed_tokens[...]) + np.linspace(-0.1, 0.1, SMALL.hidden_size)
    tokens = np.random.default_rng(0).integers(0, 512, (4, 65), dtype=np.int32)
    counts = np.full(512, 1_000)
    if sink is not None:
        rows[sink] = 5 * rows.mean(axis=0)
        tokens[tokens == sink] = 0
        counts[sink] = 0
    model.embed_tokens.set_value(jnp.asarray(rows, jnp.float32))
    loops = batches.with_loops(
        tokens, num_rows=4, newlines=np.asarray([3]), rng=np.random.default_rng(0)
    )
    return graph, nnx.state(model), loops, counts


def test_a_sink_is_found_and_repaired():
    graph, params, loops, counts = _looped_model(sink=77)
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(params))
    repaired, found = sinks.repair(graph, params, loops, counts, config=SMALL.step)
    assert [sink.token_id for sink in found] == [77]
    assert found[0].share > 0.9 and found[0].text_share == 0
    rows = before.pop("embed_tokens")
    # The parameters passed in are left alone.
    np.testing.assert_array_equal(params["embed_tokens"][...], rows)
    after = nnx.to_pure_dict(repaired)
    new_rows = after.pop("embed_tokens")
    others = np.delete(rows, 77, axis=0)
    np.testing.assert_allclose(new_rows[77], others.mean(axis=0), atol=1e-6)
    np.testing.assert_array_equal(np.delete(new_rows, 77, axis=0), others)
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert sinks.find(graph, repaired, loops, counts, config=SMALL.step) == []


def test_the_next_sink_is_found_too():
    graph, params, loops, counts = _looped_model(sink=77)
    rows = params["embed_tokens"][...]
    params["embed_tokens"].set_value(rows.at[99].set(rows[77] * 0.9))
    counts[99] = 0
    _, found = sinks.repair(graph, params, loops, counts, config=SMALL.step)
    assert [sink.token_id for sink in found] == [77, 99]


def test_a_healthy_model_keeps_its_rows():
    graph, params, loops, counts = _looped_model(sink=None)
    repaired, found = sinks.repair(graph, params, loops, counts, config=SMALL.step)
    assert found == [] and repaired is params
    # The same token, but text holds it: no sink.
    graph, params, loops, counts = _looped_model(sink=77)
    counts[77] = 10
    assert sinks.repair(graph, params, loops, counts, config=SMALL.step) == (params, [])


def test_whole_run(tmp_path):
    prompts = [Prompt("a", "code", "few", "def main():\n"), Prompt("b", "code", "few", TEXT)]
    lines: list[str] = []
    directory = tmp_path / "model"
    limits = Limits(time.monotonic(), num_steps=30)
    small = dataclasses.replace(SMALL, peak_learning_rate=1e-2)
    summary = recipe.run(small, directory, limits=limits, prompts=prompts, say=lines.append)
    assert summary["training"]["num_steps"] == 30
    # Of one batch, of whichever releases of the sources are installed.
    assert summary["training"]["last_loss"] < np.log(512) - 0.3
    assert summary["held_out"]["held_out_nats_per_token"] < np.log(512) - 0.5
    assert [row["id"] for row in summary["samples"]] == ["a", "b"]
    names = {path.name for path in directory.iterdir()}
    fixed = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert names - fixed == {
        "README.md",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    }
    card = (directory / "README.md").read_text()
    assert "click" in card and summary["sinks"] == [] and "No rare token became a sink" in card
    _check_reload(directory, prompts[1].text, summary["samples"][1]["text"])
    with pytest.raises(FileExistsError, match="not empty"):
        recipe.run(small, directory, limits=limits, say=lines.append)


def _check_reload(directory: Path, prompt: str, continuation: str) -> None:
    import torch

    reference = load_with_transformers(directory)
    model, tokenizer = checkpoints.load(directory, dtype=jnp.float32)
    ids = tokenizer(prompt).input_ids
    tokens = jnp.asarray([ids], jnp.int32)
    layout = BlockLayout.linear(len(ids))
    logits, _ = model(tokens, jnp.zeros(1, jnp.int32), None, layout)
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits.numpy()
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    with torch.no_grad():
        out = reference.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)
    # Written by the training, with the same weights.
    assert tokenizer.decode(out[0, len(ids) :]).startswith(continuation)
    end_of_turn, end_of_text = tokenizer.convert_tokens_to_ids([bpe.END_OF_TURN, bpe.END_OF_TEXT])
    stored = json.loads((directory / "config.json").read_text())
    assert stored["eos_token_id"] == end_of_turn
    generation = json.loads((directory / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [end_of_turn, end_of_text]


def test_sinks_are_found_in_the_corpus_and_named_in_the_card(tokenizer):
    sink = tokenizer.token_to_id(bpe.SPECIAL_TOKENS[-1])
    graph, params, _, _ = _looped_model(sink)
    train = bpe.encode(tokenizer, [Path(m.__file__).read_text() for m in (steps, measure)])
    data = Data(tokenizer, train, train, corpus.Corpus([], [], [], Counter()))
    state = steps.TrainState(params, None)
    trainer = Trainer(SMALL, Limits(0.0), data, graph, state, None, SMALL.step)
    state, found = recipe.without_sinks(trainer)
    assert sink in [row["token_id"] for row in found]
    assert not np.array_equal(state.params["embed_tokens"][...], params["embed_tokens"][...])
    row = {"token_id": 7, "share": 0.99, "text_share": 2e-7, "text": "hev"}
    line = report.sinks_line([row])
    assert "1 such token was" in line and '7 ("hev", 99.0% of the predictions' in line
