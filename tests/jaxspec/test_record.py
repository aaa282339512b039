"""How each token came about, and where two runs part."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec import (
    Auto,
    BlockLayout,
    Difference,
    GenerateConfig,
    Generation,
    Lookahead,
    NoDraft,
    PromptLookup,
    Proposal,
    current_tokens,
    first_difference,
    generate,
    generation,
    stream,
)
from jaxspec.record import NOT_DRAFTED, Origin, TokenRecord, step_record
from jaxspec.stats import accepted_over_time, comparison
from tests.jaxspec.models import ScriptedDraft, random_model, random_prompts, score_logits

DRAFTERS = [
    NoDraft(),
    PromptLookup(4),
    Lookahead(2, 3, 2),
    Auto((2, 5), step_costs=(1.0, 1.1, 1.2)),
]
NUM_NEW = 48
CONFIG = GenerateConfig(max_new_tokens=NUM_NEW)

every_drafter = pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda each: type(each).__name__)


@functools.cache
def model():
    # The last id is never picked: as a draft it is wrong for sure.
    return random_model(num_hidden_layers=1, num_valid_tokens=96)


@functools.cache
def prompts(batch_size=3):
    return random_prompts((5, 40, 17)[:batch_size])


@functools.cache
def plain(batch_size=3):
    return generate(model(), prompts(batch_size), CONFIG)


def check_statistics(result, drafter):
    """Assert that all that a result says about its steps agrees; return whether drafts ended it."""
    num_draft_tokens = drafter.layout.num_draft_tokens
    arms = drafter.arms if isinstance(drafter, Auto) else (drafter,)
    shape = (len(result.token_ids), num_draft_tokens)
    assert result.accepted_by_position.shape == shape
    ended_by_draft = []
    for row, lengths in enumerate(result.accepted_lengths):
        num_tokens, num_steps = result.num_tokens[row], result.num_steps[row]
        assert lengths.sum() == num_tokens == len(result.token_ids[row])
        assert len(lengths) == num_steps > 0
        assert 1 <= lengths.min() and lengths.max() <= 1 + num_draft_tokens
        assert result.mean_accepted_length[row] == pytest.approx(lengths.mean())

        # A step emits its accepted drafts and a token of the model's own, but for the last one,
        # which is clipped: its drafts alone may reach the end.
        accepted = result.accepted_by_position[row]
        is_draft = int(accepted.sum()) - int(num_tokens - num_steps)
        assert is_draft in (0, 1)
        num_accepted = lengths - 1
        num_accepted[-1] += is_draft
        expected = [np.sum(num_accepted > j) for j in range(num_draft_tokens)]
        assert accepted.tolist() == expected
        ended_by_draft.append(bool(is_draft))

        by_rows = result.num_steps_by_rows[row]
        assert sum(by_rows.values()) == num_steps
        assert list(by_rows) == sorted(set(by_rows) & {arm.layout.num_rows for arm in arms})
        # Every row but the current token's is a draft at most.
        most = sum(count * (rows - 1) for rows, count in by_rows.items())
        assert accepted.sum() <= result.num_drafted[row] <= most
    return ended_by_draft


# --- steps and drafts


@pytest.mark.parametrize(
    "drafter, batch_size",
    [*((each, 3) for each in DRAFTERS), (DRAFTERS[3], 1)],
    ids=lambda value: value if isinstance(value, int) else type(value).__name__,
)
def test_the_record_is_what_single_steps_show(drafter, batch_size, monkeypatch):
    expected, counts, to_host = plain(batch_size).token_ids, [], generation.to_host

    def spy(state, *more, **options):
        counts.append(np.asarray(state.num_steps))
        return to_host(state, *more, **options)

    monkeypatch.setattr(generation, "to_host", spy)
    chunks = list(stream(model(), prompts(batch_size), CONFIG, drafter, steps_per_chunk=1))
    result = chunks[-1]
    check_statistics(result, drafter)
    assert result.token_ids == expected
    grown = np.diff([[0] * batch_size, *(chunk.num_tokens for chunk in chunks)], axis=0)
    for row, lengths in enumerate(result.accepted_lengths):
        assert lengths.tolist() == [length for length in grown[:, row].tolist() if length]
    for chunk, num_steps in zip(chunks, counts, strict=True):
        assert chunk.num_steps.tolist() == num_steps.tolist()
    whole = generate(model(), prompts(batch_size), CONFIG, drafter)
    for name in ("num_steps", "num_drafted", "accepted_by_position", "num_steps_by_rows"):
        assert np.array_equal(getattr(whole, name), getattr(result, name))


def test_plain_decoding_drafts_nothing():
    result = plain()
    assert result.num_steps.tolist() == [NUM_NEW] * 3
    assert result.num_drafted.tolist() == [0] * 3
    assert result.accepted_by_position.shape == (3, 0)
    assert result.num_steps_by_rows == [{1: NUM_NEW}] * 3


def test_logits_that_were_not_asked_for_are_not_kept():
    assert plain().record.logits is None
    assert plain().logprobs is None and plain().top_logprobs is None


def test_auto_mixes_widths_and_the_rows_of_a_batch_share_them():
    result = generate(model(), prompts(), CONFIG, DRAFTERS[3])
    assert all(len(by_rows) > 1 for by_rows in result.num_steps_by_rows)
    # All rows take part until they end.
    arms = [Origin.unpack(np.asarray(row)).arm for row in result.record.origin]
    step_arms = [
        arm[start + np.cumsum(lengths) - 1]
        for arm, start, lengths in zip(
            arms, result.prompt_lengths, result.accepted_lengths, strict=True
        )
    ]
    longest = max(step_arms, key=len)
    assert all(arms.tolist() == longest[: len(arms)].tolist() for arms in step_arms)


def test_drafts_of_a_lookup_are_counted():
    drafter = PromptLookup(4)
    propose = jax.jit(functools.partial(drafter.propose, ()))
    result = generate(model(), prompts(), CONFIG, drafter)
    for row, lengths in enumerate(result.accepted_lengths):
        starts = result.prompt_lengths[row] + np.cumsum([0, *lengths[:-1]])
        # Padded to one shape.
        padded = jnp.asarray(np.resize(starts, NUM_NEW), jnp.int32)
        tokens = jnp.asarray(np.tile(result.tokens[row], (NUM_NEW, 1)))
        drafted = propose(tokens, padded).num_draft[: len(starts)]
        assert result.num_drafted[row] == drafted.sum()
        assert 0 < drafted.sum() < 4 * len(lengths)


@dataclasses.dataclass(frozen=True)
class Uneven:
    """Two candidates of wrong drafts only: length % 4 of the one, length % 3 of the other."""

    @property
    def layout(self):
        paths = [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 4), (0, 4, 5), (0, 4, 5, 6)]
        return BlockLayout.from_mask(
            depth=[0, 1, 2, 3, 1, 2, 3],
            mask=[[row in path for row in range(7)] for path in paths],
            candidate_rows=[(0, 1, 2, 3), (0, 4, 5, 6)],
            logit_rows=range(7),
        )

    def init(self, tokens, length, key):
        return ()

    def propose(self, state, tokens, length):
        drafts = jnp.full((tokens.shape[0], 6), 96, jnp.int32)
        block = jnp.concatenate([current_tokens(tokens, length)[:, None], drafts], axis=1)
        return Proposal(block, jnp.stack([length % 4, length % 3], axis=1))

    def update(self, state, outcome, tokens, length):
        return state


def test_drafts_of_all_candidates_are_counted():
    result = generate(model(), prompts(), CONFIG, Uneven())
    check_statistics(result, Uneven())
    assert result.token_ids == plain().token_ids
    expected = [
        sum(length % 4 + length % 3 for length in range(start, start + NUM_NEW))
        for start in result.prompt_lengths
    ]
    assert result.num_drafted.tolist() == expected
    assert result.num_steps_by_rows == [{7: NUM_NEW}] * 3


def scripted(wrong_at=None):
    script = tuple(prompts(1)[0] + plain(1).token_ids[0])
    return ScriptedDraft((script,), num_draft_tokens=4, wrong_at=wrong_at)


@pytest.mark.parametrize(
    "wrong_at, budget, lengths, accepted",
    [
        (None, 48, [5] * 9 + [3], [10, 10, 10, 9]),
        (None, 46, [5] * 9 + [1], [10, 9, 9, 9]),
        (None, 45, [5] * 9, [9, 9, 9, 9]),
        (None, 44, [5] * 8 + [4], [9, 9, 9, 9]),
        (None, 1, [1], [1, 0, 0, 0]),
        (2, 48, [3] * 16, [16, 16, 0, 0]),
        (2, 47, [3] * 15 + [2], [16, 16, 0, 0]),
        (2, 46, [3] * 15 + [1], [16, 15, 0, 0]),
    ],
)
def test_steps_counted_by_hand(wrong_at, budget, lengths, accepted):
    config = dataclasses.replace(CONFIG, max_new_tokens=budget)
    result = generate(model(), prompts(1), config, scripted(wrong_at))
    check_statistics(result, scripted(wrong_at))
    assert result.token_ids == [plain(1).token_ids[0][:budget]]
    assert result.accepted_lengths[0].tolist() == lengths
    assert result.num_steps.tolist() == [len(lengths)]
    assert result.accepted_by_position.tolist() == [accepted]
    assert result.num_drafted.tolist() == [4 * len(lengths)]
    assert result.num_steps_by_rows == [{5: len(lengths)}]


def test_steps_up_to_an_eos_counted_by_hand():
    ids = plain(1).token_ids[0]
    index = next(i for i in range(10, 20) if ids.index(ids[i]) == i and i % 5 == 1)
    config = dataclasses.replace(CONFIG, eos_token_ids=(ids[index],))
    result = generate(model(), prompts(1), config, scripted())
    num_whole = index // 5
    assert result.token_ids[0] == ids[: index + 1] and result.finish_reasons == ("eos",)
    assert result.accepted_lengths[0].tolist() == [5] * num_whole + [2]
    assert result.accepted_by_position[0].tolist() == [
        num_whole + 1,
        num_whole + 1,
        num_whole,
        num_whole,
    ]
    assert result.num_drafted.tolist() == [4 * (num_whole + 1)]


@every_drafter
def test_every_budget_is_kept(drafter):
    width = drafter.layout.num_draft_tokens + 1
    full, is_clipped = plain().token_ids, []
    for budget in sorted({1, 2, 3, width - 1, width, width + 1, width + 2} - {0}):
        config = dataclasses.replace(CONFIG, max_new_tokens=budget)
        result = generate(model(), prompts(), config, drafter)
        assert result.token_ids == [ids[:budget] for ids in full]
        assert result.finish_reasons == ("length",) * 3
        is_clipped += check_statistics(result, drafter)
        # What also is an EOS ends as one.
        last = full[0][budget - 1]
        result = generate(
            model(), prompts(), dataclasses.replace(config, eos_token_ids=(last,)), drafter
        )
        for ids, whole, reason in zip(result.token_ids, full, result.finish_reasons, strict=True):
            end = whole.index(last) + 1 if last in whole else NUM_NEW
            assert ids == whole[: min(end, budget)]
            assert reason == ("eos" if end <= budget else "length")
    if isinstance(drafter, PromptLookup):
        assert any(is_clipped)


@pytest.mark.parametrize("arm", [0, 1, 63])
def test_a_record_of_the_largest_blocks_is_unpacked(arm):
    num_accepted = np.array([0, 1, 4095], np.int32)
    num_draft = np.array([[0, 0], [1, 2], [0, 4095]], np.int32)
    emitted = jnp.zeros((3, 4096), jnp.int32)
    record = step_record(emitted, jnp.asarray(num_accepted), jnp.asarray(num_draft), None, arm=arm)
    origin = Origin.unpack(np.asarray(record.origin))
    for row, count in enumerate(num_accepted):
        assert origin.draft_position[row, :count].tolist() == list(range(count))
        assert origin.draft_position[row, count] == NOT_DRAFTED
        assert set(origin.num_drafted[row]) == {num_draft[row].sum()}
    assert set(origin.arm.ravel()) == {arm}


@pytest.mark.parametrize(
    "lengths, parts",
    [
        ([], []),
        ([3], [3.0]),
        ([1, 2, 3], [1.0, 2.0, 3.0]),
        ([*range(8)], [float(i) for i in range(8)]),
        ([1, 3] * 8, [2.0] * 8),
        ([1, 3, 5, *[2] * 7], [2.0, 3.5, *[2.0] * 6]),
    ],
)
def test_accepted_over_time(lengths, parts):
    assert accepted_over_time(lengths) == parts
    assert accepted_over_time(np.asarray(lengths, np.int64)) == parts


# --- where two runs part

WITH_LOGITS = dataclasses.replace(CONFIG, num_logprobs=2)


def best_two(of, row, ids):
    """Return the two best tokens after a prompt and `ids`, and their logits."""
    tokens = prompts()[row] + ids
    padded = jnp.asarray([tokens + [0] * (96 - len(tokens))], jnp.int32)
    logits = score_logits(of, padded, BlockLayout.linear(96))[0, len(tokens) - 1, :96]
    values, best = jax.lax.top_k(logits, 2)
    return tuple(best.tolist()), values


@functools.cache
def nudged(scale):
    """Return the model with all weights off by a little."""
    graph, params = nnx.split(model())
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(params))))
    noise = jax.tree.map(lambda w: 1 + scale * jax.random.normal(next(keys), w.shape), params)
    return nnx.merge(graph, jax.tree.map(jnp.multiply, params, noise))


@functools.cache
def run_of(other, drafter=DRAFTERS[1]):
    return generate(other, prompts(), WITH_LOGITS, drafter)


@pytest.mark.parametrize("drafter", DRAFTERS[:2], ids=["NoDraft", "PromptLookup"])
@pytest.mark.parametrize("scale", [3e-4, 1.0])
def test_two_models_part_where_their_logits_say(scale, drafter):
    run, reference = run_of(nudged(scale)), run_of(model(), drafter)
    num_different = 0
    for row, (ours, theirs) in enumerate(zip(run.token_ids, reference.token_ids, strict=True)):
        found = first_difference(run, reference, row)
        if found is None:
            assert ours == theirs
            continue
        num_different += 1
        index = found.position
        assert ours[:index] == theirs[:index]
        assert (found.token_id, found.reference_token_id) == (ours[index], theirs[index])
        assert ours[index] != theirs[index]
        for of, name in ((nudged(scale), ""), (model(), "reference_")):
            best, logits = best_two(of, row, ours[:index])
            top2_ids = getattr(found, f"{name}top2_ids")
            assert top2_ids == best and top2_ids[0] == getattr(found, f"{name}token_id")
            np.testing.assert_allclose(getattr(found, f"{name}top2_logits"), logits, atol=1e-4)
            gap = getattr(found, f"{name}gap")
            assert gap == pytest.approx(float(logits[0] - logits[1]), abs=1e-4)
        if scale < 0.1:
            assert found.gap < 1 and found.reference_gap < 1
            assert found.top2_ids == found.reference_top2_ids[::-1]
    # A little noise turns a near tie, a lot changes all texts.
    assert num_different in ((1, 2) if scale < 0.1 else (3,))


@every_drafter
def test_runs_of_one_model_do_not_part(drafter):
    run = generate(model(), prompts(), CONFIG, drafter)
    for row in range(3):
        assert first_difference(run, plain(), row) is None
        assert first_difference(plain(), run, row) is None


def without_logits(run, num_logprobs=None):
    """Return a run as if it had been asked for fewer log-probabilities."""
    logits = None
    if num_logprobs is not None:
        top = slice(num_logprobs)
        logits = dataclasses.replace(
            run.record.logits,
            top_ids=run.record.logits.top_ids[..., top],
            top_logits=run.record.logits.top_logits[..., top],
        )
    return dataclasses.replace(run, record=dataclasses.replace(run.record, logits=logits))


@pytest.mark.parametrize("num_logprobs", [None, 0, 1])
def test_a_run_without_two_logits_gives_the_place_alone(num_logprobs):
    run, reference = run_of(nudged(1.0)), run_of(model())
    full = first_difference(run, reference, 2)
    bare = without_logits(reference, num_logprobs)
    names = [field.name for field in dataclasses.fields(Difference)]
    ours = {name: None for name in names if name.startswith("reference_top2")}
    ours["reference_gap"] = None
    assert first_difference(run, bare, 2) == dataclasses.replace(full, **ours)
    assert first_difference(without_logits(run, num_logprobs), bare, 2) == Difference(
        full.position, full.token_id, full.reference_token_id
    )


def test_a_text_that_ends_earlier():
    long, short = (
        generate(
            model(), prompts(), dataclasses.replace(WITH_LOGITS, max_new_tokens=budget), DRAFTERS[1]
        )
        for budget in (9, 5)
    )
    ids = long.token_ids[1]
    best, logits = best_two(model(), 1, ids[:5])
    found = first_difference(short, long, 1)
    assert (found.position, found.token_id, found.reference_token_id) == (5, None, ids[5])
    assert (found.top2_ids, found.top2_logits, found.gap) == (None, None, None)
    assert found.reference_top2_ids == best
    np.testing.assert_allclose(found.reference_top2_logits, logits, atol=1e-4)
    found = first_difference(long, short, 1)
    assert (found.position, found.token_id, found.reference_token_id) == (5, ids[5], None)
    assert found.top2_ids == best and found.reference_top2_ids is None


def test_a_token_without_a_rival_has_no_gap():
    """As with top_k=1: JSON has no infinity."""
    run, reference = run_of(nudged(1.0)), run_of(model())
    logits = dataclasses.replace(
        run.record.logits, pick_gap=np.full_like(run.record.logits.pick_gap, np.inf)
    )
    alone = dataclasses.replace(run, record=dataclasses.replace(run.record, logits=logits))
    expected = dataclasses.replace(first_difference(run, reference, 1), gap=None)
    assert first_difference(alone, reference, 1) == expected


def test_a_comparison_takes_the_logits_of_the_place_in_question_only():
    row = {"token_ids": [1, 2, 3], "tokens_per_second": 1.0}
    reference = {"token_ids": [1, 2, 4], "tokens_per_second": 1.0}
    there = Difference(2, 3, 4, (3, 4), (1.0, 0.5), 0.5, (4, 3), (0.9, 0.8), 0.1)
    found = comparison(row, reference, there)["first_difference"]
    assert found == dataclasses.asdict(there)
    elsewhere = dataclasses.replace(there, position=1)
    expected = dataclasses.asdict(Difference(2, 3, 4))
    assert comparison(row, reference, elsewhere)["first_difference"] == expected
    assert comparison(row, reference)["first_difference"] == expected
    assert comparison(row, row, there)["first_difference"] is None


def test_more_drafts_than_there_is_room_for_are_counted_as_the_most():
    emitted = jnp.zeros((2, 3), jnp.int32)
    accepted = jnp.asarray([2, 0], jnp.int32)
    num_draft = jnp.asarray([[3000, 3000], [-1, 2]], jnp.int32)
    record = step_record(emitted, accepted, num_draft, None, arm=5)
    origin = Origin.unpack(np.asarray(record.origin))
    assert origin.num_drafted[:, 0].tolist() == [4095, 2]
    assert origin.draft_position.tolist() == [[0, 1, -1], [-1, -1, -1]]
    assert (origin.arm == 5).all()


def test_reports_of_many_rows_unpack_each_once(monkeypatch):
    """Not again for every row of every statistic."""
    batch_size, capacity = 256, 512
    origin = np.arange(batch_size * capacity, dtype=np.int32).reshape(batch_size, -1) % 3
    generation = Generation(
        tokens=np.zeros((batch_size, capacity), np.int32),
        lengths=np.full(batch_size, capacity),
        prompt_lengths=np.zeros(batch_size, np.int64),
        finish_reasons=("length",) * batch_size,
        record=TokenRecord(origin, None),
        num_draft_tokens=2,
        rows_by_arm=(3,),
        prefill_seconds=0.0,
        decode_seconds=0.0,
        compile_seconds=0.0,
        measure_seconds=0.0,
    )
    unpack, unpacked = Origin.unpack, []
    monkeypatch.setattr(Origin, "unpack", lambda row: unpacked.append(1) or unpack(row))
    for _ in range(20):
        assert generation.num_steps.shape == generation.num_drafted.shape == (batch_size,)
    assert len(unpacked) == batch_size
