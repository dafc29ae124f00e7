"""The statements of doctor: one typed function per SQL statement in
`sql/queries/riverpy_doctor.sql`. Durations in rows are in seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from riverpy._names import DEFAULT_DOMAIN
from riverpy._postgres.sql_files import get_query

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime, timedelta

    from riverpy._postgres.driver import Transaction
    from riverpy._tools.reads import ClientRow

RowT = TypeVar("RowT")

_SQL_FILE = "riverpy_doctor"


class ServerRow(NamedTuple):
    """The properties of the server, and the role and process of the session."""

    version: str
    is_standby: bool
    is_read_only: bool
    session_role: str
    session_pid: int


class SettingRow(NamedTuple):
    """A setting of the session."""

    name: str
    value: str
    source: str
    """Where the value was set, in PostgreSQL's words."""
    seconds: float | None
    """The value in seconds. None: the setting is not a duration."""


class ConnectionCountsRow(NamedTuple):
    """The numbers of used and allowed connections of the server, and of riverpy's connections."""

    used_count: int
    allowed_count: int
    riverpy_connections: int


class SessionRow(NamedTuple):
    """A session of the server. A field is empty if the role may not read it."""

    pid: int
    database: str
    role: str
    application: str
    state: str
    transaction_age_seconds: float | None
    """The age of the session's transaction. None: no transaction is open."""


class RelationPrivilegesRow(NamedTuple):
    """The privileges of the role on a table or sequence."""

    relation_name: str
    privileges: list[str]
    """The privileges in the words of GRANT, such as `SELECT` and `UPDATE (kind)`."""
    is_owned_by_role: bool


class RunningJobGroup(NamedTuple):
    """Running jobs of the same client, kind and queue. The client reports either all or none of
    these jobs as stuck, i.e. as still running long after their cancellation."""

    client_id: str | None
    kind: str
    queue: str
    is_stuck: bool
    job_count: int
    long_job_count: int
    """The number of jobs in the group that have run for at least `long_running_after`, an argument
    of `read_running_job_groups`."""
    longest_run_seconds: float
    oldest_job_id: int


class BacklogRow(NamedTuple):
    """The jobs of one queue that wait in one state."""

    state: str
    queue: str
    job_count: int
    is_partial: bool
    """Whether there may be more jobs, because counting ended at the limit."""
    seconds_since_due: float | None
    """The time since the first job became due. Negative: the first job is not due yet."""


class WaitingKindRow(NamedTuple):
    """The waiting jobs of one kind."""

    kind: str
    job_count: int
    example_job_id: int
    queues: list[str]
    failed_job_count: int
    """The number of jobs whose most recent attempt failed."""
    min_attempts_left: int | None
    """The smallest number of attempts that a failed job has left. None: no job has failed."""
    newest_error: str | None


class QueueRow(NamedTuple):
    """A queue in River's table of queues."""

    name: str
    seconds_since_pause: float | None
    seconds_since_update: float
    """The time since a client that works the queue last updated the row."""


class PeriodicJobRow(NamedTuple):
    """A periodic job, from its row in the table."""

    id: str
    seconds_since_pause: float | None
    seconds_since_due: float | None
    """The time since the periodic job became due, or since a run was requested. Negative: it is not
    due yet."""
    is_recently_updated: bool
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
    is_being_built: bool
    size: int
    rebuilt_size: float | None
    """The estimated size of a new index with the same number of entries."""


class JobTableStatsRow(NamedTuple):
    """The numbers of live and dead rows of the table of jobs, and the state of its vacuum."""

    live_rows: int
    dead_rows: int
    seconds_since_vacuum: float | None
    """The time since the last vacuum. None: there was no vacuum."""
    seconds_without_vacuum: float
    """The time since the last of these events: a vacuum, the creation of the table, the start of
    the server."""
    is_vacuum_running: bool
    """Whether a vacuum of the table runs now. If the role cannot see which table a vacuum is for,
    this is True for any running vacuum."""
    is_autovacuum_on_for_server: bool
    is_autovacuum_off_for_table: bool


class OpenSnapshotRow(NamedTuple):
    """A session, prepared transaction or replication slot that prevents the removal of dead
    rows."""

    holder_type: str
    """What holds the snapshot: `session`, `prepared transaction` or `replication slot`."""
    holder_id: str
    role: str
    application: str
    holder_state: str
    age_seconds: float | None
    """The age of the snapshot. None: not known."""
    newer_transactions: int | None
    """The number of transactions that started after the snapshot."""
    statement: str


class ForeignKeyRow(NamedTuple):
    """A foreign key to a table of River or riverpy."""

    referenced_table: str
    referring_table: str
    constraint_name: str


class LockHolderRow(NamedTuple):
    """An open transaction that holds locks."""

    holder_id: str
    role: str
    application: str
    holder_state: str
    age_seconds: float
    statement: str
    locked_tables: list[str]
    is_whole_table_locked: bool
    """Whether the transaction locks a whole table, not only rows."""
    waiting_session_count: int


async def set_transaction_timeouts(
    connection: Transaction, *, statement_timeout: timedelta, lock_timeout: timedelta
) -> None:
    """Set the statement timeout and the lock timeout of the open transaction."""
    await get_query(_SQL_FILE, "doctor_set_timeouts", None).execute(
        connection,
        statement=round(statement_timeout.total_seconds() * 1000),
        lock=round(lock_timeout.total_seconds() * 1000),
    )


async def read_server(connection: Transaction) -> ServerRow:
    """Return the properties of the server, and the role and process of the session."""
    return (await _fetch_rows(ServerRow, connection, "doctor_server"))[0]


async def read_settings(connection: Transaction, setting_names: Sequence[str]) -> list[SettingRow]:
    """Return the PostgreSQL settings with these names, with the values that apply to this session.
    Settings that the server does not have are left out."""
    return await _fetch_rows(SettingRow, connection, "doctor_settings", name=list(setting_names))


async def read_server_time(connection: Transaction) -> datetime:
    """Return the time of the server's clock."""
    return await get_query(_SQL_FILE, "doctor_now", None).fetchval(connection)


async def read_connection_counts(connection: Transaction) -> ConnectionCountsRow:
    """Return the numbers of used and allowed connections of the server, and of riverpy's
    connections."""
    return (await _fetch_rows(ConnectionCountsRow, connection, "doctor_connections"))[0]


async def count_listeners(connection: Transaction) -> int:
    """Return the number of connections with which riverpy clients listen for notifications."""
    return await get_query(_SQL_FILE, "doctor_listeners", None).fetchval(connection)


async def send_notification(connection: Transaction, *, channel: str, payload: str) -> None:
    """Send a notification when the transaction commits."""
    await get_query(_SQL_FILE, "doctor_notify", None).execute(
        connection, channel=channel, payload=payload
    )


async def read_notification_queue_usage(connection: Transaction) -> float:
    """Return how full the server's notification queue is, from 0 to 1."""
    return await get_query(_SQL_FILE, "doctor_notification_usage", None).fetchval(connection)


async def enable_server_warnings(connection: Transaction) -> None:
    """Let the server send its warnings to this session until the open transaction ends."""
    await get_query(_SQL_FILE, "doctor_show_warnings", None).execute(connection)


async def read_session_or_oldest_transactions(
    connection: Transaction, pid: int | None
) -> list[SessionRow]:
    """Return the session with this process id. If `pid` is None, return up to three sessions with
    the oldest transactions: probably one of them blocks the server's notification queue."""
    return await _fetch_rows(SessionRow, connection, "doctor_sessions", pid=pid)


async def read_relation_privileges(
    connection: Transaction, schema: str
) -> dict[str, RelationPrivilegesRow]:
    """Return the privileges of the role on each table and sequence, by name."""
    rows = await _fetch_rows(RelationPrivilegesRow, connection, "doctor_relations", schema=schema)
    return {row.relation_name: row for row in rows}


async def read_schema_privileges(connection: Transaction, schema: str) -> set[str]:
    """Return the privileges of the role on the schema: `USAGE`, `CREATE` or both."""
    rows = await get_query(_SQL_FILE, "doctor_schema", None).fetch(connection, schema=schema)
    return {row[0] for row in rows}


async def read_running_job_groups(
    connection: Transaction,
    schema: str,
    *,
    clients: Sequence[ClientRow],
    long_running_after: timedelta,
    limit: int,
    damaged_job_ids: Sequence[int],
) -> list[RunningJobGroup]:
    """Return at most `limit` running jobs, in groups of the same client, kind and queue. The group
    with the longest-running job comes first. Jobs that `clients` report as stuck are in separate
    groups. `long_job_count` counts the jobs that have run for at least `long_running_after`. For
    the jobs in `damaged_job_ids`, the client is not read."""
    stuck = [(client.client_id, job_id) for client in clients for job_id in client.stuck_job_ids]
    return await _fetch_rows(
        RunningJobGroup,
        connection,
        "doctor_running",
        schema,
        client_id=[client_id for client_id, _ in stuck],
        id=[job_id for _, job_id in stuck],
        long=long_running_after.total_seconds(),
        limit=limit,
        skipped=list(damaged_job_ids),
    )


async def read_backlogs(
    connection: Transaction, schema: str, *, limit: int, total_limit: int
) -> list[BacklogRow]:
    """Return the number of waiting jobs in each queue and state. At most `limit` jobs of each queue
    and state are counted, and about `total_limit` jobs in total."""
    return await _fetch_rows(
        BacklogRow, connection, "doctor_backlogs", schema, limit=limit, total_limit=total_limit
    )


async def read_waiting_kinds(
    connection: Transaction,
    schema: str,
    *,
    backlogs: Sequence[BacklogRow],
    limit: int,
    damaged_job_ids: Sequence[int],
) -> list[WaitingKindRow]:
    """Return the kinds of the first `limit` jobs of each backlog, in the order of claims. The
    errors of the jobs in `damaged_job_ids` are not read."""
    return await _fetch_rows(
        WaitingKindRow,
        connection,
        "doctor_kinds",
        schema,
        states=[backlog.state for backlog in backlogs],
        queues=[backlog.queue for backlog in backlogs],
        limit=limit,
        skipped=list(damaged_job_ids),
    )


async def count_discarded_jobs(
    connection: Transaction, schema: str, *, window: timedelta, limit: int
) -> dict[str, int]:
    """Return the number of jobs of each kind that were discarded within `window`. At most the
    newest `limit` discarded jobs are counted."""
    seconds, statement = window.total_seconds(), get_query(_SQL_FILE, "doctor_discarded", schema)
    rows = await statement.fetch(connection, window=seconds, limit=limit)
    return {row[0]: row[1] for row in rows}


async def read_queues(connection: Transaction, schema: str) -> list[QueueRow]:
    """Return the rows of River's table of queues."""
    return await _fetch_rows(QueueRow, connection, "doctor_queues", schema)


async def read_periodic_jobs(connection: Transaction, schema: str) -> list[PeriodicJobRow]:
    """Return the periodic jobs."""
    return await _fetch_rows(PeriodicJobRow, connection, "doctor_periodic", schema)


async def read_indexes(connection: Transaction, schema: str) -> list[IndexRow]:
    """Return the indexes of River's and riverpy's tables."""
    return await _fetch_rows(IndexRow, connection, "doctor_indexes", schema=schema)


async def read_job_table_stats(
    connection: Transaction, schema: str, *, made_at: datetime
) -> JobTableStatsRow | None:
    """Return the numbers of live and dead rows of the table of jobs, and the state of its vacuum.
    Return None if the table is missing. `made_at` is the time at which the table was created."""
    values = {"schema": schema, "made_at": made_at}
    rows = await _fetch_rows(JobTableStatsRow, connection, "doctor_table", **values)
    return rows[0] if rows else None


async def read_open_snapshots(connection: Transaction) -> list[OpenSnapshotRow]:
    """Return the sessions, prepared transactions and replication slots that prevent the removal of
    dead rows. The oldest comes first."""
    return await _fetch_rows(OpenSnapshotRow, connection, "doctor_snapshots")


async def read_lock_holders(connection: Transaction, schema: str) -> list[LockHolderRow]:
    """Return the open transactions that hold locks on River's tables, the oldest first."""
    return await _fetch_rows(LockHolderRow, connection, "doctor_locks", schema=schema)


async def read_foreign_keys(connection: Transaction, schema: str) -> list[ForeignKeyRow]:
    """Return the foreign keys that can prevent the deletion of rows of River's and riverpy's
    tables."""
    return await _fetch_rows(ForeignKeyRow, connection, "doctor_references", schema=schema)


async def _fetch_rows(
    row_type: Callable[..., RowT],
    connection: Transaction,
    query_name: str,
    in_schema: str | None = None,
    /,
    **values: Any,
) -> list[RowT]:
    rows = await get_query(_SQL_FILE, query_name, in_schema).fetch(connection, **values)
    return [row_type(*row) for row in rows]
