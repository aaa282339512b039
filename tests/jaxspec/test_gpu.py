"""The loop compiled for a GPU, its kernels by Triton: `pytest -m gpu`."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec import Auto, GenerateConfig, Lookahead, NoDraft, PromptLookup, Qwen3, generate
from jaxspec.decode import prefill, run_steps
from jaxspec.drafters import make_drafter
from jaxspec.request import make_request
from jaxspec.state import init_state
from tests.jaxspec.models import random_model, random_prompts

pytestmark = pytest.mark.gpu
DRAFTERS = [
    *(make_drafter(spec, platform="gpu") for spec in ("promptlookup", "lookahead")),
    PromptLookup(num_draft_tokens=7),
    Lookahead(7, 5, 7),
    Lookahead(1, 2, 1),
    Auto((7, 15), Lookahead(7, 5, 7), step_costs=(1.0, 1.02, 1.05, 1.2)),
]
SAMPLED = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.1}


def gpu_model() -> Qwen3:
    """Return a random model of a shape that all kernels take."""
    return random_model(head_dim=64)


def in_dtype(model: Qwen3, dtype) -> Qwen3:
    graph, params = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(lambda w: w.astype(dtype), params))


@pytest.fixture(scope="module", params=[NoDraft(), *DRAFTERS], ids=str)
def compiled(request):
    drafter = request.param
    model = gpu_model()
    config = GenerateConfig(max_new_tokens=3000, max_seq_len=4096)
    tokens, arrays = make_request(model.config, random_prompts((40,)), config)
    state = init_state(model, tokens, arrays, drafter=drafter)
    loop = run_steps.lower(model, state, arrays, jnp.int32(3), drafter=drafter).compile()
    filled = prefill.lower(model, state, jnp.int32(1), chunk_size=512).compile()
    return drafter, state, loop, filled


def test_the_loop_runs_the_triton_kernels(compiled):
    drafter, _, loop, _ = compiled
    hlo = loop.as_text()
    names = [
        "_linear_scale",
        "_linear_swiglu",
        "_linear_residual",
        "_linear_head",
        "_attention_kernel",
        "_argmax_partial_kernel",
        "_verify_greedy_kernel",
        "_write_rows_kernel",
    ]
    if isinstance(drafter, PromptLookup | Auto):
        names.append("_find_ngram")
    if isinstance(drafter, Lookahead | Auto):
        names += ["_lookup_ngrams_kernel", "_insert_ngrams_kernel"]
    for name in names:
        assert name in hlo


def test_the_cache_is_updated_in_place(compiled):
    _, state, loop, filled = compiled
    cache_bytes = sum(part.nbytes for part in jax.tree.leaves(state.cache))
    shape = re.escape("f32[" + ",".join(map(str, state.cache[0][0].shape)) + "]")
    for program in (loop, filled):
        assert program.memory_analysis().alias_size_in_bytes >= cache_bytes
        assert not re.findall(rf"= {shape}\S* copy\(", program.as_text())


@pytest.mark.parametrize("drafter", [NoDraft(), *DRAFTERS], ids=str)
def test_the_loop_does_not_return_to_the_host(drafter, tmp_path):
    """Of a loop in a CUDA graph a profile has the predicate's kernel; the host reads nothing."""
    model, num_steps = gpu_model(), 8
    config = GenerateConfig(max_new_tokens=300, eos_token_ids=())
    tokens, request = make_request(model.config, random_prompts((40,)), config)
    state = init_state(model, tokens, request, drafter=drafter)
    for steps in (1, num_steps):
        with jax.profiler.trace(tmp_path / str(steps)):
            state = run_steps(model, state, request, jnp.int32(steps), drafter=drafter)
            jax.block_until_ready(state)
    assert int(state.num_steps[0]) == num_steps + 1
    (path,) = (tmp_path / str(num_steps)).rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(path)).planes
    lines = [
        line for plane in planes if plane.name.startswith("/device:GPU") for line in plane.lines
    ]
    names = [event.name for line in lines for event in line.events]
    assert "set_while_condition" in names
    assert names.count("MemcpyD2H") < num_steps


@pytest.mark.parametrize("drafter", DRAFTERS, ids=str)
@pytest.mark.parametrize("lengths", [(23,), (1, 40, 17)], ids=str)
def test_float32_tokens_are_those_of_plain_decoding(drafter, lengths):
    model, prompts = gpu_model(), random_prompts(lengths)
    expected = generate(model, prompts, GenerateConfig(max_new_tokens=64))
    for kernels in (None, "xla"):
        config = GenerateConfig(max_new_tokens=64, kernels=kernels)
        assert generate(model, prompts, config, drafter).token_ids == expected.token_ids


@pytest.mark.parametrize("drafter", [DRAFTERS[0], DRAFTERS[1], DRAFTERS[-1]], ids=str)
def test_float32_sampled_tokens_are_those_of_plain_decoding(drafter):
    model, prompts = gpu_model(), random_prompts((1, 40, 17))
    config = GenerateConfig(max_new_tokens=64, seed=(1, 2, 3), num_logprobs=2, **SAMPLED)
    expected = generate(model, prompts, config)
    actual = generate(model, prompts, config, drafter)
    assert actual.token_ids == expected.token_ids
    for left, right in zip(actual.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(left, right, atol=1e-4)


@pytest.mark.parametrize("num_draft_tokens", [7, 15])
def test_bfloat16_prompt_lookup_equals_plain_decoding_of_the_same_width(num_draft_tokens):
    model = in_dtype(gpu_model(), jnp.bfloat16)
    prompts = random_prompts((5, 40, 17))
    config = GenerateConfig(max_new_tokens=200)
    wide = generate(model, prompts, config, NoDraft(num_draft_tokens))
    result = generate(model, prompts, config, PromptLookup(num_draft_tokens))
    assert result.token_ids == wide.token_ids
    assert result.num_steps.sum() < wide.num_steps.sum()


@pytest.mark.parametrize("num_draft_tokens", [7, 15])
def test_bfloat16_prompt_lookup_equals_plain_decoding_of_one_row(num_draft_tokens):
    """Up to 16 rows share tilings whose bits do not depend on the number of rows."""
    model = in_dtype(gpu_model(), jnp.bfloat16)
    config = GenerateConfig(max_new_tokens=200)
    for prompt in random_prompts((5, 40, 17)):
        narrow = generate(model, [prompt], config)
        result = generate(model, [prompt], config, PromptLookup(num_draft_tokens))
        assert result.token_ids == narrow.token_ids
        assert result.num_steps.sum() < narrow.num_steps.sum()
