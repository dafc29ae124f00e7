"""RunOnceKeyCleaner: deletes the expired keys of `Client.run_once`, `run_at_most_once` and
`run_at_least_once`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._maintenance.base import MaintenanceService
from riverpy._maintenance.batch_runner import MaintenanceBatchRunner
from riverpy._postgres.executions import (
    ExpiredRunOnceKey,
    execution_delete_expired,
    execution_list_expired,
    execution_table_exists,
)

if TYPE_CHECKING:
    from riverpy._leading.term_context import TermContext
    from riverpy._lifecycle import StopScope

RUN_INTERVAL = 3600.0
"""Seconds between two runs."""


class RunOnceKeyCleaner(MaintenanceService):
    """Deletes the expired keys of `Client.run_once`, `run_at_most_once` and `run_at_least_once` in
    the whole schema. After a key is deleted, a call with this key runs its code again. Two leaders
    may delete keys at the same time."""

    name = "execution cleaner"

    def __init__(self, context: TermContext) -> None:
        super().__init__(context)
        self.batch_runner: MaintenanceBatchRunner[ExpiredRunOnceKey] = MaintenanceBatchRunner(
            self, "deleting expired keys", self._delete_expired_keys, row_key=lambda row: row.key
        )

    async def run_once(self, scope: StopScope) -> float:
        """Delete all expired keys, if the table of keys exists."""
        async with self.acquire_read_connection(
            "looking for the table of executions"
        ) as connection:
            has_table = await execution_table_exists(connection, self.schema)
        if has_table:
            await self.batch_runner.read_and_send_pages(self._read_expired_keys)
        return self.batch_runner.seconds_until_next_run(RUN_INTERVAL)

    async def _read_expired_keys(
        self, after: ExpiredRunOnceKey | None, limit: int
    ) -> list[ExpiredRunOnceKey]:
        async with self.acquire_read_connection("reading expired keys") as connection:
            return await execution_list_expired(
                connection, self.schema, after_cursor=after, limit=limit
            )

    async def _delete_expired_keys(self, executions: list[ExpiredRunOnceKey]) -> None:
        async with self.batch_runner.open_transaction() as connection:
            await execution_delete_expired(
                connection, self.schema, keys=[row.key for row in executions]
            )
