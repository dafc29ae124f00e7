"""Queue: a row of `river_queue`."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec


class Queue(msgspec.Struct, frozen=True, kw_only=True):
    """A queue with a row in `river_queue`. A client writes the row of each queue that it works."""

    name: str
    created_at: datetime
    metadata: dict[str, Any]
    """The metadata that `Client.queue_update` has set. riverpy itself does not use the metadata."""
    paused_at: datetime | None
    """The time at which the queue was paused; None: the queue is not paused."""
    updated_at: datetime
    """The time of the last change of the row. A client that works the queue updates it regularly.
    It is also updated when the queue is paused, resumed or gets other metadata."""
