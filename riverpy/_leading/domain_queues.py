"""DomainQueueReader: reads which queues a leader maintains, if there is more than one domain. A
domain is a group of clients that elect one leader.

A queue is orphaned if no client of its domain has written a heartbeat for
`DOMAIN_ORPHANED_AFTER_SECONDS`. The leader of the domain `default` maintains orphaned queues. If
this domain has no leader, or if its leader is not a riverpy client, the holder of the schema lease
maintains the orphaned queues.

This process measures with its own clock how long a heartbeat has not changed, because the server's
clock may be set to another time. If a heartbeat is older than `DOMAIN_ORPHANED_AFTER_SECONDS` by
the server's clock, the process waits only for `Config.dead_after`: if the heartbeat does not change
during this time, the queue is orphaned.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import anyio

from riverpy._clients.observer import HeartbeatObserver
from riverpy._leading.queue_scope import ALL_QUEUES, all_queues_except, only_queues
from riverpy._log import get_logger
from riverpy._log_events import QUEUE_OWNER_PERMISSION_DENIED
from riverpy._names import DEFAULT_DOMAIN, SCHEMA_LEASE_NAME
from riverpy._postgres.clients import LastHeartbeat
from riverpy._postgres.domains import (
    DOMAIN_ORPHANED_AFTER_SECONDS,
    owner_list_queues,
    owner_table_exists,
    owner_table_is_empty,
)
from riverpy._postgres.driver import InsufficientPrivilegeError, UndefinedTableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from riverpy._clock import Timer
    from riverpy._leading.queue_scope import QueueScope
    from riverpy._postgres.connection import DedicatedConnection
    from riverpy._postgres.domains import OwnedQueue

OWNED_QUEUES_READ_INTERVAL = 1.0
"""The owners of queues are cached for this number of seconds, because several maintenance services
of a leader often need the owners at the same time."""
READ_INTERVAL_WITHOUT_OWNED_QUEUES = 300.0
"""Seconds between two reads of the owners if no domain owns a queue and this client receives
notifications. The interval can be long, because a client that claims a queue for its domain sends a
notification. This interval is also used if the table of owners is missing."""
OWNED_QUEUES_READ_TIMEOUT = 5.0


class DomainQueueReader:
    """Reads during one term (a client's time as leader) which domains own which queues."""

    def __init__(
        self,
        connection: DedicatedConnection,
        schema: str | None,
        domain: str,
        *,
        has_notifications: bool,
        timer: Timer,
        dead_after: timedelta,
        contact_duration: Callable[[], float],
    ) -> None:
        """Create the reader. This call sends no statement.

        Args:
            domain: the domain of the leader, or the name of the schema lease. The holder of the
                schema lease maintains only orphaned queues.
            has_notifications: whether `forget_queue_owners` is called when owners change.
            contact_duration: returns for how many seconds, without interruption, this process has
                been in contact with the server.
        """
        self._connection, self._schema, self._timer = connection, schema, timer
        self._domain = domain
        self._observer = HeartbeatObserver(timer, contact_duration)
        self._dead_after = dead_after.total_seconds()
        self._no_owned_queues_interval = (
            READ_INTERVAL_WITHOUT_OWNED_QUEUES if has_notifications else OWNED_QUEUES_READ_INTERVAL
        )
        self._queue_scope = ALL_QUEUES
        self._has_owner_table = False
        self._next_read_at = 0.0
        self._forget_count = 0
        self._read_lock = anyio.Lock()  # one service reads, the others wait for its result
        self._is_denial_logged = False
        self._log = get_logger()

    async def read_queue_scope(self) -> QueueScope:
        """Return the queues to maintain now.

        Raises:
            Exception: one of DATABASE_ERRORS.
        """
        async with self._read_lock:
            if self._timer.seconds_since_boot() >= self._next_read_at:
                forget_calls = self._forget_count
                owned = await self._read_owned_queues()
                self._queue_scope = self._select_queue_scope(owned)
                if forget_calls == self._forget_count:  # False: owners changed during the read
                    interval = OWNED_QUEUES_READ_INTERVAL
                    if not owned and self._has_owner_table:
                        interval = self._no_owned_queues_interval
                    elif not owned:
                        interval = READ_INTERVAL_WITHOUT_OWNED_QUEUES
                    self._next_read_at = self._timer.seconds_since_boot() + interval
            return self._queue_scope

    def forget_queue_owners(self) -> None:
        """Forget the cached owners of queues, so that the next call of `read_queue_scope` reads the
        owners again."""
        self._next_read_at = 0.0
        self._forget_count += 1

    async def _read_owned_queues(self) -> Sequence[OwnedQueue]:
        """Read the queues that have an owner. If the table of owners is missing, return an empty
        sequence."""
        purpose = "reading the owners of queues"
        async with self._connection.acquire(purpose, OWNED_QUEUES_READ_TIMEOUT) as connection:
            # A migration that creates the table sends no notification. So check for the table at
            # each read until it exists.
            if not self._has_owner_table:
                self._has_owner_table = await owner_table_exists(connection, self._schema)
            if not self._has_owner_table:
                return ()
            try:
                return await owner_list_queues(
                    connection,
                    self._schema,
                    domain_orphaned_after=timedelta(seconds=DOMAIN_ORPHANED_AFTER_SECONDS),
                )
            except UndefinedTableError:  # the table was dropped, so no queue has an owner
                return ()
            except InsufficientPrivilegeError:
                if not await owner_table_is_empty(connection, self._schema):
                    raise
                self._log_permission_denied()
                return ()

    def _select_queue_scope(self, owned_queues: Sequence[OwnedQueue]) -> QueueScope:
        """Return the queues to maintain. `owned_queues` are the queues that have an owner."""
        self._observer.observe(
            LastHeartbeat(
                row.queue,
                row.last_heartbeat,
                0.0 if row.is_heartbeat_old else DOMAIN_ORPHANED_AFTER_SECONDS,
            )
            for row in owned_queues
        )
        orphaned = self._observer.find_stopped_heartbeats(self._dead_after).heartbeats
        if self._domain == DEFAULT_DOMAIN:
            return all_queues_except(row.queue for row in owned_queues if row.queue not in orphaned)
        if self._domain == SCHEMA_LEASE_NAME:
            return only_queues(orphaned)
        return only_queues(row.queue for row in owned_queues if row.domain == self._domain)

    def _log_permission_denied(self) -> None:
        if not self._is_denial_logged:
            self._is_denial_logged = True
            self._log.warning(
                QUEUE_OWNER_PERMISSION_DENIED,
                effect="maintenance will fail as soon as a domain owns a queue",
                advice="GRANT SELECT, INSERT, UPDATE, DELETE ON riverpy_queue_owner to this role",
            )
