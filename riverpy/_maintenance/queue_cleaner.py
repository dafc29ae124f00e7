"""QueueCleaner: deletes the rows of queues that no client has used for a day."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from riverpy._log_events import UNUSED_QUEUES_DELETED
from riverpy._maintenance.base import MaintenanceService
from riverpy._maintenance.batch_runner import MaintenanceBatchRunner
from riverpy._postgres.queues import queue_delete_unused, queue_list_unused

if TYPE_CHECKING:
    from riverpy._leading.term_context import TermContext
    from riverpy._lifecycle import StopScope
    from riverpy._postgres.sql_files import QueueFilter

RUN_INTERVAL = 3600.0
"""Seconds between two runs."""
QUEUE_RETENTION = timedelta(hours=24)
"""How long the row of an unused queue is kept. Clients update the rows of their queues every ten
minutes."""


class QueueCleaner(MaintenanceService):
    """Deletes the rows of unused queues. Rows of paused queues, and of queues with metadata, are
    kept for the next client that uses the queue."""

    name = "queue cleaner"

    def __init__(self, context: TermContext) -> None:
        super().__init__(context)
        self.batch_runner: MaintenanceBatchRunner[str] = MaintenanceBatchRunner(
            self, "deleting unused queues", self._delete_unused_queues, row_key=str
        )

    async def run_once(self, scope: StopScope) -> float:
        """Delete the rows of all unused queues."""
        queues = await self.context.read_queue_scope()
        self.batch_runner.set_queue_scope(queues)
        for within in queues.make_statement_filters():
            await self.batch_runner.read_and_send_pages(partial(self._read_unused_queues, within))
        return self.batch_runner.seconds_until_next_run(RUN_INTERVAL)

    async def _read_unused_queues(
        self, queue_filter: QueueFilter | None, after: str | None, limit: int
    ) -> list[str]:
        async with self.acquire_read_connection("looking for unused queues") as connection:
            return await queue_list_unused(
                connection,
                self.schema,
                queue_filter=queue_filter,
                unused_for=QUEUE_RETENTION,
                after_name=after or "",
                limit=limit,
            )

    async def _delete_unused_queues(self, queue_names: list[str]) -> None:
        async with self.batch_runner.open_transaction() as connection:
            deleted = await queue_delete_unused(
                connection, self.schema, names=queue_names, unused_for=QUEUE_RETENTION
            )
        if deleted:
            self.log.info(UNUSED_QUEUES_DELETED, count=len(deleted), queues=sorted(deleted)[:10])
