"""Speculation changes no token: every mode gives the text of plain decoding, in float32."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec import GenerateConfig, Lookahead, NoDraft, PromptLookup, generate, stream
from jaxspec.decode import prefill, run_steps
from jaxspec.drafters import DEFAULT_SETTINGS, DRAFTERS, make_drafter
from jaxspec.request import make_request
from jaxspec.state import init_state
from pallas_kernels import dispatch
from tests.jaxspec.models import ScriptedDraft, random_model, random_prompts, smallest_gap

NUM_NEW = 48


def plain(model, prompts, **config):
    return generate(model, prompts, GenerateConfig(**config), NoDraft())


@pytest.fixture(scope="module")
def model():
    return random_model()


@pytest.mark.parametrize("lengths", [(23,), (1,), (5, 40, 17)], ids=str)
@pytest.mark.parametrize("num_draft_tokens", range(1, 9))
def test_prompt_lookup_equals_plain_decoding(model, lengths, num_draft_tokens, record_gap):
    prompts = random_prompts(lengths)
    expected = plain(model, prompts, max_new_tokens=NUM_NEW)
    drafter = PromptLookup(num_draft_tokens=num_draft_tokens, ngram_size=3)
    result = generate(model, prompts, GenerateConfig(max_new_tokens=NUM_NEW), drafter)
    gaps = [
        smallest_gap(model, prompt, ids)
        for prompt, ids in zip(prompts, expected.token_ids, strict=True)
    ]
    record_gap(min(gaps))
    assert result.token_ids == expected.token_ids
    assert min(gaps) > 1e-4
    # The text repeats itself, so that drafts are accepted: the test is not vacuous.
    assert result.num_steps.sum() < expected.num_steps.sum()


@pytest.mark.parametrize("platform", DEFAULT_SETTINGS)
@pytest.mark.parametrize("spec", DRAFTERS)
def test_every_drafter_with_its_defaults_is_lossless(model, spec, platform, record_gap):
    prompts = random_prompts((9, 30, 1))
    expected = plain(model, prompts, max_new_tokens=NUM_NEW)
    drafter = make_drafter(spec, platform=platform)
    config = GenerateConfig(max_new_tokens=NUM_NEW)
    assert generate(model, prompts, config, drafter).token_ids == expected.token_ids
    record_gap(min(map(smallest_gap, [model] * 3, prompts, expected.token_ids)))


@pytest.mark.parametrize("kernels", ["xla", "interpret"])
def test_the_calls_kernels_reach_the_drafter(model, kernels, monkeypatch):
    used = set()
    original = dispatch._run

    def spy(package, op, name, *args, **settings):
        used.add((op, name))
        return original(package, op, name, *args, **settings)

    monkeypatch.setattr(dispatch, "_run", spy)
    config = GenerateConfig(max_new_tokens=3, kernels=kernels)
    generate(model, [[1, 2, 1]], config, PromptLookup(num_draft_tokens=2, ngram_size=5))
    generate(model, [[1, 2, 1]], config, Lookahead(1, 3, 1, pool_size=16))
    loop = {"argmax_partial", "verify_greedy", "write_rows"}
    drafters = {"find_ngram", "lookup_ngrams", "insert_ngrams"}
    assert used >= {(op, kernels) for op in loop | drafters}
    assert {name for _, name in used} == {kernels}


@pytest.mark.parametrize("match", ["first", "last"])
@pytest.mark.parametrize("ngram_size, min_ngram_size", [(1, 1), (4, 2), (64, 1)])
def test_every_lookup_setting_is_lossless(model, match, ngram_size, min_ngram_size):
    prompts = random_prompts((9, 30))
    drafter = PromptLookup(
        num_draft_tokens=5, ngram_size=ngram_size, min_ngram_size=min_ngram_size, match=match
    )
    result = generate(model, prompts, GenerateConfig(max_new_tokens=NUM_NEW), drafter)
    assert result.token_ids == plain(model, prompts, max_new_tokens=NUM_NEW).token_ids


def test_rows_equal_their_batch_of_one(model):
    prompts = random_prompts((5, 40, 17))
    drafter = PromptLookup(num_draft_tokens=3)
    config = GenerateConfig(max_new_tokens=NUM_NEW)
    together = generate(model, prompts, config, drafter).token_ids
    alone = [generate(model, [prompt], config, drafter).token_ids[0] for prompt in prompts]
    assert together == alone


def test_always_wrong_drafts_cost_steps_and_no_tokens():
    model = random_model(num_valid_tokens=96)
    prompts = random_prompts((5, 12))
    expected = plain(model, prompts, max_new_tokens=NUM_NEW)
    drafter = ScriptedDraft(
        script=tuple(tuple(p) + tuple(t) for p, t in zip(prompts, expected.token_ids, strict=True)),
        num_draft_tokens=4,
        wrong_at=0,
    )
    result = generate(model, prompts, GenerateConfig(max_new_tokens=NUM_NEW), drafter)
    assert result.token_ids == expected.token_ids
    assert result.num_steps.tolist() == [NUM_NEW, NUM_NEW]
    assert result.accepted_by_position.sum() == 0


@pytest.mark.parametrize("wrong_at", [1, 2, 3, None])
def test_drafts_are_accepted_up_to_the_first_wrong_one(wrong_at):
    model = random_model(num_valid_tokens=96)
    prompt = random_prompts((11,))[0]
    expected = plain(model, [prompt], max_new_tokens=40)
    script = (tuple(prompt) + tuple(expected.token_ids[0]),)
    drafter = ScriptedDraft(script=script, num_draft_tokens=4, wrong_at=wrong_at)
    result = generate(model, [prompt], GenerateConfig(max_new_tokens=40), drafter)
    assert result.token_ids == expected.token_ids
    per_step = 5 if wrong_at is None else wrong_at + 1
    assert result.num_steps[0] == -(-40 // per_step)


def oracle(prompts, generation, num_draft_tokens):
    script = tuple(
        tuple(prompt) + tuple(ids)
        for prompt, ids in zip(prompts, generation.token_ids, strict=True)
    )
    return ScriptedDraft(script=script, num_draft_tokens=num_draft_tokens)


def test_eos_at_every_offset_of_an_accepted_block(model):
    prompts = random_prompts((6, 9))
    expected = plain(model, prompts, max_new_tokens=24)
    drafter = oracle(prompts, expected, num_draft_tokens=5)
    for index, eos_id in enumerate(expected.token_ids[0]):
        config = GenerateConfig(max_new_tokens=24, eos_token_ids=(eos_id,))
        result = generate(model, prompts, config, drafter)
        for ids, full, reason in zip(
            result.token_ids, expected.token_ids, result.finish_reasons, strict=True
        ):
            end = full.index(eos_id) + 1 if eos_id in full else len(full)
            assert ids == full[:end], f"EOS {eos_id} at {index}"
            assert reason == ("eos" if eos_id in full else "length")


def test_eos_on_the_last_budgeted_token_counts_as_eos(model):
    prompt = random_prompts((6,))[0]
    full = plain(model, [prompt], max_new_tokens=24).token_ids[0]
    first_seen = [i for i, token in enumerate(full) if token not in full[:i]]
    index = first_seen[-1]
    for budget, reason in [(index, "length"), (index + 1, "eos"), (index + 2, "eos")]:
        if budget:
            config = GenerateConfig(max_new_tokens=budget, eos_token_ids=(full[index],))
            result = generate(model, [prompt], config, PromptLookup(num_draft_tokens=4))
            assert result.token_ids[0] == full[: min(budget, index + 1)]
            assert result.finish_reasons == (reason,)


def test_several_eos_ids(model):
    prompt = random_prompts((6,))[0]
    full = plain(model, [prompt], max_new_tokens=24).token_ids[0]
    eos_ids = (full[7], full[5], 96)
    config = GenerateConfig(max_new_tokens=24, eos_token_ids=eos_ids)
    result = generate(model, [prompt], config, PromptLookup(num_draft_tokens=4))
    end = min(full.index(eos_id) for eos_id in eos_ids if eos_id in full) + 1
    assert result.token_ids[0] == full[:end]


def test_every_budget_is_exact(model):
    prompts = random_prompts((7, 20))
    full = plain(model, prompts, max_new_tokens=130).token_ids
    for budget in range(1, 131):
        config = GenerateConfig(max_new_tokens=budget)
        result = generate(model, prompts, config, PromptLookup(num_draft_tokens=7))
        assert result.token_ids == [ids[:budget] for ids in full]
        assert result.finish_reasons == ("length", "length")


@pytest.mark.parametrize("budget", [3, 4, 5, 6, 9])
def test_budgets_around_a_fully_accepted_block(model, budget):
    prompts = random_prompts((6,))
    expected = plain(model, prompts, max_new_tokens=budget)
    drafter = oracle(prompts, expected, num_draft_tokens=4)
    result = generate(model, prompts, GenerateConfig(max_new_tokens=budget), drafter)
    assert result.token_ids == expected.token_ids
    assert result.num_steps[0] == -(-budget // 5)


def test_text_that_fills_the_capacity_exactly(model):
    # 128 is a capacity: the last blocks reach past the end of text and cache.
    prompts = random_prompts((28, 3))
    config = GenerateConfig(max_new_tokens=100)
    tokens, _ = make_request(model.config, prompts, config)
    assert tokens.shape[1] == 128
    result = generate(model, prompts, config, PromptLookup(num_draft_tokens=8))
    assert result.token_ids == plain(model, prompts, max_new_tokens=100).token_ids


def test_three_calls_in_one_process_do_not_disturb_each_other(model):
    long, short = random_prompts((40, 8))
    config = GenerateConfig(max_new_tokens=NUM_NEW)
    drafter = PromptLookup(num_draft_tokens=4)
    first = generate(model, [long], config, drafter).token_ids
    both = generate(model, [long, short], config, drafter).token_ids
    again = generate(model, [long], config, drafter).token_ids
    assert first == again == both[:1]


@given(seed=st.integers(0, 10_000), length=st.integers(1, 60))
@settings(max_examples=15, deadline=None)
def test_random_prompts_over_three_symbols(seed, length):
    model = random_model(1)
    prompt = np.random.default_rng(seed).integers(0, 3, length).tolist()
    result = generate(
        model, [prompt], GenerateConfig(max_new_tokens=40), PromptLookup(num_draft_tokens=6)
    )
    assert result.token_ids == plain(model, [prompt], max_new_tokens=40).token_ids


def test_streamed_chunks_grow_into_the_same_text(model):
    prompts = random_prompts((5, 17))
    config = GenerateConfig(max_new_tokens=NUM_NEW)
    drafter = PromptLookup(num_draft_tokens=3)
    chunks = list(stream(model, prompts, config, drafter, steps_per_chunk=2))
    assert len(chunks) > 2
    for before, after in zip(chunks, chunks[1:], strict=False):
        for old, new in zip(before.token_ids, after.token_ids, strict=True):
            assert new[: len(old)] == old
    assert chunks[-1].is_finished and not chunks[-2].is_finished
    assert chunks[-1].token_ids == generate(model, prompts, config, drafter).token_ids


def test_cache_holds_what_a_fresh_prefill_would(model):
    prompts = random_prompts((9, 21))
    config = GenerateConfig(max_new_tokens=20)
    tokens, request = make_request(model.config, prompts, config)
    drafter = PromptLookup(num_draft_tokens=4)
    state = init_state(model, tokens, request, drafter=drafter)
    state = prefill(model, state, jnp.int32(1), chunk_size=64)
    for _ in range(8):
        state = run_steps(model, state, request, jnp.int32(1), drafter=drafter)
        text = dataclasses.replace(request, prompt_length=state.length + 0)
        fresh = init_state(model, state.tokens, text, drafter=drafter)
        fresh = prefill(model, fresh, jnp.int32(1), chunk_size=64)
        for row, length in enumerate(np.asarray(state.length)):
            for layer, fresh_layer in zip(state.cache, fresh.cache, strict=True):
                for part, fresh_part in zip(layer, fresh_layer, strict=True):
                    np.testing.assert_allclose(
                        part[row, :, : length - 1], fresh_part[row, :, : length - 1], atol=2e-5
                    )


def test_a_bad_prompt_token_is_not_forgotten(model):
    # Keys that are not finite must reach the output, not leave holes in the prompt.
    graph, params = nnx.split(random_model(7))
    params["embed_tokens"] = params["embed_tokens"].replace(
        params["embed_tokens"][...].at[5].set(jnp.inf)
    )
    broken = nnx.merge(graph, params)
    for chunk_size in (1, 64):
        config = GenerateConfig(max_new_tokens=3, prefill_chunk_size=chunk_size)
        assert generate(broken, [[5, 1, 2, 3]], config).token_ids == [[0, 0, 0]]


@pytest.mark.parametrize("chunk_size", [1, 7, None])
def test_a_token_that_is_not_in_the_text_has_no_part_in_it(chunk_size):
    # Buffers are padded with id 0, here one that is not finite; the text does not hold it.
    graph, params = nnx.split(random_model(7))
    table = params["embed_tokens"][...]
    prompts = random_prompts((9, 23), vocab_size=96)
    prompts = [[token + 1 for token in prompt] for prompt in prompts]
    config = GenerateConfig(max_new_tokens=20, prefill_chunk_size=chunk_size)
    expected = generate(nnx.merge(graph, params), prompts, config).token_ids
    assert 0 not in sum(expected, [])
    params["embed_tokens"] = params["embed_tokens"].replace(table.at[0].set(jnp.nan))
    assert generate(nnx.merge(graph, params), prompts, config).token_ids == expected


def test_garbage_past_the_end_changes_nothing(model):
    prompts = random_prompts((9,))
    config = GenerateConfig(max_new_tokens=30)
    expected = plain(model, prompts, max_new_tokens=30).token_ids
    for poison in (1e4, float(np.finfo(np.float32).max), -1e30):
        tokens, request = make_request(model.config, prompts, config)
        drafter = PromptLookup(num_draft_tokens=4)
        state = init_state(model, tokens, request, drafter=drafter)
        state = state.__class__(
            **{
                **{name: getattr(state, name) for name in state.__dataclass_fields__},
                "cache": tuple(
                    tuple(jnp.full_like(part, poison) for part in layer) for layer in state.cache
                ),
                "tokens": jnp.where(
                    jnp.arange(tokens.shape[1])[None] < 9, tokens, jnp.int32(prompts[0][-1])
                ),
            }
        )
        state = prefill(model, state, jnp.int32(1), chunk_size=128)
        state = run_steps(model, state, request, jnp.int32(30), drafter=drafter)
        assert np.asarray(state.tokens)[0, 9:39].tolist() == expected[0]
