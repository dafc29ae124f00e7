"""ExecutionCleaner: deletes the keys of `run_once` whose retention is over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._maintenance.base import MaintenanceService
from riverpy._maintenance.batches import Batches
from riverpy._postgres.executions import (
    ExpiredCursor,
    exec_delete_expired,
    exec_exists,
    exec_expired,
)

if TYPE_CHECKING:
    from riverpy._leading.term_context import TermContext
    from riverpy._lifecycle import StopScope

INTERVAL = 3600.0
"""Seconds between two passes."""
STATEMENT_TIMEOUT = 5.0
"""Seconds for one read."""


class ExecutionCleaner(MaintenanceService):
    """Deletes expired keys of `run_once` in the whole schema. Two leaders may do this at once."""

    name = "execution cleaner"

    def __init__(self, context: TermContext) -> None:
        """Create the execution cleaner.

        Args:
            context: what the services of the term share.
        """
        super().__init__(context)
        self.batches: Batches[ExpiredCursor] = Batches(
            self, "deleting expired keys", self._delete, key=lambda row: row.key
        )

    async def run_once(self, scope: StopScope) -> float:
        """Delete all expired keys, if the table exists.

        Raises:
            FencedOutError: the term is over.
            Exception: one of DATABASE_ERRORS.
        """
        context = self.context
        async with context.connection.use(
            "looking for the table of executions", STATEMENT_TIMEOUT
        ) as connection:
            is_there = await exec_exists(connection, context.schema)
        if is_there:
            await self.batches.handle_pages(self._read)
        return self.batches.delay(INTERVAL)

    async def _read(self, after: ExpiredCursor | None, limit: int) -> list[ExpiredCursor]:
        context = self.context
        async with context.connection.use("reading expired keys", STATEMENT_TIMEOUT) as connection:
            return await exec_expired(connection, context.schema, after=after, limit=limit)

    async def _delete(self, rows: list[ExpiredCursor]) -> None:
        async with self.batches.transaction() as connection:
            await exec_delete_expired(
                connection, self.context.schema, keys=[row.key for row in rows]
            )
