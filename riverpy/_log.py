"""Log: whether lines about single jobs are wanted."""

from __future__ import annotations

import logging
from typing import Any

import structlog


def tells_of_jobs(log: Any) -> bool:
    """Whether a line for each job would be written: the program asked structlog for debug lines. A
    program that never configured structlog asked for nothing."""
    if not structlog.is_configured():
        return False
    asked = getattr(log, "is_enabled_for", None) or getattr(log, "isEnabledFor", None)
    return asked is None or bool(asked(logging.DEBUG))
