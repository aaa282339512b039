"""The traced and the compiled loop: one while, in place, on the device, compiled once."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from jaxspec import GenerateConfig, Lookahead, NoDraft, PromptLookup, generate, stream
from jaxspec.decode import prefill, run_steps
from jaxspec.request import capacity_for, make_request
from jaxspec.state import init_state
from tests.jaxspec.models import random_model, random_prompts

DRAFTERS = [NoDraft(), PromptLookup(num_draft_tokens=7), Lookahead(2, 3, 2)]


@pytest.fixture(scope="module", params=DRAFTERS, ids=lambda drafter: type(drafter).__name__)
def program(request):
    """Return the loop's state, jaxpr and compiled form for a long text, XLA kernels."""
    drafter = request.param
    if isinstance(drafter, PromptLookup):
        drafter = dataclasses.replace(drafter, kernels="xla")
    model = random_model()
    config = GenerateConfig(max_new_tokens=3000, max_seq_len=4096)
    tokens, arrays = make_request(model.config, random_prompts((40,)), config)
    state = init_state(model, tokens, arrays, drafter=drafter)
    traced = run_steps.trace(model, state, arrays, jnp.int32(3), drafter=drafter, kernels="xla")
    return state, traced.jaxpr, traced.lower().compile()


def all_primitives(jaxpr):
    """Yield the names of all primitives, inner ones included."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in equation.params.values():
            for inner in value if isinstance(value, list | tuple) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from all_primitives(inner)


def test_one_while_and_no_callback_in_the_trace(program):
    _, jaxpr, _ = program
    names = list(all_primitives(jaxpr.jaxpr))
    assert names.count("while") == 1
    assert "scan" not in names
    assert not [name for name in names if "callback" in name or "outfeed" in name]


def test_one_while_and_no_host_transfer_in_the_compiled_program(program):
    _, _, compiled = program
    hlo = compiled.as_text()
    assert len(re.findall(r"= .* while\(", hlo)) == 1
    for word in ("infeed", "outfeed", "send(", "recv(", "callback"):
        assert word not in hlo


def test_no_large_constant(program):
    _, jaxpr, compiled = program
    traced = sum(getattr(const, "nbytes", 0) for const in jaxpr.consts)
    sizes = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "pred": 1, "s8": 1, "u8": 1}
    total = 0
    for dtype, shape in re.findall(r"= (\w+)\[([\d,]*)\][^=]* constant\(", compiled.as_text()):
        count = 1
        for dim in filter(None, shape.split(",")):
            count *= int(dim)
        total += count * sizes.get(dtype, 8)
    assert traced < 1_000_000
    assert total < 1_000_000


def test_cache_is_updated_in_place(program):
    state, _, compiled = program
    memory = compiled.memory_analysis()
    cache_bytes = sum(part.nbytes for part in jax.tree.leaves(state.cache))
    layer_bytes = sum(part.nbytes for part in state.cache[0])
    assert memory.alias_size_in_bytes >= cache_bytes
    # On a CPU one layer's values are copied, their dead slots cleared; never the cache.
    assert memory.temp_size_in_bytes < 1.7 * layer_bytes < cache_bytes


def test_donated_state_is_gone():
    model = random_model()
    drafter = NoDraft()
    tokens, arrays = make_request(model.config, [[1, 2, 3]], GenerateConfig(max_new_tokens=4))
    state = init_state(model, tokens, arrays, drafter=drafter)
    for run in (
        lambda s: prefill(model, s, jnp.int32(1), chunk_size=64),
        lambda s: run_steps(model, s, arrays, jnp.int32(1), drafter=drafter),
    ):
        old = jax.tree.leaves(state.cache)
        state = run(state)
        assert all(part.is_deleted() for part in old)


def test_two_calls_of_one_shape_trace_once():
    model = random_model(2)
    drafter = PromptLookup(num_draft_tokens=2)
    prefill.clear_cache()
    run_steps.clear_cache()
    calls = [
        (random_prompts((20, 9)), GenerateConfig(max_new_tokens=30)),
        (random_prompts((33, 70), seed=5), GenerateConfig(max_new_tokens=50)),
        (random_prompts((1, 2)), GenerateConfig(max_new_tokens=1, eos_token_ids=(4,))),
        (
            random_prompts((20, 9)),
            GenerateConfig(max_new_tokens=9, eos_token_ids=(1, 2, 3), seed=7),
        ),
        (random_prompts((20, 9)), GenerateConfig(max_new_tokens=9, seed=(8, 9))),
    ]
    for prompts, config in calls:
        generate(model, prompts, config, drafter)
    for _ in stream(model, calls[0][0], calls[0][1], drafter, steps_per_chunk=3):
        pass
    assert run_steps._cache_size() == 1
    assert prefill._cache_size() == 1


@pytest.mark.parametrize(
    "num_tokens, capacity",
    [(1, 128), (128, 128), (129, 192), (193, 256), (257, 384), (385, 512), (40960, 49152)],
)
def test_capacities_are_few_and_follow_need(num_tokens, capacity):
    assert capacity_for(num_tokens) == capacity
    assert len({capacity_for(n) for n in range(1, 5000)}) <= 13


def test_capacity_never_exceeds_need_by_half():
    assert all(capacity_for(n) <= max(128, 1.5 * n) for n in range(1, 70_000, 7))
