"""Sampling: transformers' filters, one law for every mode, and the same tokens in all of them."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import BlockLayout, GenerateConfig, Lookahead, PromptLookup, generate
from jaxspec.decode import GREEDY
from jaxspec.drafters import Outcome, Proposal
from jaxspec.request import make_request, sampling_mode
from jaxspec.sampling import SamplingMode, SamplingParams, prefix_counts, process_logits
from jaxspec.verify import verify
from tests.jaxspec.models import CONFIG, random_model, random_prompts

DRAFTERS = [PromptLookup(num_draft_tokens=4), Lookahead(2, 3, 3)]
SETTINGS = [
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    {"temperature": 2.0, "min_p": 0.05},
    {"repetition_penalty": 1.3},
    {"temperature": 0.8, "presence_penalty": 1.0, "frequency_penalty": 0.4},
]
process = jax.jit(process_logits, static_argnames=("mode", "num_valid"))


def params(batch_size: int, **settings) -> SamplingParams:
    config = GenerateConfig(**settings)
    prompts = [[1]] * batch_size
    return make_request(CONFIG, prompts, config)[1].sampling


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_speculation_changes_no_sampled_token(settings):
    model, prompts = random_model(), random_prompts((1, 40, 17))
    config = GenerateConfig(max_new_tokens=40, seed=tuple(range(len(prompts))), **settings)
    expected = generate(model, prompts, config)
    for drafter in DRAFTERS:
        assert generate(model, prompts, config, drafter).token_ids == expected.token_ids
    alone = generate(
        model, prompts[:1], dataclasses.replace(config, seed=config.seed[0]), DRAFTERS[0]
    )
    assert alone.token_ids[0] == expected.token_ids[0]


def test_seeds_differ_and_repeat():
    model, prompt = random_model(), random_prompts((9,))[0]
    config = GenerateConfig(max_new_tokens=20, temperature=1.5, seed=(1, 2, 1))
    first, second, third = generate(model, [prompt] * 3, config).token_ids
    assert first == third != second
    greedy = generate(model, [prompt], GenerateConfig(max_new_tokens=20)).token_ids[0]
    assert greedy not in (first, second)


def test_top_k_of_one_is_greedy():
    model, prompts = random_model(), random_prompts((9, 20))
    config = GenerateConfig(max_new_tokens=20, temperature=1.0, top_k=1, seed=3)
    greedy = generate(model, prompts, GenerateConfig(max_new_tokens=20))
    assert generate(model, prompts, config, DRAFTERS[0]).token_ids == greedy.token_ids


def test_sampling_settings_do_not_compile_again():
    from jaxspec.decode import run_steps

    model, prompts = random_model(), random_prompts((9, 20))
    run_steps.clear_cache()
    for temperature, top_p in ((0.5, 0.9), (1.0, 0.5), (2.0, 0.99)):
        config = GenerateConfig(max_new_tokens=5, temperature=temperature, top_p=top_p)
        generate(model, prompts, config)
    assert run_steps._cache_size() == 1


@pytest.mark.parametrize(
    "settings, mode",
    [
        ({}, GREEDY),
        ({"top_p": 0.5, "top_k": 3}, GREEDY),
        ({"temperature": 1.0}, SamplingMode(is_sampled=True)),
        ({"temperature": 1.0, "min_p": 0.1}, SamplingMode(is_sampled=True, has_min_p=True)),
        (
            {"temperature": 1.0, "top_k": 2, "top_p": 0.1},
            SamplingMode(is_sampled=True, has_top_k=True, has_top_p=True),
        ),
        ({"repetition_penalty": 1.1}, SamplingMode(has_penalties=True)),
    ],
)
def test_a_program_has_only_what_it_needs(settings, mode):
    assert sampling_mode(GenerateConfig(**settings)) == mode


@pytest.mark.parametrize("top_k", [0, 1, 5, 97, 500])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
def test_filters_are_those_of_transformers(top_k, top_p):
    import torch
    from transformers.generation import logits_process as theirs

    logits = np.random.default_rng(0).normal(size=(2, 3, 97)).astype(np.float32) * 3
    settings = {"temperature": 0.7, "top_k": top_k, "top_p": top_p, "min_p": 0.02}
    mode = SamplingMode(is_sampled=True, has_top_k=True, has_top_p=True, has_min_p=True)
    ours = np.asarray(process(logits, params(2, **settings), mode, num_valid=None, counts=None))
    expected = torch.from_numpy(logits.reshape(6, 97))
    warpers = [theirs.TemperatureLogitsWarper(0.7)]
    warpers += [theirs.TopKLogitsWarper(top_k)] if top_k else []
    warpers += [theirs.TopPLogitsWarper(top_p)] if top_p < 1 else []
    for warper in [*warpers, theirs.MinPLogitsWarper(0.02)]:
        expected = warper(None, expected)
    expected = expected.numpy().reshape(2, 3, 97)
    np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(expected))
    kept = np.isfinite(ours)
    np.testing.assert_allclose(ours[kept], expected[kept], rtol=1e-6)


def test_extreme_logits_survive_the_filters():
    logits = np.full((1, 5, 9), -np.inf, np.float32)
    logits[0, 0, 3] = 1.0
    logits[0, 1] = 0.0
    logits[0, 2] = [-3e38, 3e38, 0, -0.0, 1e-40, -1e-40, 5, 5, -5]
    logits[0, 3, :2] = 7.0
    logits[0, 4] = np.arange(9)
    mode = SamplingMode(is_sampled=True, has_top_k=True, has_top_p=True, has_min_p=True)
    settings = {"temperature": 1.0, "top_k": 2, "top_p": 0.8}
    ours = np.isfinite(process(logits, params(1, **settings), mode, num_valid=None, counts=None))[0]
    assert ours[0].tolist() == [i == 3 for i in range(9)]
    assert ours[1].all()  # ties at a threshold all stay
    assert np.flatnonzero(ours[2]).tolist() == [1]
    assert np.flatnonzero(ours[3]).tolist() == [0, 1]
    assert np.flatnonzero(ours[4]).tolist() == [7, 8]


@pytest.mark.parametrize("settings", [{"top_k": 1}, {"top_p": 0.3}, {"min_p": 0.1}], ids=str)
def test_a_nan_stays_and_wins_as_in_an_argmax(settings):
    logits = np.array([[[1.0, np.nan, 3.0, np.nan]]], np.float32)
    mode = sampling_mode(GenerateConfig(temperature=1.0, **settings))
    arrays = params(1, temperature=1.0, **settings)
    ours = process(logits, arrays, mode, num_valid=None, counts=None)
    assert np.argmax(ours) == 1 and np.isnan(ours[0, 0, 1])


def test_ids_past_the_tokenizer_are_never_drawn():
    model = random_model(num_valid_tokens=50)
    config = GenerateConfig(max_new_tokens=100, temperature=50.0, seed=tuple(range(8)))
    result = generate(model, [[1]] * 8, config, DRAFTERS[1])
    ids = np.asarray(result.token_ids)
    assert ids.max() == 49 and len(np.unique(ids)) == 50


@pytest.mark.parametrize("drafter", DRAFTERS, ids=str)
def test_penalties_count_the_rows_own_prefix(drafter):
    layout = drafter.layout
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 5, (2, 30)).astype(np.int32)
    length, prompt_length = np.array([20, 7], np.int32), np.array([12, 7], np.int32)
    block = rng.integers(0, 5, (2, layout.num_rows)).astype(np.int32)
    arrays = map(jnp.asarray, (tokens, length, prompt_length, block))
    text, output = prefix_counts(*arrays, layout, 5)
    for b, (index, row) in itertools.product(range(2), enumerate(layout.logit_rows)):
        drafts = [block[b, j] for j in range(1, layout.num_rows) if layout.mask[row, j]]
        known = tokens[b, : length[b]].tolist()
        for counts, prefix in ((text, known), (output, known[prompt_length[b] :])):
            expected = np.bincount([*prefix, *drafts], minlength=5)
            np.testing.assert_array_equal(counts[b, index], expected)


def test_penalties_are_those_of_transformers_and_the_openai_api():
    import torch
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    logits = np.random.default_rng(1).normal(size=(1, 1, 6)).astype(np.float32)
    counts = np.array([[[0, 1, 2, 0, 3, 0]]], np.int32)
    mode = SamplingMode(has_penalties=True)
    ours = process(
        logits, params(1, repetition_penalty=1.4), mode, num_valid=None, counts=(counts, counts)
    )
    seen = torch.tensor([[1, 2, 2, 4, 4, 4]])
    expected = RepetitionPenaltyLogitsProcessor(1.4)(seen, torch.from_numpy(logits[0]))
    np.testing.assert_allclose(ours[0], expected.numpy(), rtol=1e-6)
    settings = {"presence_penalty": 0.5, "frequency_penalty": 0.25}
    ours = process(logits, params(1, **settings), mode, num_valid=None, counts=(counts, counts))
    np.testing.assert_allclose(ours, logits - 0.25 * counts - 0.5 * (counts > 0), rtol=1e-6)


# A chain over four tokens: the next token depends on the last one only, so the law of the next two
# tokens is known, and the logits of a block can be written down without a model.
TABLE = np.log(
    np.array(
        [[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.3, 0.2], [0.6, 0.2, 0.1, 0.1]]
    )
).astype(np.float32)


def chain_law(temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Return P[i, j] = probability of token j after token i."""
    mode = SamplingMode(is_sampled=True, has_top_k=top_k > 0, has_top_p=top_p < 1)
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    logits = process(TABLE[None], params(1, **settings), mode, num_valid=None, counts=None)
    return np.asarray(jax.nn.softmax(logits[0].astype(jnp.float32), axis=-1), np.float64)


def draws(layout: BlockLayout, block: np.ndarray, settings: dict, num_draws: int) -> np.ndarray:
    """Return the first two tokens of `num_draws` texts after token 0, drafted by `block`."""
    from jaxspec.sampling import add_noise

    mode = sampling_mode(GenerateConfig(**settings))
    candidates = np.asarray(layout.candidate_rows)

    @jax.jit
    def one_batch(seeds):
        batch_size = seeds.shape[0]
        request = params(batch_size, **settings)
        rows = jnp.tile(jnp.asarray(block)[None], (batch_size, 1))
        logits = jnp.asarray(TABLE)[rows][:, list(layout.logit_rows)]
        scores = process_logits(logits, request, mode, num_valid=None, counts=None)
        length = jnp.full((batch_size, 1), 5, jnp.int32)
        depth = np.asarray(layout.depth, np.int32)[list(layout.logit_rows)]
        scores = add_noise(scores, request, seeds, length + depth[None], depth)
        num_draft = jnp.full((batch_size, layout.num_candidates), layout.num_draft_tokens)
        proposal = Proposal(rows, num_draft.astype(jnp.int32))
        outcome: Outcome = verify(logits, proposal, layout, scores=scores)
        path = jnp.asarray(candidates)[outcome.best_candidate]
        tokens = jnp.take_along_axis(outcome.target_tokens, path, axis=1)
        # Where nothing was accepted the second token comes from the next step: position 6.
        again = jnp.asarray(TABLE)[tokens[:, :1]]
        again = process_logits(again, request, mode, num_valid=None, counts=None)
        again = add_noise(again, request, seeds, length + 1, depth[:1])
        second = jnp.argmax(again[:, 0], axis=-1)
        if layout.num_draft_tokens:
            second = jnp.where(outcome.num_accepted > 0, tokens[:, 1], second)
        return jnp.stack([tokens[:, 0], second], axis=1), outcome.num_accepted

    size = 20_000
    results = [
        one_batch(jnp.arange(start, start + size, dtype=jnp.uint32))
        for start in range(0, num_draws, size)
    ]
    accepted = np.concatenate([np.asarray(a) for _, a in results])
    assert (accepted > 0).any() == (layout.num_draft_tokens > 0)
    return np.concatenate([np.asarray(t) for t, _ in results])


CANDIDATES = BlockLayout.from_mask(
    depth=[0, 1, 2, 1, 2, 1, 2],
    mask=np.array(
        [[j in p for j in range(7)] for p in
         [(0,), (0, 1), (0, 1, 2), (0, 3), (0, 3, 4), (0, 5), (0, 5, 6)]]
    ),
    candidate_rows=[(0, 1, 2), (0, 3, 4), (0, 5, 6)],
    logit_rows=range(7),
)  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7, "top_k": 0, "top_p": 1.0},
        {"temperature": 1.0, "top_k": 0, "top_p": 1.0},
        {"temperature": 1.0, "top_k": 2, "top_p": 1.0},
        {"temperature": 1.0, "top_k": 0, "top_p": 0.9},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "layout, block",
    [
        (BlockLayout.linear(1), [0]),
        (BlockLayout.linear(3), [0, 1, 3]),
        # Three candidates, two of which share their first token.
        (CANDIDATES, [0, 1, 2, 1, 3, 0, 0]),
    ],
    ids=["plain", "one candidate", "three candidates"],
)
def test_the_law_of_two_tokens(settings, layout, block):
    num_draws = 200_000
    tokens = draws(layout, np.asarray(block, np.int32), settings, num_draws)
    law = chain_law(**settings)
    joint = (law[0][:, None] * law).ravel()
    counts = np.bincount(tokens[:, 0] * 4 + tokens[:, 1], minlength=16)
    possible = joint > 1e-12
    assert counts[~possible].sum() == 0
    expected = joint[possible] * num_draws
    chi_square = ((counts[possible] - expected) ** 2 / expected).sum()
    degrees = possible.sum() - 1
    # Mean + 4.5 standard deviations of the chi-square law: a chance below 1 in 20,000.
    assert chi_square < degrees + 4.5 * np.sqrt(2 * degrees) + 6, chi_square


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"temperature": -0.1}, "temperature=-0.1 is outside 0..100"),
        ({"temperature": float("nan")}, "temperature=nan is outside"),
        ({"top_k": -1}, "top_k=-1 is outside"),
        ({"top_p": 0.0}, "top_p=0.0 is outside"),
        ({"top_p": 1.5}, "top_p=1.5 is outside"),
        ({"min_p": -1.0}, "min_p=-1.0 is outside"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 is outside"),
    ],
)
def test_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        GenerateConfig(**fields)
