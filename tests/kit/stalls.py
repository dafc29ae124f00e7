"""What riverpy says of a process that does not run: any test may be told so on a busy machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_STALLS = (
    "the event loop is blocked",
    "the event loop was blocked",
    "this process did not run for a while",
)


def is_stall(line: Mapping[str, Any]) -> bool:
    """Whether a line of the log is of that, and of nothing that a test is about."""
    return str(line["event"]).startswith(_STALLS)
