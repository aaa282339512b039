"""Plain and speculative decoding give the ids of transformers' greedy `generate`."""

from __future__ import annotations

import numpy as np
import pytest

import checkpoints
from jaxspec import GenerateConfig, PromptLookup, generate
from tests.helpers import YARN, make_hf_checkpoint
from tests.jaxspec.models import smallest_gap

SHAPES = {
    "tied": {"tie_word_embeddings": True},
    "untied": {},
    "wide_heads": {"hidden_size": 48, "head_dim": 32},
    "one_kv_head": {"num_key_value_heads": 1},
    "yarn": {"rope": YARN},
    "odd_vocabulary": {"vocab_size": 1013},
}
NUM_NEW = 64


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_ids(tmp_path, shape, record_gap):
    import torch

    theirs = make_hf_checkpoint(tmp_path, **SHAPES[shape])
    model = checkpoints.load_model(tmp_path, dtype="float32")
    prompt = np.random.default_rng(3).integers(4, 97, 21).tolist()
    with torch.no_grad():
        output = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
            max_new_tokens=NUM_NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    expected = output[0, len(prompt) :].tolist()
    config = GenerateConfig(max_new_tokens=NUM_NEW, eos_token_ids=())
    for drafter in (None, PromptLookup(num_draft_tokens=4)):
        assert generate(model, [prompt], config, drafter).token_ids[0] == expected
    gap = smallest_gap(model, prompt, expected)
    record_gap(gap)
    assert len(expected) == NUM_NEW and gap > 1e-5
