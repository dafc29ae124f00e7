"""DatabaseSnapshot: the database that doctor checks, and the reads that several checks share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from riverpy._postgres.clients import client_registered
from riverpy._postgres.damaged_jobs import read_undamaged
from riverpy._postgres.leaders import leader_get
from riverpy._postgres.schema import (
    CLIENTS_VERSION,
    DOMAINS_VERSION,
    MAIN_LINE,
    OWN_LINE,
    PERIODIC_VERSION,
    SchemaState,
)
from riverpy._tools.doctor.statements import (
    doctor_backlogs,
    doctor_clients,
    doctor_kinds,
    doctor_periodic,
    doctor_running,
)
from riverpy._tools.domain_map import DomainMap, read_permitted_domains

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime, timedelta

    from riverpy._postgres.leaders import LeaderRow
    from riverpy._tools.doctor.session import Session
    from riverpy._tools.doctor.statements import (
        BacklogRow,
        ClientRow,
        KindRow,
        PeriodicRow,
        RunningRow,
        ServerRow,
    )

COUNT_LIMIT = 10_001
"""The maximum number of jobs that are counted in one queue and state."""
COUNT_TOTAL_LIMIT = 100_000
"""The maximum number of jobs that are counted in all queues and states. With many queues, fewer
jobs of each queue are counted."""
TOUCHED_LIMIT = 1200.0
"""Seconds. If the row of a queue was not updated for this time, no client works the queue. Clients
in every language update the row every 10 minutes."""
KINDS_LIMIT = 1_000
"""The maximum number of jobs in one queue and state whose kinds are read."""
KINDS_TOTAL_LIMIT = 20_000
"""The maximum number of jobs in all queues and states whose kinds are read. With many queues, fewer
jobs of each queue are read."""
WAITING = ("available", "retryable", "scheduled")
"""The states of waiting jobs."""
RUNNING_LIMIT = 10_001
"""The maximum number of running jobs that are read."""


def kinds_limit(backlogs: Sequence[BacklogRow]) -> int:
    """Return the maximum number of jobs of each backlog whose kinds are read."""
    return min(KINDS_LIMIT, KINDS_TOTAL_LIMIT // max(len(backlogs), 1) + 1)


@dataclass(frozen=True)
class Leader:
    """The current or the last leader."""

    row: LeaderRow
    is_registered: bool | None
    """Whether the leader is a registered riverpy client; None: not known."""

    @property
    def has_expired(self) -> bool:
        """Whether the lease of the leader has expired."""
        return self.row.remaining < 0


@dataclass
class DatabaseSnapshot:
    """A database that has River's tables. Each read may raise one of DATABASE_ERRORS."""

    session: Session
    server: ServerRow
    state: SchemaState
    listen_url: str | None
    """The URL for LISTEN; None: the URL of the session."""
    stuck_after: timedelta
    """The time after which a running job is reported."""
    max_lag: timedelta
    """The time after which a due job is reported."""
    notifications_arrive: bool = True
    """Whether the notification of the check `listen` arrived."""
    is_queue_full: bool = False
    """Whether the server's notification queue is so full that riverpy sends no notifications."""
    damaged: dict[int, str] = field(default_factory=dict[int, str])
    """The ids of the jobs that the server could not read, each with the server's error."""
    _backlogs: list[BacklogRow] | None = None

    @property
    def schema(self) -> str:
        """The schema of River's tables."""
        return self.state.schema

    @property
    def made_at(self) -> datetime:
        """The time at which River's tables were created."""
        return min(self.state.applied[MAIN_LINE].values())

    def has(self, version: int) -> bool:
        """Return whether the database has this migration of riverpy's own tables."""
        return version in self.state.versions(OWN_LINE)

    async def clients(self) -> list[ClientRow] | None:
        """Return the registered clients; None: the table of clients is missing."""
        if not self.has(CLIENTS_VERSION):
            return None
        async with self.session.reading() as connection:
            return await doctor_clients(connection, self.schema)

    async def domains(self) -> DomainMap | None:
        """Return the domains; None: the tables of domains are missing, or the role may not read
        these tables."""
        if not self.has(DOMAINS_VERSION):
            return None
        async with self.session.reading() as connection:
            return await read_permitted_domains(connection, self.schema)

    async def leader(self) -> Leader | None:
        """Return the current or last leader; None: there was no leader, or the last leader
        resigned."""
        async with self.session.reading() as connection:
            row = await leader_get(connection, self.schema)
            if row is None:
                return None
            if not self.has(CLIENTS_VERSION):
                return Leader(row, None)
            known = await client_registered(connection, self.schema, client_ids=[row.leader_id])
            return Leader(row, row.leader_id in known)

    async def backlogs(self) -> list[BacklogRow]:
        """Return how many jobs wait in each queue and state. Only the first call reads the
        database."""
        if self._backlogs is None:
            async with self.session.reading() as connection:
                self._backlogs = await doctor_backlogs(
                    connection, self.schema, limit=COUNT_LIMIT, total_limit=COUNT_TOTAL_LIMIT
                )
        return self._backlogs

    async def periodic(self) -> list[PeriodicRow]:
        """Return the periodic jobs. If the table of periodic jobs is missing, the list is empty."""
        if not self.has(PERIODIC_VERSION):
            return []
        async with self.session.reading() as connection:
            return await doctor_periodic(connection, self.schema)

    async def kinds(self, backlogs: Sequence[BacklogRow]) -> list[KindRow]:
        """Return the kinds of the first `kinds_limit` jobs of each backlog."""
        async with self.session.reading() as connection:
            rows, self.damaged = await read_undamaged(
                connection,
                self.schema,
                WAITING,
                lambda skipped: doctor_kinds(
                    connection, self.schema, backlogs, kinds_limit(backlogs), skipped=skipped
                ),
                self.damaged,
            )
            return rows

    async def running(self, clients: Sequence[ClientRow]) -> list[RunningRow]:
        """Return the running jobs in groups, the longest-running first. The reports of `clients`
        decide which jobs are stuck."""
        async with self.session.reading() as connection:
            rows, self.damaged = await read_undamaged(
                connection,
                self.schema,
                ["running"],
                lambda skipped: doctor_running(
                    connection,
                    self.schema,
                    clients=clients,
                    long=self.stuck_after,
                    limit=RUNNING_LIMIT,
                    skipped=skipped,
                ),
                self.damaged,
            )
            return rows
