"""Plan: the worker of one kind of job and its resolved timeout."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from msgspec import UNSET

if TYPE_CHECKING:
    from datetime import timedelta

    from riverpy.worker import WorkUnit


class Plan:
    """A work unit and the timeout of its jobs in seconds. There is one plan per kind."""

    __slots__ = ("timeout", "timeout_is_default", "unit")

    def __init__(self, unit: WorkUnit, default: timedelta | None) -> None:
        self.unit = unit
        self.timeout = timeout_seconds(unit.resolve_timeout(default))
        self.timeout_is_default = unit.timeout is UNSET


def timeout_seconds(timeout: timedelta | None) -> float:
    """Return the seconds of a timeout; infinity for no timeout."""
    return math.inf if timeout is None else timeout.total_seconds()
