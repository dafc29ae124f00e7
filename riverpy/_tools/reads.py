"""Functions with which `riverpy doctor` and `riverpy top` read clients, the leader of `default`,
and jobs. They also work if some jobs are damaged, i.e. the server cannot read their rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from riverpy._postgres.clients import client_find_registered
from riverpy._postgres.damaged_jobs import read_jobs_despite_damage
from riverpy._postgres.leaders import leader_get
from riverpy._postgres.sql_files import get_query

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from datetime import datetime

    from riverpy._postgres.driver import Transaction
    from riverpy._postgres.leaders import LeaderRow

ResultT = TypeVar("ResultT")


class SkippedRow(msgspec.Struct, frozen=True):
    """A row that a client skips for a while, because statements on this row fail."""

    operation: str = msgspec.field(name="what")
    """The operation that failed for the row."""
    row_key: str = msgspec.field(name="row")
    """The id or another key of the row."""
    error: str
    tries: int
    failing_since: str = msgspec.field(name="since")
    """When a statement on only this row failed for the first time, as an RFC 3339 text."""


class SkippedRowsReport(msgspec.Struct, frozen=True):
    """The rows that a client currently skips, because statements on these rows fail."""

    row_count: int = msgspec.field(name="count")
    first_rows: list[SkippedRow] = msgspec.field(name="rows")
    """The first skipped rows. A client reports only a limited number of rows."""


class ClientRow(NamedTuple):
    """A registered client. Durations are in seconds."""

    client_id: str
    queues: list[str]
    kinds: list[str]
    is_candidate: bool
    """Whether the client takes part in leader election, and is not stopping."""
    poll_only: bool
    version: str
    started_at: datetime
    uptime: float
    """Seconds since the start of the client."""
    heartbeat_age: float
    """Seconds since the client's last heartbeat, by the server's clock. Negative if the server's
    clock was set back."""
    dead_after: float
    is_stopping: bool
    queue_slots: list[int] | None
    """The number of slots of each queue, i.e. how many of its jobs the client runs at the same
    time, in the order of `queues`. None if the client has an older version of riverpy, which does
    not report slots."""
    stuck_job_ids: list[int]
    """The ids of the jobs that still run after their cancellation."""
    skipped_rows: SkippedRowsReport | None
    """The rows that the client skips now. None if it skips no rows, or reports them in a form that
    this version cannot read."""

    @property
    def is_alive(self) -> bool:
        """Whether the last heartbeat is younger than `dead_after`, by the server's clock."""
        return abs(self.heartbeat_age) <= self.dead_after


class DefaultDomainLeader(NamedTuple):
    """The current or last leader of domain `default`."""

    leader_row: LeaderRow
    is_registered: bool | None
    """Whether the leader is a registered riverpy client. None if the table of clients is
    missing."""

    @property
    def has_lease_expired(self) -> bool:
        """Whether the lease of the leader has expired."""
        return self.leader_row.seconds_until_expiry < 0


async def read_clients(
    connection: Transaction, schema: str | None, *, limit: int
) -> list[ClientRow]:
    """Return up to `limit` registered clients. Clients without a recent heartbeat come last."""
    rows = await get_query("riverpy_client", "client_list", schema).fetch(connection, limit=limit)
    return [
        ClientRow(
            *row[:-3],
            queue_slots=msgspec.json.decode(row["slots"] or "null", type=list[int] | None),
            stuck_job_ids=msgspec.json.decode(row["stuck"] or "[]", type=list[int]),
            skipped_rows=_decode_skipped_rows(row["set_aside"]),
        )
        for row in rows
    ]


def _decode_skipped_rows(text: str | None) -> SkippedRowsReport | None:
    """Return the skipped rows that a client has reported. Return None if it skips none, or if
    another version of riverpy wrote the report in a form that this version cannot read."""
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=SkippedRowsReport)
    except msgspec.DecodeError:
        return None


async def read_default_domain_leader(
    connection: Transaction, schema: str | None, *, has_client_table: bool
) -> DefaultDomainLeader | None:
    """Return the current or last leader of domain `default`. Return None if there was no leader or
    the last leader resigned. `has_client_table` says whether the table of clients exists."""
    row = await leader_get(connection, schema)
    if row is None:
        return None
    if not has_client_table:
        return DefaultDomainLeader(row, None)
    known = await client_find_registered(connection, schema, client_ids=[row.leader_id])
    return DefaultDomainLeader(row, row.leader_id in known)


async def run_job_statement_despite_damage(
    connection: Transaction,
    schema: str | None,
    job_states: Sequence[str],
    damaged_job_errors: dict[int, str],
    statement: Callable[..., Awaitable[ResultT]],
    /,
    **values: Any,
) -> ResultT:
    """Call `statement`, which reads jobs in the states `job_states`, even if some jobs are damaged.
    Return its result.

    `damaged_job_errors` maps the ids of known damaged jobs to the server's errors. This function
    adds the damaged jobs that it finds. It passes the ids of all damaged jobs to `statement` as
    `damaged_job_ids`, and `statement` must not read `attempted_by` and `errors` of these jobs.
    """
    result, found = await read_jobs_despite_damage(
        connection,
        schema,
        job_states,
        lambda ids: statement(connection, schema, damaged_job_ids=ids, **values),
        damaged_job_errors,
    )
    damaged_job_errors.update(found)
    return result
