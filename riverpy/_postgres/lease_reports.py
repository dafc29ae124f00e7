"""Lease reports: what clients write about leases with their heartbeats. A client reports for which
leases it stands by: it would acquire them if they were free. It also reports how far it is behind
with the leases that it holds.

The names of leases are those of the table of leases. The lease of the leader of `default`, which
River's table has, is reported as `default`.
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
"""The maximum number of standby leases, and of lags, in one report. If there are more, the first by
name are reported."""
REPORTING_CLIENTS_MAX = 10_000
"""The maximum number of clients whose reports are read."""


class ReportedLag(msgspec.Struct, frozen=True):
    """How far the holder of a lease is behind, by its own report."""

    epoch: int
    """The number of the term. The lag of an earlier term means nothing."""
    count: int | None
    """The number of items that were not handled; None: not reported."""
    age: float | None
    """The age of the oldest of these items, in seconds; None: not reported."""
    reported_ago: float
    """Seconds from the report of the lag to the heartbeat."""


class LeaseReport(msgspec.Struct, frozen=True):
    """What a client reports about leases. The heartbeat stores it as JSON."""

    standby: list[str] = []
    """The leases that the client would acquire if they were free."""
    lags: dict[str, ReportedLag] = {}
    """The lags of leases that the client holds, by the name of the lease."""
    left_out: int = 0
    """How many standby leases the report leaves out, because there are more than a report may
    have."""

    @classmethod
    def make(cls, standby: Iterable[str], lags: Mapping[str, ReportedLag]) -> LeaseReport:
        """Return the report. It has at most `REPORTED_LEASES_MAX` standby leases and lags."""
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
    """The last report. None: the client has not reported yet, or cannot report. Then its riverpy
    version is too old, or the table was too old when the client started."""


async def client_list_lease_reports(
    connection: Transaction, schema: str | None
) -> list[ReportingClient]:
    """Return the clients with a recent heartbeat, in the order of their starts, and their last
    reports about leases. Migration CLIENTS_MIGRATION must be applied."""
    rows = await get_query("riverpy_client", "client_lease_reports", schema).fetch(
        connection, limit=REPORTING_CLIENTS_MAX
    )
    return [ReportingClient(*row[:-1], report=_decode_report(row[-1])) for row in rows]


def _decode_report(text: str | None) -> LeaseReport | None:
    """Return a stored report; None: there is none, or another version of riverpy wrote it in a form
    that this one cannot read."""
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=LeaseReport)
    except msgspec.DecodeError:
        return None
