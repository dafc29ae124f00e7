"""Log lines about a process that does not run. On a busy machine they appear in any test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from riverpy._log_events import EVENT_LOOP_BLOCKED, EVENT_LOOP_RESUMED, PROCESS_PAUSED

if TYPE_CHECKING:
    from collections.abc import Mapping

_STALLS = {EVENT_LOOP_BLOCKED, EVENT_LOOP_RESUMED, PROCESS_PAUSED}


def is_stall(line: Mapping[str, Any]) -> bool:
    """Return whether a log line is about a stall of the process, which no test is about."""
    return line["event"] in _STALLS
