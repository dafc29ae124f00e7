"""DomainQueues: which queues the leader of a domain maintains, where there is more than one domain.

A domain is silent when its heartbeat has not changed for `ORPHANED_AFTER`, or is that old by the
server's clock and has not changed for `dead_after`: that clock may be stepped.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import anyio

from riverpy._clients.observer import HeartbeatObserver
from riverpy._leading.queue_scope import All, Except, Only
from riverpy._log import get_logger
from riverpy._log_events import QUEUE_OWNER_PERMISSION_DENIED
from riverpy._postgres.clients import LastHeartbeat
from riverpy._postgres.domains import ORPHANED_AFTER, owner_exists, owner_is_empty, owner_read
from riverpy._postgres.driver import InsufficientPrivilegeError, UndefinedTableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from riverpy._clock import Timer
    from riverpy._leading.queue_scope import Scope
    from riverpy._postgres.connection import DedicatedConnection
    from riverpy._postgres.domains import OwnedQueue

FRESH = 1.0
"""Seconds for which an answer serves: the services of a term often ask at once."""
UNDIVIDED = 300.0
"""The same of the answer that no domain has a queue, if notifications are listened to: who claims
the first one says so. And of the answer that there is no table of owners, in any case."""
STATEMENT_TIMEOUT = 5.0


class Owner(NamedTuple):
    """Which domain has a queue."""

    queue: str
    domain: str
    is_orphaned: bool
    """Whether no client of the domain has written a heartbeat for long."""


class DomainQueues:
    """Reads, for one term, whose the queues are."""

    def __init__(
        self,
        connection: DedicatedConnection,
        schema: str | None,
        choose: Callable[[Sequence[Owner]], Scope],
        *,
        is_divided: Callable[[], bool],
        listens: bool,
        timer: Timer,
        dead_after: timedelta,
        contact: Callable[[], float],
    ) -> None:
        """Make it.

        Args:
            connection: for statements that are short.
            schema: of River's tables.
            choose: what of the queues that domains have is maintained.
            is_divided: whether the table of owners is known to be there. Else it is looked for
                now and then, since it may be made while a leader runs that does not hear of it.
            listens: whether `forget` is called when queues change hands.
            timer: by which it measures.
            dead_after: the client's setting.
            contact: seconds for which this process has been in unbroken contact with the server.
        """
        self._connection, self._schema, self._timer = connection, schema, timer
        self._choose, self._is_divided = choose, is_divided
        self._observer = HeartbeatObserver(timer, contact)
        self._dead_after = dead_after.total_seconds()
        self._undivided = UNDIVIDED if listens else FRESH
        self._scope: Scope = All()
        self._is_found = False
        """Whether the table was looked for, and was there."""
        self._fresh_until = 0.0
        self._forgotten = 0
        """How often it was told to read anew, also while it reads."""
        self._lock = anyio.Lock()  # one asks, the others wait for the answer
        self._is_told = False
        """Whether it was said that the role may not read the table."""
        self._log = get_logger()

    async def scope(self) -> Scope:
        """What is to be maintained now.

        Raises:
            Exception: one of DATABASE_ERRORS: it is not known.
        """
        async with self._lock:
            if self._timer.boottime() >= self._fresh_until:
                forgotten = self._forgotten
                owners = await self._read()
                self._scope = All() if owners is None else self._choose(owners)
                if forgotten == self._forgotten:  # else the answer may be from before the change
                    undivided = UNDIVIDED if owners is None else self._undivided
                    fresh = FRESH if owners else undivided
                    self._fresh_until = self._timer.boottime() + fresh
            return self._scope

    def forget(self) -> None:
        """Read anew at the next call: queues have changed hands."""
        self._fresh_until = 0.0
        self._forgotten += 1

    async def _read(self) -> Sequence[Owner] | None:
        """Whose the queues are. None: there is no table of it."""
        purpose = "reading whose the queues are"
        async with self._connection.use(purpose, STATEMENT_TIMEOUT) as connection:
            if not (self._is_found or self._is_divided()):
                self._is_found = await owner_exists(connection, self._schema)
                if not self._is_found:
                    return None
            try:
                rows = await owner_read(
                    connection, self._schema, orphaned_after=timedelta(seconds=ORPHANED_AFTER)
                )
                return self._judge(rows)
            except UndefinedTableError:  # it was dropped: no domain has a queue
                return ()
            except InsufficientPrivilegeError:
                if not await owner_is_empty(connection, self._schema):
                    raise
                self._tell_of_grant()
                return ()

    def _judge(self, rows: Sequence[OwnedQueue]) -> Sequence[Owner]:
        self._observer.observe(
            LastHeartbeat(row.queue, row.last_seen, 0.0 if row.is_old else ORPHANED_AFTER)
            for row in rows
        )
        silent = self._observer.silent(self._dead_after).heartbeats
        return [Owner(row.queue, row.domain, row.queue in silent) for row in rows]

    def _tell_of_grant(self) -> None:
        if not self._is_told:
            self._is_told = True
            self._log.warning(
                QUEUE_OWNER_PERMISSION_DENIED,
                effect="maintenance will fail as soon as a domain owns a queue",
                advice="GRANT SELECT, INSERT, UPDATE, DELETE ON riverpy_queue_owner to this role",
            )


def of_default(owners: Sequence[Owner]) -> Scope:
    """Every queue but those of domains that give signs of life."""
    return Except(frozenset(owner.queue for owner in owners if not owner.is_orphaned))


def orphans(owners: Sequence[Owner]) -> Scope:
    """The queues of domains that give no sign of life."""
    return Only(frozenset(owner.queue for owner in owners if owner.is_orphaned))


def of_domain(domain: str) -> Callable[[Sequence[Owner]], Scope]:
    """The queues that this domain has."""

    def choose(owners: Sequence[Owner]) -> Scope:
        return Only(frozenset(owner.queue for owner in owners if owner.domain == domain))

    return choose
