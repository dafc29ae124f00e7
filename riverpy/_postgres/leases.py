"""The statements on leases: one typed function per block of `sql/queries/riverpy_lease.sql`."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from riverpy._postgres.sql_files import query
from riverpy._postgres.transactions import savepoint_error

if TYPE_CHECKING:
    from collections.abc import Iterable

    from riverpy._postgres.driver import Transaction

TOPIC = "riverpy_lease"
"""The topic of notifications that a lease was released, or that a process requests its release."""

RELEASE_LOCK_TIMEOUT = timedelta(milliseconds=500)
"""The longest wait of a release for a locked row. The limit is short because other statements wait
for the same connection."""

_FILE = "riverpy_lease"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_PARAMETER = re.compile(r"\$(\d+)")


class LeaseLockedError(TimeoutError):
    """Leases could not be renewed, because other transactions have locked their rows."""

    def __init__(self, names: Iterable[str]) -> None:
        """Create the error from the names of the locked leases."""
        self.names = frozenset(names)
        super().__init__(
            "another transaction has locked the rows of leases: " + ", ".join(sorted(self.names))
        )


class LeaseAnswer(NamedTuple):
    """The answer to an attempt to acquire a lease."""

    is_granted: bool
    holder: str
    """The current holder of the lease."""
    epoch: int
    acquired_at: datetime
    remaining: float | None
    """Seconds until the other holder's lease expires. None: the lease was granted, or the time is
    unknown."""


def epoch_of(acquired_at: datetime) -> int:
    """Return the epoch of a term in River's table of leaders: the microseconds from 1970 to the
    start of the term. The table has no column for an epoch."""
    return (acquired_at - _EPOCH) // timedelta(microseconds=1)


def time_of(epoch: int) -> datetime:
    """Return the start of the term that has this epoch: the reverse of `epoch_of`."""
    return _EPOCH + timedelta(microseconds=epoch)


class LeaseRow(NamedTuple):
    """The row of a lease, with the current holder or the last one."""

    name: str
    epoch: int
    holder: str
    ttl: timedelta
    acquired_at: datetime
    expires_at: datetime | None
    """The time of the expiry. None: the lease was released."""
    remaining: float | None
    """Seconds until the lease expires; negative after the expiry. None: the lease was released."""


async def lease_acquire(
    connection: Transaction,
    schema: str | None,
    *,
    name: str,
    holder: str,
    ttl: timedelta,
    lock_timeout: timedelta | None = None,
) -> LeaseAnswer | None:
    """Try to acquire a lease. Returns None if another session acquired it during the statement.

    The statement waits for a transaction that is fenced by the last term, and fails after
    `lock_timeout`. None: the session's own limit applies.
    """
    statement = query(_FILE, "lease_acquire", schema)
    values: dict[str, object] = {"name": name, "holder": holder, "ttl": ttl.total_seconds()}
    values["lock_milliseconds"] = 0 if lock_timeout is None else _milliseconds(lock_timeout)
    row = await connection.fetchrow(statement.text, *statement.arguments(values))
    if row is None:
        return None
    is_granted, by, epoch, microseconds, remaining = row
    return LeaseAnswer(is_granted, by, epoch, time_of(microseconds), remaining)


async def lease_renew(
    connection: Transaction, schema: str | None, *, holder: str, terms: Iterable[tuple[str, int]]
) -> dict[str, bool]:
    """Extend terms, each given as a name and an epoch. Returns the names of the terms that have not
    ended. The value is True if the term was extended, and False if another transaction has locked
    the row of the lease."""
    names, epochs = zip(*terms, strict=True)
    statement = query(_FILE, "lease_renew", schema)
    values: dict[str, object] = {"name": names, "epoch": epochs, "holder": holder}
    rows = await connection.fetch(statement.text, *statement.arguments(values))
    return {row[0]: row[1] for row in rows}


async def lease_release(
    connection: Transaction, schema: str | None, *, name: str, epoch: int, holder: str
) -> bool:
    """End a term. Returns False if it had ended before. Fails if the row stays locked for longer
    than `RELEASE_LOCK_TIMEOUT`."""
    statement = query(_FILE, "lease_release", schema)
    values: dict[str, object] = {"name": name, "epoch": epoch, "holder": holder}
    values["lock_milliseconds"] = _milliseconds(RELEASE_LOCK_TIMEOUT)
    return await connection.fetchrow(statement.text, *statement.arguments(values)) is not None


async def lease_fence(
    connection: Transaction,
    schema: str | None,
    *,
    name: str,
    epoch: int,
    timeout: timedelta,
    lock_timeout: timedelta,
) -> bool:
    """Bind the transaction that is open on `connection` to a term. The server ends the transaction
    after `timeout`. It ends each wait for a lock after `lock_timeout`, also the wait of the fence.
    Returns False if the term has ended.

    Raises:
        TransactionError: a savepoint is open, whose rollback would undo the fence.
    """
    statement = query(_FILE, "lease_fence", schema)
    values = _fence_values(name, epoch, timeout, lock_timeout)
    row = await connection.fetchrow(statement.text, *statement.arguments(values))
    if row is None:
        return False
    if not row[0]:
        raise savepoint_error()
    return True


def lease_fence_text(
    schema: str | None, *, name: str, epoch: int, timeout: timedelta, lock_timeout: timedelta
) -> str:
    """Return the statement of `lease_fence` with the values in the text, for any driver."""
    statement = query(_FILE, "lease_fence", schema)
    values = statement.arguments(_fence_values(name, epoch, timeout, lock_timeout))
    return _PARAMETER.sub(lambda match: _literal(values[int(match[1]) - 1]), statement.text)


def _fence_values(
    name: str, epoch: int, timeout: timedelta, lock_timeout: timedelta
) -> dict[str, object]:
    return {
        "name": name,
        "epoch": epoch,
        "milliseconds": _milliseconds(timeout),
        "lock_milliseconds": _milliseconds(lock_timeout),
    }


def _milliseconds(timeout: timedelta) -> int:
    return round(timeout.total_seconds() * 1000)


def _literal(value: object) -> str:
    if isinstance(value, int):
        return str(value)
    text = str(value).replace("\\", r"\\").replace("'", "''")
    return f"E'{text}'"


async def lease_list(connection: Transaction, schema: str | None) -> list[LeaseRow]:
    """Return all leases, ordered by name."""
    rows = await connection.fetch(query(_FILE, "lease_list", schema).text)
    return [LeaseRow(*row) for row in rows]


async def lease_request_resign(connection: Transaction, schema: str | None, *, name: str) -> bool:
    """Request that the holder releases the lease. The notification is sent at the commit. Returns
    False if the lease is not held."""
    statement = query(_FILE, "lease_request_resign", schema)
    return await connection.fetchrow(statement.text, name) is not None
