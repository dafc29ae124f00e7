"""The statements of a script, stored in an SQL file in blocks that start with `-- name: NAME`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def read_statements(path: Path) -> dict[str, str]:
    """Return the statements by name."""
    _, *blocks = path.read_text("utf-8").split("-- name: ")
    named = (block.split("\n", 1) for block in blocks)
    return {name: text.strip() for name, text in named}
