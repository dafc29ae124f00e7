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
RETENTION = 600.0
"""Seconds for which the row of a dead client is kept."""
DELETION_MARGIN = 1.0
"""Seconds between the time at which a row may be deleted and the pass that deletes it."""


class ClientCleaner(MaintenanceService):
    """Deletes the rows of dead clients of all queues and domains."""

    name = "client cleaner"

    def __init__(self, context: TermContext, contact_seconds: Callable[[], float]) -> None:
        """Create the client cleaner. `contact_seconds` returns how long this process has had
        contact with the server without a break."""
        super().__init__(context)
        self._observer = HeartbeatObserver(context.timer, contact_seconds)
        self.batches: Batches[tuple[str, bytes]] = Batches(
            self, "deleting dead clients", self._delete_clients, key=itemgetter(0)
        )

    async def run_once(self, scope: StopScope) -> float:
        """Delete the rows of dead clients. If no client is dead, the pass only reads the
        heartbeats."""
        async with self.read_connection("looking for dead clients") as connection:
            self._observer.observe(*await client_heartbeats(connection, self.schema))
        dead_after = self.context.config.dead_after.total_seconds()
        stopped = self._observer.find_stopped_heartbeats(dead_after, extra_seconds=RETENTION)
        if stopped.heartbeats:
            await self.batches.handle_rows(stopped.heartbeats.items())
        return self.batches.delay(min(INTERVAL, stopped.seconds_until_next_stop + DELETION_MARGIN))

    async def _delete_clients(self, heartbeats: list[tuple[str, bytes]]) -> None:
        """Delete the rows of clients that have written no heartbeat after those in `heartbeats`."""
        async with self.batches.transaction() as connection:
            deleted = await client_delete_idle(connection, self.schema, dict(heartbeats))
        if deleted:
            self.log.info(DEAD_CLIENTS_DELETED, client_ids=deleted)
