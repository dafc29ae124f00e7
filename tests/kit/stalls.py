"""Log lines about a process that does not run. On a busy machine they appear in any test."""

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
    """Return whether a log line is about a stall of the process, which no test is about."""
    return str(line["event"]).startswith(_STALLS)
