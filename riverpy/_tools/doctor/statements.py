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
    """Where we are."""

    version: str
    is_standby: bool
    is_read_only: bool
    role: str
    pid: int
    """Of the server's process."""


class SettingRow(NamedTuple):
    """A setting of the session."""

    name: str
    value: str
    source: str
    """What set it, in PostgreSQL's words."""
    seconds: float | None
    """None: it is no duration."""


class ConnectionsRow(NamedTuple):
    """How many connections there are."""

    used: int
    most: int
    own: int


class SessionRow(NamedTuple):
    """A session of the server. What the role may not see is empty."""

    pid: int
    database: str
    role: str
    application: str
    state: str
    seconds: float | None
    """Since its transaction began."""


class RelationRow(NamedTuple):
    """What the role may do with a table or sequence."""

    name: str
    can_select: bool
    can_insert: bool
    can_update: bool
    can_delete: bool
    can_use: bool
    can_update_kind: bool
    is_owner: bool


class SchemaRow(NamedTuple):
    """What the role may do with the schema."""

    can_use: bool
    can_create: bool


class AsideRow(msgspec.Struct, frozen=True):
    """A row that a client has set aside."""

    what: str
    """What is done with it."""
    row: str
    """Its id or key."""
    error: str
    tries: int
    since: str
    """When it failed alone first, in RFC 3339."""


class SetAsideRows(msgspec.Struct, frozen=True):
    """The rows that a client has set aside."""

    count: int
    rows: list[AsideRow]
    """Those that it names."""


class ClientRow(NamedTuple):
    """A registered client. Durations in seconds."""

    client_id: str
    queues: list[str]
    kinds: list[str]
    candidate: bool
    """Whether it takes part in leader election, and is not stopping."""
    poll_only: bool
    version: str
    silent: float
    """Since its last heartbeat, by the server's clock; below zero if that was set back."""
    dead_after: float
    running: float
    """Since its start."""
    slots: list[int] | None
    """In the order of its queues. None: not known, as of an older riverpy."""
    stuck: list[int]
    """Ids of jobs that go on although they were cancelled."""
    is_stopping: bool
    aside: SetAsideRows | None
    """The rows that it has set aside. None: it says nothing of any."""

    @property
    def is_alive(self) -> bool:
        """Whether its heartbeat is recent, by the server's clock and its own setting. One that
        looked once cannot know more."""
        return abs(self.silent) <= self.dead_after

    @property
    def is_lively(self) -> bool:
        """Whether it writes heartbeats as it should: each sixth of `dead_after`."""
        return self.silent <= self.dead_after / 2


class RunningRow(NamedTuple):
    """The running jobs of one kind and queue that one client claimed, and calls stuck or not."""

    client_id: str | None
    kind: str
    queue: str
    is_stuck: bool
    jobs: int
    long: int
    """How many of them run for as long as was asked."""
    longest: float
    """Seconds."""
    id: int
    """Of the one that runs longest."""


class PlaceRow(NamedTuple):
    """The jobs of one queue that wait in one state."""

    state: str
    queue: str
    jobs: int
    is_cut: bool
    """Counting ended there: there may be more."""
    due_for: float | None
    """Seconds since the first was due; below zero: until it is."""


class KindRow(NamedTuple):
    """A kind of which jobs wait."""

    kind: str
    jobs: int
    id: int
    queues: list[str]
    failed: int
    """How many of the jobs failed at their last attempt."""
    left_over: int | None
    """Attempts that are left to the one of these with the fewest."""
    error: str | None
    """The newest of theirs."""


class QueueRow(NamedTuple):
    """A queue that has a row. Durations in seconds."""

    name: str
    paused_for: float | None
    touched: float
    """Since a client last said that it works it."""


class PeriodicRow(NamedTuple):
    """A periodic job. Durations in seconds."""

    id: str
    paused_for: float | None
    late: float | None
    """Since its slot, or since a run was asked for; below zero: until then."""
    is_used: bool
    """Whether a leader said lately that a client has it."""

    @property
    def domain(self) -> str:
        """Whose leader inserts it."""
        return self.id.partition("@")[2] or DEFAULT_DOMAIN


class IndexRow(NamedTuple):
    """An index of River's tables, or riverpy's. Sizes in bytes."""

    name: str
    is_valid: bool
    is_artifact: bool
    """It has the name of what a rebuild makes."""
    is_held: bool
    """Somebody builds it."""
    size: int
    estimate: float | None
    """Of a new one with as many entries."""


class TableRow(NamedTuple):
    """How the table of jobs is vacuumed."""

    live: int
    dead: int
    vacuumed: float | None
    """Seconds since."""
    waited: float
    """Seconds since it was vacuumed, it was made, or the server started: the last of these."""
    is_under_way: bool
    """A vacuum runs that is this table's, as far as the role may see."""
    is_on: bool
    is_off_here: bool


class SnapshotRow(NamedTuple):
    """What keeps dead rows from being removed."""

    holder: str
    """`session`, `prepared transaction` or `replication slot`."""
    id: str
    role: str
    application: str
    state: str
    seconds: float | None
    """Since it began; None: not known."""
    transactions: int | None
    """How many began since."""
    text: str
    """Of its statement."""


class ReferenceRow(NamedTuple):
    """A foreign key to a table of River's or riverpy's."""

    table: str
    """The table that it refers to."""
    referring: str
    """The table that has it."""
    name: str


class LockRow(NamedTuple):
    """Whose open transaction holds locks."""

    id: str
    role: str
    application: str
    state: str
    seconds: float
    text: str
    tables: list[str]
    is_whole: bool
    """A whole table is locked, not only rows of it."""
    waiting: int
    """How many sessions wait for it."""


async def doctor_limits(connection: Transaction, *, statement: timedelta, lock: timedelta) -> None:
    """Limit the statements of the transaction, and their waits for a lock."""
    limits = query(_FILE, "doctor_limits", None)
    values: dict[str, object] = {
        "statement": round(statement.total_seconds() * 1000),
        "lock": round(lock.total_seconds() * 1000),
    }
    await connection.execute(limits.text, *limits.arguments(values))


async def doctor_server(connection: Transaction) -> ServerRow:
    """Where we are."""
    return ServerRow(*(await _rows(connection, "doctor_server"))[0])


async def doctor_settings(connection: Transaction, names: Sequence[str]) -> list[SettingRow]:
    """Those of the settings that the server knows."""
    rows = await _rows(connection, "doctor_settings", name=list(names))
    return [SettingRow(row["name"], row["setting"], row["source"], row["seconds"]) for row in rows]


async def doctor_now(connection: Transaction) -> datetime:
    """The server's clock."""
    return (await _rows(connection, "doctor_now"))[0][0]


async def doctor_connections(connection: Transaction) -> ConnectionsRow:
    """How many connections there are."""
    return ConnectionsRow(*(await _rows(connection, "doctor_connections"))[0])


async def doctor_listeners(connection: Transaction) -> int:
    """How many connections there are on which clients of riverpy's listen."""
    return (await _rows(connection, "doctor_listeners"))[0][0]


async def doctor_notify(connection: Transaction, *, channel: str, payload: str) -> None:
    """Notify whoever listens on the channel, at the commit."""
    await _rows(connection, "doctor_notify", channel=channel, payload=payload)


async def doctor_notification_usage(connection: Transaction) -> float:
    """How full the server's queue of notifications is, from 0 to 1."""
    return (await _rows(connection, "doctor_notification_usage"))[0][0]


async def doctor_show_warnings(connection: Transaction) -> None:
    """Let the open transaction receive the server's warnings."""
    await _rows(connection, "doctor_show_warnings")


async def doctor_sessions(connection: Transaction, pid: int | None) -> list[SessionRow]:
    """The session of a process; None: up to three, those with the oldest transactions."""
    return [SessionRow(*row) for row in await _rows(connection, "doctor_sessions", pid=pid)]


async def doctor_relations(connection: Transaction, schema: str) -> dict[str, RelationRow]:
    """What the role may do with each table and sequence, by name."""
    rows = await _rows(connection, "doctor_relations", schema=schema)
    return {row["name"]: RelationRow(*row) for row in rows}


async def doctor_schema(connection: Transaction, schema: str) -> SchemaRow:
    """What the role may do with the schema."""
    rows = await _rows(connection, "doctor_schema", schema=schema)
    return SchemaRow(*rows[0]) if rows else SchemaRow(can_use=False, can_create=False)


async def doctor_clients(connection: Transaction, schema: str) -> list[ClientRow]:
    """Who is registered, in the order of their starts."""
    statement = query(_FILE, "doctor_clients", schema)
    return [
        ClientRow(
            *row[:-4],
            slots=_numbers(row["slots"]),
            stuck=_numbers(row["stuck"]) or [],
            is_stopping=row["is_stopping"],
            aside=_aside(row["set_aside"]),
        )
        for row in await connection.fetch(statement.text)
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
    """Up to `limit` running jobs by client, queue, kind and whether they are stuck, the longest
    first. The clients of the `skipped` ones are not read."""
    statement = query(_FILE, "doctor_running", schema)
    stuck = [(one.client_id, job_id) for one in clients for job_id in one.stuck]
    values: dict[str, object] = {
        "client_id": [client_id for client_id, _ in stuck],
        "id": [job_id for _, job_id in stuck],
        "long": long.total_seconds(),
        "limit": limit,
        "skipped": list(skipped),
    }
    rows = await connection.fetch(statement.text, *statement.arguments(values))
    return [RunningRow(*row) for row in rows]


async def doctor_places(
    connection: Transaction, schema: str, *, limit: int, most: int
) -> list[PlaceRow]:
    """Where jobs wait. Of one place at most `limit` are counted, and about `most` of all."""
    statement = query(_FILE, "doctor_places", schema)
    arguments = statement.arguments({"limit": limit, "most": most})
    return [PlaceRow(*row) for row in await connection.fetch(statement.text, *arguments)]


async def doctor_kinds(
    connection: Transaction,
    schema: str,
    places: Sequence[PlaceRow],
    limit: int,
    *,
    skipped: Sequence[int],
) -> list[KindRow]:
    """The kinds among the first `limit` jobs of each place. Errors of the `skipped` ones are not
    read."""
    statement = query(_FILE, "doctor_kinds", schema)
    values: dict[str, object] = {
        "states": [place.state for place in places],
        "queues": [place.queue for place in places],
        "limit": limit,
        "skipped": list(skipped),
    }
    rows = await connection.fetch(statement.text, *statement.arguments(values))
    return [KindRow(*row) for row in rows]


async def doctor_discarded(
    connection: Transaction, schema: str, *, window: timedelta, limit: int
) -> dict[str, int]:
    """How many jobs of each kind were discarded within `window`, among the newest `limit`."""
    statement = query(_FILE, "doctor_discarded", schema)
    values: dict[str, object] = {"window": window.total_seconds(), "limit": limit}
    rows = await connection.fetch(statement.text, *statement.arguments(values))
    return {row[0]: row[1] for row in rows}


async def doctor_queues(connection: Transaction, schema: str) -> list[QueueRow]:
    """The queues that have a row."""
    statement = query(_FILE, "doctor_queues", schema)
    return [QueueRow(*row) for row in await connection.fetch(statement.text)]


async def doctor_periodic(connection: Transaction, schema: str) -> list[PeriodicRow]:
    """The periodic jobs."""
    statement = query(_FILE, "doctor_periodic", schema)
    return [PeriodicRow(*row) for row in await connection.fetch(statement.text)]


async def doctor_indexes(connection: Transaction, schema: str) -> list[IndexRow]:
    """The indexes of River's tables and riverpy's."""
    return [IndexRow(*row) for row in await _rows(connection, "doctor_indexes", schema=schema)]


async def doctor_table(
    connection: Transaction, schema: str, *, made_at: datetime
) -> TableRow | None:
    """How the table of jobs, which was made then, is vacuumed. None: it is not there."""
    rows = await _rows(connection, "doctor_table", schema=schema, made_at=made_at)
    return TableRow(*rows[0]) if rows else None


async def doctor_snapshots(connection: Transaction) -> list[SnapshotRow]:
    """What keeps dead rows from being removed, the oldest first."""
    return [SnapshotRow(*row) for row in await _rows(connection, "doctor_snapshots")]


async def doctor_locks(connection: Transaction, schema: str) -> list[LockRow]:
    """Whose open transactions hold locks on River's tables, the oldest first."""
    return [LockRow(*row) for row in await _rows(connection, "doctor_locks", schema=schema)]


async def doctor_references(connection: Transaction, schema: str) -> list[ReferenceRow]:
    """The foreign keys that keep rows of River's and riverpy's tables from being deleted."""
    rows = await _rows(connection, "doctor_references", schema=schema)
    return [ReferenceRow(*row) for row in rows]


def _numbers(text: str | None) -> list[int] | None:
    return None if text is None else msgspec.json.decode(text, type=list[int])


def _aside(text: str | None) -> SetAsideRows | None:
    return None if text is None else msgspec.json.decode(text, type=SetAsideRows)


async def _rows(connection: Transaction, block: str, **values: object) -> list[Record]:
    statement = query(_FILE, block, None)
    return await connection.fetch(statement.text, *statement.arguments(values))
