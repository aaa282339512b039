"""`Auto`: the tokens of plain decoding, at no more than the best drafter's cost by far."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import Auto, GenerateConfig, Lookahead, NoDraft, PromptLookup, generate, stream
from jaxspec import step_costs as step_costs_module
from jaxspec.decode import run_steps
from jaxspec.drafters import Outcome, make_drafter
from jaxspec.drafters.auto import MAX_ARMS
from jaxspec.placement import FlatModel
from jaxspec.request import make_request
from jaxspec.result import to_host
from jaxspec.state import init_state
from tests.jaxspec.models import random_model, random_prompts

# Of a step: on an H200 at the 8B shape, and of a machine that pays for every row.
COSTS = {(7, 15): (1.006, 1.021, 1.047), (3, 7): (1.0, 1.4, 1.9)}


def total_cost(result, costs_by_rows):
    return sum(
        count * costs_by_rows[rows]
        for row in result.num_steps_by_rows
        for rows, count in row.items()
    )


def costs_of(config, prompts, widths, costs):
    """Return what `Auto` costs, and each of its arms alone, in steps of plain decoding."""
    model, auto = random_model(), Auto(widths, step_costs=costs)
    by_rows = dict(zip((1, *(width + 1 for width in widths)), costs, strict=True))
    # Alone, plain decoding does not pay for the choice.
    alone = by_rows | {1: 1.0}
    arms = [NoDraft(), *(PromptLookup(width) for width in widths)]
    results = [generate(model, prompts, config, arm) for arm in arms]
    chosen = generate(model, prompts, config, auto)
    assert all(result.token_ids == chosen.token_ids for result in results)
    return total_cost(chosen, by_rows), [total_cost(result, alone) for result in results]


@pytest.mark.parametrize("widths, costs", COSTS.items(), ids=str)
@pytest.mark.parametrize("lengths", [(90,), (90, 40, 17)], ids=str)
def test_text_without_anything_to_copy_costs_at_most_3_percent(lengths, widths, costs):
    """So hot that tokens are as good as uniform: a lookup matches nearly always, and is wrong."""
    config = GenerateConfig(max_new_tokens=256, temperature=50.0, seed=tuple(range(len(lengths))))
    chosen, (none, *_) = costs_of(config, random_prompts(lengths), widths, costs)
    print(f"{chosen / none:.4f} of the cost of none")
    assert none < chosen < 1.03 * none


@pytest.mark.parametrize("widths, costs", COSTS.items(), ids=str)
def test_text_that_copies_costs_at_most_5_percent_over_the_best_width(widths, costs):
    config = GenerateConfig(max_new_tokens=256, eos_token_ids=())
    chosen, alone = costs_of(config, random_prompts((90,)), widths, costs)
    print(f"{chosen / min(alone):.4f} of the cost of the best width")
    assert chosen < 1.05 * min(alone) < 0.8 * alone[0]


def test_lookahead_is_tried_and_changes_no_token():
    model, prompts = random_model(), random_prompts((90, 17))
    config = GenerateConfig(max_new_tokens=160, temperature=2.0, seed=(1, 2))
    auto = Auto((2,), Lookahead(2, 3, 2), step_costs=(1.0, 1.2, 1.6))
    result = generate(model, prompts, config, auto)
    assert result.token_ids == generate(model, prompts, config).token_ids
    # A trial is twelve steps long, and the second one would come 256 steps after the first.
    assert [row[8] for row in result.num_steps_by_rows] == [12, 12]


def test_lookahead_stays_where_it_pays():
    model, prompts = random_model(), random_prompts((40,))
    config = GenerateConfig(max_new_tokens=256, eos_token_ids=())
    # Lookups cost so much that they never pay.
    auto = Auto((1,), Lookahead(2, 3, 2), step_costs=(1.0, 50.0, 1.1))
    result = generate(model, prompts, config, auto)
    assert result.token_ids == generate(model, prompts, config).token_ids
    assert result.num_steps_by_rows[0][8] > 50


def test_chunks_of_steps_change_nothing():
    model, prompts = random_model(), random_prompts((40, 17))
    config = GenerateConfig(max_new_tokens=40)
    auto = Auto((2, 5), step_costs=(1.0, 1.1, 1.2))
    whole = generate(model, prompts, config, auto)
    for steps in (1, 3):
        *_, last = stream(model, prompts, config, auto, steps_per_chunk=steps)
        assert last.token_ids == whole.token_ids
        assert last.num_steps_by_rows == whole.num_steps_by_rows


def small_state(auto, *, hits, tries, gain=1.0, clock=9):
    tokens = jnp.asarray([[1, 2, 3, 4, 1, 2, 3, 0, 0, 0, 0, 0]], jnp.int32)
    length = jnp.asarray([7], jnp.int32)
    state = auto.init(tokens, length, jax.vmap(jax.random.key)(jnp.zeros(1, jnp.uint32)))
    value = {"hits": hits, "tries": tries, "gain": gain}
    arrays = {name: jnp.asarray([number], jnp.float32) for name, number in value.items()}
    return dataclasses.replace(state, clock=jnp.asarray([clock]), **arrays), tokens, length


@pytest.mark.parametrize(
    "hits, costs, arm",
    [
        (0.0, (1.0, 1.01, 1.02), 0),
        (0.5, (1.0, 1.4, 1.9), 1),  # 1, 1.75, 1.97 tokens
        (0.5, (1.0, 1.8, 1.9), 2),
        (0.5, (1.0, 1.8, 2.0), 0),
        (0.9, (1.0, 1.4, 1.9), 2),  # 1, 2.71, 4.10 tokens, over their costs 1, 1.94, 2.16
    ],
)
def test_the_arm_of_most_tokens_for_its_time_is_planned(hits, costs, arm):
    auto = Auto((2, 4))
    state, tokens, length = small_state(auto, hits=hits, tries=1.0)
    room = jnp.asarray([99])
    planned = auto.plan(state, tokens, length, jnp.asarray(costs), room)
    expected = [sum(hits**j for j in range(width + 1)) for width in (0, 2, 4)]
    assert planned.arm[0] == np.argmax(np.array(expected) / costs)
    assert planned.arm[0] == arm
    assert planned.draft_tokens[0].tolist() == [4, 1, 2, 3] and planned.num_draft[0, 0] == 4


def test_no_more_is_drafted_than_there_is_room_for():
    auto = Auto((2, 4))
    state, tokens, length = small_state(auto, hits=0.9, tries=1.0)
    costs = jnp.asarray([1.0, 1.05, 1.2])
    arms = [auto.plan(state, tokens, length, costs, jnp.asarray([n])).arm[0] for n in (1, 2, 3, 9)]
    assert arms == [0, 1, 1, 2]


def test_a_trial_that_cannot_win_waits_and_does_not_count():
    auto = Auto((4,), Lookahead(2, 3, 2))
    state, tokens, length = small_state(auto, hits=0.99, tries=1.0, clock=0)
    room, counts = jnp.asarray([99]), jnp.asarray([1], jnp.int32)
    outcome = Outcome(None, None, None, None, counts)
    # Five tokens a step: more than the three of lookahead, at what it costs, can be.
    planned = auto.plan(state, tokens, length, jnp.asarray([1.0, 1.0, 1.2]), room)
    assert planned.arm[0] == 1
    learnt = auto.learn(auto.arms[1], planned, outcome, tokens, length)
    assert (learnt.clock[0], learnt.wait[0]) == (0, planned.wait[0])
    # Where lookups fail it has its turn.
    failing = dataclasses.replace(state, hits=jnp.asarray([0.1]))
    assert auto.plan(failing, tokens, length, jnp.asarray([1.0, 1.0, 1.2]), room).arm[0] == 2


def test_without_a_match_nothing_is_drafted():
    auto = Auto((2, 4))
    state, _, length = small_state(auto, hits=1.0, tries=1.0)
    tokens = jnp.arange(12, dtype=jnp.int32)[None]
    planned = auto.plan(state, tokens, length, jnp.ones(3), jnp.asarray([99]))
    assert planned.arm[0] == 0 and planned.num_draft[0, 0] == 0


@pytest.mark.parametrize(
    "emitted, num_hits, has_miss",
    [([4], 1, 0), ([9], 0, 1), ([4, 1], 2, 0), ([4, 9], 1, 1), ([4, 1, 2, 3, 5], 4, 0)],
)
def test_what_a_lookup_would_have_foretold_is_learnt(emitted, num_hits, has_miss):
    auto = Auto((2, 4))
    state, tokens, length = small_state(auto, hits=2.0, tries=3.0)
    state = auto.plan(state, tokens, length, jnp.ones(3), jnp.asarray([99]))
    count = len(emitted)
    tokens = tokens.at[0, 7 : 7 + count].set(jnp.asarray(emitted))
    counts = jnp.asarray([count], jnp.int32)
    outcome = Outcome(None, None, None, None, counts)
    learnt = auto.learn(NoDraft(), state, outcome, tokens, length + counts)
    hits, tries = 2.0, 3.0
    for is_hit in [True] * num_hits + [False] * has_miss:
        hits, tries = hits * 0.85 + is_hit, tries * 0.85 + 1
    np.testing.assert_allclose(learnt.hits[0], hits, rtol=1e-6)
    np.testing.assert_allclose(learnt.tries[0], tries, rtol=1e-6)


def test_a_finished_row_learns_nothing_and_has_no_say():
    auto = Auto((2, 4))
    state, tokens, length = small_state(auto, hits=2.0, tries=3.0)
    state = auto.plan(state, tokens, length, jnp.ones(3), jnp.asarray([0]))
    outcome = Outcome(None, None, None, None, jnp.asarray([0], jnp.int32))
    learnt = auto.learn(NoDraft(), state, outcome, tokens, length)
    assert (learnt.hits[0], learnt.tries[0]) == (2.0, 3.0)


def test_the_cache_stays_in_place():
    model = random_model()
    auto = Auto((3, 7), Lookahead(2, 3, 2), kernels="xla")
    config = GenerateConfig(max_new_tokens=3000, max_seq_len=4096)
    tokens, request = make_request(model.config, random_prompts((40,)), config)
    request = dataclasses.replace(request, step_costs=jnp.ones(4))
    state = init_state(model, tokens, request, drafter=auto)
    lowered = run_steps.lower(model, state, request, jnp.int32(3), drafter=auto, kernels="xla")
    compiled = lowered.compile()
    hlo = compiled.as_text()
    cache_bytes = sum(part.nbytes for part in jax.tree.leaves(state.cache))
    layer_bytes = sum(part.nbytes for part in state.cache[0])
    shape = re.escape("f32[" + ",".join(map(str, state.cache[0][0].shape)) + "]")
    assert compiled.memory_analysis().alias_size_in_bytes >= cache_bytes
    assert compiled.memory_analysis().temp_size_in_bytes < 1.7 * layer_bytes
    assert not re.findall(rf"= {shape}\S* copy\(", hlo)
    # One loop over all, and one for each of the four arms.
    assert len(re.findall(r"= .* while\(", hlo)) == 5


def test_costs_are_measured_once_for_a_shape(monkeypatch):
    model, measured = random_model(), []
    measure = step_costs_module._measure
    seconds, compiling = [], []

    def spy(*args, **kwargs):
        measured.append(measure(*args, **kwargs))
        return measured[-1]

    monkeypatch.setattr(step_costs_module, "_measure", spy)
    monkeypatch.setattr(step_costs_module, "_known", {})
    auto, config = Auto((2, 5)), GenerateConfig(max_new_tokens=20)
    run_steps.clear_cache()
    num_programs = run_steps._cache_size()
    for prompts in (random_prompts((9,)), random_prompts((30,), seed=1)):
        expected = generate(model, prompts, config).token_ids
        result = generate(model, prompts, config, auto)
        assert result.token_ids == expected
        seconds.append(result.measure_seconds)
        compiling.append(result.compile_seconds)
    assert len(measured) == 1 and seconds[0] > 0 == seconds[1]
    # Measuring compiles the programs, and that is not its time.
    assert compiling[0] > 2 * compiling[1] and compiling[0] > seconds[0]
    costs, taken = measured[0]
    assert len(costs) == 3 and costs[0] == 1 and min(costs) > 0
    assert seconds[0] == taken
    np.testing.assert_allclose(result.step_costs, costs, rtol=1e-6)
    # Costs are no part of a program: to measure them compiles nothing.
    assert run_steps._cache_size() == num_programs + 2  # plain decoding, and all arms
    generate(model, random_prompts((9, 9)), config, auto)
    assert len(measured) == 2


def test_every_arm_can_be_forced():
    """Which is how they are measured."""
    model, prompts = random_model(), random_prompts((40,))
    config = GenerateConfig(max_new_tokens=30)
    auto = Auto((2, 5), Lookahead(2, 3, 2), kernels="xla")
    tokens, request = make_request(model.config, prompts, config)
    flat = FlatModel.of(model)
    for index, rows in enumerate((1, 3, 6, 8)):
        costs = jnp.full(4, 1e6).at[index].set(1e-6)
        forced = dataclasses.replace(request, step_costs=costs)
        state = init_state(flat, tokens, forced, drafter=auto)
        state = run_steps(flat, state, forced, jnp.int32(9), drafter=auto, kernels="xla")
        assert list(to_host(state, forced, auto).num_steps_by_rows[0]) == [rows]


# Not called gpu: such a name would mark the test as one that needs it.
@pytest.mark.parametrize("platform", ["cpu", "gpu"], ids=["of a cpu", "of an accelerator"])
def test_the_defaults_are_narrow(platform):
    """Up to 16 rows a row has the same bits in any block, in bfloat16 on a GPU too."""
    auto = make_drafter("auto", platform=platform)
    assert max(arm.layout.num_rows for arm in auto.arms) <= 16


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"num_draft_tokens": ()}, r"num_draft_tokens=\(\) is not an ascending, non-empty tuple"),
        ({"num_draft_tokens": (5, 3)}, "is not an ascending"),
        ({"num_draft_tokens": (0, 3)}, "num_draft_tokens=0 is not at least 1"),
        ({"num_draft_tokens": tuple(range(1, 30))}, f"30 arms are more than {MAX_ARMS}"),
        ({"num_draft_tokens": (9000,)}, "block has 9001 rows"),
        ({"step_costs": (1.0, 2.0)}, "are not 3 positive numbers"),
        ({"step_costs": (1.0, 2.0, 0.0)}, "are not 3 positive numbers"),
        ({"match": "middle"}, "match='middle' is neither first nor last"),
    ],
)
def test_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        Auto(**fields)
