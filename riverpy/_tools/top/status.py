"""The status that `riverpy top` shows: the queues, workers and leaders of a schema at one time."""

from __future__ import annotations

import time
from collections import Counter
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import anyio
import msgspec

from riverpy._postgres.damaged_jobs import find_damaged_jobs
from riverpy._postgres.driver import close_connection, connect
from riverpy._postgres.jobs import FINAL_STATES
from riverpy._postgres.schema import CLIENTS_VERSION, DOMAINS_VERSION, RIVERPY_LINE, check_schema
from riverpy._tools.doctor.server import expect_primary
from riverpy._tools.domain_map import read_permitted_domains
from riverpy._tools.reads import client_list, read_jobs, read_leader
from riverpy._tools.top.statements import (
    EndedRow,
    QueueRow,
    RunningRow,
    UnworkedKind,
    top_ended_jobs,
    top_kinds,
    top_queue_names,
    top_queues,
    top_read_time,
    top_running,
    top_set_timeout,
    top_totals,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from riverpy._postgres.driver import Connection
    from riverpy._tools.domain_map import DomainMap
    from riverpy._tools.reads import ClientRow

RATE_WINDOW = timedelta(seconds=10)
"""The time over which rates are computed."""
LATE_AFTER = timedelta(seconds=10)
"""The time after which a due scheduled job or retry counts as late. A leader needs at most 5 s."""
COUNT_LIMIT = 10_000
"""The limit of each count of jobs. There is a count for each state in each queue, for running jobs,
for recently ended jobs, and for each pending or final state."""
COUNT_TOTAL_LIMIT = 100_000
"""The maximum number of jobs of one state that are counted in all queues. With many queues, fewer
jobs of each queue are counted."""
QUEUES_MAX = 1_000
KIND_JOBS_MAX = 20_000
"""The maximum number of available jobs whose kinds are read, of which at most 1,000 in one
queue."""
UNWORKED_KINDS_MAX = 20
"""The maximum number of kinds without a worker that are shown."""
CLIENTS_MAX = 1_000
STATEMENT_TIMEOUT = timedelta(seconds=5)
"""The server cancels a statement after this time."""
STATUS_TIMEOUT = 15.0
"""Seconds that the connection and all statements of one read may take."""


class QueueStatus(msgspec.Struct, frozen=True):
    """The status of one queue."""

    name: str
    paused: bool
    workers: int | None
    """The number of live clients that work the queue; None: not known, because riverpy's own tables
    are missing."""
    available: int
    due_for: float | None
    """Seconds since the oldest job became due; None: no job is due."""
    running: int
    slots: int | None
    """The number of slots of the live clients; None: not known, because a client has an older
    version of riverpy."""
    scheduled: int
    retryable: int
    late: int
    """The number of scheduled jobs and retries that a leader should have made available."""
    started_per_s: float
    completed_per_s: float
    failed_per_s: float
    wait_p95: float | None
    """The 95th percentile of the time from when a job was due to its start, in seconds, over the
    recently ended jobs; None: no job ended."""


class WorkerStatus(msgspec.Struct, frozen=True):
    """A client that is registered or runs jobs."""

    client_id: str
    state: str
    """`alive`, `stopping`, `silent` (no heartbeat for its `dead_after`), or `unregistered` (a River
    client in Go, or a client whose row was deleted)."""
    running: int
    longest: float | None = None
    """The run time of the client's longest-running job, in seconds; None: the client runs no
    job."""
    slots: int | None = None
    stuck: int = 0
    """The number of jobs that still run after their cancellation."""
    aside: int = 0
    """The number of rows that the client skips for a while, because statements for these rows
    fail."""
    version: str | None = None
    queues: Sequence[str] | None = None
    candidate: bool | None = None
    started_at: datetime | None = None
    silent_for: float | None = None
    """Seconds since the last heartbeat; None: the client is not registered."""


class LeaderStatus(msgspec.Struct, frozen=True):
    """The current or last leader."""

    leader_id: str
    elected_at: datetime
    expires_in: float
    """Seconds until the lease expires; negative: the lease has expired, so there is no leader."""
    foreign: bool | None
    """Whether the leader is not a riverpy client, but for example River in Go; None: not known,
    because riverpy's own tables are missing."""
    epoch: int | None = None
    """The number of this term (time as leader); None: terms of `default` have no number."""


class DomainStatus(msgspec.Struct, frozen=True):
    """A leader domain other than `default`."""

    name: str
    leader: LeaderStatus | None
    """The leader of the domain; None: there is no leader."""
    workers: int
    """The number of live clients of the domain."""
    candidates: int
    """The number of live clients that take part in leader election."""
    queues: list[str]
    """The queues that the domain owns."""


class FleetStatus(msgspec.Struct, frozen=True):
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
    """Seconds over which the rates are computed."""
    domains: list[DomainStatus] = []
    """The domains other than `default`."""
    kinds_without_worker: list[UnworkedKind] = []
    """The kinds of available jobs for which no running riverpy client has a worker. The list is
    also empty if no riverpy client is registered."""
    damaged: list[int] = []
    """The ids of jobs that the server cannot read. These jobs are counted, but their errors and
    their clients are not known."""


class StatusReader:
    """Reads the status of one schema. After an error, the next read connects again.

    Each read is one read-only transaction and changes no setting of the session, so the reader
    works through a pooler."""

    def __init__(self, url: str, schema: str | None) -> None:
        self._url, self._schema = url, schema
        self._connection: Connection | None = None
        self._has_clients = self._has_domains = False
        self._damaged_jobs: dict[int, str] = {}
        """The ids of the jobs that the server cannot read, each with the server's error."""

    async def read(self) -> FleetStatus:
        """Read the status within `STATUS_TIMEOUT`. An error closes the connection.

        Raises:
            ConfigError, DatabaseError, or one of DATABASE_ERRORS: the read failed.
        """
        began = time.monotonic()
        reason = f"reading took longer than {STATUS_TIMEOUT:g} s"
        try:
            with anyio.fail_after(STATUS_TIMEOUT, reason=reason):
                connection = await self._open_connection()
                async with connection.transaction(isolation="repeatable_read", readonly=True):
                    await top_set_timeout(connection, STATEMENT_TIMEOUT)
                    return await self._read_status(connection, began)
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

    async def _open_connection(self) -> Connection:
        if self._connection is None or self._connection.is_closed():
            self._connection = await connect(self._url, through_pooler=True)
            await expect_primary(self._connection)
            state = await check_schema(self._connection, self._schema, url=self._url)
            versions = state.applied_versions(RIVERPY_LINE)
            self._has_clients = CLIENTS_VERSION in versions
            self._has_domains = DOMAINS_VERSION in versions
        return self._connection

    async def _read_status(self, connection: Connection, began: float) -> FleetStatus:
        schema = self._schema
        moment = await top_read_time(connection, schema)
        clients = None
        if self._has_clients:
            clients = await client_list(connection, schema, limit=CLIENTS_MAX)
        names = await self._queue_names(connection, clients or [])
        cap = max(min(COUNT_LIMIT, COUNT_TOTAL_LIMIT // max(len(names), 1)), 1)
        ended, rows, running = await self._read_jobs(connection, names, cap)
        totals = await top_totals(connection, schema, cap=COUNT_LIMIT)
        for state in ("available", "running", "scheduled", "retryable"):
            totals[state] = sum(getattr(row, state) for row in rows)
        domains = None
        if self._has_domains:
            domains = await read_permitted_domains(connection, schema)
        return FleetStatus(
            at=moment.read_at,
            leader=await self._leader(connection),
            candidates=None if clients is None else _candidate_count(clients, domains),
            domains=[] if domains is None else domain_statuses(domains),
            kinds_without_worker=await self._unworked_kinds(connection, names),
            damaged=sorted(self._damaged_jobs),
            queues=queue_statuses(moment.read_at, rows, ended, clients),
            workers=worker_statuses(clients or [], running),
            totals=totals,
            jobs_about=moment.estimated_jobs,
            cap=cap,
            rates_over=round(ended[0].seconds, 3),
            took=round(time.monotonic() - began, 4),
        )

    async def _read_jobs(
        self, connection: Connection, names: Sequence[str], cap: int
    ) -> tuple[list[EndedRow], list[QueueRow], dict[str, RunningRow]]:
        schema = self._schema
        self._damaged_jobs = await find_damaged_jobs(connection, schema, list(self._damaged_jobs))
        ended = await read_jobs(
            connection,
            schema,
            sorted(FINAL_STATES),
            self._damaged_jobs,
            top_ended_jobs,
            window=RATE_WINDOW,
            cap=COUNT_LIMIT,
        )
        rows = await read_jobs(
            connection,
            schema,
            ("available", "running", "retryable"),
            self._damaged_jobs,
            top_queues,
            names=names,
            since=ended[0].since,
            late=LATE_AFTER,
            cap=cap,
        )
        running = await read_jobs(
            connection, schema, ("running",), self._damaged_jobs, top_running, cap=COUNT_LIMIT
        )
        return ended, rows, running

    async def _queue_names(
        self, connection: Connection, clients: Sequence[ClientRow]
    ) -> Sequence[str]:
        """Return the queues that have a row or jobs, or that a live client works."""
        names = await top_queue_names(connection, self._schema, limit=QUEUES_MAX)
        worked = {name for client in clients if client.is_alive for name in client.queues}
        return sorted({*names, *worked})[:QUEUES_MAX]

    async def _unworked_kinds(
        self, connection: Connection, names: Sequence[str]
    ) -> list[UnworkedKind]:
        if not self._has_clients or not names:
            return []
        return await top_kinds(
            connection,
            self._schema,
            names=names,
            limit=min(1_000, KIND_JOBS_MAX // len(names) + 1),
            kinds=UNWORKED_KINDS_MAX,
        )

    async def _leader(self, connection: Connection) -> LeaderStatus | None:
        leader = await read_leader(connection, self._schema, has_clients=self._has_clients)
        if leader is None:
            return None
        row, is_known = leader.row, leader.is_registered is not None and not leader.has_expired
        foreign = not leader.is_registered if is_known else None
        return LeaderStatus(row.leader_id, row.elected_at, round(row.remaining, 3), foreign)


def _candidate_count(clients: Sequence[ClientRow], domains: DomainMap | None) -> int:
    """Return how many live clients take part in the leader election of `default`."""
    others = set[str]() if domains is None else domains.client_ids_of_other_domains
    return sum(
        client.is_candidate and client.is_alive and client.client_id not in others
        for client in clients
    )


def domain_statuses(domains: DomainMap) -> list[DomainStatus]:
    """Return the status of each domain other than `default`."""
    statuses: list[DomainStatus] = []
    for name in domains.other_domains:
        lead, live = domains.leader(name), domains.live_clients(name)
        leader = None
        if lead is not None:
            remaining, is_foreign = round(lead.remaining or 0, 3), not lead.is_registered
            leader = LeaderStatus(lead.holder, lead.elected_at, remaining, is_foreign, lead.epoch)
        candidates = sum(client.candidate for client in live)
        queues = [row.queue for row in domains.owned_queues(name)]
        statuses.append(DomainStatus(name, leader, len(live), candidates, queues))
    return statuses


def queue_statuses(
    at: datetime,
    rows: Sequence[QueueRow],
    ended: Sequence[EndedRow],
    clients: Sequence[ClientRow] | None,
) -> list[QueueStatus]:
    """Return the status of each queue."""
    by_queue = {row.queue: row for row in ended}
    nothing = ended[0]._replace(completed=0, started=0, failed=0, wait_p95=None)
    workers = Counter(name for client in clients or [] if client.is_alive for name in client.queues)
    slots = None if clients is None else _slots_by_queue(clients)
    statuses: list[QueueStatus] = []
    for row in rows:
        end = by_queue.get(row.name, nothing)
        statuses.append(
            QueueStatus(
                name=row.name,
                paused=row.is_paused,
                workers=None if clients is None else workers[row.name],
                available=row.available,
                due_for=None if row.due_at is None else (at - row.due_at).total_seconds(),
                running=row.running,
                slots=None if slots is None else slots.get(row.name, 0),
                scheduled=row.scheduled,
                retryable=row.retryable,
                late=row.late,
                started_per_s=round((end.started + row.started) / end.seconds, 2),
                completed_per_s=round(end.completed / end.seconds, 2),
                failed_per_s=round((end.failed + row.failed) / end.seconds, 2),
                wait_p95=None if end.wait_p95 is None else round(end.wait_p95, 6),
            )
        )
    return statuses


def _slots_by_queue(clients: Sequence[ClientRow]) -> dict[str, int | None]:
    """Return the number of slots of live clients by queue; None: a client of the queue does not
    report its slots."""
    found: dict[str, int | None] = {}
    for client in clients:
        if client.is_alive:
            slots = client.slots or [None] * len(client.queues)
            for name, number in zip(client.queues, slots, strict=False):
                before = found.get(name, 0)
                found[name] = None if before is None or number is None else before + number
    return found


def worker_statuses(
    clients: Sequence[ClientRow], running: dict[str, RunningRow]
) -> list[WorkerStatus]:
    """Return the status of the registered clients, then of other clients that run jobs."""
    idle = RunningRow(0, None)
    registered = [
        WorkerStatus(
            client_id=client.client_id,
            state=_worker_state(client),
            running=running.get(client.client_id, idle).jobs,
            longest=_rounded_seconds(running.get(client.client_id, idle).longest_run),
            slots=None if client.slots is None else sum(client.slots),
            stuck=len(client.stuck_job_ids),
            aside=0 if client.set_aside is None else client.set_aside.count,
            version=client.version,
            queues=client.queues,
            candidate=client.is_candidate,
            started_at=client.started_at,
            silent_for=_rounded_seconds(client.heartbeat_age),
        )
        for client in clients
    ]
    known = {client.client_id for client in clients}
    return registered + [
        WorkerStatus(client_id, "unregistered", row.jobs, _rounded_seconds(row.longest_run))
        for client_id, row in running.items()
        if client_id not in known
    ]


def _worker_state(client: ClientRow) -> str:
    if not client.is_alive:
        return "silent"
    return "stopping" if client.is_stopping else "alive"


def _rounded_seconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(max(seconds, 0.0), 3)
