"""What went wrong in other decoders between a checkpoint's files and the text, tried here."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import checkpoints
from jaxspec import GenerateConfig, Lookahead, NoDraft, PromptLookup, generate
from tests.helpers import make_hf_checkpoint, make_tokenizer
from tests.jaxspec.models import random_model, random_prompts, smallest_gap

DRAFTERS = {
    "promptlookup_2": PromptLookup(num_draft_tokens=2),
    "promptlookup_8": PromptLookup(num_draft_tokens=8),
    "lookahead": Lookahead(2, 3, 2),
}
COUNT = "# Count from 1 to 20, one number per line.\nprint(1)\nprint(2)\nprint(3)\n"
TEXTS = [COUNT, "ha " * 64, "def fibonacci(n):\n"]
NUM_NEW = 48


@pytest.fixture(scope="module")
def bundled():
    """Return the bundled model, its tokenizer, prompts, and their plain continuations."""
    model, tokenizer = checkpoints.load(checkpoints.BUNDLED_MODEL, dtype="float32")
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    plain = generate(model, prompts, GenerateConfig(max_new_tokens=NUM_NEW), NoDraft())
    return model, tokenizer, prompts, plain.token_ids


def test_the_bundled_model_says_what_it_always_said(bundled, record_gap):
    model, tokenizer, prompts, expected = bundled
    assert [ids[:12] for ids in expected] == [
        [1411, 7, 19, 8, 198, 1411, 7, 20, 8, 198, 1411, 7],
        [16, 8, 198, 257, 2, 220, 16, 13, 220, 2019, 1695, 352],
        [258, 338, 290, 272, 257, 314, 294, 2344, 261, 3864, 72, 561],
    ]
    starts = [tokenizer.decode(ids[:12]) for ids in expected]
    assert starts[0] == "print(4)\nprint(5)\nprint("
    assert starts[1].startswith("1)\n    # 1.  We need")
    assert starts[2].startswith("        return n\n\n    def fib")
    gap = min(map(smallest_gap, [model] * 3, prompts, expected))
    record_gap(gap)
    # A margin that no order of float32 sums crosses.
    assert gap > 1e-2


@pytest.mark.parametrize("spec", DRAFTERS)
def test_counts_and_repeated_words_lose_no_token(bundled, spec):
    model, _, prompts, expected = bundled
    config = GenerateConfig(max_new_tokens=NUM_NEW)
    result = generate(model, prompts, config, DRAFTERS[spec])
    assert result.token_ids == expected
    assert (result.num_steps < result.num_tokens).all()


def change_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    "files",
    [
        {"config.json": 18},
        {"config.json": 18, "generation_config.json": [17, 20]},
        {"tokenizer": 22},
        {"config.json": 3, "generation_config.json": [14, 19], "tokenizer": 21},
    ],
    ids=lambda files: "+".join(files),
)
def test_the_end_of_text_ids_of_every_file_end_a_text(tmp_path, files):
    """In a Hugging Face directory and in what is converted from it."""
    source, converted = tmp_path / "source", tmp_path / "converted"
    checkpoints.save(random_model(num_hidden_layers=1), source)
    for name in set(files) - {"tokenizer"}:
        change_json(source / name, eos_token_id=files[name])
    eos_word = f"w{files['tokenizer']}" if "tokenizer" in files else None
    make_tokenizer(source, num_words=24, eos_token=eos_word)
    checkpoints.convert(source, converted)
    eos_ids = set(np.concatenate([np.atleast_1d(value) for value in files.values()]).tolist())
    prompts, drafter = random_prompts((9, 20), vocab_size=24), DRAFTERS["lookahead"]
    for directory in (source, converted):
        model, _ = checkpoints.load(directory)
        assert set(model.config.eos_token_ids) == eos_ids
        config = GenerateConfig(max_new_tokens=30, eos_token_ids=())
        endless = generate(model, prompts, config, drafter).token_ids
        ends = [
            next((i + 1 for i, token in enumerate(ids) if token in eos_ids), None)
            for ids in endless
        ]
        assert any(ends)
        result = generate(model, prompts, GenerateConfig(max_new_tokens=30), drafter)
        assert result.token_ids == [ids[:end] for ids, end in zip(endless, ends, strict=True)]
        assert result.finish_reasons == tuple("eos" if end else "length" for end in ends)


@pytest.mark.parametrize("num_heads, num_kv_heads", [(40, 8), (64, 8)])
def test_heads_of_the_published_sizes_decode_as_transformers_does(
    tmp_path, num_heads, num_kv_heads, record_gap
):
    import torch

    theirs = make_hf_checkpoint(
        tmp_path,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        num_hidden_layers=1,
        head_dim=8,
        tie_word_embeddings=num_heads == 40,
        initializer_range=0.3,
    )
    model = checkpoints.load_model(tmp_path, dtype="float32")
    prompt = random_prompts((20,), seed=num_heads)[0]
    ids = torch.tensor([prompt])
    with torch.no_grad():
        output = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=32,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    expected = output[0, len(prompt) :].tolist()
    config = GenerateConfig(max_new_tokens=32, eos_token_ids=())
    for drafter in (DRAFTERS["promptlookup_2"], DRAFTERS["lookahead"]):
        assert generate(model, [prompt], config, drafter).token_ids == [expected]
    gap = smallest_gap(model, prompt, expected)
    record_gap(gap)
    assert gap > 1e-5 and len(set(expected)) > 4
