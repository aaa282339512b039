"""Small sound checkpoints for the tests of malformed ones to change."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.helpers import make_hf_checkpoint

SHAPE = {
    "vocab_size": 13,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
}


@pytest.fixture(scope="session")
def sources(tmp_path_factory) -> dict[str, Path]:
    """Return a sound one-file and a sound sharded checkpoint, which no test changes."""
    single, sharded = (tmp_path_factory.mktemp(name) for name in ("single", "sharded"))
    make_hf_checkpoint(single, **SHAPE)
    make_hf_checkpoint(sharded, max_shard_size="1KB", **SHAPE)
    return {"single": single, "sharded": sharded}


@pytest.fixture
def single(sources, tmp_path) -> Path:
    return Path(shutil.copytree(sources["single"], tmp_path / "model"))


@pytest.fixture
def sharded(sources, tmp_path) -> Path:
    return Path(shutil.copytree(sources["sharded"], tmp_path / "model"))
