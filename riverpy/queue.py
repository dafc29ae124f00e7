"""Queues: the row of `river_queue` as it is read."""

from __future__ import annotations

from datetime import datetime  # noqa: TC003 (msgspec reads the annotations)
from typing import Any

import msgspec


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """A queue that clients work or worked not long ago."""

    name: str
    created_at: datetime
    metadata: dict[str, Any]
    """What `Client.queue_update` wrote; riverpy gives it no meaning."""
    paused_at: datetime | None
    """Since when nobody claims from it; None if it is not paused."""
    updated_at: datetime
    """When a client that works it last said so, or somebody changed it."""
