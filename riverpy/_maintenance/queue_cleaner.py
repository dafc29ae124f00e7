"""QueueCleaner: forgets queues that nobody works any more."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from riverpy._db.queues import queue_forget
from riverpy._maintenance.base import MaintenanceService
from riverpy._maintenance.batches import Batches

if TYPE_CHECKING:
    from riverpy._db.filters import QueueFilter
    from riverpy._lifecycle import StopScope
    from riverpy._maintenance.base import Office

INTERVAL = 3600.0
"""Seconds between two passes."""
RETENTION = timedelta(hours=24)
"""How long the row of a queue is kept that nobody touches. Clients touch theirs each few
minutes."""


class QueueCleaner(MaintenanceService):
    """Deletes the rows of such queues, but never one that is paused or has metadata: it says
    something that a worker of the queue must find when it comes back."""

    name = "queue cleaner"

    def __init__(self, office: Office) -> None:
        super().__init__(office)
        self._batches = Batches(office.timer, self.log)

    async def run_once(self, scope: StopScope) -> float:
        """Forget all that may be.

        Raises:
            FencedOutError: the term is over.
            Exception: one of DATABASE_ERRORS.
        """
        for within in (await self.office.scope()).filters():
            await self._batches.run(partial(self._forget, within))
        return INTERVAL

    async def _forget(self, within: QueueFilter | None, limit: int) -> int:
        office = self.office
        async with office.mandate.transaction(office.connection, "forgetting queues") as connection:
            names = await queue_forget(
                connection, office.schema, within=within, age=RETENTION, limit=limit
            )
        if names:
            self.log.info("queues forgotten", count=len(names), queues=names[:10])
        return len(names)
