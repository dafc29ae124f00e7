"""The statements on leases: one typed function per SQL statement in
`sql/queries/riverpy_lease.sql`.

A term is the time for which one holder has a lease. Its epoch is a number that is larger than the
epoch of the term before."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from riverpy._postgres.sql_files import get_query, get_query_with_conditional_parts, to_milliseconds
from riverpy._postgres.transactions import make_fence_in_savepoint_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from riverpy._postgres.driver import Transaction

LEASE_TOPIC = "riverpy_lease"
"""The topic of notifications about leases: a lease was released, or its holder should release
it."""

RELEASE_LOCK_TIMEOUT = timedelta(milliseconds=500)
"""How long a release waits for a locked row. This is short, because other statements wait for the
same connection."""

_SQL_FILE = "riverpy_lease"
_UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SQL_PARAMETER_PATTERN = re.compile(r"\$(\d+)")


class LeaseLockedError(TimeoutError):
    """Leases could not be renewed, because other transactions have locked their rows."""

    def __init__(self, names: Iterable[str]) -> None:
        self.lease_names = frozenset(names)
        super().__init__(
            "another transaction has locked the rows of leases: "
            + ", ".join(sorted(self.lease_names))
        )


class LeaseAcquireResult(NamedTuple):
    """The result of a call of `lease_acquire`."""

    is_granted: bool
    holder: str
    """The current holder of the lease."""
    epoch: int
    acquired_at: datetime
    seconds_until_expiry: float | None
    """If the lease was not granted: seconds until the lease of the current holder expires. None:
    the lease was granted, or the time is unknown."""


def epoch_from_acquired_at(acquired_at: datetime) -> int:
    """Return the epoch of a term in `river_leader`: the microseconds from 1970 to the start of the
    term. River's table has no column for an epoch."""
    return (acquired_at - _UNIX_EPOCH) // timedelta(microseconds=1)


def acquired_at_from_epoch(epoch: int) -> datetime:
    """Return the start of a term from its epoch: the inverse of `epoch_from_acquired_at`."""
    return _UNIX_EPOCH + timedelta(microseconds=epoch)


class LeaseRow(NamedTuple):
    """The row of a lease, with the current holder or the last one."""

    name: str
    epoch: int
    holder: str
    ttl: timedelta
    acquired_at: datetime
    expires_at: datetime | None
    """When the lease expires. None: the lease was released."""
    seconds_until_expiry: float | None
    """Seconds until the lease expires. Negative: it has expired. None: it was released."""
    is_held: bool
    """Whether the lease has a holder. False: any process may acquire it."""


class HeldTerm(NamedTuple):
    """The current term of a held lease."""

    name: str
    holder: str
    epoch: int


async def lease_acquire(
    connection: Transaction,
    schema: str | None,
    *,
    name: str,
    holder: str,
    ttl: timedelta,
    lock_timeout: timedelta | None = None,
) -> LeaseAcquireResult | None:
    """Try to acquire a lease. The result says whether the lease was granted, and which process
    holds it now. Return None if another session acquired the lease during the statement.

    The last holder may have called `lease_fence_transaction` in transactions that are still open.
    If the lease is free, the statement waits until these transactions end. The statement fails if a
    wait is longer than `lock_timeout`. If `lock_timeout` is None, the session's own setting
    applies.
    """
    row = await get_query(_SQL_FILE, "lease_acquire", schema).fetchrow(
        connection,
        name=name,
        holder=holder,
        ttl=ttl.total_seconds(),
        lock_milliseconds=0 if lock_timeout is None else to_milliseconds(lock_timeout),
    )
    if row is None:
        return None
    is_granted, by, epoch, microseconds, remaining = row
    return LeaseAcquireResult(
        is_granted, by, epoch, acquired_at_from_epoch(microseconds), remaining
    )


async def lease_renew(
    connection: Transaction,
    schema: str | None,
    *,
    holder: str,
    names_and_epochs: Iterable[tuple[str, int]],
) -> dict[str, bool]:
    """Extend the terms of leases. Return a dict from the lease's name to whether its term was
    extended. False: another transaction has locked the lease's row. Leases whose term has ended are
    not in the dict."""
    names, epochs = zip(*names_and_epochs, strict=True)
    statement = get_query(_SQL_FILE, "lease_renew", schema)
    rows = await statement.fetch(connection, name=names, epoch=epochs, holder=holder)
    return {row[0]: row[1] for row in rows}


async def lease_release(
    connection: Transaction, schema: str | None, *, name: str, epoch: int, holder: str
) -> bool:
    """Release a lease, i.e. end the term with the number `epoch`. Return False if the term had
    already ended. Fail if another session locks the lease's row for longer than
    `RELEASE_LOCK_TIMEOUT`."""
    statement = get_query(_SQL_FILE, "lease_release", schema)
    limit = to_milliseconds(RELEASE_LOCK_TIMEOUT)
    values = {"name": name, "epoch": epoch, "holder": holder, "lock_milliseconds": limit}
    return await statement.fetchrow(connection, **values) is not None


async def lease_fence_transaction(
    connection: Transaction,
    schema: str | None,
    *,
    name: str,
    epoch: int,
    transaction_timeout: timedelta,
    lock_timeout: timedelta,
) -> bool:
    """Let the open transaction commit only during the term `epoch`: no other term can begin before
    the transaction ends. The server ends the transaction after `transaction_timeout`. A statement
    fails if it waits for a lock for longer than `lock_timeout`. Return False if the term has ended.

    Raises:
        TransactionError: a savepoint is open. A rollback to the savepoint would undo the effect of
            this call.
    """
    values = _make_fence_values(name, epoch, transaction_timeout, lock_timeout)
    row = await get_query(_SQL_FILE, "lease_fence", schema).fetchrow(connection, **values)
    if row is not None and not row[0]:
        raise make_fence_in_savepoint_error()
    return row is not None


def make_lease_fence_sql(
    schema: str | None,
    *,
    name: str,
    epoch: int,
    transaction_timeout: timedelta,
    lock_timeout: timedelta,
) -> str:
    """Return the SQL statement of `lease_fence_transaction`, which lets the open transaction commit
    only during the term `epoch`. The statement contains the values and has no parameters, so that
    any driver can run it."""
    statement = get_query(_SQL_FILE, "lease_fence", schema)
    values = statement.order_arguments(
        _make_fence_values(name, epoch, transaction_timeout, lock_timeout)
    )
    return _SQL_PARAMETER_PATTERN.sub(
        lambda match: _to_sql_literal(values[int(match[1]) - 1]), statement.text
    )


def _make_fence_values(
    name: str, epoch: int, timeout: timedelta, lock_timeout: timedelta
) -> dict[str, object]:
    return {
        "name": name,
        "epoch": epoch,
        "milliseconds": to_milliseconds(timeout),
        "lock_milliseconds": to_milliseconds(lock_timeout),
    }


def _to_sql_literal(value: object) -> str:
    if isinstance(value, int):
        return str(value)
    text = str(value).replace("\\", r"\\").replace("'", "''")
    return f"E'{text}'"


async def lease_list(
    connection: Transaction,
    schema: str | None,
    *,
    prefix: str | None = None,
    limit: int | None = None,
    expired_within: timedelta | None = None,
) -> list[LeaseRow]:
    """Return leases, sorted by name.

    Args:
        prefix: return only the leases whose names start with this text. None: all leases.
        limit: the maximum number of leases. None: no limit.
        expired_within: return only leases that are held, and leases that expired within this time.
            Released leases are left out: a table may have millions of them. None: return all
            leases, also the released ones.
    """
    values = {"prefix": prefix, "limit": limit, "expired_within": expired_within}
    return await _read_leases(connection, schema, values)


async def lease_get(connection: Transaction, schema: str | None, *, name: str) -> LeaseRow | None:
    """Return a lease, or None if no process has acquired it yet."""
    rows = await _read_leases(connection, schema, {"name": name})
    return rows[0] if rows else None


async def lease_list_terms(
    connection: Transaction, schema: str | None, *, names: Iterable[str]
) -> list[HeldTerm]:
    """Return the current terms of the leases with these names. Leases without a holder are left
    out."""
    rows = await get_query(_SQL_FILE, "lease_terms", schema).fetch(connection, name=list(names))
    return [HeldTerm(*row) for row in rows]


async def _read_leases(
    connection: Transaction, schema: str | None, conditions: Mapping[str, object]
) -> list[LeaseRow]:
    """Return the leases that meet all conditions. A condition with the value None is ignored."""
    values = {name: value for name, value in conditions.items() if value is not None}
    statement = get_query_with_conditional_parts(_SQL_FILE, "lease_list", schema, frozenset(values))
    return [LeaseRow(*row) for row in await statement.fetch(connection, **values)]


async def lease_request_resign(
    connection: Transaction, schema: str | None, *, name: str, epoch: int | None = None
) -> bool:
    """Request that the holder releases the lease. The holder is notified when the transaction
    commits. Return False if the lease has no holder.

    Args:
        name: the name of the lease in the table.
        epoch: the term to end. If it has ended already, request nothing and return False. None: any
            term.
    """
    values = {"name": name} if epoch is None else {"name": name, "epoch": epoch}
    statement = get_query_with_conditional_parts(
        _SQL_FILE, "lease_request_resign", schema, frozenset(values)
    )
    return await statement.fetchrow(connection, **values) is not None
