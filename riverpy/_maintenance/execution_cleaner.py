"""ExecutionCleaner: forgets what was done once when its time is over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._db.executions import exec_forget, exec_is_there
from riverpy._maintenance.base import MaintenanceService
from riverpy._maintenance.batches import Batches

if TYPE_CHECKING:
    from riverpy._lifecycle import StopScope
    from riverpy._maintenance.base import Office

INTERVAL = 3600.0
"""Seconds between two passes."""
STATEMENT_TIMEOUT = 5.0
"""Seconds for what is read."""


class ExecutionCleaner(MaintenanceService):
    """Deletes such rows, whichever domain it serves: two leaders do not disturb each other."""

    name = "execution cleaner"

    def __init__(self, office: Office) -> None:
        """Make it.

        Args:
            office: what the services of the term share.
        """
        super().__init__(office)
        self._batches = Batches(office.timer, self.log)

    async def run_once(self, scope: StopScope) -> float:
        """Forget all that may be. Without the table there is nothing to forget.

        Raises:
            FencedOutError: the term is over.
            Exception: one of DATABASE_ERRORS.
        """
        office = self.office
        async with office.connection.use("looking for a table", STATEMENT_TIMEOUT) as connection:
            is_there = await exec_is_there(connection, office.schema)
        if is_there:
            await self._batches.run(self._forget)
        return INTERVAL

    async def _forget(self, limit: int) -> int:
        office = self.office
        purpose = "forgetting what was done once"
        async with office.mandate.transaction(office.connection, purpose) as connection:
            return await exec_forget(connection, office.schema, limit=limit)
