"""What the drafters' comparison counts, against examples worked out by hand."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import (
    BlockLayout,
    GenerateConfig,
    Lookahead,
    NoDraft,
    PromptLookup,
    evaluation,
    generate,
    stream,
    tuning,
)
from jaxspec.evaluation import Prompt
from jaxspec.runner import Run, Runner
from jaxspec.stats import first_periodic_position
from tests.jaxspec.models import ScriptedDraft, random_model, random_prompts

CONFIG = GenerateConfig(max_new_tokens=60, eos_token_ids=())
DRAFTERS = {"none": NoDraft(), "promptlookup": PromptLookup(3), "lookahead": Lookahead(2, 3, 2)}


@pytest.fixture(scope="module")
def runner():
    return Runner(random_model(num_hidden_layers=1), random_prompts((40, 9, 60)), CONFIG)


@pytest.fixture(scope="module")
def rows(runner):
    return [evaluation.measure_prompt(runner, index, DRAFTERS, repeats=1) for index in range(3)]


@pytest.mark.parametrize("spec", DRAFTERS)
def test_a_runner_decodes_as_generate_does(runner, spec):
    for index, prompt in enumerate(runner.prompts):
        run = runner.run(index, DRAFTERS[spec])
        expected = generate(runner.model, [prompt], CONFIG, DRAFTERS[spec])
        assert run.token_ids == expected.token_ids[0]
        assert run.num_steps == expected.num_steps[0]
        assert run.accepted_by_position == expected.accepted_by_position[0].tolist()


def test_a_short_prompt_beside_a_long_one():
    prompts = random_prompts((9, 130))
    runner = Runner(random_model(), prompts, CONFIG)
    expected = generate(runner.model, prompts[:1], CONFIG)
    assert runner.capacity == 192 and expected.tokens.shape[1] == 128
    assert runner.run(0, NoDraft()).token_ids == expected.token_ids[0]


def test_acceptance_is_counted_up_to_the_position_where_the_text_becomes_periodic():
    whole = Run([5, 8, 6, 9, *[1, 2] * 28], 14, [12, 11, 10], 1.0)
    part = Run([5, 8, 6, 9], 3, [1, 0, 0], 1.0)
    assert first_periodic_position(whole.token_ids) == 4
    assert evaluation.acceptance(whole, part) == {
        "num_tokens": 60,
        "num_steps": 14,
        "mean_accepted_length": 60 / 14,
        "accepted_by_position": [12, 11, 10],
        "periodic_from": 4,
        "loops": True,
        "counted_tokens": 4,
        "counted_steps": 3,
        "counted_accepted_length": 4 / 3,
        "counted_by_position": [1, 0, 0],
    }
    nothing = evaluation.acceptance(whole, None)
    assert nothing["periodic_from"] == nothing["counted_tokens"] == nothing["counted_steps"] == 0
    assert nothing["counted_accepted_length"] is None
    full = evaluation.acceptance(part, part)
    assert full["periodic_from"] is None and not full["loops"]


def test_a_smaller_budget_takes_the_same_steps_up_to_it():
    model, prompt = random_model(), random_prompts((12,))[0]
    text = generate(model, [prompt], CONFIG).token_ids[0]
    # Three drafts a step, the third of them wrong: steps emit three tokens, and the last one one.
    drafter = ScriptedDraft((tuple(prompt + text),), 3, wrong_at=2)
    run = Runner(model, [prompt], CONFIG).run(0, drafter, budget=7)
    assert run.token_ids == text[:7] and run.num_steps == 3
    assert run.accepted_by_position == [3, 2, 0]


@pytest.mark.parametrize("spec", ["promptlookup", "lookahead"])
def test_counted_steps_are_those_of_a_stream_of_single_steps(runner, rows, spec):
    for index, by_spec in enumerate(rows):
        row = next(row for row in by_spec if row["spec"] == spec)
        end = row["counted_tokens"]
        chunks = stream(
            runner.model, [runner.prompts[index]], CONFIG, DRAFTERS[spec], steps_per_chunk=1
        )
        ends = [int(chunk.num_tokens[0]) for chunk in chunks]
        assert ends[-1] == row["num_tokens"] and len(ends) == row["num_steps"]
        expected = 0 if end == 0 else 1 + next(i for i, x in enumerate(ends) if x >= end)
        assert row["counted_steps"] == expected


def test_rows_of_a_prompt(rows):
    for by_spec in rows:
        none, *others = by_spec
        assert [row["spec"] for row in by_spec] == list(DRAFTERS)
        assert none["speedup"] == 1 and none["verdict"] == "-" and none["num_steps"] == 60
        for row in others:
            assert row["equal"] and row["first_difference"] is None
            assert row["tokens_per_second"] == row["num_tokens"] / row["seconds"]
            assert row["speedup"] == row["tokens_per_second"] / none["tokens_per_second"]
            assert row["counted_steps"] <= row["num_steps"]


def test_totals_are_sums_over_prompts(rows):
    totals = {row["spec"]: row for row in evaluation.summarize(sum(rows, []))}
    parts = [row for by_spec in rows for row in by_spec if row["spec"] == "promptlookup"]
    total = totals["promptlookup"]
    assert total["num_prompts"] == total["num_equal"] == 3
    assert total["num_tokens"] == 180
    assert total["mean_accepted_length"] == 180 / sum(row["num_steps"] for row in parts)
    assert total["speedup"] == pytest.approx(totals["none"]["seconds"] / total["seconds"])
    first = sum(row["counted_by_position"][0] for row in parts) / total["counted_steps"]
    assert total["acceptance_by_position"][0] == first
    assert totals["none"]["acceptance_by_position"] == []


def test_a_difference_names_its_position_and_the_gap_there(runner):
    text = runner.run(0, NoDraft()).token_ids
    wrong = [*text[:7], (text[7] + 1) % 97, *text[8:]]
    difference = evaluation._difference(runner, 0, wrong, text)
    gap = evaluation.top2_gap(runner.model, [*runner.prompts[0], *text], 47)
    assert difference["equal"] is False and difference["first_difference"] == 7
    assert difference["gap_at_difference"] == pytest.approx(gap, rel=1e-4)


@pytest.mark.parametrize("num_valid", [None, 50])
def test_top2_gap_is_that_of_a_direct_forward(num_valid):
    model = random_model(1, num_valid_tokens=num_valid)
    ids = random_prompts((30,), seed=4)[0]
    layout = BlockLayout.linear(len(ids))
    logits, _ = model(jnp.asarray([ids]), jnp.zeros((1,), jnp.int32), None, layout)
    best = np.sort(np.asarray(logits)[0, :, :num_valid], axis=-1)
    expected = best[:, -1] - best[:, -2]
    np.testing.assert_allclose(evaluation.top2_gaps(model, ids), expected, rtol=1e-3, atol=1e-4)
    assert evaluation.top2_gap(model, ids, 12) == pytest.approx(expected[11], rel=1e-3, abs=1e-4)


def test_a_wide_model_has_float32_parameters():
    model = evaluation.as_float32(random_model(0))
    assert model.dtype == jnp.float32 and model.config == random_model(0).config


@pytest.mark.parametrize(
    "speedup, counted, tokens, expected",
    [
        (1.3, 1.3, 99, "win"),
        (2.0, 1.29, 99, "even"),
        (1.29, 2.0, 99, "even"),
        (0.94, 1.5, 99, "loss"),
        (0.95, 0.95, 99, "even"),
        (3.0, 3.0, 15, "loops"),
        (3.0, 3.0, 24, "loops"),
        (3.0, 3.0, 25, "win"),
        (3.0, None, 0, "loops"),
    ],
)
def test_verdicts(speedup, counted, tokens, expected):
    row = {"spec": "x", "speedup": speedup, "counted_speedup": counted}
    row |= {"counted_tokens": tokens, "num_tokens": 100}
    assert evaluation.verdict(row) == expected
    assert evaluation.verdict(row | {"spec": "none"}) == "-"


def test_prompts_are_read_with_their_kind(tmp_path):
    file = tmp_path / "some.jsonl"
    file.write_text(
        '{"id": "a", "prompt": "x = 1\\n"}\n\n{"id": "b", "kind": "k", "prompt": "é"}\n'
    )
    assert evaluation.read_prompts(file) == [
        Prompt("a", "some", "some", "x = 1\n"),
        Prompt("b", "k", "some", "é"),
    ]


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "some.jsonl: no prompts"),
        ("{", "some.jsonl, line 1: not JSON"),
        ("\udcff", "some.jsonl: expected UTF-8 text, got invalid start byte at byte 0"),
        ('{"id": "a", "prompt": "x"}\n[1]', "some.jsonl, line 2: expected an object"),
        ('{"id": "a"}', "line 1: expected an object with id and prompt"),
        ('{"id": "a", "prompt": ""}', "line 1: expected an object with id and prompt"),
        ('{"id": 3, "prompt": "x"}', "line 1: expected an object with id and prompt"),
    ],
)
def test_malformed_prompt_files(tmp_path, text, message):
    file = tmp_path / "some.jsonl"
    file.write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ValueError, match=message):
        evaluation.read_prompts(file)


def test_the_sweep_yields_a_row_a_setting_and_the_other_match_last(runner):
    lookups = [("promptlookup", PromptLookup(drafts, 3, 1)) for drafts in (1, 3)]
    groups = [lookups, [("lookahead", DRAFTERS["lookahead"])]]
    rows = list(tuning.sweep(runner, groups))
    assert [row["spec"] for row in rows] == ["promptlookup"] * 2 + ["lookahead", "promptlookup"]
    assert [row["settings"].get("match") for row in rows] == ["last", "last", None, "first"]
    assert [row["rows_per_step"] for row in rows[:3]] == [2, 4, 8]
    best = max(rows[:2], key=lambda row: row["tokens_per_second"])
    assert rows[-1]["settings"] == best["settings"] | {"match": "first"}
    for row in rows:
        assert row["num_equal"] == row["num_prompts"] == 3 and row["speedup"] > 0
        assert row["mean_accepted_length"] == row["num_tokens"] / row["num_steps"] >= 1


def test_the_sweep_stops_when_told(runner):
    answers = iter([False, False, False, True, True])
    group = [("promptlookup", PromptLookup(3)), ("promptlookup", PromptLookup(3, 5, 5))]
    rows = list(tuning.sweep(runner, [group], is_over=lambda: next(answers)))
    assert len(rows) == 1


def test_the_settings_of_the_sweep():
    groups = tuning.candidates(["none", "promptlookup", "lookahead"])
    assert [len(group) for group in groups] == [8, 13, 8, 8]
    assert len(set(sum(groups, []))) == 37
    assert [len(group) for group in tuning.candidates(["lookahead"])] == [13]
    assert tuning.candidates(["none"]) == []


def test_costs_and_break_even(runner):
    costs = list(tuning.step_costs(runner, (1, 4), num_steps=8, repeats=1))
    assert [cost["rows_per_step"] for cost in costs] == [1, 4]
    assert costs[0]["relative"] == 1 and costs[1]["step_ms"] > 0
    table = [{"rows_per_step": 1, "relative": 1.0}, {"rows_per_step": 5, "relative": 2.0}]
    assert tuning.break_even(table, 3) == 1.5
    assert list(tuning.step_costs(runner, (1, 4), is_over=lambda: True)) == []
