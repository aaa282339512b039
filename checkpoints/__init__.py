"""Weights in and out: Hugging Face and converted directories <-> `jaxspec.Qwen3`."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from checkpoints.config_files import read_config
from checkpoints.conversion import Conversion, Format, convert, parse_size
from checkpoints.hub import find_directory
from checkpoints.huggingface import load_model, load_weights, save
from checkpoints.tokenizer import load_tokenizer, with_tokenizer
from jaxspec.config import Qwen3Config
from jaxspec.model import Qwen3
from jaxspec.sharding import check_mesh

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "BUNDLED_MODEL",
    "Checkpoint",
    "Conversion",
    "Format",
    "convert",
    "load",
    "load_model",
    "open_checkpoint",
    "parse_size",
    "save",
]

# A small Qwen3 trained on Python source, which comes with the package.
BUNDLED_MODEL = Path(__file__).parent / "qwen3-tiny-code"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A directory whose small files are read and whose weights are not: to check a call first.

    Attributes:
      directory: where the files are.
      config: with the end-of-text ids of all files (`generation_config.json`, `config.json`,
        tokenizer) and the number of ids that the tokenizer uses.
      tokenizer: None where the directory has none.
    """

    directory: Path
    config: Qwen3Config
    tokenizer: PreTrainedTokenizerBase | None

    def load_model(
        self,
        *,
        mesh: jax.sharding.Mesh | None = None,
        dtype: jax.typing.DTypeLike | None = None,
    ) -> Qwen3:
        """Load the weights; arguments and errors are those of `load`."""
        if mesh is not None:
            check_mesh(mesh)
        return load_weights(self.directory, self.config, dtype=dtype, mesh=mesh)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read configuration and tokenizer; the path and the errors are those of `load`."""
    directory = find_directory(path)
    config = read_config(directory)
    tokenizer = load_tokenizer(directory)
    if tokenizer is not None:
        try:
            config = with_tokenizer(config, tokenizer)
        except ValueError as error:
            raise ValueError(f"{directory}: tokenizer: {error}") from None
    return Checkpoint(directory, config, tokenizer)


def load(
    path: str | os.PathLike[str],
    *,
    mesh: jax.sharding.Mesh | None = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> tuple[Qwen3, PreTrainedTokenizerBase | None]:
    """Load model and tokenizer from a Hugging Face directory, a converted one or a hub id.

    The model's configuration gets the end-of-text ids of all files (`generation_config.json`,
    `config.json`, tokenizer) and the number of ids that the tokenizer uses.

    Args:
      path: the directory, or the id of a model on the Hugging Face hub such as
        "Qwen/Qwen3-0.6B"; a directory of that name goes first.
      mesh: devices to spread the parameters over, with axes `data` and `model`; None = all on the
        default device.
      dtype: of the parameters; None = that of the stored weights.

    Returns:
      The model, and the tokenizer or None where the directory has none.

    Raises:
      FileNotFoundError: the directory or a file it needs does not exist.
      MemoryError: the devices cannot hold the parameters.
      OSError: a file cannot be read, or the model cannot be downloaded.
      ValueError: a file is malformed, the model is not supported or cannot be spread over the
        mesh; one line names file and field.
    """
    if mesh is not None:
        check_mesh(mesh)
    checkpoint = open_checkpoint(path)
    return checkpoint.load_model(mesh=mesh, dtype=dtype), checkpoint.tokenizer
