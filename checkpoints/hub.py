"""Models that are named by their id on the Hugging Face hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from checkpoints.directories import left_aside

_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
# What a checkpoint consists of; a repository may hold the same weights in other formats too.
_WANTED = (
    "*.safetensors",
    "*.json",
    "*.txt",
    "*.jinja",
    "tokenizer*",
    "LICENSE*",
    "NOTICE*",
    "README.md",
)
_UNWANTED = ("*/*.safetensors", "onnx/*")


def find_directory(source: str | os.PathLike[str]) -> Path:
    """Return the directory of a checkpoint, downloading it first if `source` is a hub id.

    A directory that exists goes before an id that is spelled the same; only a string is an id.

    Raises:
      FileNotFoundError: there is no such directory and no such model.
      OSError: the model cannot be downloaded; one line says what to do.
    """
    path = Path(source)
    if not isinstance(source, str) or path.exists() or not _ID.fullmatch(source):
        return path
    if left_aside(path) is not None:
        return path  # Whoever opens it says so.
    return _download(source)


def _download(model_id: str) -> Path:
    # Imported here because it takes long and directories do not need it.
    import huggingface_hub
    from huggingface_hub import errors

    where = f"{model_id}: no such directory here"
    instead = f"download it elsewhere (hf download {model_id} --local-dir DIR) and give the folder"
    try:
        return Path(
            huggingface_hub.snapshot_download(
                model_id, allow_patterns=list(_WANTED), ignore_patterns=list(_UNWANTED)
            )
        )
    except errors.GatedRepoError:
        raise PermissionError(
            f"{where}, and the model of this name on the Hugging Face hub is gated: accept its "
            f"terms at https://huggingface.co/{model_id} and log in (hf auth login)"
        ) from None
    except errors.RepositoryNotFoundError:
        raise FileNotFoundError(
            f"{where} and no such model on the Hugging Face hub; if it is private, log in "
            "(hf auth login)"
        ) from None
    except errors.HFValidationError as error:
        raise FileNotFoundError(f"{where} and no valid hub id: {_first_line(error)}") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        # Before the error below, of which huggingface-hub 0.x makes the first one a subclass.
        raise ConnectionError(
            f"{where} or in the cache of the Hugging Face hub, which cannot be reached: check the "
            f"network and HF_HUB_OFFLINE, or {instead}"
        ) from None
    except errors.HfHubHTTPError as error:
        raise OSError(f"{where}, and the Hugging Face hub answered: {_first_line(error)}") from None
    except Exception as error:
        # Of the HTTP client, which changes between releases of the library.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ConnectionError(
            f"{where}, and the Hugging Face hub cannot be reached ({_first_line(error)}): check "
            f"the network, or {instead}"
        ) from None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
