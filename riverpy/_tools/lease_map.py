"""LeaseReportMap: which live clients stand by for each lease, and the lag that each holder of a
lease has reported.

A client stands by for a lease if it would acquire the lease when the lease is free. The lag is how
much work under the lease the holder has not done yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from riverpy._names import DEFAULT_DOMAIN, SCHEMA_LEASE_NAME, domain_lease_name
from riverpy._postgres.lease_reports import client_list_lease_reports
from riverpy._tools.text import format_count, format_seconds
from riverpy.stats import LeaseLag

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from riverpy._postgres.driver import Transaction
    from riverpy._postgres.lease_reports import ReportingClient


def leader_lease_name(domain: str) -> str:
    """Return the name that lease reports use for the lease of a domain's leader. `@schema` is
    returned unchanged: it is the name of the schema lease, not of a domain."""
    return domain if domain in {DEFAULT_DOMAIN, SCHEMA_LEASE_NAME} else domain_lease_name(domain)


@dataclass(frozen=True)
class LeaseReportMap:
    """The lease reports of the clients with a recent heartbeat. A `LeaseManager` without a client
    writes no heartbeat, so it is not in the map."""

    clients_by_lease: Mapping[str, Sequence[ReportingClient]]
    """The clients that stand by for each lease, sorted by start time. The key is the name of the
    lease in table `riverpy_lease`. The key for the leader of domain `default` is `default`."""
    clients_by_id: Mapping[str, ReportingClient]
    client_ids_without_report: frozenset[str]
    """The live clients whose report is missing or incomplete. They may stand by for any lease."""

    def standby_clients(self, name: str, *, holder: str | None) -> list[ReportingClient]:
        """Return the clients that stand by for a lease. The result excludes `holder`: its last
        report may be from the time before it acquired the lease."""
        found = self.clients_by_lease.get(name, ())
        return [client for client in found if client.client_id != holder]

    def standby_client_ids(self, name: str, *, holder: str | None) -> list[str]:
        """Return the ids of the clients that stand by for a lease, without `holder`."""
        return [client.client_id for client in self.standby_clients(name, holder=holder)]

    def find_reported_lag(self, name: str, *, holder: str | None, epoch: int) -> LeaseLag | None:
        """Return the lag that the holder of a lease last reported: how much work under the lease it
        has not done yet. Return None if there is no holder, or if the holder has reported no lag
        since it acquired the lease. `epoch` is the number of the holder's current term."""
        client = None if holder is None else self.clients_by_id.get(holder)
        if client is None or client.report is None:
            return None
        lag = client.report.lags.get(name)
        if lag is None or lag.epoch != epoch:
            return None
        since = lag.reported_ago + max(client.seconds_since_heartbeat, 0.0)
        return LeaseLag(
            count=lag.count,
            age=None if lag.age is None else round(lag.age, 3),
            reported_ago=round(since, 3),
        )


class LeaseReports(NamedTuple):
    """What the live clients have reported about one lease. A value is None if it is not known."""

    standbys: list[str] | None
    """The ids of the clients that stand by."""
    lag: LeaseLag | None


def find_lease_reports(
    lease_map: LeaseReportMap | None, name: str, *, holder: str | None, epoch: int
) -> LeaseReports:
    """Return what the live clients have reported about a lease. `name` is the name of the lease in
    table `riverpy_lease`, including its prefix. `holder` is the id of the current holder, or None.
    `epoch` is the number of the current term."""
    if lease_map is None:
        return LeaseReports(None, None)
    return LeaseReports(
        lease_map.standby_client_ids(name, holder=holder),
        lease_map.find_reported_lag(name, holder=holder, epoch=epoch),
    )


def describe_lag(lag: LeaseLag) -> str:
    """Return a text about a lag, such as `40 items, the oldest 1m5s, reported 3s ago`."""
    parts = [] if lag.count is None else [format_count(lag.count, "item")]
    if lag.age is not None:
        parts.append(f"the oldest {format_seconds(lag.age)}")
    return f"{', '.join(parts)}, reported {format_seconds(lag.reported_ago)} ago"


async def read_lease_reports(connection: Transaction, schema: str | None) -> LeaseReportMap:
    """Read the lease reports of the live clients. Migration CLIENTS_MIGRATION must be applied."""
    clients = await client_list_lease_reports(connection, schema)
    by_lease: dict[str, list[ReportingClient]] = {}
    unknown: set[str] = set()
    for client in clients:
        if client.is_stopping:
            continue
        if client.report is None or client.report.left_out:
            unknown.add(client.client_id)
        for name in () if client.report is None else client.report.standby:
            by_lease.setdefault(name, []).append(client)
    return LeaseReportMap(
        by_lease, {client.client_id: client for client in clients}, frozenset(unknown)
    )
