"""Lookahead decoding: lossless for every setting, and its parts as the paper has them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import GenerateConfig, Lookahead, NoDraft, generate
from jaxspec.cache import init_cache
from jaxspec.decode import decode_step, prefill
from jaxspec.drafters import ngram_pool
from jaxspec.drafters.lookahead import LookaheadState
from jaxspec.request import make_request
from jaxspec.state import init_state
from tests.jaxspec.models import random_model, random_prompts, smallest_gap

SETTINGS = [(1, 2, 1), (2, 3, 2), (3, 2, 4), (1, 5, 1), (4, 4, 1), (7, 5, 7), (15, 5, 15)]


@pytest.fixture(scope="module")
def model():
    return random_model()


def plain(model, prompts, **config):
    return generate(model, prompts, GenerateConfig(**config), NoDraft()).token_ids


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("lengths", [(23,), (1, 40, 17)], ids=str)
def test_lossless(model, setting, lengths, record_gap):
    prompts = random_prompts(lengths)
    expected = plain(model, prompts, max_new_tokens=48)
    record_gap(min(map(smallest_gap, [model] * len(prompts), prompts, expected)))
    for seed in range(5):
        config = GenerateConfig(max_new_tokens=48, seed=seed)
        result = generate(model, prompts, config, Lookahead(*setting))
        assert result.token_ids == expected
        assert result.num_steps.sum() < 48 * len(prompts)


@pytest.mark.parametrize("setting", [(1, 2, 0), (3, 3, 0)], ids=str)
def test_without_candidates_it_is_plain_decoding(model, setting):
    prompts = random_prompts((5, 23))
    result = generate(model, prompts, GenerateConfig(max_new_tokens=30), Lookahead(*setting))
    assert result.token_ids == plain(model, prompts, max_new_tokens=30)
    assert result.num_steps.tolist() == [30, 30]


def test_eos_and_budget_at_every_offset(model):
    prompts = random_prompts((6, 9))
    expected = plain(model, prompts, max_new_tokens=24)
    drafter = Lookahead(3, 4, 3)
    for eos_id in expected[0]:
        config = GenerateConfig(max_new_tokens=24, eos_token_ids=(eos_id,))
        result = generate(model, prompts, config, drafter)
        for ids, full in zip(result.token_ids, expected, strict=True):
            assert ids == full[: full.index(eos_id) + 1 if eos_id in full else len(full)]
    for budget in range(1, 25):
        result = generate(model, prompts, GenerateConfig(max_new_tokens=budget), drafter)
        assert result.token_ids == [ids[:budget] for ids in expected]


def test_a_tiny_pool_is_lossless(model):
    prompts = random_prompts((23, 40))
    drafter = Lookahead(3, 3, 4, pool_size=2)
    result = generate(model, prompts, GenerateConfig(max_new_tokens=40), drafter)
    assert result.token_ids == plain(model, prompts, max_new_tokens=40)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_layout(setting):
    window_size, ngram_size, num_candidates = setting
    layout = Lookahead(*setting).layout
    levels = ngram_size - 1
    assert layout.num_rows == levels * (window_size + num_candidates)
    assert (layout.num_candidates, layout.num_draft_tokens) == (num_candidates, levels)
    depth, mask = np.asarray(layout.depth), layout.mask
    for level in range(levels):
        for column in range(window_size):
            # Every position up to its own, each exactly once.
            seen = depth[mask[level * window_size + column]]
            assert sorted(seen) == list(range(level + column + 1))
    for candidate in range(num_candidates):
        for draft in range(levels):
            row = levels * window_size + candidate * levels + draft
            assert sorted(depth[mask[row]]) == list(range(draft + 2))
            assert layout.candidate_rows[candidate][draft + 1] == row


def start(model, prompts, drafter, **config):
    tokens, request = make_request(model.config, prompts, GenerateConfig(**config))
    state = init_state(model, tokens, request, drafter=drafter)
    return prefill(model, state, jnp.int32(1), chunk_size=tokens.shape[1]), request


def test_a_perfect_pool_gives_n_tokens_a_step(model):
    drafter = Lookahead(2, 4, 3)
    prompt = random_prompts((20,))[0]
    text = prompt + plain(model, [prompt], max_new_tokens=40)[0]
    state, request = start(model, [prompt], drafter, max_new_tokens=32)
    pool = ngram_pool.from_text(
        jnp.asarray([text], jnp.int32), jnp.asarray([len(text)], jnp.int32),
        ngram_size=4, pool_size=4096,
    )  # fmt: skip
    # The true continuation as the most recent n-gram of its key is always a candidate.
    step = jax.jit(decode_step, static_argnames=("drafter", "kernels"))
    for _ in range(8):
        length = int(state.length[0])
        gram = jnp.asarray([[text[length - 1 : length + 3]]], jnp.int32)
        pool = ngram_pool.insert(pool, gram, jnp.ones((1, 1), bool))
        state = dataclasses.replace(state, drafter=dataclasses.replace(state.drafter, pool=pool))
        state = step(model, state, request, drafter=drafter)
        assert int(state.length[0]) == length + 4
    assert state.tokens[0, : len(prompt) + 32].tolist() == text[: len(prompt) + 32]


def test_a_true_window_guesses_the_true_continuation(model):
    window_size, ngram_size = 3, 4
    drafter = Lookahead(window_size, ngram_size, 1)
    prompt = random_prompts((20,))[0]
    text = prompt + plain(model, [prompt], max_new_tokens=20)[0]
    state, request = start(model, [prompt], drafter, max_new_tokens=20)
    current = len(prompt) - 1
    window = [
        [text[current + level + column] for column in range(window_size)]
        for level in range(ngram_size - 1)
    ]
    true = LookaheadState(
        window=jnp.asarray([window], jnp.int32),
        pool=state.drafter.pool,
        num_steps=jnp.zeros((1,), jnp.int32),
    )
    state = decode_step(model, dataclasses.replace(state, drafter=true), request, drafter)
    after = np.asarray(state.drafter.window)[0]
    new_current = int(state.length[0]) - 1
    assert after[0, 0] == text[new_current]
    assert after[-1].tolist() == text[current + ngram_size - 1 :][:window_size]
    assert after[1].tolist() == window[2]


def test_guesses_of_random_tokens_are_not_harvested(model):
    drafter = Lookahead(2, 5, 1, pool_size=64)
    state, request = start(model, [[5]], drafter, max_new_tokens=40)
    for step in range(6):
        before = np.asarray(state.drafter.pool.grams)[0]
        length = int(state.length[0])
        window = np.asarray(state.drafter.window)[0]
        state = decode_step(model, state, request, drafter)
        known = {tuple(gram) for gram in np.asarray(state.drafter.pool.grams)[0].tolist()}
        new = known - {tuple(gram) for gram in before.tolist()}
        text = state.tokens[0, : int(state.length[0])].tolist()
        text_grams = {tuple(text[i : i + 5]) for i in range(len(text) - 4)}
        guessed = new - text_grams
        if step < 3:
            assert not guessed
        for gram in guessed:
            assert list(gram[:4]) in window.T.tolist()
        assert int(state.length[0]) > length


def test_a_finished_row_keeps_its_window_and_pool(model):
    drafter = Lookahead(3, 3, 2)
    prompts = random_prompts((6, 9))
    state, request = start(model, prompts, drafter, max_new_tokens=30)
    request = dataclasses.replace(request, max_new_tokens=jnp.asarray([1, 30], jnp.int32))
    state = decode_step(model, state, request, drafter)
    after = decode_step(model, state, request, drafter)
    for old, new in zip(
        jax.tree.leaves(state.drafter), jax.tree.leaves(after.drafter), strict=True
    ):
        np.testing.assert_array_equal(old[0], new[0])
    np.testing.assert_array_equal(state.tokens[0], after.tokens[0])
    for (old, _), (new, _) in zip(state.cache, after.cache, strict=True):
        np.testing.assert_array_equal(old[0], new[0])


def test_branches_and_window_do_not_see_each_other(model):
    drafter = Lookahead(2, 3, 2)
    layout = drafter.layout
    cache = init_cache(model.config, batch_size=1, capacity=16, dtype=jnp.float32)
    tokens = np.random.default_rng(0).integers(0, 97, (1, layout.num_rows)).astype(np.int32)
    length = jnp.zeros((1,), jnp.int32)
    run = jax.jit(lambda tokens: model(tokens, length, cache, layout)[0][0])
    base = np.asarray(run(tokens))
    row_of = {row: index for index, row in enumerate(layout.logit_rows)}
    groups = [
        {1, 2, 3},  # the window but for the current token
        set(layout.candidate_rows[0][1:]),
        set(layout.candidate_rows[1][1:]),
    ]
    for group in groups:
        changed = tokens.copy()
        changed[:, sorted(group)] += 1
        moved = np.abs(np.asarray(run(changed)) - base).max(axis=-1)
        for row, index in row_of.items():
            if row not in group:
                assert moved[index] == 0
        assert max(moved[row_of[row]] for row in group if row in row_of) > 0


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"window_size": 0}, "window_size=0 is not at least 1"),
        ({"ngram_size": 1}, "ngram_size=1 is not at least 2"),
        ({"num_candidates": -1}, "num_candidates=-1 is not at least 0"),
        ({"pool_size": 0}, "pool_size=0 is not at least 1"),
        ({"window_size": 2000}, "block has 8028 rows, expected at most 4096"),
    ],
)
def test_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        Lookahead(**fields)
