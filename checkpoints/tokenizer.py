"""Load a checkpoint's tokenizer from its local files."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoints.json_files import read_object
from jaxspec.config import Qwen3Config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt")


def check_files(directory: Path) -> bool:
    """Return whether the directory has a tokenizer, after checking its files as far as JSON goes.

    Raises:
      FileNotFoundError: some tokenizer files are there, but not those that hold the vocabulary.
      OSError: a file cannot be read.
      ValueError: a file is malformed.
    """
    present = {name for name in _FILES if (directory / name).exists()}
    if not present:
        return False
    # transformers would quietly make an empty tokenizer out of the rest.
    if "tokenizer.json" not in present and not present >= {"vocab.json", "merges.txt"}:
        raise FileNotFoundError(
            f"{directory}: has {', '.join(sorted(present))} but neither tokenizer.json nor "
            "vocab.json with merges.txt"
        )
    for name in sorted(present - {"merges.txt"}):
        read_object(directory / name)
    return True


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase | None:
    """Return the directory's tokenizer, or None where it has no tokenizer files at all.

    Raises:
      FileNotFoundError: some tokenizer files are there, but not those that hold the vocabulary.
      OSError: a file cannot be read.
      ValueError: a file is malformed.
    """
    if not check_files(directory):
        return None
    # Imported here because it pulls in torch where that is installed, which weights do not need.
    # It would advise to install torch, which a tokenizer does not need.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # The tokenizers library raises bare Exception.
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"{directory}: cannot load the tokenizer: {reason}") from None


def with_tokenizer(config: Qwen3Config, tokenizer: PreTrainedTokenizerBase) -> Qwen3Config:
    """Return `config` with what only the tokenizer knows: its EOS id and the ids in use.

    Raises:
      ValueError: the tokenizer has no tokens, or its EOS id has no embedding.
    """
    # With holes among the added ids, `len(tokenizer)` would be too small.
    num_tokens = 1 + max(tokenizer.get_vocab().values(), default=-1)
    if num_tokens < 1:
        raise ValueError("the tokenizer has no tokens")
    eos_ids = dict.fromkeys(config.eos_token_ids)
    if tokenizer.eos_token_id is not None:
        eos_ids[tokenizer.eos_token_id] = None
    return dataclasses.replace(
        config,
        eos_token_ids=tuple(eos_ids),
        num_valid_tokens=min(num_tokens, config.vocab_size),
    )
