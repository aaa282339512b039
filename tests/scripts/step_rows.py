"""What the tests of `benchmark.py step` share."""

from __future__ import annotations

from typing import Any


def of(rows: list[dict[str, Any]], measure: str) -> list[dict[str, Any]]:
    """Return the rows of one measure."""
    return [row for row in rows if row["measure"] == measure]
