"""One look of `riverpy top` at the database: what it reads, what that costs at most, how an outage
shows."""

from __future__ import annotations

import time
from collections import Counter
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, TypeVar

import anyio
import msgspec

from riverpy._postgres.clients import election_status
from riverpy._postgres.damaged_jobs import damaged_of, read_undamaged
from riverpy._postgres.driver import DATABASE_ERRORS, close, connect
from riverpy._postgres.jobs import FINAL_STATES
from riverpy._postgres.leaders import leader_get
from riverpy._postgres.schema import CLIENTS_VERSION, DOMAINS_VERSION, OWN_LINE, check_schema
from riverpy._tools.doctor.server import expect_primary
from riverpy._tools.doctor.snapshot import PRIVILEGE_LACKING
from riverpy._tools.domain_map import read_domains
from riverpy._tools.top.statements import (
    ClientRow,
    EndedRow,
    QueueRow,
    RunningRow,
    top_clients,
    top_ended,
    top_kinds,
    top_limits,
    top_moment,
    top_queue_names,
    top_queues,
    top_running,
    top_totals,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from riverpy._postgres.driver import Connection
    from riverpy._postgres.schema import SchemaState
    from riverpy._tools.domain_map import DomainMap

T = TypeVar("T")

WINDOW = timedelta(seconds=10)
"""Rates are of the last seconds, at most so many."""
LATE = timedelta(seconds=10)
"""Twice as long as a leader takes to make due jobs available, at most."""
CAP = 10_000
"""Where counting jobs stops: of one state in one queue, in all queues for some, or that ended."""
QUEUES_CAP = 100_000
"""Where counting jobs of one state stops in all queues together: with many queues each has less."""
QUEUES_MOST = 1_000
KINDS_JOBS_MAX = 20_000
"""Available jobs of all queues together whose kinds are read; at most 1,000 of one queue."""
KINDS_MAX = 20
"""Kinds without a worker that are shown."""
CLIENTS_MOST = 1_000
STATEMENT_LIMIT = timedelta(seconds=5)
"""After which the server ends a statement."""
STATUS_TIMEOUT = 15.0
"""Seconds that a look may take, with the time to connect."""


class QueueStatus(msgspec.Struct, frozen=True):
    """One queue."""

    name: str
    paused: bool
    workers: int | None
    """Clients that work it and give signs of life. None: not known, without the line `riverpy`."""
    available: int
    due_for: float | None
    """Seconds for which the oldest due job waits. None: none does."""
    running: int
    slots: int | None
    """How many jobs these clients may run at once. None: not known, as of an older riverpy."""
    scheduled: int
    retryable: int
    late: int
    """Scheduled ones and retries that are due for longer than a leader leaves them."""
    started_per_s: float
    completed_per_s: float
    failed_per_s: float
    wait_p95: float | None
    """Seconds between due and started that 95 % of what started and ended of late did not
    exceed. None: nothing did."""


class WorkerStatus(msgspec.Struct, frozen=True):
    """A client that is registered, or that rows say runs jobs."""

    client_id: str
    state: str
    """`alive`, `stopping`, `silent` for longer than its `dead_after` by the server's clock, or
    `unregistered`: one of River's in Go, or one whose row is gone."""
    running: int
    longest: float | None = None
    """Seconds that the longest of these jobs runs. None: there is none."""
    slots: int | None = None
    stuck: int = 0
    """Jobs that go on although they were cancelled."""
    aside: int = 0
    """Rows that it has set aside, because each fails alone."""
    version: str | None = None
    queues: Sequence[str] | None = None
    candidate: bool | None = None
    started_at: datetime | None = None
    silent_for: float | None = None
    """Seconds since its last sign of life."""


class LeaderStatus(msgspec.Struct, frozen=True):
    """Who leads, or led last."""

    leader_id: str
    elected_at: datetime
    expires_in: float
    """Seconds; below zero: the lease has expired, and nobody leads."""
    foreign: bool | None
    """Whether it is no client of riverpy's, as one of River's in Go. None: not known, without the
    line `riverpy`."""
    epoch: int | None = None
    """The number of the term. None: of `default`, whose terms have none."""


class DomainStatus(msgspec.Struct, frozen=True):
    """A leader domain other than `default`."""

    name: str
    leader: LeaderStatus | None
    """None: nobody leads it."""
    workers: int
    """Clients that give signs of life."""
    candidates: int
    """Those of them that stand for election."""
    queues: list[str]
    """What it has."""


class UnworkedKind(msgspec.Struct, frozen=True):
    """A kind of available jobs that no running client of riverpy has a worker for."""

    kind: str
    jobs: int
    """Among the first available jobs of each queue."""
    queues: list[str]


class FleetStatus(msgspec.Struct, frozen=True):
    """What was seen at one moment."""

    at: datetime
    took: float
    """Seconds, to connect included."""
    leader: LeaderStatus | None
    """None: nobody leads or led."""
    candidates: int | None
    """Clients that stand for election in `default` and give signs of life. None: not known."""
    queues: list[QueueStatus]
    workers: list[WorkerStatus]
    totals: dict[str, int]
    """Jobs by state."""
    jobs_about: int | None
    """All jobs, as of the last analyze of their table. None: it was never analyzed."""
    cap: int
    """A number of jobs that is not below it stands for itself or more, in a state's total too."""
    rates_over: float
    """Seconds that the rates are of."""
    domains: list[DomainStatus] = []
    """Those other than `default`."""
    kinds_without_worker: list[UnworkedKind] = []
    """Empty also where no client of riverpy is registered."""
    damaged: list[int] = []
    """Ids of jobs that the server cannot read, among those that are read. They count, but neither
    the last attempt's error nor the worker of a running one is known."""


class StatusReader:
    """Looks at one database, over one connection that is made again when it was lost.

    Each look is one read-only transaction, and leaves nothing behind in the session: through a
    pooler it works as well.
    """

    def __init__(self, url: str, schema: str | None) -> None:
        """Make it."""
        self._url, self._schema = url, schema
        self._connection: Connection | None = None
        self._has_clients = self._has_domains = False
        self._damaged: dict[int, str] = {}
        """The errors of jobs that the server cannot read, by id."""

    async def read(self) -> FleetStatus:
        """Read the status. An error closes the connection; the next call makes another.

        Raises:
            ConfigError, DatabaseError, or one of DATABASE_ERRORS: the text has the reason.
        """
        began = time.monotonic()
        try:
            with anyio.fail_after(
                STATUS_TIMEOUT, reason=f"reading took longer than {STATUS_TIMEOUT:g} s"
            ):
                connection = await self._connected()
                async with connection.transaction(isolation="repeatable_read", readonly=True):
                    await top_limits(connection, STATEMENT_LIMIT)
                    return await self._read(connection, began)
        except BaseException:
            if self._connection is not None:
                self._connection.terminate()
                self._connection = None
            raise

    async def close(self) -> None:
        """Say goodbye."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await close(connection)

    async def _connected(self) -> Connection:
        if self._connection is None or self._connection.is_closed():
            self._connection = await connect(self._url, pooled=True)
            await expect_primary(self._connection)
            state = await check_schema(self._connection, self._schema, url=self._url)
            self._has_clients = has_clients(state)
            self._has_domains = await self._may_see_domains(self._connection, state)
        return self._connection

    async def _may_see_domains(self, connection: Connection, state: SchemaState) -> bool:
        """A role of a fleet without domains may lack the grants, and an error would end the look's
        transaction."""
        if DOMAINS_VERSION not in state.versions(OWN_LINE):
            return False
        try:
            await read_domains(connection, self._schema)
        except DATABASE_ERRORS as error:
            if getattr(error, "sqlstate", None) != PRIVILEGE_LACKING:
                raise
            return False
        return True

    async def _read(self, connection: Connection, began: float) -> FleetStatus:
        schema = self._schema
        moment = await top_moment(connection, schema)
        clients = None
        if self._has_clients:
            clients = await top_clients(connection, schema, limit=CLIENTS_MOST)
        names = await self._queue_names(connection, clients or [])
        cap = max(min(CAP, QUEUES_CAP // max(len(names), 1)), 1)
        self._damaged = await damaged_of(connection, schema, list(self._damaged))
        ended = await self._undamaged(
            connection,
            sorted(FINAL_STATES),
            lambda skipped: top_ended(connection, schema, window=WINDOW, cap=CAP, skipped=skipped),
        )
        rows = await self._undamaged(
            connection,
            ("available", "running", "retryable"),
            lambda skipped: top_queues(
                connection,
                schema,
                names=names,
                since=ended[0].since,
                late=LATE,
                cap=cap,
                skipped=skipped,
            ),
        )
        queues = queue_statuses(moment.at, rows, ended, clients)
        totals = await top_totals(connection, schema, cap=CAP)
        for state in ("available", "running", "scheduled", "retryable"):
            totals[state] = sum(getattr(row, state) for row in rows)
        running = await self._undamaged(
            connection,
            ("running",),
            lambda skipped: top_running(connection, schema, cap=CAP, skipped=skipped),
        )
        seen = await read_domains(connection, schema) if self._has_domains else None
        strangers = set[str]() if seen is None else seen.strangers
        return FleetStatus(
            at=moment.at,
            leader=await self._leader(connection),
            candidates=None
            if clients is None
            else sum(
                client.candidate and not client.is_silent and client.client_id not in strangers
                for client in clients
            ),
            domains=[] if seen is None else domain_statuses(seen),
            kinds_without_worker=await self._kinds_without_worker(connection, names),
            damaged=sorted(self._damaged),
            queues=queues,
            workers=worker_statuses(clients or [], running),
            totals=totals,
            jobs_about=moment.about,
            cap=cap,
            rates_over=round(ended[0].seconds, 3),
            took=round(time.monotonic() - began, 4),
        )

    async def _undamaged(
        self,
        connection: Connection,
        states: Sequence[str],
        read: Callable[[list[int]], Awaitable[T]],
    ) -> T:
        """What `read` returns, without wide columns of damaged jobs."""
        found, self._damaged = await read_undamaged(
            connection, self._schema, states, read, self._damaged
        )
        return found

    async def _queue_names(
        self, connection: Connection, clients: Sequence[ClientRow]
    ) -> Sequence[str]:
        """Also the queues that a client works and that hold nothing."""
        names = await top_queue_names(connection, self._schema, limit=QUEUES_MOST)
        worked = {name for client in clients if not client.is_silent for name in client.queues}
        return sorted({*names, *worked})[:QUEUES_MOST]

    async def _kinds_without_worker(
        self, connection: Connection, names: Sequence[str]
    ) -> list[UnworkedKind]:
        if not self._has_clients or not names:
            return []
        limit = min(1_000, KINDS_JOBS_MAX // len(names) + 1)
        rows = await top_kinds(connection, self._schema, names=names, limit=limit, kinds=KINDS_MAX)
        return [UnworkedKind(*row) for row in rows]

    async def _leader(self, connection: Connection) -> LeaderStatus | None:
        row = await leader_get(connection, self._schema)
        if row is None:
            return None
        foreign = None
        if self._has_clients and row.remaining >= 0:
            foreign = not (await election_status(connection, self._schema)).is_registered
        return LeaderStatus(row.leader_id, row.elected_at, round(row.remaining, 3), foreign)


def domain_statuses(seen: DomainMap) -> list[DomainStatus]:
    """What is shown of each domain other than `default`."""
    looks: list[DomainStatus] = []
    for name in seen.others:
        lead, living = seen.lead(name), seen.living(name)
        leader = None
        if lead is not None and lead.remaining is not None and not lead.is_over:
            left = round(lead.remaining, 3)
            leader = LeaderStatus(
                lead.holder, lead.elected_at, left, not lead.is_registered, lead.epoch
            )
        candidates = sum(one.candidate for one in living)
        queues = [one.queue for one in seen.owned(name)]
        looks.append(DomainStatus(name, leader, len(living), candidates, queues))
    return looks


def has_clients(state: SchemaState) -> bool:
    """Whether the database has our table of clients."""
    return CLIENTS_VERSION in state.versions(OWN_LINE)


def queue_statuses(
    at: datetime,
    rows: Sequence[QueueRow],
    ended: Sequence[EndedRow],
    clients: Sequence[ClientRow] | None,
) -> list[QueueStatus]:
    """What is shown of each queue."""
    of_queue = {row.queue: row for row in ended}
    nothing = ended[0]._replace(completed=0, started=0, failed=0, wait_p95=None)
    live = Counter(
        name for client in clients or [] if not client.is_silent for name in client.queues
    )
    slots = None if clients is None else _slots_by_queue(clients)
    looks: list[QueueStatus] = []
    for row in rows:
        end = of_queue.get(row.name, nothing)
        looks.append(
            QueueStatus(
                name=row.name,
                paused=row.is_paused,
                workers=None if clients is None else live[row.name],
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
    return looks


def _slots_by_queue(clients: Sequence[ClientRow]) -> dict[str, int | None]:
    """The slots of live clients; None for a queue of which one of them does not tell."""
    found: dict[str, int | None] = {}
    for client in clients:
        if not client.is_silent:
            slots = client.slots or [None] * len(client.queues)
            for name, number in zip(client.queues, slots, strict=False):
                before = found.get(name, 0)
                found[name] = None if before is None or number is None else before + number
    return found


def _state(client: ClientRow) -> str:
    if client.is_silent:
        return "silent"
    return "stopping" if client.is_stopping else "alive"


def worker_statuses(
    clients: Sequence[ClientRow], running: dict[str, RunningRow]
) -> list[WorkerStatus]:
    """Those that are registered, and those that run jobs without."""
    nothing = RunningRow(0, 0.0)
    registered = [
        WorkerStatus(
            client_id=client.client_id,
            state=_state(client),
            running=running.get(client.client_id, nothing).jobs,
            longest=_longest(running.get(client.client_id, nothing)),
            slots=None if client.slots is None else sum(client.slots),
            stuck=client.stuck,
            aside=client.aside,
            version=client.version,
            queues=client.queues,
            candidate=client.candidate,
            started_at=client.started_at,
            silent_for=round(max(client.silent_for, 0.0), 3),
        )
        for client in clients
    ]
    known = {client.client_id for client in clients}
    return registered + [
        WorkerStatus(
            client_id=client_id, state="unregistered", running=row.jobs, longest=_longest(row)
        )
        for client_id, row in running.items()
        if client_id not in known
    ]


def _longest(row: RunningRow) -> float | None:
    return round(max(row.longest, 0.0), 3) if row.jobs else None
