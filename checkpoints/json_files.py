"""JSON files that must hold one object; every fault is one line that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def parse_object(text: bytes, where: str) -> dict[str, Any]:
    """Parse JSON text that must be one object without repeated names.

    Args:
      text: UTF-8 bytes.
      where: what the text is, for the message.

    Raises:
      ValueError: the text is not UTF-8, not JSON, not an object, or repeats a name.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            repeated = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"name {repeated!r} occurs twice")
        return dict(pairs)

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 text (byte {error.start})") from None
    except ValueError as error:
        raise ValueError(f"{where}: not valid JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"{where}: not valid JSON: nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where}: holds a JSON {type(value).__name__}, expected an object")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that must hold one object.

    Raises:
      OSError: the file cannot be read.
      ValueError: its contents are not one JSON object.
    """
    return parse_object(path.read_bytes(), str(path))


def write_object(path: Path, value: dict[str, Any]) -> None:
    """Write one JSON object, indented, with a final newline."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
