"""One typed function for each statement in `sql/queries/riverpy_doctor.sql`. Durations in rows are
in seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from riverpy._names import DEFAULT_DOMAIN
from riverpy._postgres.sql_files import query

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime, timedelta

    from riverpy._postgres.driver import Transaction
    from riverpy._tools.reads import ClientRow

RowT = TypeVar("RowT")

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
    riverpy_connections: int
    """The number of riverpy's connections."""


class SessionRow(NamedTuple):
    """A session of the server. A field is empty if the role may not read it."""

    pid: int
    database: str
    role: str
    application: str
    state: str
    seconds: float | None
    """The age of the session's transaction; None: no transaction is open."""


class RelationRow(NamedTuple):
    """The privileges of the role on a table or sequence."""

    name: str
    privileges: list[str]
    """The privileges in the words of GRANT, such as `SELECT` and `UPDATE (kind)`."""
    is_owner: bool


class RunningRow(NamedTuple):
    """The running jobs of one client, kind and queue: either its stuck jobs or its other jobs."""

    client_id: str | None
    kind: str
    queue: str
    is_stuck: bool
    jobs: int
    long_jobs: int
    """The number of jobs in the group that have run for at least `long`, a parameter of
    `doctor_running`."""
    longest_run: float
    """The run time of the longest-running job."""
    oldest_id: int


class BacklogRow(NamedTuple):
    """The jobs of one queue that wait in one state."""

    state: str
    queue: str
    jobs: int
    is_partial: bool
    """Whether counting ended at the limit, so that there may be more jobs."""
    due_for: float | None
    """The time since the first job became due; negative: the first job is not due yet."""


class KindRow(NamedTuple):
    """The waiting jobs of one kind."""

    kind: str
    jobs: int
    example_id: int
    """The id of one of the jobs."""
    queues: list[str]
    failed: int
    """The number of jobs whose most recent attempt failed."""
    attempts_left: int | None
    """The smallest number of attempts that a failed job has left; None: no job has failed."""
    error: str | None
    """The newest error of the failed jobs."""


class QueueRow(NamedTuple):
    """A queue in River's table of queues."""

    name: str
    paused_for: float | None
    seconds_since_update: float
    """The time since a client that works the queue last updated the row."""


class PeriodicRow(NamedTuple):
    """A periodic job, as its row in the table shows it."""

    id: str
    paused_for: float | None
    seconds_late: float | None
    """The time since the periodic job became due, or since a run was requested; negative: it is not
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
    is_rebuild_remnant: bool
    """Whether the index has a name that REINDEX CONCURRENTLY gives to temporary indexes."""
    is_building: bool
    """Whether a session builds the index now."""
    size: int
    estimate: float | None
    """The estimated size of a new index with the same number of entries."""


class TableRow(NamedTuple):
    """The numbers of live and dead rows of the table of jobs, and the state of its vacuum."""

    live_rows: int
    dead_rows: int
    seconds_since_vacuum: float | None
    """The time since the last vacuum; None: there was no vacuum."""
    seconds_without_vacuum: float
    """The time since the last vacuum, the creation of the table or the start of the server,
    whichever was last."""
    is_vacuum_running: bool
    """Whether a vacuum of the table runs now. If the role cannot see the table of a vacuum, every
    vacuum counts."""
    is_autovacuum_on: bool
    is_autovacuum_off_for_table: bool


class SnapshotRow(NamedTuple):
    """A session, prepared transaction or replication slot that prevents the removal of dead
    rows."""

    holder: str
    """`session`, `prepared transaction` or `replication slot`."""
    id: str
    role: str
    application: str
    state: str
    seconds: float | None
    """The age of the snapshot; None: not known."""
    transactions: int | None
    """The number of transactions that started after the snapshot."""
    statement: str


class ReferenceRow(NamedTuple):
    """A foreign key to a table of River or riverpy."""

    table: str
    """The referenced table."""
    referring_table: str
    """The table that has the foreign key."""
    name: str


class LockRow(NamedTuple):
    """An open transaction that holds locks."""

    id: str
    role: str
    application: str
    state: str
    seconds: float
    statement: str
    tables: list[str]
    is_whole_table: bool
    """Whether the transaction locks a whole table, not only rows."""
    waiting_sessions: int


async def doctor_set_timeouts(
    connection: Transaction, *, statement: timedelta, lock: timedelta
) -> None:
    """Set the statement timeout and the lock timeout of the open transaction."""
    await query(_FILE, "doctor_set_timeouts", None).execute(
        connection,
        statement=round(statement.total_seconds() * 1000),
        lock=round(lock.total_seconds() * 1000),
    )


async def doctor_server(connection: Transaction) -> ServerRow:
    """Return the properties of the server, and the role and process of the session."""
    return (await _fetch_rows(ServerRow, connection, "doctor_server"))[0]


async def doctor_settings(connection: Transaction, names: Sequence[str]) -> list[SettingRow]:
    """Return the settings with these names. Settings that the server does not have are left out."""
    return await _fetch_rows(SettingRow, connection, "doctor_settings", name=list(names))


async def doctor_now(connection: Transaction) -> datetime:
    """Return the time of the server's clock."""
    return await query(_FILE, "doctor_now", None).fetchval(connection)


async def doctor_connections(connection: Transaction) -> ConnectionsRow:
    """Return the used and the allowed number of connections of the server."""
    return (await _fetch_rows(ConnectionsRow, connection, "doctor_connections"))[0]


async def doctor_listeners(connection: Transaction) -> int:
    """Return the number of connections over which riverpy clients listen."""
    return await query(_FILE, "doctor_listeners", None).fetchval(connection)


async def doctor_notify(connection: Transaction, *, channel: str, payload: str) -> None:
    """Send a notification when the transaction commits."""
    await query(_FILE, "doctor_notify", None).execute(connection, channel=channel, payload=payload)


async def doctor_notification_usage(connection: Transaction) -> float:
    """Return how full the server's notification queue is, from 0 to 1."""
    return await query(_FILE, "doctor_notification_usage", None).fetchval(connection)


async def doctor_show_warnings(connection: Transaction) -> None:
    """Let the open transaction receive the server's warnings."""
    await query(_FILE, "doctor_show_warnings", None).execute(connection)


async def doctor_sessions(connection: Transaction, pid: int | None) -> list[SessionRow]:
    """Return the session with this process id. If `pid` is None, return up to three sessions with
    the oldest transactions."""
    return await _fetch_rows(SessionRow, connection, "doctor_sessions", pid=pid)


async def doctor_relations(connection: Transaction, schema: str) -> dict[str, RelationRow]:
    """Return the privileges of the role on each table and sequence, by name."""
    rows = await _fetch_rows(RelationRow, connection, "doctor_relations", schema=schema)
    return {row.name: row for row in rows}


async def doctor_schema(connection: Transaction, schema: str) -> set[str]:
    """Return the privileges of the role on the schema: `USAGE`, `CREATE` or both."""
    rows = await query(_FILE, "doctor_schema", None).fetch(connection, schema=schema)
    return {row[0] for row in rows}


async def doctor_running(
    connection: Transaction,
    schema: str,
    *,
    clients: Sequence[ClientRow],
    long: timedelta,
    limit: int,
    damaged_job_ids: Sequence[int],
) -> list[RunningRow]:
    """Return at most `limit` running jobs in groups, the longest-running first. A job counts as
    stuck if its client reports it as stuck. `long` is the time after which a job counts as
    long-running. For jobs of `damaged_job_ids` the column that has the client is not read."""
    stuck = [(client.client_id, job_id) for client in clients for job_id in client.stuck_job_ids]
    return await _fetch_rows(
        RunningRow,
        connection,
        "doctor_running",
        schema,
        client_id=[client_id for client_id, _ in stuck],
        id=[job_id for _, job_id in stuck],
        long=long.total_seconds(),
        limit=limit,
        skipped=list(damaged_job_ids),
    )


async def doctor_backlogs(
    connection: Transaction, schema: str, *, limit: int, total_limit: int
) -> list[BacklogRow]:
    """Return how many jobs wait in each queue and state. At most `limit` jobs of each queue and
    state are counted, and about `total_limit` jobs in total."""
    return await _fetch_rows(
        BacklogRow, connection, "doctor_backlogs", schema, limit=limit, total_limit=total_limit
    )


async def doctor_kinds(
    connection: Transaction,
    schema: str,
    *,
    backlogs: Sequence[BacklogRow],
    limit: int,
    damaged_job_ids: Sequence[int],
) -> list[KindRow]:
    """Return the kinds of the first `limit` jobs of each backlog. The errors of the jobs of
    `damaged_job_ids` are not read."""
    return await _fetch_rows(
        KindRow,
        connection,
        "doctor_kinds",
        schema,
        states=[backlog.state for backlog in backlogs],
        queues=[backlog.queue for backlog in backlogs],
        limit=limit,
        skipped=list(damaged_job_ids),
    )


async def doctor_discarded(
    connection: Transaction, schema: str, *, window: timedelta, limit: int
) -> dict[str, int]:
    """Return the number of jobs of each kind that were discarded within `window`. At most the
    newest `limit` discarded jobs are counted."""
    seconds, statement = window.total_seconds(), query(_FILE, "doctor_discarded", schema)
    rows = await statement.fetch(connection, window=seconds, limit=limit)
    return {row[0]: row[1] for row in rows}


async def doctor_queues(connection: Transaction, schema: str) -> list[QueueRow]:
    """Return the rows of River's table of queues."""
    return await _fetch_rows(QueueRow, connection, "doctor_queues", schema)


async def doctor_periodic(connection: Transaction, schema: str) -> list[PeriodicRow]:
    """Return the periodic jobs."""
    return await _fetch_rows(PeriodicRow, connection, "doctor_periodic", schema)


async def doctor_indexes(connection: Transaction, schema: str) -> list[IndexRow]:
    """Return the indexes of River's and riverpy's tables."""
    return await _fetch_rows(IndexRow, connection, "doctor_indexes", schema=schema)


async def doctor_table(
    connection: Transaction, schema: str, *, made_at: datetime
) -> TableRow | None:
    """Return the numbers of live and dead rows of the table of jobs, and the state of its vacuum;
    None: the table is missing. `made_at` is the time at which the table was created."""
    rows = await _fetch_rows(TableRow, connection, "doctor_table", schema=schema, made_at=made_at)
    return rows[0] if rows else None


async def doctor_snapshots(connection: Transaction) -> list[SnapshotRow]:
    """Return the sessions, prepared transactions and replication slots that prevent the removal of
    dead rows. The oldest comes first."""
    return await _fetch_rows(SnapshotRow, connection, "doctor_snapshots")


async def doctor_locks(connection: Transaction, schema: str) -> list[LockRow]:
    """Return the open transactions that hold locks on River's tables, the oldest first."""
    return await _fetch_rows(LockRow, connection, "doctor_locks", schema=schema)


async def doctor_references(connection: Transaction, schema: str) -> list[ReferenceRow]:
    """Return the foreign keys that can prevent the deletion of rows of River's and riverpy's
    tables."""
    return await _fetch_rows(ReferenceRow, connection, "doctor_references", schema=schema)


async def _fetch_rows(
    row_type: Callable[..., RowT],
    connection: Transaction,
    block: str,
    in_schema: str | None = None,
    /,
    **values: Any,
) -> list[RowT]:
    rows = await query(_FILE, block, in_schema).fetch(connection, **values)
    return [row_type(*row) for row in rows]
