"""One typed function per block of `sql/queries/riverpy_lease.sql`."""

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
"""The topic on which the release of a lease, and a request to release one, is notified."""

RELEASE_LOCK_TIMEOUT = timedelta(milliseconds=500)
"""How long a release waits for a locked row. Other statements wait for the same connection."""

_FILE = "riverpy_lease"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_PARAMETER = re.compile(r"\$(\d+)")


class LeaseLockedError(TimeoutError):
    """Other transactions have locked the rows of leases, so these could not be renewed."""

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
    """The holder of the lease now."""
    epoch: int
    acquired_at: datetime
    remaining: float | None
    """Seconds until the other holder's lease expires; None if it was granted, or if unknown."""


def epoch_of(acquired_at: datetime) -> int:
    """The microseconds since 1970 of a term's begin: its epoch in River's table of leaders, which
    has no column for one."""
    return (acquired_at - _EPOCH) // timedelta(microseconds=1)


def time_of(epoch: int) -> datetime:
    """The reverse of `epoch_of`."""
    return _EPOCH + timedelta(microseconds=epoch)


class LeaseRow(NamedTuple):
    """The holder of a lease, or its last holder."""

    name: str
    epoch: int
    holder: str
    ttl: timedelta
    acquired_at: datetime
    expires_at: datetime | None
    """None: it was released."""
    remaining: float | None
    """Seconds until it expires; negative: it has expired. None: it was released."""


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
    `lock_timeout`; None: after the session's limit.
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
    """Extend terms, each a name and an epoch. Returns the names of the terms that have not ended,
    each with whether it was extended: another transaction has locked the row of one that was
    not."""
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
    """Bind the transaction that is open on `connection` to a term. The server ends it after
    `timeout`, and each wait for a lock in it, the fence's own included, after `lock_timeout`.
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
    """The statement of `lease_fence` with its values in the text, for any driver."""
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
    """All leases, by name."""
    rows = await connection.fetch(query(_FILE, "lease_list", schema).text)
    return [LeaseRow(*row) for row in rows]


async def lease_request_resign(connection: Transaction, schema: str | None, *, name: str) -> bool:
    """Ask the holder to release the lease, at the commit. Returns False if it is not held."""
    statement = query(_FILE, "lease_request_resign", schema)
    return await connection.fetchrow(statement.text, name) is not None
