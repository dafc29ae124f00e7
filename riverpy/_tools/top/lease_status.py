"""The leases that `riverpy top` shows."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from riverpy._names import USER_LEASE_NAME_PREFIX
from riverpy._postgres.driver import DATABASE_ERRORS
from riverpy._tools.domain_map import PRIVILEGE_MISSING_SQLSTATE
from riverpy._tools.lease_map import LeaseReportMap, find_lease_reports, read_lease_reports
from riverpy._tools.top.statements import read_leases
from riverpy.stats import LeaseLag

if TYPE_CHECKING:
    from riverpy._postgres.driver import Transaction
    from riverpy._tools.top.statements import HeldOrExpiredLeaseRow

SHOWN_LEASES_MAX = 20
"""The maximum number of leases that are shown."""
READ_LEASES_MAX = 5_000
"""The maximum number of rows of the table of leases that are read."""


class LeaseStatus(msgspec.Struct, frozen=True):
    """A lease or singleton of user code that is held, or that has expired without being
    released."""

    name: str
    state: Literal["held", "expired"]
    """`held`: a process holds the lease. `expired`: the last holder did not renew the lease, and no
    process has acquired it again."""
    holder: str
    """The current holder. If the lease has expired, the last holder."""
    epoch: int
    """The number of the holder's term. A term is the time from acquiring a lease until the lease
    ends."""
    acquired_at: datetime
    held_for: float
    """Seconds since the start of the term."""
    expires_in: float
    """Seconds until the lease expires if it is not renewed. Negative if it has expired."""
    standbys: list[str] | None = None
    """The ids of the live clients that would acquire the lease if it was free; None: not known."""
    lag: LeaseLag | None = None
    """The lag that the holder last reported in its current term: the number of work items that are
    not handled yet, and the age of the oldest one. None if the holder reported no lag."""


class ShownLeases(NamedTuple):
    """The leases to show, and the number of leases that were read but are not shown."""

    leases: list[LeaseStatus]
    left_out: int
    is_partial: bool
    """Whether the table may have more leases than were read."""


async def read_lease_statuses(
    connection: Transaction, schema: str | None, *, has_reports: bool
) -> ShownLeases:
    """Read the leases of user code, the most important first.

    Expired leases come before held leases. In each of these two groups, leases without standbys
    (clients that would acquire the lease) come first. Leases that are equal so far are sorted by
    the reported age of their oldest item, the highest age first.

    If the role may not read the table, return no leases. The statements run in a savepoint, so that
    the caller's transaction remains usable after the server has refused a statement.

    Args:
        has_reports: whether migration LEASE_REPORTS_MIGRATION is applied.
    """
    try:
        async with connection.transaction():
            rows, is_partial = await read_leases(
                connection, schema, name_prefix=USER_LEASE_NAME_PREFIX, limit=READ_LEASES_MAX
            )
            lease_map = (
                await read_lease_reports(connection, schema) if has_reports and rows else None
            )
    except DATABASE_ERRORS as error:
        if getattr(error, "sqlstate", None) != PRIVILEGE_MISSING_SQLSTATE:
            raise
        return ShownLeases([], 0, is_partial=False)
    found = sorted(
        (_make_lease_status(row, lease_map) for row in rows), key=_get_importance_sort_key
    )
    left_out = max(len(found) - SHOWN_LEASES_MAX, 0)
    return ShownLeases(found[:SHOWN_LEASES_MAX], left_out, is_partial)


def _make_lease_status(row: HeldOrExpiredLeaseRow, lease_map: LeaseReportMap | None) -> LeaseStatus:
    holder = row.holder if row.is_held else None
    reports = find_lease_reports(lease_map, row.name, holder=holder, epoch=row.epoch)
    return LeaseStatus(
        name=row.name.removeprefix(USER_LEASE_NAME_PREFIX),
        state="held" if row.is_held else "expired",
        holder=row.holder,
        epoch=row.epoch,
        acquired_at=row.acquired_at,
        held_for=round(row.held_seconds, 3),
        expires_in=round(row.seconds_until_expiry, 3),
        standbys=reports.standbys,
        lag=reports.lag,
    )


def _get_importance_sort_key(lease: LeaseStatus) -> tuple[bool, bool, float, str]:
    age = 0.0 if lease.lag is None or lease.lag.age is None else lease.lag.age
    return lease.state == "held", bool(lease.standbys), -age, lease.name
