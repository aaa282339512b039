"""Log-probabilities are the model's own, of the tokens and of the best ones, in every mode."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import checkpoints
from jaxspec import (
    Auto,
    BlockLayout,
    GenerateConfig,
    Lookahead,
    NoDraft,
    PromptLookup,
    generate,
    stream,
)
from tests.helpers import make_hf_checkpoint
from tests.jaxspec.models import random_model, random_prompts, score_logits

DRAFTERS = [
    NoDraft(),
    PromptLookup(4),
    Lookahead(2, 3, 2),
    Auto((2, 5), step_costs=(1.0, 1.1, 1.2)),
]
NUM_NEW, NUM_VALID = 40, 80
SEEDS = (3, 4, 5)
GREEDY = GenerateConfig(max_new_tokens=NUM_NEW, num_logprobs=5, seed=SEEDS)
SAMPLED = dataclasses.replace(
    GREEDY,
    temperature=0.8,
    top_k=20,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.1,
)

every_drafter = pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda each: type(each).__name__)


@functools.cache
def model(config=GREEDY):
    """Return a model of 97 ids, of which the last 17 are none of the tokenizer's."""
    # What is sampled compiles for long: there one layer must do.
    return random_model(
        num_valid_tokens=NUM_VALID, num_hidden_layers=1 if config.temperature else 2
    )


@functools.cache
def prompts(batch_size=3):
    return random_prompts((5, 40, 17)[:batch_size], vocab_size=NUM_VALID)


def forced_logits(of, prompt, ids):
    """Return f32[n, V], the logits that one forward of the whole text has before each token."""
    tokens = [*prompt, *ids]
    padded = jnp.asarray([tokens + [0] * (96 - len(tokens))], jnp.int32)
    logits = np.asarray(score_logits(of, padded, BlockLayout.linear(96))[0])
    return logits[len(prompt) - 1 : len(tokens) - 1]


def log_softmax(logits):
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def forced_of(result, prompts, config=GREEDY):
    """Return for each row of a result the logits of a pass over its text."""
    return [
        forced_logits(model(config), prompt, ids)
        for prompt, ids in zip(prompts, result.token_ids, strict=True)
    ]


def check_logprobs(result, forced, num_logprobs, num_valid=NUM_VALID):
    """Assert that a result's log-probabilities are those of the logits of forward passes."""
    for row, (logits, ids) in enumerate(zip(forced, result.token_ids, strict=True)):
        # Ids that are none of the tokenizer's have their share of the probability all the same.
        expected = log_softmax(logits)
        own = expected[np.arange(len(ids)), ids]
        assert result.logprobs[row].shape == own.shape
        np.testing.assert_allclose(result.logprobs[row], own, atol=1e-4)

        best_ids, best = result.top_logprobs[row]
        assert best_ids.shape == best.shape == (len(ids), num_logprobs)
        order = np.argsort(-logits[:, :num_valid], axis=-1, kind="stable")[:, :num_logprobs]
        # Near ties may change places.
        np.testing.assert_allclose(best, np.take_along_axis(expected, order, axis=1), atol=1e-4)
        np.testing.assert_allclose(best, np.take_along_axis(expected, best_ids, axis=1), atol=1e-4)
        assert np.sum(best_ids != order) <= 0.02 * order.size
        assert all(len(set(place)) == num_logprobs for place in best_ids.tolist())
        assert (best_ids < num_valid).all()


def picked_scores(logits, prompt, ids, config, seed):
    """Return f64[n, V] by which the tokens of a text are picked, written down anew."""
    scores = logits.astype(np.float64)
    for place in range(len(ids)):
        row, output = scores[place], np.bincount(ids[:place], minlength=logits.shape[1])
        seen = (np.bincount(prompt, minlength=logits.shape[1]) + output) > 0
        factor = np.where(row < 0, config.repetition_penalty, 1 / config.repetition_penalty)
        row[seen] *= factor[seen]
        row -= config.frequency_penalty * output + config.presence_penalty * (output > 0)
        row[NUM_VALID:] = -np.inf
        if config.temperature:
            row /= config.temperature
            if config.top_k:
                row[row < np.sort(row)[-config.top_k]] = -np.inf
            key = jax.random.fold_in(jax.random.key(seed), len(prompt) + place)
            row += np.asarray(jax.random.gumbel(key, row.shape, jnp.float32))
    return scores


@functools.cache
def reference(config):
    """Return the texts of plain decoding."""
    return generate(model(config), prompts(), config)


@pytest.mark.parametrize("config", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@every_drafter
def test_they_are_those_of_a_forward_of_the_whole_text(drafter, config):
    result = generate(model(config), prompts(), config, drafter)
    assert result.token_ids == reference(config).token_ids
    forced = forced_of(result, prompts(), config)
    check_logprobs(result, forced, 5)
    for row, (prompt, ids) in enumerate(zip(prompts(), result.token_ids, strict=True)):
        scores = picked_scores(forced[row], prompt, ids, config, SEEDS[row])
        assert np.argmax(scores, axis=-1).tolist() == ids
        second, first = np.sort(scores, axis=-1)[:, -2:].T
        start, end = result.prompt_lengths[row], result.lengths[row]
        gaps = result.record.logits.pick_gap[row, start:end]
        np.testing.assert_allclose(gaps, first - second, atol=1e-3)
        if config is GREEDY:
            logits = result.record.logits.top_logits[row, start:end]
            np.testing.assert_allclose(gaps, logits[:, 0] - logits[:, 1], atol=1e-6)
            assert result.top_logprobs[row][0][:, 0].tolist() == ids
    if config is SAMPLED:
        # Sampled tokens are not always the best ones.
        assert any(
            result.top_logprobs[row][0][:, 0].tolist() != ids
            for row, ids in enumerate(result.token_ids)
        )


@pytest.mark.parametrize("drafter, num_logprobs", [(PromptLookup(4), 0), (NoDraft(), 2)])
def test_as_many_alternatives_as_were_asked_for(drafter, num_logprobs):
    config = dataclasses.replace(GREEDY, num_logprobs=num_logprobs, seed=0)
    result = generate(model(SAMPLED), prompts(1), config, drafter)
    forced = forced_of(result, prompts(1), SAMPLED)
    check_logprobs(result, forced, num_logprobs)
    assert result.token_ids[0] == np.argmax(forced[0][:, :NUM_VALID], axis=-1).tolist()


@pytest.mark.parametrize("config", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", DRAFTERS[1:3], ids=["PromptLookup", "Lookahead"])
def test_chunks_change_nothing(drafter, config):
    whole = generate(model(config), prompts(), config, drafter)
    for steps in (1, 7):
        for chunk in stream(model(config), prompts(), config, drafter, steps_per_chunk=steps):
            for row, num_tokens in enumerate(chunk.num_tokens):
                ours = (chunk.logprobs[row], *chunk.top_logprobs[row])
                expected = (whole.logprobs[row], *whole.top_logprobs[row])
                for part, full in zip(ours, expected, strict=True):
                    np.testing.assert_array_equal(part, full[:num_tokens])
        assert chunk.token_ids == whole.token_ids


@every_drafter
def test_they_end_with_the_text(drafter):
    full = reference(GREEDY)
    eos_id = full.token_ids[0][11]
    for fields in ({"max_new_tokens": 7}, {"eos_token_ids": (eos_id,)}):
        result = generate(model(), prompts(), dataclasses.replace(GREEDY, **fields), drafter)
        assert min(result.num_tokens) < NUM_NEW
        for row, ids in enumerate(result.token_ids):
            assert ids == full.token_ids[row][: len(ids)]
            ours = (result.logprobs[row], *result.top_logprobs[row])
            expected = (full.logprobs[row], *full.top_logprobs[row])
            for part, whole in zip(ours, expected, strict=True):
                np.testing.assert_allclose(part, whole[: len(ids)], atol=1e-4)


def test_they_are_those_of_transformers(tmp_path):
    import torch

    theirs = make_hf_checkpoint(tmp_path)
    ours = checkpoints.load_model(tmp_path, dtype="float32")
    prompt = random_prompts((13,))[0]
    config = GenerateConfig(max_new_tokens=NUM_NEW, num_logprobs=3, eos_token_ids=())
    result = generate(ours, [prompt], config, PromptLookup(4))
    with torch.no_grad():
        logits = theirs(torch.tensor([prompt + result.token_ids[0]])).logits[0].numpy()
    forced = logits[len(prompt) - 1 : -1]
    check_logprobs(result, [forced], 3, num_valid=97)
    assert result.token_ids[0] == np.argmax(forced, axis=-1).tolist()


@pytest.mark.parametrize(
    "num_valid, num_logprobs, num_ids", [(NUM_VALID, NUM_VALID + 1, NUM_VALID), (None, 98, 97)]
)
@pytest.mark.parametrize("call", [generate, stream])
def test_more_alternatives_than_tokens_are_refused(call, num_valid, num_logprobs, num_ids):
    of = random_model(num_valid_tokens=num_valid)
    with pytest.raises(ValueError) as caught:
        call(of, [[1]], GenerateConfig(num_logprobs=num_logprobs))
    message = f"num_logprobs={num_logprobs} is more than the {num_ids} tokens that there are"
    assert str(caught.value) == message
    stream(of, [[1]], GenerateConfig(num_logprobs=num_ids))


@pytest.mark.parametrize(
    "num_logprobs, message",
    [
        (-1, "num_logprobs=-1 is not at least 0"),
        (1001, "num_logprobs=1001 is more than 1000"),
    ],
)
def test_bad_counts_are_refused_in_one_line(num_logprobs, message):
    with pytest.raises(ValueError) as caught:
        GenerateConfig(num_logprobs=num_logprobs)
    assert str(caught.value) == message
