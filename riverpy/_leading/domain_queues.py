"""DomainQueues: reads which queues a leader maintains, if there is more than one domain.

A queue is orphaned if the heartbeat of its domain has not changed for `ORPHANED_AFTER`. It is also
orphaned if that heartbeat is older than `ORPHANED_AFTER` by the server's clock and has not changed
for `dead_after`. The server's clock alone does not decide, because it may be set to another time.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import anyio

from riverpy._clients.observer import HeartbeatObserver
from riverpy._leading.queue_scope import AllQueues, AllQueuesExcept, OnlyQueues
from riverpy._log import get_logger
from riverpy._log_events import QUEUE_OWNER_PERMISSION_DENIED
from riverpy._postgres.clients import LastHeartbeat
from riverpy._postgres.domains import ORPHANED_AFTER, owner_exists, owner_is_empty, owner_read
from riverpy._postgres.driver import InsufficientPrivilegeError, UndefinedTableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from riverpy._clock import Timer
    from riverpy._leading.queue_scope import QueueScope
    from riverpy._postgres.connection import DedicatedConnection
    from riverpy._postgres.domains import OwnedQueue

READ_INTERVAL = 1.0
"""Seconds for which the owners that were read are used. The services of a term often need them at
the same time."""
UNOWNED_READ_INTERVAL = 300.0
"""Seconds between two reads if no domain owns a queue and this client receives notifications: a
client that claims the first queue sends one. Also used if the table of owners is missing."""
STATEMENT_TIMEOUT = 5.0


class Owner(NamedTuple):
    """The domain that owns a queue."""

    queue: str
    domain: str
    is_orphaned: bool
    """Whether no client of the domain has written a heartbeat for a long time."""


class DomainQueues:
    """Reads the owners of queues during one term."""

    def __init__(
        self,
        connection: DedicatedConnection,
        schema: str | None,
        choose: Callable[[Sequence[Owner]], QueueScope],
        *,
        is_divided: Callable[[], bool],
        listens: bool,
        timer: Timer,
        dead_after: timedelta,
        contact: Callable[[], float],
    ) -> None:
        """Create the domain queues.

        Args:
            connection: the connection for short statements.
            schema: the schema of River's tables.
            choose: selects the queues to maintain, from the owners of queues.
            is_divided: returns whether the table of owners is known to exist. If not, the table is
                looked up from time to time, because a migration creates it without a notification.
            listens: whether `forget` is called when owners change.
            timer: measures time.
            dead_after: the client's setting `dead_after`.
            contact: returns how long this process has had contact with the server without a break,
                in seconds.
        """
        self._connection, self._schema, self._timer = connection, schema, timer
        self._choose, self._is_divided = choose, is_divided
        self._observer = HeartbeatObserver(timer, contact)
        self._dead_after = dead_after.total_seconds()
        self._unowned_interval = UNOWNED_READ_INTERVAL if listens else READ_INTERVAL
        self._scope: QueueScope = AllQueues()
        self._is_found = False  # whether a check has found the table
        self._next_read_at = 0.0
        self._forgotten = 0  # number of calls of `forget`
        self._lock = anyio.Lock()  # one service reads, the others wait for its result
        self._is_denial_logged = False
        self._log = get_logger()

    async def scope(self) -> QueueScope:
        """Return the queues to maintain now.

        Raises:
            Exception: one of DATABASE_ERRORS.
        """
        async with self._lock:
            if self._timer.boottime() >= self._next_read_at:
                forgotten = self._forgotten
                owners = await self._read()
                self._scope = AllQueues() if owners is None else self._choose(owners)
                if forgotten == self._forgotten:  # otherwise they may have changed since
                    unowned = UNOWNED_READ_INTERVAL if owners is None else self._unowned_interval
                    interval = READ_INTERVAL if owners else unowned
                    self._next_read_at = self._timer.boottime() + interval
            return self._scope

    def forget(self) -> None:
        """Read the owners again at the next call, because they have changed."""
        self._next_read_at = 0.0
        self._forgotten += 1

    async def _read(self) -> Sequence[Owner] | None:
        """Read the owners. Returns None if there is no table of owners."""
        purpose = "reading the owners of queues"
        async with self._connection.use(purpose, STATEMENT_TIMEOUT) as connection:
            if not (self._is_found or self._is_divided()):
                self._is_found = await owner_exists(connection, self._schema)
                if not self._is_found:
                    return None
            try:
                rows = await owner_read(
                    connection, self._schema, orphaned_after=timedelta(seconds=ORPHANED_AFTER)
                )
                return self._owners(rows)
            except UndefinedTableError:  # the table was dropped: no domain owns a queue
                return ()
            except InsufficientPrivilegeError:
                if not await owner_is_empty(connection, self._schema):
                    raise
                self._log_denial()
                return ()

    def _owners(self, rows: Sequence[OwnedQueue]) -> Sequence[Owner]:
        self._observer.observe(
            LastHeartbeat(row.queue, row.last_seen, 0.0 if row.is_old else ORPHANED_AFTER)
            for row in rows
        )
        silent = self._observer.silent(self._dead_after).heartbeats
        return [Owner(row.queue, row.domain, row.queue in silent) for row in rows]

    def _log_denial(self) -> None:
        if not self._is_denial_logged:
            self._is_denial_logged = True
            self._log.warning(
                QUEUE_OWNER_PERMISSION_DENIED,
                effect="maintenance will fail as soon as a domain owns a queue",
                advice="GRANT SELECT, INSERT, UPDATE, DELETE ON riverpy_queue_owner to this role",
            )


def of_default(owners: Sequence[Owner]) -> QueueScope:
    """Return the queues of `default`: all that no domain owns, and the orphaned ones."""
    return AllQueuesExcept(frozenset(owner.queue for owner in owners if not owner.is_orphaned))


def orphans(owners: Sequence[Owner]) -> QueueScope:
    """Return the orphaned queues."""
    return OnlyQueues(frozenset(owner.queue for owner in owners if owner.is_orphaned))


def of_domain(domain: str) -> Callable[[Sequence[Owner]], QueueScope]:
    """Return a function that selects the queues of this domain."""
    return lambda owners: OnlyQueues(
        frozenset(owner.queue for owner in owners if owner.domain == domain)
    )
