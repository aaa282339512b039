"""Meshes of GPUs, with the kernels: `pytest -m gpu`, on as many GPUs as there are."""

from __future__ import annotations

import functools

import jax
import pytest

from jaxspec import Auto, GenerateConfig, Lookahead, NoDraft, PromptLookup, generate
from jaxspec.placement import spread
from jaxspec.sharding import make_mesh
from tests.jaxspec.models import random_model, random_prompts

pytestmark = pytest.mark.gpu
MESHES = [(1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (1, 8), (2, 4), (8, 1)]
DRAFTERS = [NoDraft(), PromptLookup(7), Lookahead(7, 5, 7), Auto((7,), step_costs=(1.0, 1.1))]
SAMPLED = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.1}
model = functools.partial(random_model, num_attention_heads=8, head_dim=64, intermediate_size=512)


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_float32_tokens_are_those_of_one_device(shape, drafter, sampling):
    if shape[0] * shape[1] > jax.device_count():
        pytest.skip(f"{jax.device_count()} GPUs are too few")
    config = GenerateConfig(max_new_tokens=64, num_logprobs=2 if sampling else None, **sampling)
    shared = spread(model(), make_mesh(*shape))
    # A batch that no mesh divides.
    for lengths in ((23,), (1, 40, 17)):
        prompts = random_prompts(lengths)
        expected = generate(model(), prompts, config)
        for kernels in (None, "xla"):
            config_of_run = GenerateConfig(**{**vars(config), "kernels": kernels})
            result = generate(shared, prompts, config_of_run, drafter)
            assert result.token_ids == expected.token_ids
