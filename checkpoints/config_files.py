"""`config.json` and `generation_config.json` <-> `Qwen3Config`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from checkpoints.directories import left_aside
from checkpoints.json_files import read_object, write_object
from jaxspec.config import Qwen3Config

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
# All other fields of `Qwen3Config` are those of `config.json`.
_SPELLED_OTHERWISE = {"rope_scaling", "eos_token_ids", "num_valid_tokens"}


def read_config(directory: Path) -> Qwen3Config:
    """Read the model's shape and its end-of-text ids.

    Raises:
      FileNotFoundError: the directory or its `config.json` does not exist.
      OSError: a file cannot be read.
      ValueError: a file is malformed, or the model is not a supported dense Qwen3.
    """
    aside = left_aside(directory)
    hint = f"; a killed conversion left the old one at {aside}: rename it back" if aside else ""
    if not directory.exists():
        raise FileNotFoundError(f"{directory}: no such directory{hint}")
    if not directory.is_dir():
        raise NotADirectoryError(f"{directory}: not a directory")
    path = directory / CONFIG_FILE
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file (a Hugging Face checkpoint has one){hint}")
    config = read_object(path)
    parsed = _parse(path, config)
    generation_path = directory / GENERATION_CONFIG_FILE
    if not generation_path.exists():
        return parsed
    return _parse(generation_path, config, read_object(generation_path))


def _parse(
    path: Path, config: dict[str, Any], generation_config: dict[str, Any] | None = None
) -> Qwen3Config:
    try:
        return Qwen3Config.from_hf(config, generation_config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def write_config(config: Qwen3Config, directory: Path, *, dtype_name: str) -> None:
    """Write both files; transformers v4 and v5 spell rope and dtype differently, so both are there.

    Args:
      config: the model's shape.
      directory: where to write.
      dtype_name: of the stored weights, e.g. "bfloat16".

    Raises:
      OSError: a file cannot be written.
    """
    eos_ids = list(config.eos_token_ids)
    scaling = None
    if config.rope_scaling is not None:
        scaling = {"rope_type": "yarn"} | _without_none(dataclasses.asdict(config.rope_scaling))
    rope = (scaling or {"rope_type": "default"}) | {"rope_theta": config.rope_theta}
    names = [field.name for field in dataclasses.fields(config)]
    values = {name: getattr(config, name) for name in names if name not in _SPELLED_OTHERWISE}
    write_object(
        directory / CONFIG_FILE,
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            **values,
            "rope_scaling": scaling,
            "rope_parameters": rope,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "use_cache": True,
            "eos_token_id": eos_ids[0] if eos_ids else None,
            "torch_dtype": dtype_name,
            "dtype": dtype_name,
        },
    )
    generation = {"eos_token_id": eos_ids} if eos_ids else {}
    write_object(directory / GENERATION_CONFIG_FILE, generation)


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
