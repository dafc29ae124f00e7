"""Lease reports: what clients write about leases with their heartbeats.

A client reports its standby leases, i.e. the leases that it would acquire if they were free. For
the leases that it holds, it reports the lag, i.e. how much work is still to be done under the
lease.

Reports name a lease as the table of leases does. The lease for the leader of domain `default` is in
River's own table instead. Reports name this lease `default`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from riverpy._postgres.sql_files import get_query

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime

    from riverpy._postgres.driver import Transaction

REPORTED_LEASES_MAX = 1_000
"""The maximum number of standby leases in one report, and the maximum number of lags in one report.
If a client has more, the report contains only the first by name."""
REPORTING_CLIENTS_MAX = 10_000
"""The maximum number of clients whose reports are read at once."""


class ReportedLag(msgspec.Struct, frozen=True):
    """How much work is still to be done under a lease, as the holder of the lease reports it."""

    epoch: int
    """The epoch of the term in which the holder reported the lag. Readers ignore the lag of an
    earlier term."""
    count: int | None
    """The number of items that are still to be handled. None: not reported."""
    age: float | None
    """The age of the oldest item that is still to be handled, in seconds. None: not reported."""
    reported_ago: float
    """Seconds from the call of `Lease.report_lag` until the heartbeat that stored the lag."""


class LeaseReport(msgspec.Struct, frozen=True):
    """What a client reports about leases. The heartbeat stores it as JSON."""

    standby: list[str] = []
    """The leases that the client would acquire if they were free."""
    lags: dict[str, ReportedLag] = {}
    """The lag (how much work is still to be done) of each held lease, by lease name. Leases without
    a reported lag are left out."""
    left_out: int = 0
    """The number of standby leases that are left out, because there are more than
    `REPORTED_LEASES_MAX`."""

    @classmethod
    def make(cls, standby: Iterable[str], lags: Mapping[str, ReportedLag]) -> LeaseReport:
        """Make a report with at most `REPORTED_LEASES_MAX` standby leases, and at most
        `REPORTED_LEASES_MAX` lags."""
        names = sorted(set(standby))
        return cls(
            names[:REPORTED_LEASES_MAX],
            {name: lags[name] for name in sorted(lags)[:REPORTED_LEASES_MAX]},
            max(len(names) - REPORTED_LEASES_MAX, 0),
        )

    @property
    def json_text(self) -> str:
        """The report as JSON."""
        return msgspec.json.encode(self).decode()


class ReportingClient(NamedTuple):
    """A client with a recent heartbeat, and what it last reported about leases."""

    client_id: str
    version: str
    heartbeat_at: datetime
    seconds_since_heartbeat: float
    is_stopping: bool
    report: LeaseReport | None
    """The last report. None: there is no report, or this version of riverpy cannot read it. A
    client writes no reports if its riverpy is too old, or if the table of clients was too old when
    the client started."""


async def client_list_lease_reports(
    connection: Transaction, schema: str | None
) -> list[ReportingClient]:
    """Return the clients with a recent heartbeat, each with its last report about leases, sorted by
    start time. The database must have migration CLIENTS_MIGRATION."""
    rows = await get_query("riverpy_client", "client_lease_reports", schema).fetch(
        connection, limit=REPORTING_CLIENTS_MAX
    )
    return [ReportingClient(*row[:-1], report=_decode_report(row[-1])) for row in rows]


def _decode_report(text: str | None) -> LeaseReport | None:
    """Decode a stored report. Return None if there is no report, or if another version of riverpy
    wrote it in a form that this version cannot read."""
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=LeaseReport)
    except msgspec.DecodeError:
        return None
