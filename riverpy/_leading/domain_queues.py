"""DomainQueues: the queues that a leader maintains, if there is more than one domain.

A domain is silent if its heartbeat has not changed for `ORPHANED_AFTER`. A domain is also silent if
the heartbeat is that old by the server's clock, and has not changed for `dead_after`. The server's
clock alone does not decide, because that clock may be set to another time.
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
"""Seconds after which the owners of queues are read again. The services of a term share the last
read."""
UNDIVIDED_READ_INTERVAL = 300.0
"""Seconds after which the owners are read again, if no domain owns a queue, or if there is no table
of owners. A client that claims the first queue sends a notification, so the interval is long only
for clients that receive notifications."""
STATEMENT_TIMEOUT = 5.0


class Owner(NamedTuple):
    """The domain that owns a queue."""

    queue: str
    domain: str
    is_orphaned: bool
    """Whether the domain is silent: none of its clients has written a heartbeat for long."""


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
        self._undivided = UNDIVIDED_READ_INTERVAL if listens else READ_INTERVAL
        self._scope: QueueScope = AllQueues()
        self._is_found = False
        """Whether a check has found the table."""
        self._fresh_until = 0.0
        self._forgotten = 0
        """The number of calls of `forget`."""
        self._lock = anyio.Lock()  # one service reads, the others wait for its result
        self._is_denial_logged = False
        self._log = get_logger()

    async def scope(self) -> QueueScope:
        """Return the queues to maintain now.

        Raises:
            Exception: one of DATABASE_ERRORS.
        """
        async with self._lock:
            if self._timer.boottime() >= self._fresh_until:
                forgotten = self._forgotten
                owners = await self._read()
                self._scope = AllQueues() if owners is None else self._choose(owners)
                if forgotten == self._forgotten:  # else the owners may have changed during the read
                    undivided = UNDIVIDED_READ_INTERVAL if owners is None else self._undivided
                    fresh = READ_INTERVAL if owners else undivided
                    self._fresh_until = self._timer.boottime() + fresh
            return self._scope

    def forget(self) -> None:
        """Read the owners again at the next call, because they have changed."""
        self._fresh_until = 0.0
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
    """Return the queues that no domain owns, and those of silent domains."""
    return AllQueuesExcept(frozenset(owner.queue for owner in owners if not owner.is_orphaned))


def orphans(owners: Sequence[Owner]) -> QueueScope:
    """Return the queues of silent domains."""
    return OnlyQueues(frozenset(owner.queue for owner in owners if owner.is_orphaned))


def of_domain(domain: str) -> Callable[[Sequence[Owner]], QueueScope]:
    """Return a function that selects the queues that `domain` owns."""

    def choose(owners: Sequence[Owner]) -> QueueScope:
        return OnlyQueues(frozenset(owner.queue for owner in owners if owner.domain == domain))

    return choose
