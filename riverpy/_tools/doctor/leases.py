"""The check of the leases of user code."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from riverpy._names import USER_LEASE_NAME_PREFIX
from riverpy._postgres.leases import lease_list
from riverpy._postgres.schema import LEASES_MIGRATION
from riverpy._tools.doctor.finding import Finding, ok_finding, warn_finding
from riverpy._tools.lease_map import describe_lag, find_lease_reports
from riverpy._tools.text import format_count, format_names, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from riverpy._postgres.leases import LeaseRow
    from riverpy._tools.doctor.snapshot import DatabaseSnapshot
    from riverpy._tools.lease_map import LeaseReportMap
    from riverpy.stats import LeaseLag

EXPIRED_LEASE_WARN_SECONDS_MIN = 60.0
"""A lease that expired at least this many seconds ago, and that no process has acquired since, is
reported. If a process waited for the lease, it would have acquired it by then."""
EXPIRED_LEASE_WITHOUT_STANDBY_WARN_SECONDS_MIN = 10.0
"""An expired lease is reported after this many seconds if all live clients report which leases
they wait for, and no client waits for this lease. A `LeaseManager` without a client reports
nothing, but if it waited for the lease, it would have acquired the lease by then."""
EXPIRED_LEASE_WARN_SECONDS_MAX = 86_400.0
"""A lease that expired longer ago than this many seconds is not reported: probably no process needs
it."""
DESCRIBED_LEASES_MAX = 20
"""The maximum number of held leases that are described."""


class _UserLease(NamedTuple):
    """A lease of user code that is held or has expired."""

    name: str
    row: LeaseRow
    seconds_until_expiry: float
    standbys: list[str] | None
    """The clients that would acquire the lease if it were free. None: not known."""
    lag: LeaseLag | None

    @property
    def is_held(self) -> bool:
        return self.seconds_until_expiry >= 0

    @property
    def seconds_behind(self) -> float:
        """How many seconds the holder of the lease is behind with its work.

        The value is the age of the oldest unhandled item in the holder's last lag report, plus the
        time since this report. A report with only a number of unhandled items counts as age 0. The
        value is 0 if the holder has made no report, or if the report contains no unhandled item."""
        if self.lag is None or not (self.lag.age or self.lag.count):
            return 0.0
        return (self.lag.age or 0.0) + self.lag.reported_ago


async def check_leases(snapshot: DatabaseSnapshot) -> list[Finding]:
    """Report the leases that are held, the leases that have expired, and the leases whose holder is
    late with its work. Only leases of user code are checked."""
    if not snapshot.has_migration(LEASES_MIGRATION):
        return [ok_finding("off: their table is missing (see `schema`)", leases=None)]
    rows = await snapshot.session.read(
        lease_list,
        snapshot.schema,
        prefix=USER_LEASE_NAME_PREFIX,
        expired_within=timedelta(seconds=EXPIRED_LEASE_WARN_SECONDS_MAX),
    )
    lease_map = await snapshot.lease_reports()
    leases = [lease for row in rows if (lease := _make_user_lease(row, lease_map)) is not None]
    limit = snapshot.options.max_lag_age.total_seconds()
    return [
        _held_leases_finding([lease for lease in leases if lease.is_held], lease_map),
        *_expired_lease_findings(leases, lease_map),
        *_lag_findings([lease for lease in leases if lease.seconds_behind > limit]),
    ]


def _make_user_lease(row: LeaseRow, lease_map: LeaseReportMap | None) -> _UserLease | None:
    """Return a lease of user code with what live clients report about it (its standby clients and
    its lag). Return None if the lease was released. `lease_map` is None if the reports are not
    known."""
    if row.seconds_until_expiry is None:
        return None
    holder = row.holder if row.seconds_until_expiry >= 0 else None
    reports = find_lease_reports(lease_map, row.name, holder=holder, epoch=row.epoch)
    name = row.name.removeprefix(USER_LEASE_NAME_PREFIX)
    return _UserLease(name, row, row.seconds_until_expiry, *reports)


def _held_leases_finding(
    held_leases: Sequence[_UserLease], lease_map: LeaseReportMap | None
) -> Finding:
    text = format_count(len(held_leases), "lease") + " of user code"
    if held_leases:
        shown = [_describe_lease(lease) for lease in held_leases[:DESCRIBED_LEASES_MAX]]
        more = len(held_leases) - len(shown)
        text += ": " + "; ".join([*shown, *([f"and {more:,} more"] if more > 0 else [])])
    data: dict[str, object] = {"leases": {lease.name: lease.row.holder for lease in held_leases}}
    if lease_map is not None:
        data["standbys"] = {lease.name: lease.standbys for lease in held_leases}
        data["lags"] = {lease.name: lease.lag for lease in held_leases if lease.lag is not None}
        data["clients_without_report"] = sorted(lease_map.client_ids_without_report)
    return ok_finding(text, **data)


def _describe_lease(lease: _UserLease) -> str:
    parts = [f'"{lease.name}" held by {lease.row.holder} (epoch {lease.row.epoch})']
    if lease.standbys is not None:
        count = len(lease.standbys)
        clients = format_count(count, "client") if count else "no running client"
        parts.append(f"{clients} stand{'' if count > 1 else 's'} by")
    if lease.lag is not None:
        parts.append(f"lag {describe_lag(lease.lag)}")
    return ", ".join(parts)


def _expired_lease_findings(
    leases: Sequence[_UserLease], lease_map: LeaseReportMap | None
) -> list[Finding]:
    is_known = lease_map is not None and not lease_map.client_ids_without_report
    found: list[_UserLease] = []
    for lease in leases:
        is_alone = is_known and not lease.standbys
        age_min = (
            EXPIRED_LEASE_WITHOUT_STANDBY_WARN_SECONDS_MIN
            if is_alone
            else EXPIRED_LEASE_WARN_SECONDS_MIN
        )
        if age_min <= -lease.seconds_until_expiry < EXPIRED_LEASE_WARN_SECONDS_MAX:
            found.append(lease)
    if not found:
        return []
    oldest = -min(lease.seconds_until_expiry for lease in found)
    text = (
        f"expired up to {format_seconds(oldest)} ago and not acquired again: "
        f"{format_names(lease.name for lease in found)}. "
        f"Last holder: {format_names(dict.fromkeys(lease.row.holder for lease in found))}"
    )
    alone = [lease.name for lease in found if lease.standbys == []]
    if alone:
        text += f". No running client reports that it stands by for {format_names(alone)}"
    expired = {lease.name: round(-lease.seconds_until_expiry, 3) for lease in found}
    return [
        warn_finding(
            text,
            "start a process that uses the lease or runs the singleton. If it is no longer "
            "needed, do nothing: this warning ends after a day",
            expired=expired,
            without_standby=alone,
        )
    ]


def _lag_findings(leases_behind: Sequence[_UserLease]) -> list[Finding]:
    return [
        warn_finding(
            f'the holder of "{lease.name}" is behind: {describe_lag(lease.lag)}',
            f"read the log of {lease.row.holder}: the work under the lease is too slow, waits, or "
            "no longer reports its lag (docs/singletons.md#lag). If the lag is expected, raise "
            "--max-lag-age",
            lease=lease.name,
            holder=lease.row.holder,
            lag=lease.lag,
            behind_for=round(lease.seconds_behind, 3),
        )
        for lease in sorted(leases_behind, key=lambda lease: -lease.seconds_behind)
        if lease.lag is not None
    ]
