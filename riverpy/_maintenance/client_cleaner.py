"""ClientCleaner: deletes the rows of clients that have been dead for a while."""

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

    from riverpy._leading.term_context import TermContext
    from riverpy._lifecycle import StopScope

INTERVAL = 600.0
"""Seconds between two passes."""
KEPT = 600.0
"""Seconds for which the row of a dead client is kept."""
MARGIN = 1.0
"""Seconds by which a pass comes later than the time at which a row may be deleted."""
_READ_TIMEOUT = 5.0


class ClientCleaner(MaintenanceService):
    """Deletes rows of dead clients, whatever their queues and domains."""

    name = "client cleaner"

    def __init__(self, context: TermContext, contact: Callable[[], float]) -> None:
        """Create the client cleaner.

        Args:
            context: the term's.
            contact: returns the seconds of this process's unbroken contact with the server. Without
                contact it cannot judge other clients.
        """
        super().__init__(context)
        self._observer = HeartbeatObserver(context.timer, contact)
        self.batches: Batches[tuple[str, bytes]] = Batches(
            self, "deleting dead clients", self._delete, key=itemgetter(0), name=itemgetter(0)
        )

    async def run_once(self, scope: StopScope) -> float:
        """Delete the rows that may be deleted. Mostly no client is dead, and a pass is one read.

        Raises:
            FencedOutError: the term is over.
            Exception: one of DATABASE_ERRORS.
        """
        context = self.context
        async with context.connection.use("looking for dead clients", _READ_TIMEOUT) as connection:
            self._observer.observe(*await client_heartbeats(connection, context.schema))
        dead_after = context.config.dead_after.total_seconds()
        silent = self._observer.silent(dead_after, kept=KEPT)
        if silent.heartbeats:
            await self.batches.handle(silent.heartbeats.items())
        return self.batches.delay(min(INTERVAL, silent.next_in + MARGIN))

    async def _delete(self, heartbeats: list[tuple[str, bytes]]) -> None:
        """Delete the rows of clients whose last heartbeat is still the observed one."""
        async with self.batches.transaction() as connection:
            deleted = await client_delete_idle(connection, self.context.schema, dict(heartbeats))
        if deleted:
            self.log.info(DEAD_CLIENTS_DELETED, client_ids=deleted)
