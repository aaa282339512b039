"""Where a text ends, in every mode: stop strings, EOS ids, so many tokens at least and at most."""

from __future__ import annotations

import dataclasses
import functools
import random
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from checkpoints import BUNDLED_MODEL
from checkpoints.tokenizer import load_tokenizer
from jaxspec import (
    Auto,
    BlockLayout,
    GenerateConfig,
    Lookahead,
    NoDraft,
    PromptLookup,
    generate,
    generation,
    stream,
)
from jaxspec.state import FINISHED_BY_STOP, UNFINISHED
from jaxspec.text import decode, decode_until_stop
from tests.jaxspec.models import ScriptedDraft, random_model, random_prompts, score_logits

DRAFTERS = [
    NoDraft(),
    PromptLookup(4),
    Lookahead(2, 3, 2),
    Auto((2, 5), step_costs=(1.0, 1.1, 1.2)),
]
NUM_NEW = 48
# One program a drafter and batch size serves nearly all of this file.
PLAIN = GenerateConfig(max_new_tokens=NUM_NEW, num_logprobs=2)

every_drafter = pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda each: type(each).__name__)


def make_pieces() -> list[bytes]:
    """Return the text of 97 tokens: up to four of few letters, parts of characters, none."""
    rng = random.Random(0)
    pieces = ["".join(rng.choices("abc\n", k=rng.choice((1, 1, 2, 3, 4)))) for _ in range(97)]
    # Tokens that the small model likes: 12, 62 is an e with an accent, 94 is half of nothing.
    return [
        {12: b"\xc3", 62: b"\xa9", 94: b"\xa9", 96: b"", 42: "漢".encode()}.get(i, piece.encode())
        for i, piece in enumerate(pieces)
    ]


class Pieces:
    """A tokenizer of 97 tokens, as far as text needs one."""

    pieces = make_pieces()

    def decode(self, ids, *, skip_special_tokens, clean_up_tokenization_spaces):
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", errors="replace")


TOKENIZER = Pieces()


@functools.cache
def model():
    return random_model(num_hidden_layers=1)


@functools.cache
def prompts(batch_size):
    return random_prompts((5, 40, 17)[:batch_size])


@functools.cache
def plain(batch_size=3):
    """Return the texts that nothing ends but the budget."""
    return generate(model(), prompts(batch_size), PLAIN)


def certain_text(tokenizer, ids):
    """Return the text that no further token changes: up to the last one that ended a character."""
    for end in range(len(ids), 0, -1):
        text = decode(tokenizer, ids[:end])
        if not text.endswith("\ufffd"):
            return text
    return ""


def cut(ids, *, stops=(), eos_ids=(), budget=NUM_NEW, minimum=0, tokenizer=TOKENIZER):
    """Return by brute force how a text ends: its ids, the text before the stop, the reason."""
    ids, before = ids[:budget], ""
    for num_kept, token_id in enumerate(ids, start=1):
        if token_id in eos_ids:
            return ids[:num_kept], decode(tokenizer, ids[: num_kept - 1]), "eos"
        text = certain_text(tokenizer, ids[:num_kept])
        starts = [text.find(stop, max(0, len(before) + 1 - len(stop))) for stop in stops]
        if num_kept > minimum and max(starts, default=-1) >= 0:
            return ids[:num_kept], text[: min(s for s in starts if s >= 0)], "stop"
        before = text
    return ids, decode(tokenizer, ids), "length"


def check(result, full, config, **options):
    """Assert that every row of a result is the full text, cut as the configuration says."""
    eos_ids = config.eos_token_ids or ()
    tokenizer = options.get("tokenizer", TOKENIZER)
    reasons = []
    for row, ids in enumerate(full.token_ids):
        expected, text, reason = cut(
            ids,
            stops=config.stop_strings,
            eos_ids=eos_ids,
            budget=config.max_new_tokens,
            minimum=config.min_new_tokens,
            **options,
        )
        reasons.append(reason)
        assert result.token_ids[row] == expected
        assert decode_until_stop(
            tokenizer,
            expected,
            config.stop_strings,
            eos_ids=eos_ids,
            min_new_tokens=config.min_new_tokens,
        ) == (text, len(expected) if reason == "stop" else None)
        length = len(expected)
        np.testing.assert_allclose(result.logprobs[row], full.logprobs[row][:length], atol=1e-4)
        for ours, theirs in zip(result.top_logprobs[row], full.top_logprobs[row], strict=True):
            np.testing.assert_allclose(ours, theirs[:length], atol=1e-4)
    assert result.finish_reasons == tuple(reasons)
    return result.finish_reasons


def stops_at(ids, *, tokenizer=TOKENIZER):
    """Return for each token that ends new text a stop string that it is the first to complete.

    In turn the shortest such string, a longer one, and all of the text; ends lie inside tokens too.
    """
    rng, stops, before = random.Random(1), {}, ""
    for num_kept in range(1, len(ids) + 1):
        text = certain_text(tokenizer, ids[:num_kept])
        if len(text) > len(before):
            end = rng.randint(len(before) + 1, len(text))
            start = next(s for s in range(end - 1, -1, -1) if text.find(text[s:end]) == s)
            start = (start, max(0, start - 3), 0)[len(stops) % 3]
            stops[num_kept] = text[start:end]
        before = text
    return stops


@pytest.mark.parametrize(
    "drafter, batch_size",
    [*((each, 3) for each in DRAFTERS), *((each, 1) for each in DRAFTERS[:2])],
    ids=lambda value: value if isinstance(value, int) else type(value).__name__,
)
def test_a_stop_string_ends_a_text_with_the_token_that_completes_it(drafter, batch_size):
    full = plain(batch_size)
    places = [
        (row, num_kept, stop)
        for row, ids in enumerate(full.token_ids)
        for num_kept, stop in stops_at(ids).items()
    ]
    # Tokens without text are no such place: a special one, and parts of characters.
    assert 25 * batch_size < len(places) < NUM_NEW * batch_size
    for row, num_kept, stop in places if batch_size == 1 else places[::5]:
        config = dataclasses.replace(PLAIN, stop_strings=(stop,))
        result = generate(model(), prompts(batch_size), config, drafter, tokenizer=TOKENIZER)
        assert check(result, full, config)[row] == "stop"
        assert result.num_tokens[row] == num_kept


def three_ends():
    """Return settings that end one row by a stop, one by EOS, and one by the budget."""
    texts = plain().token_ids
    last = {row: decode(TOKENIZER, ids) for row, ids in enumerate(texts)}
    stop = next(
        stop
        for num_kept, stop in stops_at(texts[0]).items()
        if num_kept > 15 and stop not in last[1] and stop not in last[2]
    )
    eos_id = next(i for i in texts[1][20:] if i not in (*texts[0], *texts[1][:20], *texts[2]))
    return {"stop_strings": (stop,), "eos_token_ids": (eos_id,)}


@every_drafter
def test_each_row_ends_in_its_own_way(drafter):
    config = dataclasses.replace(PLAIN, **three_ends())
    results = [
        generate(model(), prompts(3), config, drafter, tokenizer=TOKENIZER) for _ in range(2)
    ]
    assert check(results[0], plain(), config) == ("stop", "eos", "length")
    # The second call knows nothing of the first.
    assert check(results[1], plain(), config) == ("stop", "eos", "length")


@every_drafter
def test_chunks_change_nothing(drafter):
    config = dataclasses.replace(PLAIN, **three_ends())
    whole = generate(model(), prompts(3), config, drafter, tokenizer=TOKENIZER)
    for steps_per_chunk in (1, 3, None):
        chunks = list(
            stream(
                model(),
                prompts(3),
                config,
                drafter,
                tokenizer=TOKENIZER,
                steps_per_chunk=steps_per_chunk,
            )
        )
        check(chunks[-1], plain(), config)
        assert [chunk.is_finished for chunk in chunks].index(True) == len(chunks) - 1
        for before, after in zip(chunks, chunks[1:], strict=False):
            for row, old in enumerate(before.token_ids):
                assert after.token_ids[row][: len(old)] == old
                if before.finish_reasons[row] is not None:
                    assert after.token_ids[row] == old
                    assert after.finish_reasons[row] == before.finish_reasons[row]
        for ours, expected in zip(chunks[-1].accepted_lengths, whole.accepted_lengths, strict=True):
            assert ours.tolist() == expected.tolist()
        if steps_per_chunk == 1:
            assert len(chunks) == whole.num_steps.max()


def test_a_stopped_row_takes_part_in_no_further_step(monkeypatch):
    entered = []
    run_steps = generation.run_steps_of(model())

    def spy(flat, state, request, num_steps, **options):
        if num_steps > 0:
            entered.append((np.asarray(state.finish), np.asarray(state.num_steps)))
        return run_steps(flat, state, request, num_steps, **options)

    monkeypatch.setattr(generation, "run_steps_of", lambda model: spy)
    config = dataclasses.replace(PLAIN, **three_ends())
    *_, result = stream(model(), prompts(3), config, tokenizer=TOKENIZER, steps_per_chunk=1)
    num_kept = result.num_tokens[0]
    assert [finish[0] for finish, _ in entered[: num_kept + 1]] == [
        *[UNFINISHED] * num_kept,
        FINISHED_BY_STOP,
    ]
    assert entered[-1][1].tolist()[0] == num_kept < NUM_NEW == len(entered)


# Not Auto, which drafts less towards the end of a budget.
@pytest.mark.parametrize("drafter", DRAFTERS[:3], ids=lambda each: type(each).__name__)
def test_the_statistics_are_those_of_the_text_that_was_kept(drafter):
    """As if the budget had been the tokens up to the stop."""
    stops = stops_at(plain().token_ids[0])
    for num_kept in [*stops][::5]:
        config = dataclasses.replace(PLAIN, stop_strings=(stops[num_kept],))
        budget = dataclasses.replace(PLAIN, max_new_tokens=num_kept)
        stopped = generate(model(), prompts(3), config, drafter, tokenizer=TOKENIZER)
        short = generate(model(), prompts(3), budget, drafter)
        assert (stopped.finish_reasons[0], short.finish_reasons[0]) == ("stop", "length")
        assert stopped.accepted_lengths[0].tolist() == short.accepted_lengths[0].tolist()
        assert stopped.num_steps_by_rows[0] == short.num_steps_by_rows[0]
        for name in ("num_steps", "accepted_by_position", "num_drafted", "mean_accepted_length"):
            ours, expected = getattr(stopped, name)[0], getattr(short, name)[0]
            assert ours.tolist() == expected.tolist()


def test_several_stops_and_stops_that_never_come():
    ids = plain(1).token_ids[0]
    text, stops = decode(TOKENIZER, ids), stops_at(ids)
    late, early = stops[max(stops)], stops[min(n for n in stops if n > 9)]
    overlapping = (text[12:16], text[10:16], text[11:20])
    for stop_strings in [
        (late, early),
        (early, late),
        (early, early),
        ("never", early),
        overlapping,
        ("never", "é" * 9),
        (text + "a",),
        (text * 9,),
        (),
    ]:
        config = dataclasses.replace(PLAIN, stop_strings=stop_strings)
        result = generate(model(), prompts(1), config, PromptLookup(4), tokenizer=TOKENIZER)
        is_stopped = early in stop_strings or stop_strings == overlapping
        assert check(result, plain(1), config) == ("stop" if is_stopped else "length",)


@every_drafter
def test_a_stop_completed_by_the_last_token_of_the_budget(drafter):
    stops = stops_at(plain().token_ids[0])
    for num_kept in [*stops][::7]:
        for budget, reason in [(num_kept - 1, "length"), (num_kept, "stop")]:
            if budget:
                config = dataclasses.replace(
                    PLAIN, max_new_tokens=budget, stop_strings=(stops[num_kept],)
                )
                result = generate(model(), prompts(3), config, drafter, tokenizer=TOKENIZER)
                assert check(result, plain(), config)[0] == reason


def test_of_a_stop_and_an_eos_in_one_block_the_first_ends_the_text():
    ids = plain(1).token_ids[0]
    drafter = ScriptedDraft((tuple(prompts(1)[0] + ids),), num_draft_tokens=5)
    first_seen = {token_id: ids.index(token_id) for token_id in ids}
    met = set()
    for num_kept, stop in stops_at(ids).items():
        for eos_id, index in first_seen.items():
            # Both in one block of six tokens.
            if index // 6 != (num_kept - 1) // 6:
                continue
            config = dataclasses.replace(PLAIN, stop_strings=(stop,), eos_token_ids=(eos_id,))
            result = generate(model(), prompts(1), config, drafter, tokenizer=TOKENIZER)
            reason = "stop" if num_kept - 1 < index else "eos"
            assert check(result, plain(1), config) == (reason,)
            met.add((reason, index == num_kept - 1))
    # An EOS has no text: where the stop would need the EOS's own text, EOS ends.
    assert met == {("stop", False), ("eos", False), ("eos", True)}


class BundledPieces:
    """The bundled tokenizer, of which the small model knows 97 tokens."""

    def __init__(self):
        self._tokenizer = load_tokenizer(BUNDLED_MODEL)
        ids = self._tokenizer(Path(__file__).read_text(), add_special_tokens=False)["input_ids"]
        emoji = self._tokenizer("🙂é漢", add_special_tokens=False)["input_ids"]
        special = self._tokenizer.convert_tokens_to_ids("<|im_start|>")
        self._ids = list(dict.fromkeys([*emoji, special, *ids]))[:97]

    def decode(self, ids, **options):
        return self._tokenizer.decode([self._ids[i] for i in ids], **options)


def test_stops_in_the_text_of_the_bundled_tokenizer():
    tokenizer, full, drafter = BundledPieces(), plain(1), PromptLookup(4)
    stops = stops_at(full.token_ids[0], tokenizer=tokenizer)
    assert len(stops) > 30
    for num_kept, stop in stops.items():
        config = dataclasses.replace(PLAIN, stop_strings=("\0", stop))
        result = generate(model(), prompts(1), config, drafter, tokenizer=tokenizer)
        assert check(result, full, config, tokenizer=tokenizer) == ("stop",)
        assert result.num_tokens.tolist() == [num_kept]


@pytest.fixture
def unchecked():
    """Let values of wrong types reach the library, as they do where no test runs."""
    was_off = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", was_off)


@pytest.mark.parametrize(
    "stop_strings, tokenizer, message",
    [
        (("a",), None, "stop_strings need a tokenizer to look for them with"),
        (("a", ""), TOKENIZER, "stop string 1 is empty: expected at least one character"),
        ((3,), TOKENIZER, "stop string 0 is 3, expected a string"),
        (("a\ud800",), TOKENIZER, "stop string 0, 'a\\ud800', is not valid Unicode text"),
        ("\n\n", TOKENIZER, "stop_strings='\\n\\n' is not a tuple of strings"),
        (None, TOKENIZER, "stop_strings=None is not a tuple of strings"),
    ],
)
@pytest.mark.parametrize("call", [generate, stream])
def test_bad_stop_strings_are_refused_in_one_line(
    unchecked, call, stop_strings, tokenizer, message
):
    with pytest.raises(ValueError) as caught:
        config = GenerateConfig(stop_strings=stop_strings)
        call(model(), prompts(1), config, tokenizer=tokenizer)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "eos_token_ids, message",
    [
        (5, "eos_token_ids=5 is not a tuple of token ids"),
        (0, "eos_token_ids=0 is not a tuple of token ids"),
        ((1.5,), "eos_token_ids=(1.5,) is not a tuple of token ids"),
        (("</s>",), "eos_token_ids=('</s>',) is not a tuple of token ids"),
        ((5, -1), "eos_token_ids holds -1, expected 0..96"),
        ((97,), "eos_token_ids holds 97, expected 0..96"),
    ],
)
def test_bad_eos_ids_are_refused_in_one_line(unchecked, eos_token_ids, message):
    with pytest.raises(ValueError) as caught:
        stream(model(), prompts(1), GenerateConfig(eos_token_ids=eos_token_ids))
    assert str(caught.value) == message


def test_lists_of_settings_become_tuples(unchecked):
    config = GenerateConfig(stop_strings=["a"], eos_token_ids=[1, 2])
    assert (config.stop_strings, config.eos_token_ids) == (("a",), (1, 2))
    assert hash(config) == hash(GenerateConfig(stop_strings=("a",), eos_token_ids=(1, 2)))


@pytest.mark.parametrize("num_ids, size", [(0, 8), (1, 8), (8, 8), (9, 16), (17, 24)])
def test_longer_lists_of_eos_ids_share_few_programs(num_ids, size):
    config = GenerateConfig(eos_token_ids=tuple(range(num_ids)))
    eos_ids = generation.make_request(model().config, [[1]], config)[1].eos_ids
    assert eos_ids.tolist() == [*range(num_ids)] + [-1] * (size - num_ids)


def test_eos_ids_of_the_call_replace_those_of_the_model():
    ids = plain(1).token_ids[0]
    own, other = ids[9], ids[15]
    assert ids.index(own) < ids.index(other)
    with_eos = random_model(num_hidden_layers=1, eos_token_ids=(own,))
    for eos_token_ids, ends in [
        (None, {own}),
        ((), set()),
        ((other,), {other}),
        ((96, other, own), {own}),
    ]:
        config = dataclasses.replace(PLAIN, eos_token_ids=eos_token_ids)
        result = generate(with_eos, prompts(1), config)
        expected, _, reason = cut(ids, eos_ids=ends)
        assert (result.token_ids[0], result.finish_reasons) == (expected, (reason,))


# --- at least so many tokens


def reference_text(prompt, config, seed):
    """Return the ids that transformers' processor and the law of the noise give, and the reason."""
    import torch
    from transformers.generation.logits_process import MinNewTokensLengthLogitsProcessor

    eos_ids = list(config.eos_token_ids)
    processor = MinNewTokensLengthLogitsProcessor(
        len(prompt), config.min_new_tokens, eos_ids, device="cpu"
    )
    ids = list(prompt)
    for _ in range(config.max_new_tokens):
        padded = jnp.asarray([ids + [0] * (96 - len(ids))], jnp.int32)
        logits = np.array(score_logits(model(), padded, BlockLayout.linear(96))[0, len(ids) - 1])
        scores = processor(torch.tensor([ids]), torch.from_numpy(logits)[None])[0].numpy()
        if config.temperature:
            key = jax.random.fold_in(jax.random.key(seed), len(ids))
            noise = np.asarray(jax.random.gumbel(key, logits.shape, jnp.float32))
            scores = scores / config.temperature + noise
        ids.append(int(np.argmax(scores)))
        if ids[-1] in eos_ids:
            return ids[len(prompt) :], "eos"
    return ids[len(prompt) :], "length"


SEEDS = (3, 4, 5)


@functools.cache
def references(config):
    return [
        reference_text(prompt, config, seed) for prompt, seed in zip(prompts(3), SEEDS, strict=True)
    ]


@functools.cache
def early_eos_configs(temperature):
    """Return settings in which a plain text would end within its first tokens."""
    base = dataclasses.replace(PLAIN, max_new_tokens=24, seed=SEEDS, temperature=temperature)
    starts = references(dataclasses.replace(base, max_new_tokens=3, eos_token_ids=()))
    eos_ids = tuple(dict.fromkeys(i for ids, _ in starts for i in ids[1:]))
    return [
        dataclasses.replace(base, eos_token_ids=eos_ids, min_new_tokens=minimum)
        for minimum in (1, 2, 4, 7, 24)
    ]


@pytest.mark.parametrize(
    "drafter, temperature",
    [*((each, 0.0) for each in DRAFTERS), (DRAFTERS[2], 0.7)],
    ids=lambda value: value if isinstance(value, float) else type(value).__name__,
)
def test_min_new_tokens_come_before_an_eos(drafter, temperature):
    num_right_after = 0
    for config in early_eos_configs(temperature):
        result = generate(model(), prompts(3), config, drafter)
        for row, (ids, reason) in enumerate(references(config)):
            assert result.token_ids[row] == ids
            assert result.finish_reasons[row] == reason
            assert not set(ids[: config.min_new_tokens]) & set(config.eos_token_ids)
            num_right_after += len(ids) == config.min_new_tokens + 1
    assert num_right_after > 0


def test_an_eos_may_come_within_the_block_that_reaches_the_minimum():
    config, texts = next(
        (config, [ids for ids, _ in references(config)])
        for config in early_eos_configs(0.0)
        # Blocks of six tokens, the drafts all right: one begins too early for the EOS in it.
        if any(
            reason == "eos" and (len(ids) - 1) // 6 * 6 < config.min_new_tokens < len(ids)
            for ids, reason in references(config)
        )
    )
    script = tuple((*prompt, *ids) for prompt, ids in zip(prompts(3), texts, strict=True))
    result = generate(model(), prompts(3), config, ScriptedDraft(script, num_draft_tokens=5))
    assert result.token_ids == texts
    assert result.num_steps.tolist() == [-(-len(ids) // 6) for ids in texts]


@every_drafter
def test_min_new_tokens_without_eos_ids_changes_no_token(drafter):
    stop = stops_at(plain().token_ids[0])
    early, late = (stop[min(n for n in stop if n > least)] for least in (3, 20))
    for stop_strings in ((), (early,), (late,), (early, late)):
        config = dataclasses.replace(
            PLAIN, min_new_tokens=15, eos_token_ids=(), stop_strings=stop_strings
        )
        result = generate(model(), prompts(3), config, drafter, tokenizer=TOKENIZER)
        check(result, plain(), config)
        assert result.finish_reasons[0] == ("stop" if late in stop_strings else "length")


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            {"min_new_tokens": 9, "max_new_tokens": 8},
            "min_new_tokens=9 is more than max_new_tokens=8",
        ),
        ({"min_new_tokens": -1}, "min_new_tokens=-1 is not at least 0"),
        ({"min_new_tokens": 1.5}, "min_new_tokens=1.5 is not an integer"),
        ({"min_new_tokens": None}, "min_new_tokens=None is not an integer"),
    ],
)
def test_bad_minimums_are_refused_in_one_line(unchecked, fields, message):
    with pytest.raises(ValueError) as caught:
        GenerateConfig(**fields)
    assert str(caught.value) == message
