"""What the tests of malformed checkpoints share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import checkpoints

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def error_of(directory: Path, kind: type[Exception] = ValueError) -> str:
    """Load, and return the one line of the error."""
    with pytest.raises(kind) as raised:
        checkpoints.load(directory)
    message = str(raised.value)
    assert len(message.splitlines()) == 1
    return message


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
