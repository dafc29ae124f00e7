"""One typed function per block of `sql/queries/riverpy_doctor.sql`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from riverpy._names import DEFAULT_DOMAIN
from riverpy._postgres.sql_files import query

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime, timedelta

    from asyncpg import Record

    from riverpy._postgres.driver import Transaction

_FILE = "riverpy_doctor"


class ServerRow(NamedTuple):
    """The properties of the server, and the role and process of the session."""

    version: str
    is_standby: bool
    is_read_only: bool
    role: str
    pid: int
    """The process id of the session on the server."""


class SettingRow(NamedTuple):
    """A setting of the session."""

    name: str
    value: str
    source: str
    """The source of the value, in PostgreSQL's words."""
    seconds: float | None
    """The value in seconds; None: the setting is not a duration."""


class ConnectionsRow(NamedTuple):
    """The number of connections of the server."""

    used: int
    limit: int
    own: int
    """The number of riverpy's connections."""


class SessionRow(NamedTuple):
    """A session of the server. A field is empty if the role may not read it."""

    pid: int
    database: str
    role: str
    application: str
    state: str
    seconds: float | None
    """Seconds since the start of the session's transaction; None: no transaction is open."""


class RelationRow(NamedTuple):
    """The privileges of the role on a table or sequence."""

    name: str
    can_select: bool
    can_insert: bool
    can_update: bool
    can_delete: bool
    can_use: bool
    can_update_kind: bool
    is_owner: bool


class SchemaRow(NamedTuple):
    """The privileges of the role on the schema."""

    can_use: bool
    can_create: bool


class SetAsideRow(msgspec.Struct, frozen=True):
    """A row that a client has set aside."""

    what: str
    """The operation that fails for the row."""
    row: str
    """The id or the key of the row."""
    error: str
    tries: int
    since: str
    """The time at which the operation first failed for this row alone, in RFC 3339."""


class SetAside(msgspec.Struct, frozen=True):
    """The rows that a client has set aside."""

    count: int
    rows: list[SetAsideRow]
    """The first rows. A client reports a limited number."""


class ClientRow(NamedTuple):
    """A registered client. Durations are in seconds."""

    client_id: str
    queues: list[str]
    kinds: list[str]
    candidate: bool
    """Whether the client takes part in leader election, and is not stopping."""
    poll_only: bool
    version: str
    silent: float
    """Seconds since the client's last heartbeat, by the server's clock; negative: this clock was
    set back."""
    dead_after: float
    running: float
    """Seconds since the start of the client."""
    slots: list[int] | None
    """The number of slots of each queue, in the order of `queues`; None: an older version of
    riverpy does not report slots."""
    stuck: list[int]
    """The ids of the jobs that still run after their cancellation."""
    is_stopping: bool
    set_aside: SetAside | None
    """The rows that the client has set aside; None: the client reports none."""

    @property
    def is_alive(self) -> bool:
        """Whether the last heartbeat is younger than `dead_after`, by the server's clock."""
        return abs(self.silent) <= self.dead_after

    @property
    def is_on_time(self) -> bool:
        """Whether the last heartbeat is younger than half of `dead_after`. A client writes six
        heartbeats in `dead_after`."""
        return self.silent <= self.dead_after / 2


class RunningRow(NamedTuple):
    """A group of running jobs of one client, kind and queue: the stuck jobs or the other jobs."""

    client_id: str | None
    kind: str
    queue: str
    is_stuck: bool
    jobs: int
    long: int
    """The number of jobs in the group that run for at least the given time."""
    longest: float
    """The run time of the oldest job, in seconds."""
    id: int
    """The id of the oldest job."""


class BacklogRow(NamedTuple):
    """The jobs of one queue that wait in one state."""

    state: str
    queue: str
    jobs: int
    is_partial: bool
    """Whether counting ended at the limit, so that there may be more jobs."""
    due_for: float | None
    """Seconds since the first job became due; negative: the first job is not due yet."""


class KindRow(NamedTuple):
    """The waiting jobs of one kind."""

    kind: str
    jobs: int
    id: int
    queues: list[str]
    failed: int
    """The number of jobs that failed at their last attempt."""
    attempts_left: int | None
    """The smallest number of attempts that a failed job has left; None: no job has failed."""
    error: str | None
    """The newest error of the failed jobs."""


class QueueRow(NamedTuple):
    """A queue in River's table of queues. Durations are in seconds."""

    name: str
    paused_for: float | None
    touched: float
    """Seconds since a client that works the queue last updated the row."""


class PeriodicRow(NamedTuple):
    """A periodic job. Durations are in seconds."""

    id: str
    paused_for: float | None
    late: float | None
    """Seconds since the periodic job became due, or since a run was requested; negative: it is not
    due yet."""
    is_used: bool
    """Whether a leader recently updated the row. A leader updates the rows of its periodic jobs."""

    @property
    def domain(self) -> str:
        """The domain whose leader inserts the periodic job."""
        return self.id.partition("@")[2] or DEFAULT_DOMAIN


class IndexRow(NamedTuple):
    """An index of River's or riverpy's tables. Sizes are in bytes."""

    name: str
    is_valid: bool
    is_artifact: bool
    """Whether the name of the index is one that REINDEX CONCURRENTLY gives to temporary indexes."""
    is_building: bool
    """Whether a session builds the index now."""
    size: int
    estimate: float | None
    """The estimated size of a new index with the same number of entries."""


class TableRow(NamedTuple):
    """The numbers of live and dead rows of the table of jobs, and the state of its vacuum."""

    live: int
    dead: int
    vacuumed: float | None
    """Seconds since the last vacuum; None: there was no vacuum."""
    waited: float
    """Seconds since the last vacuum, the creation of the table or the start of the server,
    whichever was last."""
    is_running: bool
    """Whether a vacuum of this table runs now, if the role may read this."""
    is_on: bool
    """Whether autovacuum is on for the server."""
    is_off_here: bool
    """Whether autovacuum is off for this table."""


class SnapshotRow(NamedTuple):
    """A session, prepared transaction or slot that prevents the removal of dead rows."""

    holder: str
    """`session`, `prepared transaction` or `replication slot`."""
    id: str
    role: str
    application: str
    state: str
    seconds: float | None
    """Seconds since the start of the snapshot; None: not known."""
    transactions: int | None
    """The number of transactions that started after the snapshot."""
    text: str
    """The statement of the session."""


class ReferenceRow(NamedTuple):
    """A foreign key to a table of River or riverpy."""

    table: str
    """The referenced table."""
    referring: str
    """The table that has the foreign key."""
    name: str


class LockRow(NamedTuple):
    """An open transaction that holds locks."""

    id: str
    role: str
    application: str
    state: str
    seconds: float
    text: str
    tables: list[str]
    is_table: bool
    """Whether the transaction locks a whole table, not only rows."""
    waiting: int
    """The number of sessions that wait for the locks of this transaction."""


async def doctor_limits(connection: Transaction, *, statement: timedelta, lock: timedelta) -> None:
    """Set the statement timeout and the lock timeout of the open transaction."""
    await _rows(
        connection,
        "doctor_limits",
        None,
        statement=round(statement.total_seconds() * 1000),
        lock=round(lock.total_seconds() * 1000),
    )


async def doctor_server(connection: Transaction) -> ServerRow:
    """Return the properties of the server, and the role and process of the session."""
    return ServerRow(*(await _rows(connection, "doctor_server", None))[0])


async def doctor_settings(connection: Transaction, names: Sequence[str]) -> list[SettingRow]:
    """Return the settings with these names. Settings that the server does not have are left out."""
    rows = await _rows(connection, "doctor_settings", None, name=list(names))
    return [SettingRow(row["name"], row["setting"], row["source"], row["seconds"]) for row in rows]


async def doctor_now(connection: Transaction) -> datetime:
    """Return the time of the server's clock."""
    return (await _rows(connection, "doctor_now", None))[0][0]


async def doctor_connections(connection: Transaction) -> ConnectionsRow:
    """Return the used and the allowed number of connections of the server."""
    return ConnectionsRow(*(await _rows(connection, "doctor_connections", None))[0])


async def doctor_listeners(connection: Transaction) -> int:
    """Return the number of connections over which riverpy clients listen."""
    return (await _rows(connection, "doctor_listeners", None))[0][0]


async def doctor_notify(connection: Transaction, *, channel: str, payload: str) -> None:
    """Send a notification when the transaction commits."""
    await _rows(connection, "doctor_notify", None, channel=channel, payload=payload)


async def doctor_notification_usage(connection: Transaction) -> float:
    """Return how full the server's notification queue is, from 0 to 1."""
    return (await _rows(connection, "doctor_notification_usage", None))[0][0]


async def doctor_show_warnings(connection: Transaction) -> None:
    """Let the open transaction receive the server's warnings."""
    await _rows(connection, "doctor_show_warnings", None)


async def doctor_sessions(connection: Transaction, pid: int | None) -> list[SessionRow]:
    """Return the session with a process id; None: up to three sessions with the oldest
    transactions."""
    return [SessionRow(*row) for row in await _rows(connection, "doctor_sessions", None, pid=pid)]


async def doctor_relations(connection: Transaction, schema: str) -> dict[str, RelationRow]:
    """Return the privileges of the role on each table and sequence, by name."""
    rows = await _rows(connection, "doctor_relations", None, schema=schema)
    return {row["name"]: RelationRow(*row) for row in rows}


async def doctor_schema(connection: Transaction, schema: str) -> SchemaRow:
    """Return the privileges of the role on the schema."""
    rows = await _rows(connection, "doctor_schema", None, schema=schema)
    return SchemaRow(*rows[0]) if rows else SchemaRow(can_use=False, can_create=False)


async def doctor_clients(connection: Transaction, schema: str) -> list[ClientRow]:
    """Return the registered clients, the oldest first."""
    return [
        ClientRow(
            *row[:-4],
            slots=_numbers(row["slots"]),
            stuck=_numbers(row["stuck"]) or [],
            is_stopping=row["is_stopping"],
            set_aside=_set_aside(row["set_aside"]),
        )
        for row in await _rows(connection, "doctor_clients", schema)
    ]


async def doctor_running(
    connection: Transaction,
    schema: str,
    *,
    clients: Sequence[ClientRow],
    long: timedelta,
    limit: int,
    skipped: Sequence[int],
) -> list[RunningRow]:
    """Return running jobs in groups, the longest-running first.

    Args:
        connection: the connection of doctor.
        schema: the schema of River's tables.
        clients: the clients. Their reports decide which jobs are stuck.
        long: the time after which a running job counts as long.
        limit: the maximum number of jobs.
        skipped: the ids of damaged jobs, whose column with the client is not read.
    """
    stuck = [(client.client_id, job_id) for client in clients for job_id in client.stuck]
    rows = await _rows(
        connection,
        "doctor_running",
        schema,
        client_id=[client_id for client_id, _ in stuck],
        id=[job_id for _, job_id in stuck],
        long=long.total_seconds(),
        limit=limit,
        skipped=list(skipped),
    )
    return [RunningRow(*row) for row in rows]


async def doctor_backlogs(
    connection: Transaction, schema: str, *, limit: int, total_limit: int
) -> list[BacklogRow]:
    """Return how many jobs wait in each queue and state. At most `limit` jobs of each queue and
    state are counted, and about `total_limit` jobs in total."""
    rows = await _rows(connection, "doctor_backlogs", schema, limit=limit, total_limit=total_limit)
    return [BacklogRow(*row) for row in rows]


async def doctor_kinds(
    connection: Transaction,
    schema: str,
    backlogs: Sequence[BacklogRow],
    limit: int,
    *,
    skipped: Sequence[int],
) -> list[KindRow]:
    """Return the kinds of the first `limit` jobs of each backlog. `skipped` has the ids of damaged
    jobs, whose errors are not read."""
    rows = await _rows(
        connection,
        "doctor_kinds",
        schema,
        states=[backlog.state for backlog in backlogs],
        queues=[backlog.queue for backlog in backlogs],
        limit=limit,
        skipped=list(skipped),
    )
    return [KindRow(*row) for row in rows]


async def doctor_discarded(
    connection: Transaction, schema: str, *, window: timedelta, limit: int
) -> dict[str, int]:
    """Return the number of jobs of each kind that were discarded within `window`. At most the
    newest `limit` discarded jobs are counted."""
    seconds = window.total_seconds()
    rows = await _rows(connection, "doctor_discarded", schema, window=seconds, limit=limit)
    return {row[0]: row[1] for row in rows}


async def doctor_queues(connection: Transaction, schema: str) -> list[QueueRow]:
    """Return the rows of River's table of queues."""
    return [QueueRow(*row) for row in await _rows(connection, "doctor_queues", schema)]


async def doctor_periodic(connection: Transaction, schema: str) -> list[PeriodicRow]:
    """Return the periodic jobs."""
    return [PeriodicRow(*row) for row in await _rows(connection, "doctor_periodic", schema)]


async def doctor_indexes(connection: Transaction, schema: str) -> list[IndexRow]:
    """Return the indexes of River's and riverpy's tables."""
    rows = await _rows(connection, "doctor_indexes", None, schema=schema)
    return [IndexRow(*row) for row in rows]


async def doctor_table(
    connection: Transaction, schema: str, *, made_at: datetime
) -> TableRow | None:
    """Return the dead rows and the vacuum of the table of jobs; None: the table is missing.
    `made_at` is the time at which the table was created."""
    rows = await _rows(connection, "doctor_table", None, schema=schema, made_at=made_at)
    return TableRow(*rows[0]) if rows else None


async def doctor_snapshots(connection: Transaction) -> list[SnapshotRow]:
    """Return the sessions, prepared transactions and replication slots that prevent the removal of
    dead rows. The oldest comes first."""
    return [SnapshotRow(*row) for row in await _rows(connection, "doctor_snapshots", None)]


async def doctor_locks(connection: Transaction, schema: str) -> list[LockRow]:
    """Return the open transactions that hold locks on River's tables, the oldest first."""
    return [LockRow(*row) for row in await _rows(connection, "doctor_locks", None, schema=schema)]


async def doctor_references(connection: Transaction, schema: str) -> list[ReferenceRow]:
    """Return the foreign keys that can prevent the deletion of rows of River's and riverpy's
    tables."""
    rows = await _rows(connection, "doctor_references", None, schema=schema)
    return [ReferenceRow(*row) for row in rows]


def _numbers(text: str | None) -> list[int] | None:
    return None if text is None else msgspec.json.decode(text, type=list[int])


def _set_aside(text: str | None) -> SetAside | None:
    return None if text is None else msgspec.json.decode(text, type=SetAside)


async def _rows(
    connection: Transaction, block: str, in_schema: str | None, /, **values: object
) -> list[Record]:
    return await query(_FILE, block, in_schema).fetch(connection, **values)
