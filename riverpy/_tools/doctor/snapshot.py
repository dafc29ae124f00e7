"""DatabaseSnapshot: what doctor reads from a database for several checks. Most values are read only
once."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from riverpy._postgres.schema import (
    CLIENTS_MIGRATION,
    DOMAINS_MIGRATION,
    LEASE_REPORTS_MIGRATION,
    PERIODIC_JOBS_MIGRATION,
    RIVERPY_MIGRATION_LINE,
    SchemaState,
)
from riverpy._tools.doctor.statements import (
    read_backlogs,
    read_periodic_jobs,
    read_queues,
    read_running_job_groups,
    read_waiting_kinds,
)
from riverpy._tools.domain_map import DomainMap, read_domains_if_permitted
from riverpy._tools.lease_map import LeaseReportMap, read_lease_reports
from riverpy._tools.reads import (
    read_clients,
    read_default_domain_leader,
    run_job_statement_despite_damage,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from riverpy._postgres.passwords import PasswordSource
    from riverpy._tools.doctor.session import DoctorSession
    from riverpy._tools.doctor.statements import (
        BacklogRow,
        PeriodicJobRow,
        QueueRow,
        RunningJobGroup,
        ServerRow,
        WaitingKindRow,
    )
    from riverpy._tools.reads import ClientRow, DefaultDomainLeader

ResultT = TypeVar("ResultT")

STUCK_JOB_AGE_DEFAULT = timedelta(minutes=10)
QUEUE_LAG_MAX_DEFAULT = timedelta(minutes=1)
LEASE_LAG_AGE_MAX_DEFAULT = timedelta(minutes=5)
CLIENTS_MAX = 10_000
JOB_COUNT_MAX = 10_001
"""The maximum number of jobs that are counted in one queue and state."""
JOB_COUNT_TOTAL_MAX = 100_000
"""The maximum number of jobs that are counted in all queues and states. With many queues, fewer
jobs of each queue are counted."""
QUEUE_ROW_AGE_MAX_SECONDS = 1200.0
"""If the row of a queue was not updated for this many seconds, no client works the queue. Clients
in every language update the row every 10 minutes."""
SAMPLED_JOBS_OF_QUEUE_MAX = 1_000
"""doctor reads the kinds of at most this many waiting jobs in each queue and state."""
SAMPLED_JOBS_MAX = 20_000
"""doctor reads the kinds of at most about this many waiting jobs in total. With many queues, doctor
reads fewer jobs of each queue."""
WAITING_JOB_STATES = ("available", "retryable", "scheduled")
"""The states of waiting jobs."""
RUNNING_JOBS_MAX = 10_001
"""doctor reads at most this many running jobs."""


def compute_backlog_sample_size(backlogs: Sequence[BacklogRow]) -> int:
    """Return the maximum number of jobs per backlog that are read to find their kinds. A backlog is
    all waiting jobs of one queue in one state."""
    return min(SAMPLED_JOBS_OF_QUEUE_MAX, SAMPLED_JOBS_MAX // max(len(backlogs), 1) + 1)


def _read_once(
    read: Callable[[DatabaseSnapshot], Awaitable[ResultT]],
) -> Callable[[DatabaseSnapshot], Awaitable[ResultT]]:
    """Decorate a method that reads the database. When one call has succeeded, later calls return
    the same result."""

    @wraps(read)
    async def read_once(snapshot: DatabaseSnapshot) -> ResultT:
        if read not in snapshot.cached_results:
            snapshot.cached_results[read] = await read(snapshot)
        return snapshot.cached_results[read]

    return read_once


@dataclass(frozen=True)
class WorkerProgram:
    """The program that the user names in `riverpy doctor MODULE:ATTR`. doctor compares the kinds
    and queues of this program with the waiting jobs. The program need not run."""

    name: str
    """The place of the program's Client or Workers object, in the form MODULE:ATTR."""
    kinds: frozenset[str]
    queues: frozenset[str]
    """The queues that the program works. Empty: the program names no queue."""


@dataclass(frozen=True)
class DoctorOptions:
    """The database that doctor checks, and the options of the checks."""

    url: str
    schema: str | None
    """The schema of River's tables. None: the schema of the search path."""
    listen_url: str | None
    """The URL for LISTEN. None: `url` is used."""
    stuck_after: timedelta = STUCK_JOB_AGE_DEFAULT
    """A job that runs for longer than this is reported."""
    max_lag: timedelta = QUEUE_LAG_MAX_DEFAULT
    """A queue that clients work is reported if its oldest due job has waited for this time."""
    max_lag_age: timedelta = LEASE_LAG_AGE_MAX_DEFAULT
    """A lease is reported if its holder is late: the oldest unhandled item of its work is older
    than this. (The holder reports its lag with `Lease.report_lag`.)"""
    program: WorkerProgram | None = None
    """The program whose kinds are checked. None: no program is checked."""
    password: PasswordSource | None = None
    """The password for `url` and `listen_url`, from the user's function. None: the password is in
    the URLs or the environment."""


@dataclass
class DatabaseSnapshot:
    """What doctor reads from a database that has River's tables. Each method that reads may raise
    one of DATABASE_ERRORS."""

    session: DoctorSession
    server: ServerRow
    schema_state: SchemaState
    options: DoctorOptions
    has_received_notification: bool = True
    """Whether the test notification of the check `listen` arrived."""
    is_notification_queue_full: bool = False
    """Whether the server's notification queue is so full that riverpy sends no notifications."""
    damaged_job_errors: dict[int, str] = field(default_factory=dict[int, str])
    """The jobs that the server could not read. The key is the job id, the value is the server's
    error."""
    cached_results: dict[object, Any] = field(default_factory=dict[object, Any])
    """The results of the methods that read the database only once."""

    @property
    def schema(self) -> str:
        """The schema of River's tables."""
        return self.schema_state.schema

    def has_migration(self, version: int) -> bool:
        """Return whether this version of migration line `riverpy` is applied."""
        return version in self.schema_state.applied_versions(RIVERPY_MIGRATION_LINE)

    @_read_once
    async def clients(self) -> list[ClientRow] | None:
        """Return the registered clients, or None if the table of clients is missing."""
        if not self.has_migration(CLIENTS_MIGRATION):
            return None
        return await self.session.read(read_clients, self.schema, limit=CLIENTS_MAX)

    async def live_clients(self) -> list[ClientRow]:
        """Return the registered clients that are alive."""
        return [client for client in await self.clients() or () if client.is_alive]

    @_read_once
    async def domains(self) -> DomainMap | None:
        """Return the domains, or None if the tables of domains are missing or the role may not read
        them."""
        if not self.has_migration(DOMAINS_MIGRATION):
            return None
        return await self.session.read(read_domains_if_permitted, self.schema)

    @_read_once
    async def lease_reports(self) -> LeaseReportMap | None:
        """Return what the live clients report about leases, or None if the table of clients has no
        column for it."""
        if not self.has_migration(LEASE_REPORTS_MIGRATION):
            return None
        return await self.session.read(read_lease_reports, self.schema)

    @_read_once
    async def last_leader(self) -> DefaultDomainLeader | None:
        """Return the current or last leader. Return None if there was no leader, or if the last
        leader resigned."""
        has_clients = self.has_migration(CLIENTS_MIGRATION)
        return await self.session.read(
            read_default_domain_leader, self.schema, has_client_table=has_clients
        )

    @_read_once
    async def backlogs(self) -> list[BacklogRow]:
        """Return the number of waiting jobs in each queue and state."""
        return await self.session.read(
            read_backlogs, self.schema, limit=JOB_COUNT_MAX, total_limit=JOB_COUNT_TOTAL_MAX
        )

    @_read_once
    async def queues(self) -> list[QueueRow]:
        """Return the rows of River's table of queues."""
        return await self.session.read(read_queues, self.schema)

    @_read_once
    async def periodic_jobs(self) -> list[PeriodicJobRow]:
        """Return the periodic jobs. If the table of periodic jobs is missing, the list is empty."""
        if not self.has_migration(PERIODIC_JOBS_MIGRATION):
            return []
        return await self.session.read(read_periodic_jobs, self.schema)

    async def waiting_kinds(self, backlogs: Sequence[BacklogRow]) -> list[WaitingKindRow]:
        """Return the kinds of the waiting jobs of these backlogs. In each backlog, only the first
        jobs are read, in the order of claims. `compute_backlog_sample_size` returns how many."""
        return await self.session.read(
            run_job_statement_despite_damage,
            self.schema,
            WAITING_JOB_STATES,
            self.damaged_job_errors,
            read_waiting_kinds,
            backlogs=backlogs,
            limit=compute_backlog_sample_size(backlogs),
        )

    @_read_once
    async def running_job_groups(self) -> list[RunningJobGroup]:
        """Return the running jobs in groups of the same client, kind and queue. The group with the
        longest-running job comes first. Jobs that their client reports as stuck are in separate
        groups."""
        return await self.session.read(
            run_job_statement_despite_damage,
            self.schema,
            ["running"],
            self.damaged_job_errors,
            read_running_job_groups,
            clients=await self.clients() or (),
            long_running_after=self.options.stuck_after,
            limit=RUNNING_JOBS_MAX,
        )
