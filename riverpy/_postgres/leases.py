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
"""Where the end of a term, and the wish for one, is announced."""

RELEASE_LOCK_LIMIT = timedelta(milliseconds=500)
"""How long a release waits for whoever has locked the row: others wait for the connection."""

_FILE = "riverpy_lease"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_PARAMETER = re.compile(r"\$(\d+)")


class LeaseLockedError(TimeoutError):
    """Somebody else keeps the rows of leases locked: it is not known whether these go on."""

    def __init__(self, names: Iterable[str]) -> None:
        """Make it of the names of the leases."""
        self.names = frozenset(names)
        super().__init__(
            "another transaction keeps the rows of leases locked: " + ", ".join(sorted(self.names))
        )


class LeaseBid(NamedTuple):
    """What the server answers to a bid."""

    is_granted: bool
    holder: str
    """Who holds the lease now."""
    epoch: int
    acquired_at: datetime
    remaining: float | None
    """Seconds until the lease of another expires; None if the bid won."""


class LeaseRow(NamedTuple):
    """Who holds a lease, or held it last."""

    name: str
    epoch: int
    holder: str
    ttl: timedelta
    acquired_at: datetime
    expires_at: datetime | None
    """None: it was released."""
    remaining: float | None
    """Seconds until it expires; below zero: it has. None: it was released."""


async def lease_acquire(
    connection: Transaction,
    schema: str | None,
    *,
    name: str,
    holder: str,
    ttl: timedelta,
    lock_bound: timedelta | None = None,
) -> LeaseBid | None:
    """Bid for a lease. None: somebody else has just won, who is not known yet.

    The bid waits for a transaction that is fenced by the last term, and fails after `lock_bound`;
    None: when the session's limit is over.
    """
    statement = query(_FILE, "lease_acquire", schema)
    values: dict[str, object] = {"name": name, "holder": holder, "ttl": ttl.total_seconds()}
    values["lock_milliseconds"] = 0 if lock_bound is None else _milliseconds(lock_bound)
    row = await connection.fetchrow(statement.text, *statement.arguments(values))
    if row is None:
        return None
    is_granted, by, epoch, microseconds, remaining = row
    acquired_at = _EPOCH + timedelta(microseconds=microseconds)
    return LeaseBid(is_granted, by, epoch, acquired_at, remaining)


async def lease_renew(
    connection: Transaction, schema: str | None, *, holder: str, terms: Iterable[tuple[str, int]]
) -> dict[str, bool]:
    """Extend terms, each a name and an epoch. Returns the names of those that go on, and whether
    they were extended: the row of one that was not is locked by somebody, and it goes on until it
    expires, as far as is known."""
    names, epochs = zip(*terms, strict=True)
    statement = query(_FILE, "lease_renew", schema)
    values: dict[str, object] = {"name": names, "epoch": epochs, "holder": holder}
    rows = await connection.fetch(statement.text, *statement.arguments(values))
    return {row[0]: row[1] for row in rows}


async def lease_release(
    connection: Transaction, schema: str | None, *, name: str, epoch: int, holder: str
) -> bool:
    """End a term. False: it was over before. Fails if somebody keeps the row locked for longer than
    `RELEASE_LOCK_LIMIT`."""
    statement = query(_FILE, "lease_release", schema)
    values: dict[str, object] = {"name": name, "epoch": epoch, "holder": holder}
    values["lock_milliseconds"] = _milliseconds(RELEASE_LOCK_LIMIT)
    return await connection.fetchrow(statement.text, *statement.arguments(values)) is not None


async def lease_fence(
    connection: Transaction,
    schema: str | None,
    *,
    name: str,
    epoch: int,
    bound: timedelta,
    lock_bound: timedelta,
) -> bool:
    """Tie the transaction that is open on `connection` to a term. The server ends it after `bound`,
    and a wait for a lock in it, the fence's own too, after `lock_bound`. False: the term is
    over.

    Raises:
        TransactionError: a savepoint is open, which would take the fence with it.
    """
    statement = query(_FILE, "lease_fence", schema)
    values = _fence_values(name, epoch, bound, lock_bound)
    row = await connection.fetchrow(statement.text, *statement.arguments(values))
    if row is None:
        return False
    if not row[0]:
        raise savepoint_error()
    return True


def lease_fence_text(
    schema: str | None, *, name: str, epoch: int, bound: timedelta, lock_bound: timedelta
) -> str:
    """`lease_fence` with its values in the text, for any driver."""
    statement = query(_FILE, "lease_fence", schema)
    values = statement.arguments(_fence_values(name, epoch, bound, lock_bound))
    return _PARAMETER.sub(lambda match: _literal(values[int(match[1]) - 1]), statement.text)


def _fence_values(
    name: str, epoch: int, bound: timedelta, lock_bound: timedelta
) -> dict[str, object]:
    return {
        "name": name,
        "epoch": epoch,
        "milliseconds": _milliseconds(bound),
        "lock_milliseconds": _milliseconds(lock_bound),
    }


def _milliseconds(bound: timedelta) -> int:
    return round(bound.total_seconds() * 1000)


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
    """Ask the holder to give its term up, at the commit. False: nobody holds the lease."""
    statement = query(_FILE, "lease_request_resign", schema)
    return await connection.fetchrow(statement.text, name) is not None
