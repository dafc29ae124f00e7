"""Queue: a row of `river_queue`."""

from __future__ import annotations

from datetime import datetime  # noqa: TC003 (msgspec reads the annotations)
from typing import Any

import msgspec


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """A queue that a client works, or worked in the last days."""

    name: str
    created_at: datetime
    metadata: dict[str, Any]
    """Set by `Client.queue_update`. riverpy does not use it."""
    paused_at: datetime | None
    """When the queue was paused. None: it is not paused."""
    updated_at: datetime
    """When a client that works the queue last updated the row, or the queue was changed."""
