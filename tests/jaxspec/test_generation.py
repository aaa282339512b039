"""The host's side: validation, statistics, finish reasons, no host work per token."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from jaxspec import (
    Auto,
    BlockLayout,
    Difference,
    GenerateConfig,
    Lookahead,
    NoDraft,
    PromptLookup,
    Proposal,
    current_tokens,
    generate,
    stream,
)
from jaxspec.generation import check_drafter
from jaxspec.stats import comparison, first_different_index, first_periodic_position
from tests.jaxspec.models import random_model, random_prompts


@pytest.mark.parametrize(
    "prompts, config, message",
    [
        ([], {}, "no prompts: expected at least one"),
        ([[1], []], {}, "prompt 1 is empty: expected at least one token"),
        ([[1, 97]], {}, "prompt 0 holds id 97, expected 0..96"),
        ([[-1]], {}, "prompt 0 holds id -1, expected 0..96"),
        (
            [[1] * 9],
            {"max_new_tokens": 8, "max_seq_len": 16},
            "prompt 0 has 9 tokens, which with max_new_tokens=8 exceed max_seq_len=16",
        ),
        ([[1] * 1800], {}, "exceed max_seq_len=2048"),
        ([[1], [2]], {"seed": (1, 2, 3)}, "3 seeds for 2 prompts"),
        ([[1]], {"eos_token_ids": (97,)}, "eos_token_ids holds 97, expected 0..96"),
        (
            [[1]],
            {"eos_token_ids": tuple(range(97)), "min_new_tokens": 2},
            "min_new_tokens=2, expected 0: all 97 tokens end a text",
        ),
    ],
)
def test_bad_calls_are_refused_before_any_work(prompts, config, message):
    with pytest.raises(ValueError) as caught:
        stream(random_model(), prompts, GenerateConfig(**config))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_64_bit_jax_is_refused_in_one_line():
    with jax.enable_x64(True):
        with pytest.raises(ValueError, match="^jax_enable_x64 is on, expected it off: .*$"):
            stream(random_model(), [[1, 2]])
        with jax.enable_x64(False):
            result = generate(random_model(), [[1, 2]], GenerateConfig(max_new_tokens=3))
    assert len(result.token_ids[0]) == 3


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0 is not at least 1"),
        ({"prefill_chunk_size": 0}, "prefill_chunk_size=0 is not at least 1"),
        ({"max_seq_len": 0}, "max_seq_len=0 is not at least 1"),
        ({"max_new_tokens": 2**28 + 1}, "max_new_tokens=268435457 is more than 268435456"),
        ({"kernels": "cuda"}, "kernels='cuda' is none of triton, interpret, xla"),
        ({"seed": -1}, "seed=-1 is outside"),
        ({"seed": 2**32}, "seed=4294967296 is outside"),
    ],
)
def test_generate_config_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        GenerateConfig(**fields)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"num_draft_tokens": 0}, "num_draft_tokens=0 is not at least 1"),
        ({"num_draft_tokens": 4096}, "block has 4097 rows, expected at most 4096"),
        ({"min_ngram_size": 0}, "min_ngram_size=0 is not at least 1"),
        ({"ngram_size": 2, "min_ngram_size": 3}, "ngram_size=2 is less than min_ngram_size=3"),
        ({"match": "best"}, "match='best' is neither first nor last"),
    ],
)
def test_prompt_lookup_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        PromptLookup(**fields)


CONFIG = GenerateConfig(max_new_tokens=2)
WRONG_TYPES = {
    "float ids": (
        lambda: generate(random_model(), [[1.7, 2.2]], CONFIG),
        "prompt 0 is [1.7, 2.2], expected a list of token ids",
    ),
    "no id": (lambda: generate(random_model(), [[2], [1, None]], CONFIG), "prompt 1 is [1, None]"),
    "nan": (lambda: generate(random_model(), [[2, float("nan")]], CONFIG), "prompt 0 is [2, nan]"),
    "iterator": (
        lambda: generate(random_model(), iter([[1]]), CONFIG),
        "prompts is a list_iterator, expected a list of prompts",
    ),
    "dict": (
        lambda: generate(random_model(), [[1]], {"max_new_tokens": 3}),
        "config is a dict, expected a GenerateConfig",
    ),
    "drafter": (
        lambda: generate(random_model(), [[1]], PromptLookup()),
        "config is a PromptLookup, expected a GenerateConfig",
    ),
    "pair": (lambda: generate((1, 2), [[1]], CONFIG), "model is a tuple, expected a Qwen3"),
    "steps": (
        lambda: stream(random_model(), [[1]], CONFIG, steps_per_chunk=2.5),
        "steps_per_chunk=2.5 is not an integer",
    ),
    "seed": (lambda: GenerateConfig(seed=1.5), "seed=1.5 is not an integer"),
    "no seed": (lambda: GenerateConfig(seed=None), "seed=None is not an integer"),
    "top_p": (lambda: GenerateConfig(top_p=None), "top_p=None is not a number"),
    "text": (lambda: GenerateConfig(temperature="1"), "temperature='1' is not a number"),
    "top_k": (lambda: GenerateConfig(top_k=2.5), "top_k=2.5 is not an integer"),
    "flag": (lambda: PromptLookup(True), "num_draft_tokens=True is not an integer"),
    "ngram": (lambda: PromptLookup(ngram_size=2.5), "ngram_size=2.5 is not an integer"),
    "window": (lambda: Lookahead(2.5, 3, 2), "window_size=2.5 is not an integer"),
    "widths": (lambda: Auto(3), "num_draft_tokens=3 is not an ascending, non-empty tuple"),
    "a drafter for lookahead": (lambda: Auto(lookahead=PromptLookup(3)), "is not a Lookahead"),
    "one cost": (lambda: Auto(step_costs=2.0), "step_costs=2.0 are not 3 positive numbers"),
    "costs": (
        lambda: Auto(step_costs=(float("nan"), 1.0, 1.0)),
        "step_costs=(nan, 1.0, 1.0) are not 3 positive numbers",
    ),
}


@pytest.mark.parametrize("call, message", WRONG_TYPES.values(), ids=WRONG_TYPES.keys())
def test_wrong_types_are_refused_in_one_line(monkeypatch, call, message):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError) as caught:
        call()
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_arrays_of_jax_and_numpy_are_prompts(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    expected = generate(random_model(), [[1, 2, 3]], CONFIG).token_ids
    for prompts in (jnp.array([[1, 2, 3]]), np.array([[1, 2, 3]]), [np.array([1, 2, 3])]):
        assert generate(random_model(), prompts, CONFIG).token_ids == expected
    seeds = GenerateConfig(max_new_tokens=2, seed=[5])
    assert seeds.seed == (5,) and hash(seeds) == hash(dataclasses.replace(seeds, seed=(5,)))


def test_no_draft_error():
    with pytest.raises(ValueError, match="num_padding_rows=-1 is not at least 0"):
        NoDraft(num_padding_rows=-1)


def test_a_prompt_that_just_fits():
    config = GenerateConfig(max_new_tokens=8, max_seq_len=17)
    assert generate(random_model(), [[1] * 9], config).num_tokens.tolist() == [8]


def test_statistics_add_up():
    prompts = random_prompts((5, 40))
    config = GenerateConfig(max_new_tokens=41)
    result = generate(random_model(), prompts, config, PromptLookup(num_draft_tokens=4))
    assert result.num_tokens.tolist() == [41, 41]
    # A step emits its accepted drafts and one token more, but for the last, which is clipped.
    emitted = result.num_steps + result.accepted_by_position.sum(axis=1)
    assert ((emitted - result.num_tokens) <= 1).all() and (emitted >= result.num_tokens).all()
    assert (result.mean_accepted_length > 1).all()
    assert (result.accepted_by_position[:, :-1] >= result.accepted_by_position[:, 1:]).all()
    assert (result.accepted_by_position[:, 0] <= result.num_steps).all()


def test_the_seed_does_not_change_greedy_text():
    prompts = random_prompts((5, 40))
    texts = [
        generate(random_model(), prompts, GenerateConfig(max_new_tokens=9, seed=seed)).token_ids
        for seed in (0, 1, (2, 3))
    ]
    assert texts[0] == texts[1] == texts[2]


def test_padding_rows_change_no_token():
    prompts = random_prompts((5, 40))
    config = GenerateConfig(max_new_tokens=40)
    wide = generate(random_model(), prompts, config, NoDraft(num_padding_rows=7))
    assert wide.token_ids == generate(random_model(), prompts, config).token_ids
    assert wide.num_steps.tolist() == [40, 40]


@pytest.mark.parametrize(
    "left, right, index",
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [], None), ([], [1], 0)],
)
def test_first_different_index(left, right, index):
    assert first_different_index(left, right) == first_different_index(right, left) == index


@pytest.mark.parametrize(
    "ids, position",
    [
        ([1, 2, 3, 4], 4),
        ([1, 2, 3, 3], 2),
        ([9, 1, 2, 1, 2, 1], 1),
        ([1, 2, 1, 2, 9], 5),
        ([5] * 6, 0),
        ([], 0),
        (list(range(33)) * 2, 66),
        ([7, *list(range(32)) * 2], 1),
    ],
)
def test_first_periodic_position(ids, position):
    assert first_periodic_position(ids) == position


def test_comparison_names_the_first_difference():
    row = {"token_ids": [1, 2, 3], "tokens_per_second": 30.0}
    reference = {"token_ids": [1, 2, 4, 5], "tokens_per_second": 20.0}
    assert comparison(row, row | {"tokens_per_second": 15.0}) == {
        "equal": True,
        "speedup": 2.0,
        "first_difference": None,
    }
    assert comparison(row, reference) == {
        "equal": False,
        "speedup": 1.5,
        "first_difference": dataclasses.asdict(Difference(2, 3, 4)),
    }
    shorter = comparison(row | {"token_ids": [1, 2]}, reference)
    assert shorter["first_difference"] == dataclasses.asdict(Difference(2, None, 4))


@dataclasses.dataclass(frozen=True)
class RepeatLast:
    """The README's example: drafts the current token again."""

    num_draft_tokens: int = 3
    num_rows: int = 4
    first: int = 0

    @property
    def layout(self) -> BlockLayout:
        return BlockLayout.linear(1 + self.num_draft_tokens)

    def init(self, tokens, length, key):
        return ()

    def propose(self, state, tokens, length):
        current = current_tokens(tokens, length)[:, None]
        num_draft = jnp.full((tokens.shape[0], 1), self.num_draft_tokens, jnp.int32)
        block_tokens = jnp.tile(current, (1, self.num_rows))
        return Proposal(block_tokens.at[:, 0].add(self.first), num_draft)

    def update(self, state, outcome, tokens, length):
        return state


def test_a_drafter_of_ones_own_is_lossless():
    prompts = random_prompts((5, 40))
    config = GenerateConfig(max_new_tokens=30)
    expected = generate(random_model(), prompts, config).token_ids
    assert generate(random_model(), prompts, config, RepeatLast()).token_ids == expected
    # Nor does it matter what a drafter writes in the place of the current token.
    for first in (1, -500, 500):
        drafter = RepeatLast(first=first)
        assert generate(random_model(), prompts, config, drafter).token_ids == expected


@pytest.mark.parametrize(
    "drafter, message",
    [
        (RepeatLast, "drafter=RepeatLast is a class, expected an instance of it"),
        (object(), "drafter object has no layout"),
        (RepeatLast(num_draft_tokens=[3]), "drafter RepeatLast is not hashable"),
        (
            RepeatLast(num_rows=3),
            "RepeatLast proposed block_tokens of shape (1, 3) and dtype int32, expected (1, 4)",
        ),
    ],
)
def test_a_wrong_drafter_is_named(drafter, message):
    with pytest.raises(ValueError) as caught:
        check_drafter(drafter)
        generate(random_model(), [[1, 2]], GenerateConfig(max_new_tokens=2), drafter)
    assert message in str(caught.value) and "\n" not in str(caught.value)
