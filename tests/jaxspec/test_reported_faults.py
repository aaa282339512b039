"""What went wrong in other decoders, tried here: the right behaviour in every mode.

Some models here are chains: the logits after a token depend on that token alone, so that texts and
drafts, and what is accepted of them, can be written down by hand. All models of one shape and all
batches of one size share their compiled programs, which is what takes the time.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from flax import nnx

from jaxspec import GenerateConfig, Lookahead, NoDraft, PromptLookup, Qwen3, generate, stream
from pallas_kernels import argmax_partial, find_ngram, verify_greedy
from tests.jaxspec.models import random_model, random_prompts, smallest_gap

DRAFTERS = {
    "none": NoDraft(),
    "promptlookup": PromptLookup(num_draft_tokens=4, ngram_size=3),
    "lookahead": Lookahead(window_size=2, ngram_size=5, num_candidates=2, pool_size=256),
}
# The last four rows of the vocabulary have no token, as in the published sizes.
NUM_IDS, NUM_VALID = 64, 60
SHAPE = {
    "num_hidden_layers": 1,
    "vocab_size": NUM_IDS,
    "hidden_size": NUM_IDS,
    "num_valid_tokens": NUM_VALID,
}
each_drafter = pytest.mark.parametrize("spec", DRAFTERS)
each_speculation = pytest.mark.parametrize("spec", [spec for spec in DRAFTERS if spec != "none"])


@pytest.fixture(scope="module")
def model() -> Qwen3:
    return random_model(**SHAPE)


def chain_model(logits: np.ndarray) -> Qwen3:
    """Return a model whose logits after a token are that token's row, whatever stands before."""
    graph, params = nnx.split(random_model(**SHAPE))
    # Attention and feed-forward add nothing to the embedding, which says which token it is.
    params = jax.tree.map(lambda w: w if w.ndim == 1 else jnp.zeros_like(w), params)
    model = nnx.merge(graph, params)
    model.embed_tokens.set_value(jnp.eye(NUM_IDS))
    model.lm_head.set_value(jnp.asarray(logits.T / np.sqrt(NUM_IDS), jnp.float32))
    return model


END = 2
# What follows a token: 51 and 21 are followed by END, and END by a loop without it.
NEXT = {51: END, 20: 21, 21: END, END: 7, 7: 8, 8: 9, 9: 10, 10: 11, 11: 7, 30: 31, 31: 30}
NEXT |= {63: 41, 41: 30}
# The first two rows copy END out of the prompt, as the first and as the second draft token; the
# last one copies ids that have no token, which the model likes best.
PROMPTS = [
    [3, 51, END, 7, 8, 9, 51],
    [20, 21, END, 7, 20],
    [5, 6, 7, 8, 9, 10, 11, 7, 8],
    [40, END],
    [30],
    [62, 63, 61, 62, 63],
]


@pytest.fixture(scope="module")
def successors() -> Qwen3:
    table = np.zeros((NUM_IDS, NUM_IDS), np.float32)
    for token, following in NEXT.items():
        table[token, following] = 10
    table[:, NUM_VALID:] = 20
    return chain_model(table)


def followed(prompt: list[int], num_tokens: int) -> list[int]:
    text = prompt[-1:]
    for _ in range(num_tokens):
        text.append(NEXT[text[-1]])
    return text[1:]


def up_to_end(text: list[int]) -> list[int]:
    return text[: text.index(END) + 1] if END in text else text


def test_lookups_copy_the_end_of_a_text_out_of_the_prompt():
    """The two tests below rest on this."""
    for prompt, expected in zip(PROMPTS, ([END, 7, 8, 9], [21, END, 7, 20]), strict=False):
        draft, num_draft = find_ngram(
            jnp.asarray([prompt], jnp.int32), jnp.asarray([len(prompt)], jnp.int32),
            ngram_size=3, min_ngram_size=1, num_draft_tokens=4,
        )  # fmt: skip
        assert draft[0].tolist() == expected and num_draft.tolist() == [4]


@each_drafter
def test_an_eos_that_a_draft_copies_ends_the_text(successors, spec):
    config = GenerateConfig(max_new_tokens=15, eos_token_ids=(END,))
    result = generate(successors, PROMPTS, config, DRAFTERS[spec])
    expected = [up_to_end(followed(prompt, 15)) for prompt in PROMPTS]
    assert expected[:2] == [[END], [21, END]]
    assert result.token_ids == expected
    assert result.num_tokens.tolist() == [1, 2, 15, 15, 15, 15]
    assert result.finish_reasons == ("eos", "eos", *["length"] * 4)
    if spec != "none":
        # Drafts past the end were right, but nobody sees them: they do not count.
        assert result.num_steps[:2].tolist() == [1, 1]
        assert result.accepted_by_position[:2].tolist() == [[1, 0, 0, 0], [1, 1, 0, 0]]
        assert result.mean_accepted_length[:2].tolist() == [1, 2]


@each_drafter
def test_without_an_eos_a_text_runs_to_its_budget_and_no_further(successors, spec):
    assert successors.config.eos_token_ids == ()
    for budget in (1, 2, 3, 4, 5, 6, 15):
        for eos_ids in (None, ()):
            config = GenerateConfig(max_new_tokens=budget, eos_token_ids=eos_ids)
            result = generate(successors, PROMPTS, config, DRAFTERS[spec])
            assert result.token_ids == [followed(prompt, budget) for prompt in PROMPTS]
            assert set(result.finish_reasons) == {"length"}
            if spec != "none":
                emitted = result.num_steps + result.accepted_by_position.sum(axis=1)
                assert (result.num_steps < budget).sum() >= (2 if budget > 1 else 0)
                assert ((emitted == budget) | (emitted == budget + 1)).all()


def test_any_of_many_eos_ids_ends_a_text(successors):
    others = tuple(range(42, 51)) + tuple(range(52, 64))
    for eos_ids in ((*others, END), (END, *others), (*others[:7], END, *others[7:], END)):
        config = GenerateConfig(max_new_tokens=9, eos_token_ids=eos_ids)
        result = generate(successors, PROMPTS, config, DRAFTERS["promptlookup"])
        assert result.token_ids == [up_to_end(followed(prompt, 9)) for prompt in PROMPTS]


@each_speculation
def test_an_eos_that_is_drawn_ends_the_text(spec):
    """A chain over six tokens; ids that have no token would be drawn first of all."""
    law = np.full((NUM_IDS, NUM_IDS), -1e9, np.float32)
    law[:, :6] = np.log(np.random.default_rng(0).dirichlet([1, 1, 2, 2, 3, 0.2], NUM_IDS))
    law[:, NUM_VALID:] = 9
    model, prompts = chain_model(law), [[0, 1, 2, 3, 4, 0]] * 64
    config = GenerateConfig(
        max_new_tokens=60, temperature=0.7, top_k=5, seed=tuple(range(64)), eos_token_ids=()
    )
    whole = generate(model, prompts, config, NoDraft()).token_ids
    assert {token for ids in whole for token in ids} == set(range(6))
    result = generate(model, prompts, config, DRAFTERS[spec])
    assert result.token_ids == whole and result.num_steps.sum() < result.num_tokens.sum()
    config = dataclasses.replace(config, eos_token_ids=(5, 0))
    result = generate(model, prompts, config, DRAFTERS[spec])
    ends = [next((i + 1 for i, token in enumerate(ids) if token in (5, 0)), 60) for ids in whole]
    assert len(set(ends)) > 10
    assert result.token_ids == [ids[:end] for ids, end in zip(whole, ends, strict=True)]
    assert result.finish_reasons == tuple(
        "eos" if ids[end - 1] in (5, 0) else "length" for ids, end in zip(whole, ends, strict=True)
    )
    # A row takes part in no step after its end, and counts nothing then.
    emitted = result.num_steps + result.accepted_by_position.sum(axis=1)
    assert ((emitted == result.num_tokens) | (emitted == result.num_tokens + 1)).all()


# One token again and again, no token twice, one token alone, and three that repeat in part.
MIXED = [[7] * 48, list(range(10, 40)), [50], *random_prompts((20, 12, 9), vocab_size=NUM_IDS)]


def alone(model: Qwen3, config: GenerateConfig, drafter: object) -> list:
    return [generate(model, [prompt], config, drafter) for prompt in MIXED]


@each_drafter
def test_rows_with_and_without_a_match_are_decoded_as_each_alone(model, spec, record_gap):
    tokens = np.zeros((6, 48), np.int32)
    for row, prompt in zip(tokens, MIXED, strict=True):
        row[: len(prompt)] = prompt
    lengths = jnp.asarray([len(prompt) for prompt in MIXED], jnp.int32)
    _, num_draft = find_ngram(jnp.asarray(tokens), lengths, ngram_size=1, num_draft_tokens=4)
    assert num_draft.tolist() == [4, 0, 0, 4, 4, 4]
    config = GenerateConfig(max_new_tokens=40)
    expected = [result.token_ids[0] for result in alone(model, config, NoDraft())]
    record_gap(smallest_gap(model, MIXED[0], expected[0]))
    # Without an EOS, and with two that end some rows early.
    for eos_ids in ((), (expected[1][5], expected[3][9])):
        config = dataclasses.replace(config, eos_token_ids=eos_ids)
        together = generate(model, MIXED, config, DRAFTERS[spec])
        each = alone(model, config, DRAFTERS[spec])
        for row, (single, full) in enumerate(zip(each, expected, strict=True)):
            end = next((i for i, token in enumerate(full) if token in eos_ids), len(full)) + 1
            assert together.token_ids[row] == single.token_ids[0] == full[:end]
            assert together.num_steps[row] == single.num_steps[0]
            assert together.finish_reasons[row] == single.finish_reasons[0]
            np.testing.assert_array_equal(
                together.accepted_by_position[row], single.accepted_by_position[0]
            )
        if spec != "none":
            assert together.num_steps.sum() < together.num_tokens.sum()
    assert len(set(together.num_tokens)) >= 3


@each_drafter
def test_a_call_leaves_nothing_to_the_next_one(model, spec):
    config, drafter = GenerateConfig(max_new_tokens=40), DRAFTERS[spec]
    expected = [result.token_ids[0] for result in alone(model, config, NoDraft())]
    chunks = [stream(model, [prompt], config, drafter, steps_per_chunk=3) for prompt in MIXED]
    # Texts that grow in turns, one that is given up, and one whose reader fails.
    last = [next(texts) for texts in chunks]
    chunks.pop().close()
    with pytest.raises(ZeroDivisionError):
        for _ in stream(model, MIXED[:1], config, drafter, steps_per_chunk=1):
            1 / 0  # noqa: B018
    assert [result.token_ids[0] for result in alone(model, config, drafter)] == expected
    assert generate(model, MIXED, config, drafter).token_ids == expected
    for _ in range(14):
        last = [next(texts, text) for texts, text in zip(chunks, last, strict=False)]
    assert all(text.finish_reasons == ("length",) for text in last)
    assert [text.token_ids[0] for text in last] == expected[:5]
    assert generate(model, MIXED[:1], config, drafter).token_ids == expected[:1]


@each_speculation
def test_a_text_goes_on_from_any_cut_as_it_did(model, spec):
    """A step leaves what a prompt would: no slot of the cache too many, too few or stale."""
    config, prompt = GenerateConfig(max_new_tokens=30), MIXED[4]
    whole = generate(model, [prompt], config, DRAFTERS[spec])
    text = whole.token_ids[0]
    assert whole.accepted_by_position.sum() > 2
    assert generate(model, [prompt], config, NoDraft()).token_ids == [text]
    for start in range(0, 30, 6):
        cuts = range(start, start + 6)
        result = generate(model, [prompt + text[:cut] for cut in cuts], config, DRAFTERS[spec])
        for cut, ids in zip(cuts, result.token_ids, strict=True):
            assert ids[: 30 - cut] == text[cut:]


def test_the_size_of_a_prefill_pass_changes_no_text(model):
    """One prompt's last pass is full, another's has a single token, and some end passes before."""
    expected = generate(model, MIXED, GenerateConfig(max_new_tokens=40)).token_ids
    for size in (10, 29):
        config = GenerateConfig(max_new_tokens=40, prefill_chunk_size=size)
        assert generate(model, MIXED, config, DRAFTERS["promptlookup"]).token_ids == expected


@pytest.mark.parametrize(
    "drafter",
    [PromptLookup(num_draft_tokens=200), Lookahead(15, 5, 15)],
    ids=["promptlookup", "lookahead"],
)
def test_a_text_may_reach_the_models_last_position(model, drafter):
    """Text and cache have no slot to spare then, and blocks reach far past their end."""
    prompts = random_prompts((118, 5), vocab_size=NUM_IDS)
    expected = generate(model, prompts, GenerateConfig(max_new_tokens=40)).token_ids
    for budget in (1, 2, 7, 10):
        # The first prompt leaves exactly the budget.
        longest = [prompts[0] + expected[0][: 10 - budget], prompts[1]]
        config = GenerateConfig(max_new_tokens=budget, max_seq_len=128)
        result = generate(model, longest, config, drafter)
        assert result.token_ids == [expected[0][10 - budget : 10], expected[1][:budget]]
        assert result.finish_reasons == ("length", "length")
    with pytest.raises(ValueError, match="exceed max_seq_len=128"):
        generate(model, prompts, GenerateConfig(max_new_tokens=11, max_seq_len=128), drafter)


@pytest.mark.parametrize(
    "prompts, message",
    [
        ([1, 2, 3], "prompt 0 is 1, expected a list of token ids"),
        (np.array([1, 2, 3]), "expected a list of token ids"),
        ("text", "prompt 0 is 't', expected a list of token ids"),
        (["text"], "prompt 0 is 'text', expected a list of token ids"),
    ],
    ids=["one_prompt", "one_array", "text", "texts"],
)
def test_prompts_that_are_no_lists_of_ids_are_refused_in_one_line(
    model, monkeypatch, prompts, message
):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=message) as caught:
        generate(model, prompts, GenerateConfig(max_new_tokens=3))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["max_new_tokens", "max_seq_len", "prefill_chunk_size"])
@pytest.mark.parametrize("value", [5.5, 5.0, True, "5"])
def test_counts_that_are_no_integers_are_refused(monkeypatch, name, value):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=f"^{name}={value!r} is not an integer$"):
        GenerateConfig(**{name: value})


@pytest.mark.parametrize("num_draft_tokens", [3, 5, 7])
def test_kernels_at_sizes_that_are_no_powers_of_two(num_draft_tokens):
    """Three rows of a thousand tokens, and the published vocabulary of 2^7 * 1187 ids."""
    num_ids, num_valid, batch_size, num_rows = 151936, 151669, 3, 1 + num_draft_tokens
    rng = np.random.default_rng(num_draft_tokens)
    period = rng.permutation(num_valid)[: 90 + num_draft_tokens]
    text = np.resize(period, 1000 + num_rows).astype(np.int32)
    tokens = jnp.asarray(np.tile(text[:1000], (batch_size, 1)))
    length = np.array([1000, 999, 333], np.int32)
    draft, num_draft = find_ngram(
        tokens, jnp.asarray(length), ngram_size=3, num_draft_tokens=num_draft_tokens,
        implementation="interpret",
    )  # fmt: skip
    expected = np.stack([text[n : n + num_rows] for n in length])
    assert num_draft.tolist() == [num_draft_tokens] * batch_size
    np.testing.assert_array_equal(draft, expected[:, :-1])
    # The model agrees with every draft but one of the second row; unused ids have larger logits.
    expected[1, 1] = num_valid - 1
    logits = np.zeros((batch_size * num_rows, num_ids), np.float32)
    logits[:, num_valid:] = 9
    logits[np.arange(len(logits)), expected.ravel()] = 1
    values, indices = argmax_partial(
        jnp.asarray(logits), num_valid=num_valid, implementation="interpret"
    )
    target, num_accepted, best = verify_greedy(
        draft[:, None], num_draft[:, None],
        values.reshape(batch_size, num_rows, -1), indices.reshape(batch_size, num_rows, -1),
        candidate_rows=(tuple(range(num_rows)),), implementation="interpret",
    )  # fmt: skip
    np.testing.assert_array_equal(target, expected)
    assert num_accepted.tolist() == [num_draft_tokens, 1, num_draft_tokens]
    assert best.tolist() == [0, 0, 0]
