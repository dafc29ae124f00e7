"""ClientCleaner: forgets clients that are dead for long."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING

from riverpy._clients.observer import HeartbeatObserver
from riverpy._log_events import DEAD_CLIENTS_DELETED
from riverpy._maintenance.base import MaintenanceService
from riverpy._maintenance.batches import Batches
from riverpy._postgres.clients import client_delete_idle, client_heartbeats

if TYPE_CHECKING:
    from collections.abc import Callable

    from riverpy._lifecycle import StopScope
    from riverpy._maintenance.base import TermContext

INTERVAL = 600.0
"""Seconds between two passes: a row more or less costs nothing, and a look does."""
KEPT = 600.0
"""Seconds for which a dead client is remembered."""
MARGIN = 1.0
"""Seconds that the pass which may forget a client comes later than that is so."""
_LOOK_TIMEOUT = 5.0


class ClientCleaner(MaintenanceService):
    """Deletes their rows, whatever queues they worked: the table of clients is the schema's."""

    name = "client reaper"

    def __init__(self, context: TermContext, contact: Callable[[], float]) -> None:
        """Make it.

        Args:
            context: of the term.
            contact: seconds for which this process has been in unbroken contact with the server.
                Without contact it cannot judge other clients.
        """
        super().__init__(context)
        self._observer = HeartbeatObserver(context.timer, contact)
        self.batches: Batches[tuple[str, bytes]] = Batches(
            self, "forgetting dead clients", self._reap, key=itemgetter(0), name=itemgetter(0)
        )

    async def run_once(self, scope: StopScope) -> float:
        """Forget all that may be: mostly no client is dead, and then one read is the whole pass.

        Raises:
            FencedOutError: the term is over.
            Exception: one of DATABASE_ERRORS.
        """
        context = self.context
        async with context.connection.use("looking for dead clients", _LOOK_TIMEOUT) as connection:
            self._observer.observe(*await client_heartbeats(connection, context.schema))
        dead_after = context.config.dead_after.total_seconds()
        silent = self._observer.silent(dead_after, kept=KEPT)
        if silent.heartbeats:
            await self.batches.handle(silent.heartbeats.items())
        return self.batches.delay(min(INTERVAL, silent.next_in + MARGIN))

    async def _reap(self, heartbeats: list[tuple[str, bytes]]) -> None:
        """Delete the rows of clients, each with the heartbeat that was observed."""
        async with self.batches.transaction() as connection:
            reaped = await client_delete_idle(connection, self.context.schema, dict(heartbeats))
        if reaped:
            self.log.info(DEAD_CLIENTS_DELETED, client_ids=reaped)
