"""Periodic jobs: what is inserted by the clock, and when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from datetime import datetime

    PeriodicJobsStartHook = Callable[[Any], Awaitable[None]]


class PeriodicSchedule(Protocol):
    """When something is due."""

    def next(self, after: datetime, /) -> datetime | None:
        """The first time after `after` (aware, UTC) that it is due; None: never again."""
        ...
