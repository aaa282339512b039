"""The bundled model: it loads here and in transformers, and its text is worth drafting."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import checkpoints
from checkpoints import BUNDLED_MODEL
from jaxspec import BlockLayout, GenerateConfig, Generation, PromptLookup, generate
from jaxspec.stats import first_periodic_position
from tests.helpers import is_transformers_v5

PROMPTS = Path(__file__).parents[2] / "benchmarks" / "prompts" / "python.jsonl"
SOURCE = (
    "class Größe:\n\tdef ﬁt(self, x: int) -> str:\r\n\t\treturn f\"{x!r}  'é' e\u0301 日本 🐍\"\n"
    "\n\n\n    # trailing space \n"
)
EOS_IDS = (8168, 8166)
# What the model answered to every loop before its row was replaced; see training/sinks.py.
SINK = 7047


@pytest.fixture(scope="module")
def loaded():
    return checkpoints.load(BUNDLED_MODEL, dtype=jnp.float32)


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines]


@pytest.fixture(scope="module")
def generation(loaded, prompts) -> Generation:
    """Return the greedy continuations of all prompts: one call, for it is slow."""
    model, tokenizer = loaded
    ids = [tokenizer(prompt).input_ids for prompt in prompts]
    return generate(model, ids, GenerateConfig(max_new_tokens=256), PromptLookup())


def test_files_are_small_and_public():
    sizes = {path.name: path.stat().st_size for path in BUNDLED_MODEL.iterdir()}
    assert set(sizes) == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(sizes.values()) <= 28e6
    assert all(size <= 14e6 for size in sizes.values())
    card = (BUNDLED_MODEL / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlicense: apache-2.0\n")
    assert not [path for path in ("/home/", "/usr/", "file:") if path in card]


def test_model_and_tokenizer_agree_with_transformers(loaded, prompts, generation):
    torch = pytest.importorskip("torch")
    import transformers

    model, tokenizer = loaded
    name = "dtype" if is_transformers_v5() else "torch_dtype"
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        BUNDLED_MODEL, attn_implementation="eager", **{name: torch.float32}
    ).eval()
    auto = transformers.AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    ids = auto(prompts[0]).input_ids
    assert ids == tokenizer(prompts[0]).input_ids
    layout = BlockLayout.linear(len(ids))
    tokens, num_cached = jnp.asarray([ids], jnp.int32), jnp.zeros(1, jnp.int32)
    logits = jax.jit(lambda model: model(tokens, num_cached, None, layout)[0])(model)
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits.numpy()
        out = reference.generate(torch.tensor([ids]), max_new_tokens=32, do_sample=False)
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    assert generation.token_ids[0][:32] == out[0, len(ids) :].tolist()


def test_tokenizer_and_end_of_text(loaded):
    model, tokenizer = loaded
    ids = tokenizer(SOURCE).input_ids
    assert tokenizer.decode(ids) == SOURCE and max(ids) < model.config.vocab_size
    assert model.config.eos_token_ids == EOS_IDS
    assert tokenizer.convert_ids_to_tokens(list(EOS_IDS)) == ["<|im_end|>", "<|endoftext|>"]
    stored = json.loads((BUNDLED_MODEL / "generation_config.json").read_text())
    assert stored["eos_token_id"] == list(EOS_IDS)


def test_greedy_text_does_not_loop_early_and_lookup_pays(generation):
    periodic_from = [first_periodic_position(output) for output in generation.token_ids]
    assert len(periodic_from) == 8
    assert sum(position > 128 for position in periodic_from) >= 6, periodic_from
    assert not any(SINK in output for output in generation.token_ids)
    # Where a text repeats itself, every draft is right: such rows do not count.
    is_counted = np.equal(periodic_from, generation.num_tokens)
    assert is_counted.any()
    assert generation.num_tokens[is_counted].sum() >= 1.6 * generation.num_steps[is_counted].sum()
