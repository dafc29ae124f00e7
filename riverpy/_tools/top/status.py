"""The status that `riverpy top` shows: the queues, workers and leaders of a schema at one
moment."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import anyio
import msgspec

from riverpy._postgres.damaged_jobs import find_damaged_jobs
from riverpy._postgres.driver import close_connection, connect
from riverpy._postgres.jobs import FINAL_STATES
from riverpy._postgres.schema import (
    CLIENTS_MIGRATION,
    DOMAINS_MIGRATION,
    LEASE_REPORTS_MIGRATION,
    LEASES_MIGRATION,
    RIVERPY_MIGRATION_LINE,
    check_schema,
)
from riverpy._tools.doctor.server import require_primary
from riverpy._tools.domain_map import read_domains_if_permitted
from riverpy._tools.reads import (
    read_clients,
    read_default_domain_leader,
    run_job_statement_despite_damage,
)
from riverpy._tools.top.lease_status import LeaseStatus, ShownLeases, read_lease_statuses
from riverpy._tools.top.statements import (
    EndedJobCountsRow,
    KindWithoutWorker,
    QueueJobCountsRow,
    RunningJobCountRow,
    count_pending_and_finished_jobs,
    read_ended_job_counts,
    read_kinds_without_worker,
    read_queue_job_counts,
    read_queue_names,
    read_running_job_counts,
    read_time_and_job_count,
    set_statement_timeout,
)

if TYPE_CHECKING:
    from riverpy._postgres.driver import Connection, Transaction
    from riverpy._tools.domain_map import DomainMap
    from riverpy._tools.reads import ClientRow

RATE_WINDOW = timedelta(seconds=10)
"""The time window for the rates `started_per_s`, `completed_per_s` and `failed_per_s`."""
LATE_JOB_AFTER = timedelta(seconds=10)
"""A scheduled job or retry counts as late this long after it is due. A leader needs at most 5 s to
make it available."""
JOB_COUNT_MAX = 10_000
"""The number at which the counting of jobs stops. Available, running, scheduled and retryable jobs
are counted for each queue and state. Pending and finished jobs are counted for each state, in all
queues together."""
JOB_COUNT_TOTAL_MAX = 30_000
"""The maximum number of jobs of one state that are counted in all queues. With many queues, fewer
jobs of each queue are counted."""
READ_JOBS_MAX = 1_000
"""The maximum number of jobs of one state in one queue whose attempts and errors are read."""
READ_JOBS_TOTAL_MAX = 2_000
"""The maximum number of jobs of one state in all queues whose attempts and errors are read. With
many queues, fewer jobs of each queue are read, but at least one."""
RUNNING_JOBS_MAX = 2_000
"""The maximum number of running jobs that are read, to count the jobs of each client."""
ENDED_JOBS_MAX = 2_000
"""The maximum number of recently ended jobs of each final state that are read. If more jobs have
ended, the rates are computed over a shorter time."""
QUEUES_MAX = 1_000
SAMPLED_JOBS_MAX = 20_000
"""The maximum number of available jobs whose kinds are read. At most 1,000 jobs of one queue are
read."""
KINDS_WITHOUT_WORKER_MAX = 20
"""The maximum number of kinds without a worker that are shown."""
CLIENTS_MAX = 1_000
STATEMENT_TIMEOUT = timedelta(seconds=5)
"""The server cancels a statement after this time."""
STATUS_READ_TIMEOUT = 15.0
"""The timeout of one read in seconds, including the time for connecting."""


class QueueStatus(msgspec.Struct, frozen=True):
    """The status of one queue."""

    name: str
    paused: bool
    workers: int | None
    """The number of live clients that work the queue. None if this is not known, because riverpy's
    own tables are missing."""
    available: int
    due_for: float | None
    """Seconds since the oldest job became due; None: no job is due."""
    running: int
    slots: int | None
    """The number of slots that the live clients have for the queue, i.e. how many of its jobs they
    run at the same time. None if this is not known, because a client has an older version of
    riverpy or riverpy's own tables are missing."""
    scheduled: int
    retryable: int
    late: int
    """The number of scheduled jobs and retries that should be available by now, but no leader has
    made them available."""
    started_per_s: float
    completed_per_s: float
    failed_per_s: float
    wait_p95: float | None
    """The 95th percentile of the wait times, in seconds. A wait time starts when the job is due,
    and ends when its last attempt starts. Only jobs that started and ended recently count. None if
    there was no such job."""


class WorkerStatus(msgspec.Struct, frozen=True):
    """A client that is registered or runs jobs."""

    client_id: str
    state: str
    """`alive`, `stopping`, `silent` (no heartbeat for `dead_after` seconds), or `unregistered` (a
    River client in Go, or a client whose row was deleted)."""
    running: int
    longest: float | None = None
    """The run time of the client's longest-running job, in seconds; None: no job runs."""
    slots: int | None = None
    stuck: int = 0
    """The number of jobs that still run after their cancellation."""
    aside: int = 0
    """The number of rows that the client skips for a while, because statements on these rows
    fail."""
    version: str | None = None
    queues: Sequence[str] | None = None
    candidate: bool | None = None
    started_at: datetime | None = None
    silent_for: float | None = None
    """Seconds since the last heartbeat. None if the client is not registered."""
    dead_after: float | None = None
    """Seconds without a heartbeat after which the client counts as dead."""


class LeaderStatus(msgspec.Struct, frozen=True):
    """The current or last leader of a leader domain."""

    leader_id: str
    elected_at: datetime
    expires_in: float
    """Seconds until the lease expires. If negative, the lease has expired, and there is no
    leader."""
    foreign: bool | None
    """False if the leader is a riverpy client. True if not, for example if it is River in Go. None
    if this is not known, because riverpy's own tables are missing or the lease has expired."""
    epoch: int | None = None
    """The number of the leader's term, i.e. its time as leader. None for `default`, whose terms
    have no number."""


class DomainStatus(msgspec.Struct, frozen=True):
    """A leader domain other than `default`."""

    name: str
    leader: LeaderStatus | None
    """The leader of the domain; None: there is no leader."""
    workers: int
    """The number of live clients of the domain."""
    candidates: int
    """The number of live clients that take part in the leader election of this domain."""
    queues: list[str]
    """The queues that the domain owns."""


class OverallStatus(msgspec.Struct, frozen=True):
    """The status of a schema at one moment."""

    at: datetime
    took: float
    """The duration of the read in seconds, including the time for connecting."""
    leader: LeaderStatus | None
    """The current or last leader of `default`; None: there was no leader."""
    candidates: int | None
    """The number of live clients that take part in the leader election of `default`; None: not
    known."""
    queues: list[QueueStatus]
    workers: list[WorkerStatus]
    totals: dict[str, int]
    """The number of jobs in each state."""
    jobs_about: int | None
    """The number of all jobs at the last ANALYZE of the table; None: there was no ANALYZE."""
    cap: int
    """The limit for counting jobs. If a number reaches the limit, there may be more jobs."""
    rates_over: float
    """The length of the time window for the rates (`started_per_s`, `completed_per_s` and
    `failed_per_s`), in seconds."""
    domains: list[DomainStatus] = []
    """The domains other than `default`."""
    kinds_without_worker: list[KindWithoutWorker] = []
    """The kinds of available jobs for which no running riverpy client has a worker. The list is
    also empty if no riverpy client is registered."""
    leases: list[LeaseStatus] = []
    """Up to 20 leases and singletons of user code. Those that need attention come first."""
    leases_left_out: int = 0
    """The number of leases that were read but are not in `leases`."""
    leases_partial: bool = False
    """Whether the table may have more leases than were read. Only the first leases by name were
    read."""
    damaged: list[int] = []
    """The ids of jobs that the server cannot read. These jobs are counted, but their errors and
    their clients are not known."""


class StatusReader:
    """Reads the status of one schema on a connection of its own. After an error, the next read
    connects again.

    Each read is one read-only transaction and changes no setting of the session. So the reader also
    works through a connection pooler such as PgBouncer.
    """

    def __init__(self, url: str, schema: str | None) -> None:
        self._url = url
        self._statements = StatusReaderOnConnection(schema)
        self._connection: Connection | None = None

    async def read(self) -> OverallStatus:
        """Read the status within `STATUS_READ_TIMEOUT`. An error closes the connection.

        Raises:
            ConfigError, DatabaseError, or one of DATABASE_ERRORS: the read failed.
        """
        began = time.monotonic()
        reason = f"reading took longer than {STATUS_READ_TIMEOUT:g} s"
        try:
            with anyio.fail_after(STATUS_READ_TIMEOUT, reason=reason):
                connection = await self._ensure_connection()
                return await self._statements.read(connection, began)
        except BaseException:
            if self._connection is not None:
                self._connection.terminate()
                self._connection = None
            raise

    async def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await close_connection(connection)

    async def _ensure_connection(self) -> Connection:
        if self._connection is None or self._connection.is_closed():
            self._connection = await connect(self._url, through_pooler=True)
            await self._statements.check_server_and_tables(self._connection, self._url)
        return self._connection


class StatusReaderOnConnection:
    """Reads the status of one schema on a connection of the caller."""

    def __init__(self, schema: str | None) -> None:
        self._schema = schema
        self._has_client_table = self._has_domains = False
        self._has_leases = self._has_lease_reports = False
        self._damaged_job_errors: dict[int, str] = {}
        """The jobs that the server cannot read. The key is the job id, the value is the server's
        error."""

    async def check_server_and_tables(self, connection: Transaction, url: str | None) -> None:
        """Check that the server is the primary and has River's tables. Find out which of riverpy's
        own tables exist. Call this before the first `read`.

        Raises:
            ConfigError, DatabaseError, or one of DATABASE_ERRORS: the server cannot be used.
        """
        await require_primary(connection)
        state = await check_schema(connection, self._schema, url=url)
        versions = state.applied_versions(RIVERPY_MIGRATION_LINE)
        self._has_client_table = CLIENTS_MIGRATION in versions
        self._has_domains = DOMAINS_MIGRATION in versions
        self._has_leases = LEASES_MIGRATION in versions
        self._has_lease_reports = LEASE_REPORTS_MIGRATION in versions

    async def read(self, connection: Transaction, started_at: float) -> OverallStatus:
        """Read the status in one read-only transaction. The caller must set a timeout for the whole
        read.

        `started_at` is the value of `time.monotonic()` when the caller began, before it connected
        (if it had to connect). `OverallStatus.took` is the time since then.
        """
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            await set_statement_timeout(connection, STATEMENT_TIMEOUT)
            return await self._read_status(connection, started_at)

    async def _read_status(self, connection: Transaction, started_at: float) -> OverallStatus:
        schema = self._schema
        moment = await read_time_and_job_count(connection, schema)
        clients = None
        if self._has_client_table:
            clients = await read_clients(connection, schema, limit=CLIENTS_MAX)
        names = await self._read_queue_names(connection, clients or [])
        count_limit = max(min(JOB_COUNT_MAX, JOB_COUNT_TOTAL_MAX // max(len(names), 1)), 1)
        ended, rows, running = await self._read_job_counts(connection, names, count_limit)
        totals = await count_pending_and_finished_jobs(
            connection, schema, count_limit=JOB_COUNT_MAX
        )
        for state in ("available", "running", "scheduled", "retryable"):
            totals[state] = sum(getattr(row, state) for row in rows)
        domains = None
        if self._has_domains:
            domains = await read_domains_if_permitted(connection, schema)
        leases = ShownLeases([], 0, is_partial=False)
        if self._has_leases:
            leases = await read_lease_statuses(
                connection, schema, has_reports=self._has_lease_reports
            )
        return OverallStatus(
            at=moment.read_at,
            leader=await self._read_leader_status(connection),
            candidates=None if clients is None else _count_leader_candidates(clients, domains),
            domains=[] if domains is None else domain_statuses(domains),
            kinds_without_worker=await self._read_kinds_without_worker(connection, names),
            leases=leases.leases,
            leases_left_out=leases.left_out,
            leases_partial=leases.is_partial,
            damaged=sorted(self._damaged_job_errors),
            queues=queue_statuses(moment.read_at, rows, ended, clients),
            workers=worker_statuses(clients or [], running),
            totals=totals,
            jobs_about=moment.estimated_job_count,
            cap=count_limit,
            rates_over=round(ended[0].window_seconds, 3),
            took=round(time.monotonic() - started_at, 4),
        )

    async def _read_job_counts(
        self, connection: Transaction, queue_names: Sequence[str], count_limit: int
    ) -> tuple[list[EndedJobCountsRow], list[QueueJobCountsRow], dict[str, RunningJobCountRow]]:
        schema = self._schema
        errors = await find_damaged_jobs(connection, schema, list(self._damaged_job_errors))
        self._damaged_job_errors = errors
        ended = await run_job_statement_despite_damage(
            connection,
            schema,
            sorted(FINAL_STATES),
            errors,
            read_ended_job_counts,
            window=RATE_WINDOW,
            count_limit=ENDED_JOBS_MAX,
        )
        rows = await run_job_statement_despite_damage(
            connection,
            schema,
            ("available", "running", "retryable"),
            errors,
            read_queue_job_counts,
            queue_names=queue_names,
            window_start=ended[0].window_start,
            late_after=LATE_JOB_AFTER,
            count_limit=count_limit,
            read_limit=compute_queue_read_limit(len(queue_names)),
        )
        running = await run_job_statement_despite_damage(
            connection,
            schema,
            ("running",),
            errors,
            read_running_job_counts,
            count_limit=RUNNING_JOBS_MAX,
        )
        return ended, rows, running

    async def _read_queue_names(
        self, connection: Transaction, clients: Sequence[ClientRow]
    ) -> Sequence[str]:
        """Return the names of the queues that have a row in `river_queue` or unfinished jobs, or
        that a live client works."""
        names = await read_queue_names(connection, self._schema, limit=QUEUES_MAX)
        worked = {name for client in clients if client.is_alive for name in client.queues}
        return sorted({*names, *worked})[:QUEUES_MAX]

    async def _read_kinds_without_worker(
        self, connection: Transaction, queue_names: Sequence[str]
    ) -> list[KindWithoutWorker]:
        if not self._has_client_table or not queue_names:
            return []
        return await read_kinds_without_worker(
            connection,
            self._schema,
            queue_names=queue_names,
            jobs_per_queue_max=min(1_000, SAMPLED_JOBS_MAX // len(queue_names) + 1),
            kinds_max=KINDS_WITHOUT_WORKER_MAX,
        )

    async def _read_leader_status(self, connection: Transaction) -> LeaderStatus | None:
        leader = await read_default_domain_leader(
            connection, self._schema, has_client_table=self._has_client_table
        )
        if leader is None:
            return None
        row = leader.leader_row
        is_known = leader.is_registered is not None and not leader.has_lease_expired
        foreign = not leader.is_registered if is_known else None
        return LeaderStatus(
            row.leader_id, row.elected_at, round(row.seconds_until_expiry, 3), foreign
        )


def compute_queue_read_limit(queue_count: int) -> int:
    """Return the maximum number of jobs of one state whose attempts and errors are read in each of
    `queue_count` queues."""
    return max(min(READ_JOBS_MAX, READ_JOBS_TOTAL_MAX // max(queue_count, 1)), 1)


def _count_leader_candidates(clients: Sequence[ClientRow], domains: DomainMap | None) -> int:
    """Return how many live clients take part in the leader election of `default`."""
    others = set[str]() if domains is None else domains.non_default_client_ids
    return sum(
        client.is_candidate and client.is_alive and client.client_id not in others
        for client in clients
    )


def domain_statuses(domains: DomainMap) -> list[DomainStatus]:
    """Return the status of each domain other than `default`."""
    statuses: list[DomainStatus] = []
    for name in domains.non_default_domains:
        lead, live = domains.current_leader(name), domains.live_clients(name)
        leader = None
        if lead is not None:
            remaining, is_foreign = (
                round(lead.seconds_until_expiry or 0, 3),
                not lead.is_riverpy_client,
            )
            leader = LeaderStatus(lead.holder, lead.elected_at, remaining, is_foreign, lead.epoch)
        candidates = sum(client.is_candidate for client in live)
        queues = [row.queue for row in domains.owned_queues(name)]
        statuses.append(DomainStatus(name, leader, len(live), candidates, queues))
    return statuses


def queue_statuses(
    read_at: datetime,
    queue_rows: Sequence[QueueJobCountsRow],
    ended_rows: Sequence[EndedJobCountsRow],
    clients: Sequence[ClientRow] | None,
) -> list[QueueStatus]:
    """Return the status of each queue."""
    by_queue = {row.queue: row for row in ended_rows}
    nothing = ended_rows[0]._replace(
        completed_jobs=0, started_attempts=0, failed_attempts=0, wait_p95_seconds=None
    )
    workers = Counter(name for client in clients or [] if client.is_alive for name in client.queues)
    slots = None if clients is None else _slot_count_by_queue(clients)
    statuses: list[QueueStatus] = []
    for row in queue_rows:
        end, due_at = by_queue.get(row.name, nothing), row.oldest_due_at
        started = end.started_attempts + row.started_attempts
        failed = end.failed_attempts + row.failed_attempts
        statuses.append(
            QueueStatus(
                name=row.name,
                paused=row.is_paused,
                workers=None if clients is None else workers[row.name],
                available=row.available,
                due_for=None if due_at is None else (read_at - due_at).total_seconds(),
                running=row.running,
                slots=None if slots is None else slots.get(row.name, 0),
                scheduled=row.scheduled,
                retryable=row.retryable,
                late=row.late_jobs,
                started_per_s=round(started / end.window_seconds, 2),
                completed_per_s=round(end.completed_jobs / end.window_seconds, 2),
                failed_per_s=round(failed / end.window_seconds, 2),
                wait_p95=None if end.wait_p95_seconds is None else round(end.wait_p95_seconds, 6),
            )
        )
    return statuses


def _slot_count_by_queue(clients: Sequence[ClientRow]) -> dict[str, int | None]:
    """Return the number of slots that live clients have for each queue. The number is None if a
    client of the queue does not report its slots."""
    found: dict[str, int | None] = {}
    for client in clients:
        if client.is_alive:
            slots = client.queue_slots or [None] * len(client.queues)
            for name, number in zip(client.queues, slots, strict=False):
                before = found.get(name, 0)
                found[name] = None if before is None or number is None else before + number
    return found


def worker_statuses(
    clients: Sequence[ClientRow], running_jobs: dict[str, RunningJobCountRow]
) -> list[WorkerStatus]:
    """Return the status of the registered clients, followed by the status of other clients that run
    jobs."""
    idle = RunningJobCountRow(0, None)
    registered = [
        WorkerStatus(
            client_id=client.client_id,
            state=_worker_state(client),
            running=running_jobs.get(client.client_id, idle).job_count,
            longest=_round_seconds(running_jobs.get(client.client_id, idle).longest_run_seconds),
            slots=None if client.queue_slots is None else sum(client.queue_slots),
            stuck=len(client.stuck_job_ids),
            aside=0 if client.skipped_rows is None else client.skipped_rows.row_count,
            version=client.version,
            queues=client.queues,
            candidate=client.is_candidate,
            started_at=client.started_at,
            silent_for=_round_seconds(client.heartbeat_age),
            dead_after=client.dead_after,
        )
        for client in clients
    ]
    known = {client.client_id for client in clients}
    return registered + [
        WorkerStatus(
            client_id, "unregistered", row.job_count, _round_seconds(row.longest_run_seconds)
        )
        for client_id, row in running_jobs.items()
        if client_id not in known
    ]


def _worker_state(client: ClientRow) -> str:
    """Return `alive`, `stopping` or, without a recent heartbeat, `silent`."""
    if not client.is_alive:
        return "silent"
    return "stopping" if client.is_stopping else "alive"


def _round_seconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(max(seconds, 0.0), 3)
