"""JobScheduler: makes scheduled and retryable jobs available when they are due."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from riverpy._leading.term_fence import TRANSACTION_LIMIT
from riverpy._log_events import DUPLICATE_JOBS_DISCARDED
from riverpy._maintenance.base import MaintenanceService
from riverpy._maintenance.batches import Batches
from riverpy._postgres.job_maintenance import job_due, job_lock_limit, job_schedule

if TYPE_CHECKING:
    from riverpy._lifecycle import StopScope
    from riverpy._maintenance.base import TermContext
    from riverpy._postgres.queue_filter import QueueFilter

INTERVAL = 5.0
"""Seconds between two passes."""
AHEAD = timedelta(seconds=INTERVAL)
"""Jobs that are due before the next pass are made available too: workers take none before its
time."""
LOCK_LIMIT = timedelta(milliseconds=50)
"""How long a pass waits for a transaction that inserts a job with a key that a due one needs."""


class JobScheduler(MaintenanceService):
    """Moves jobs in batches. One that cannot be moved is set aside."""

    name = "job scheduler"

    def __init__(self, context: TermContext) -> None:
        super().__init__(context)
        self.batches: Batches[int] = Batches(
            self, "making due jobs available", self._move, key=lambda job_id: job_id
        )
        self._left: list[int] = []
        """Jobs that this pass did not move: they are locked, or cannot give up a unique key."""

    async def run_once(self, scope: StopScope) -> float:
        """Move all that are due.

        Raises:
            FencedOutError: the term is over.
            Exception: one of DATABASE_ERRORS.
        """
        self._left = []
        queues = await self.context.scope()
        self.batches.begin(queues)
        for within in queues.filters():
            if not await self._move_due(within):
                break
        return INTERVAL

    async def _move_due(self, within: QueueFilter | None) -> bool:
        """Returns whether to go on."""
        while True:
            limit = self.batches.rows
            ids = await self._find(within, limit)
            if not await self.batches.handle(ids):
                return False
            if len(ids) < limit:
                return True

    async def _find(self, within: QueueFilter | None, limit: int) -> list[int]:
        connection, bound = self.context.connection, TRANSACTION_LIMIT.total_seconds()
        self.context.fence.expect_valid()
        async with connection.use("finding due jobs", bound) as open_connection:
            return await job_due(
                open_connection,
                self.context.schema,
                within=within,
                ahead=AHEAD,
                skipped=[*self._left, *(aside.row for aside in self.batches.aside.entries)],
                limit=limit,
            )

    async def _move(self, ids: list[int]) -> None:
        async with self.batches.transaction() as connection:
            await job_lock_limit(connection, LOCK_LIMIT)
            moved = await job_schedule(connection, self.context.schema, ids=ids, ahead=AHEAD)
        self._left += moved.left
        if moved.discarded:
            self.log.info(DUPLICATE_JOBS_DISCARDED, count=moved.discarded)
