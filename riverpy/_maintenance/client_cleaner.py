"""ClientCleaner: deletes the rows of clients that have been dead for a while."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING

from riverpy._clients.observer import HeartbeatObserver
from riverpy._log_events import DEAD_CLIENTS_DELETED
from riverpy._maintenance.base import MaintenanceService
from riverpy._maintenance.batch_runner import MaintenanceBatchRunner
from riverpy._postgres.clients import client_delete_dead_without_jobs, client_list_heartbeats

if TYPE_CHECKING:
    from collections.abc import Callable

    from riverpy._leading.term_context import TermContext
    from riverpy._lifecycle import StopScope

RUN_INTERVAL = 600.0
"""Seconds between two runs."""
DEAD_CLIENT_RETENTION = 600.0
"""Seconds for which the row of a dead client is kept."""
EXTRA_DELETION_DELAY = 1.0
"""Seconds from the end of a row's retention to the run that deletes the row."""


class ClientCleaner(MaintenanceService):
    """Deletes the rows of clients that have been dead for ten minutes. It handles the clients of
    all queues and domains."""

    name = "client cleaner"

    def __init__(self, context: TermContext, contact_duration: Callable[[], float]) -> None:
        """Create the client cleaner. `contact_duration` is a function that returns for how many
        seconds this process has had contact with the server without a break."""
        super().__init__(context)
        self._heartbeat_observer = HeartbeatObserver(context.timer, contact_duration)
        self.batch_runner: MaintenanceBatchRunner[tuple[str, bytes]] = MaintenanceBatchRunner(
            self, "deleting dead clients", self._delete_dead_clients, row_key=itemgetter(0)
        )

    async def run_once(self, scope: StopScope) -> float:
        """Delete the rows of dead clients. If there are none, the run only reads heartbeats."""
        async with self.acquire_read_connection("looking for dead clients") as connection:
            self._heartbeat_observer.observe(*await client_list_heartbeats(connection, self.schema))
        dead_after = self.context.config.dead_after.total_seconds()
        stopped = self._heartbeat_observer.find_stopped_heartbeats(
            dead_after, extra_seconds=DEAD_CLIENT_RETENTION
        )
        if stopped.heartbeats:
            await self.batch_runner.send_in_batches(stopped.heartbeats.items())
        interval = min(RUN_INTERVAL, stopped.seconds_until_next_stop + EXTRA_DELETION_DELAY)
        return self.batch_runner.seconds_until_next_run(interval)

    async def _delete_dead_clients(self, last_heartbeats: list[tuple[str, bytes]]) -> None:
        """Delete the rows of dead clients. `last_heartbeats` has the id and the last heartbeat of
        each. A client that has written another heartbeat since then, or that has a running job, is
        kept."""
        async with self.batch_runner.open_transaction() as connection:
            deleted = await client_delete_dead_without_jobs(
                connection, self.schema, dict(last_heartbeats)
            )
        if deleted:
            self.log.info(DEAD_CLIENTS_DELETED, client_ids=deleted)
