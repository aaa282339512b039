"""Random Hugging Face checkpoints, saved by transformers itself."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "eos_token_id": 3,
    "initializer_range": 0.12,
}
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


def is_transformers_v5() -> bool:
    import transformers

    return int(transformers.__version__.split(".")[0]) >= 5


def spelled_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters` of transformers v5 as fields that the installed release knows.

    Skips the test where it does not know `truncate`.
    """
    from transformers import modeling_rope_utils

    if "truncate" in rope and "truncate" not in inspect.getsource(modeling_rope_utils):
        pytest.skip("this release of transformers always truncates YaRN's range")
    if is_transformers_v5():
        return {"rope_parameters": dict(rope)}
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    return {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
    }


def make_hf_checkpoint(
    path: Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    max_shard_size: str = "5GB",
    rope: dict[str, Any] = ROPE,
    **overrides: Any,
):
    """Save a random Qwen3 to `path` and return it as transformers loads it, float32 and eager.

    Norm weights are random too, so that a misplaced one shows.

    Args:
      path: directory to write.
      seed: of the weights.
      dtype: of the stored weights.
      max_shard_size: of the files, as transformers spells it.
      rope: `rope_parameters` in the spelling of transformers v5.
      overrides: fields of the configuration that differ from `TINY`.
    """
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    config = transformers.Qwen3Config(**(TINY | overrides), **spelled_rope(rope))
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0.0, config.initializer_range, generator=generator)
    model.to(getattr(torch, dtype)).save_pretrained(path, max_shard_size=max_shard_size)
    return load_with_transformers(path)


def load_with_transformers(path: Path):
    """Return the transformers model of a checkpoint, in float32 and with eager attention."""
    import torch
    import transformers

    name = "dtype" if is_transformers_v5() else "torch_dtype"
    return transformers.Qwen3ForCausalLM.from_pretrained(
        path, attn_implementation="eager", **{name: torch.float32}
    ).eval()


def make_tokenizer(path: Path, num_words: int = 20, *, eos_token: str | None = "<eos>"):
    """Save a word-level tokenizer of `num_words` words and an EOS token (or none), and return it.

    The ids of "w0", "w1", ... are 0, 1, ...; that of the EOS token is `num_words`.
    """
    import tokenizers
    import transformers

    words = {f"w{i}": i for i in range(num_words)}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos_token)
    tokenizer.save_pretrained(path)
    return tokenizer
