"""The law of sampled texts: every mode draws from the model's own distribution, end to end."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import Auto, BlockLayout, GenerateConfig, Lookahead, NoDraft, PromptLookup, generate
from jaxspec.request import make_request, sampling_mode
from jaxspec.sampling import process_logits
from tests.jaxspec.models import random_model

# The verifier alone, on trees of candidates, is in test_sampling.py.
NUM_IDS, NUM_DRAWS, BATCH_SIZE = 5, 200_000, 20_000
TINY = dict(
    vocab_size=NUM_IDS, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
    num_attention_heads=1, num_key_value_heads=1, head_dim=16,
)  # fmt: skip
# A lookup drafts 1, 2 after the last 0; lookahead's pool has several n-grams that start so.
PROMPT = [0, 1, 2, 3, 0, 1, 3, 0, 2, 1, 0]
DRAFTERS = [
    NoDraft(),
    PromptLookup(2),
    Lookahead(1, 3, 3, pool_size=16),
    Auto((2,), step_costs=(1.0, 1.0)),
]
SETTINGS = [
    {"temperature": 0.7},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 2},
    {"temperature": 0.7, "top_p": 0.9},
]


def next_law(model, prefixes, settings):
    """Return f64[n, V], the exact law of the token after each prefix, all of one length."""
    tokens = jnp.asarray(prefixes, jnp.int32)
    layout = BlockLayout.linear(tokens.shape[1])
    start = jnp.zeros(tokens.shape[0], jnp.int32)
    logits = jax.jit(lambda model, tokens: model(tokens, start, None, layout)[0])(model, tokens)
    config = GenerateConfig(**settings)
    params = make_request(model.config, prefixes, config)[1].sampling
    mode = sampling_mode(config)
    scores = process_logits(logits[:, -1:], params, mode, num_valid=None, counts=None)
    return np.asarray(jax.nn.softmax(scores[:, 0], axis=-1), np.float64)


def chi_square(counts, law):
    """Return the statistic over the outcomes that can happen, and its degrees of freedom."""
    possible = law > 1e-12
    assert counts[~possible].sum() == 0
    expected = law[possible] * counts.sum()
    return ((counts[possible] - expected) ** 2 / expected).sum(), possible.sum() - 1


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda drafter: type(drafter).__name__)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_next_two_tokens_follow_the_law_of_the_model(settings, drafter):
    model = random_model(3, **TINY)
    first = next_law(model, [PROMPT], settings)[0]
    second = next_law(model, [[*PROMPT, token] for token in range(NUM_IDS)], settings)
    assert first.max() < 0.95, "the law is too narrow to tell anything"
    pairs, num_accepted = np.zeros(NUM_IDS**2, np.int64), 0
    for start in range(0, NUM_DRAWS, BATCH_SIZE):
        seeds = tuple(range(start, start + BATCH_SIZE))
        config = GenerateConfig(
            max_new_tokens=2, seed=seeds, eos_token_ids=(), prefill_chunk_size=16, **settings
        )
        result = generate(model, [PROMPT] * BATCH_SIZE, config, drafter)
        emitted = result.tokens[:, len(PROMPT) : len(PROMPT) + 2]
        pairs += np.bincount(emitted @ [NUM_IDS, 1], minlength=NUM_IDS**2)
        num_accepted += result.accepted_by_position.sum()
    # Drafts are accepted and refused both, or the law of accepted blocks is not tried at all.
    is_plain = isinstance(drafter, NoDraft)
    assert (num_accepted == 0) == is_plain and num_accepted < 0.95 * NUM_DRAWS
    laws = (first, pairs.reshape(NUM_IDS, -1).sum(1)), ((first[:, None] * second).ravel(), pairs)
    for law, counts in laws:
        statistic, degrees = chi_square(counts, law)
        # Mean + 4.5 standard deviations and more: a chance below 1 in 20,000.
        assert statistic < degrees + 4.5 * np.sqrt(2 * degrees) + 6
