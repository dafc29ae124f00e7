"""ClientReaper: forgets clients that are dead for long."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from riverpy._db.clients import client_reap, client_silent
from riverpy._maintenance.base import MaintenanceService

if TYPE_CHECKING:
    from collections.abc import Callable

    from riverpy._lifecycle import StopScope
    from riverpy._maintenance.base import Office

INTERVAL = 600.0
"""Seconds between two passes: a row more or less costs nothing, and a look does."""
KEPT = timedelta(minutes=10)
"""How long a dead client is remembered."""
_LOOK_TIMEOUT = 5.0


class ClientReaper(MaintenanceService):
    """Deletes their rows, whatever queues they worked: the table of clients is the schema's."""

    name = "client reaper"

    def __init__(self, office: Office, contact: Callable[[], float]) -> None:
        """Make it.

        Args:
            office: of the term.
            contact: seconds for which this process has been in unbroken contact with the server.
                Who was out of contact cannot tell a dead client from one that was out of contact
                too.
        """
        super().__init__(office)
        self._contact = contact

    async def run_once(self, scope: StopScope) -> float:
        """Forget all that may be: mostly nobody is silent, and then one look is the whole pass.

        Raises:
            FencedOutError: the term is over.
            Exception: one of DATABASE_ERRORS.
        """
        office, dead_after = self.office, self.office.config.dead_after
        if self._contact() < dead_after.total_seconds():
            return INTERVAL
        async with office.connection.use("looking for dead clients", _LOOK_TIMEOUT) as connection:
            silent = await client_silent(connection, office.schema, dead_after=dead_after)
        if silent.client_ids:
            await self._reap(dead_after)
        return INTERVAL

    async def _reap(self, dead_after: timedelta) -> None:
        office = self.office
        async with office.mandate.transaction(
            office.connection, "forgetting dead clients"
        ) as connection:
            reaped = await client_reap(connection, office.schema, dead_after=dead_after, kept=KEPT)
        if reaped:
            self.log.info("forgot dead clients", client_ids=reaped)
