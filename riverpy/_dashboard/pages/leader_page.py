"""The page about leaders, leader domains, leases and singletons."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from riverpy._dashboard.database import open_read_transaction
from riverpy._dashboard.health_summary import (
    HEALTH_BY_LEVEL,
    describe_leaders,
    describe_unheld_leases,
    has_valid_lease,
    make_health_summary,
)
from riverpy._dashboard.page import Page
from riverpy._dashboard.sentence import HealthSentence
from riverpy._names import DEFAULT_DOMAIN, SCHEMA_LEASE_NAME
from riverpy._postgres.driver import DATABASE_ERRORS
from riverpy._tools.doctor.finding import Level
from riverpy._tools.domain_map import TABLE_MISSING_SQLSTATE, read_domains_if_permitted
from riverpy._tools.lease_map import describe_lag
from riverpy._tools.text import format_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import datetime

    from riverpy._dashboard.page import PageRequest
    from riverpy._postgres.driver import Transaction
    from riverpy._tools.doctor.finding import Finding
    from riverpy._tools.domain_map import DomainMap
    from riverpy._tools.top.lease_status import LeaseStatus
    from riverpy._tools.top.status import LeaderStatus, OverallStatus

NAMES_SHOWN_MAX = 20
"""The maximum number of names that the page shows in one list: the queues or candidates of a
domain, or the standbys of a lease. A candidate is a client that can become leader."""
FINDINGS_AGE_MAX = 60.0
"""The maximum age of the findings of `riverpy doctor` in seconds. While the page is open, the
checks of `riverpy doctor` run again after this time."""
_UNDEFINED_COLUMN_SQLSTATE = "42703"
"""PostgreSQL's SQLSTATE for a missing column. It means that the tables have an older version."""
_CHECK_NAMES = {"leader", "domains", "leases"}
"""The checks of `riverpy doctor` whose problems this page shows."""


class DomainLeader(NamedTuple):
    """The leader of one domain, with the candidates and queues of the domain."""

    domain: str
    holder: str | None
    """The id of the leader. None: there is no leader."""
    elected_at: datetime | None
    epoch: int | None
    """The number of the leader's term. None: the terms of this domain have no number."""
    expires_at: datetime | None
    is_foreign: bool
    """Whether the leader is not a riverpy client."""
    candidates: Sequence[str] | None
    """The ids of the live clients that can become leader. None: not known."""
    queues: Sequence[str] | None
    """The queues of the domain. None: all queues that no other domain owns."""

    @property
    def can_resign(self) -> bool:
        """Whether the dashboard can request that this leader resigns."""
        return self.domain != SCHEMA_LEASE_NAME


class ListedLease(NamedTuple):
    """A lease of user code or of a singleton, with the texts that the page shows."""

    lease: LeaseStatus
    expires_at: datetime
    lag: str
    """The work that the holder of the lease has not done yet, in words, such as `40 items, the
    oldest 1m5s, reported 3s ago`. Empty: the holder has not reported it."""


async def load_leader_page(view: PageRequest) -> Mapping[str, object]:
    """Read the leaders, and the last findings of `riverpy doctor` about them."""
    status = await view.site.statuses.read()
    async with open_read_transaction(view.site.client) as tx:
        domains = await _read_domains(tx, view.site.client.config.schema)
    leaders = list(_list_leaders(status, domains))
    report = view.site.doctor.last
    findings = () if report is None else report.findings
    problems = [one for one in findings if one.name in _CHECK_NAMES and one.level is not Level.OK]
    return {
        "now": status.at,
        "status": status,
        "summary": make_health_summary(
            _describe_leaders_and_leases(status, problems), "All is well with leaders and leases"
        ),
        "leaders": leaders,
        "has_schema_lease": any(one.domain == SCHEMA_LEASE_NAME for one in leaders),
        "are_domains_known": domains is not None,
        "problems": problems,
        "report": report,
        "health_by_level": HEALTH_BY_LEVEL,
        "leases": [_make_listed_lease(status.at, one) for one in status.leases],
        "names_max": NAMES_SHOWN_MAX,
    }


PAGE = Page(
    "leader",
    "/leader",
    "leader.html",
    load_leader_page,
    "Leader",
    findings_age_max=FINDINGS_AGE_MAX,
)


async def _read_domains(tx: Transaction, schema: str | None) -> DomainMap | None:
    """Return the leader domains. Return None if their tables are missing, or if the database role
    may not read them."""
    try:
        async with tx.transaction():
            return await read_domains_if_permitted(tx, schema)
    except DATABASE_ERRORS as error:
        if getattr(error, "sqlstate", None) not in {
            TABLE_MISSING_SQLSTATE,
            _UNDEFINED_COLUMN_SQLSTATE,
        }:
            raise
        return None


def _describe_leaders_and_leases(
    status: OverallStatus, problems: Sequence[Finding]
) -> Iterator[HealthSentence]:
    yield from describe_leaders(status)
    yield from describe_unheld_leases(status)
    held = sum(one.state == "held" for one in status.leases) + status.leases_left_out
    if held:
        verb = "has a holder" if held == 1 else "have holders"
        yield HealthSentence("ok", f"{format_count(held, 'lease')} of user code {verb}.")
    yield from (
        HealthSentence(
            HEALTH_BY_LEVEL[level], f"{format_count(number, noun)} of the checks: see below."
        )
        for level, noun in ((Level.FAIL, "failure"), (Level.WARN, "warning"))
        if (number := sum(one.level is level for one in problems))
    )


def _list_leaders(status: OverallStatus, domains: DomainMap | None) -> Iterator[DomainLeader]:
    """Yield the leader of the domain `default`, the holder of the schema lease (if there is one),
    and the leaders of the other domains. If `default` has no riverpy leader, the holder of the
    schema lease does the maintenance of the whole schema."""
    default_candidates = _list_default_candidates(status, domains)
    yield _make_domain_leader(status.at, DEFAULT_DOMAIN, status.leader, default_candidates, None)
    if domains is not None:
        holder = domains.current_leader(SCHEMA_LEASE_NAME)
        if holder is not None:
            yield DomainLeader(
                SCHEMA_LEASE_NAME,
                holder.holder,
                holder.elected_at,
                holder.epoch,
                holder.expires_at,
                not holder.is_riverpy_client,
                None,
                (),
            )
    for one in status.domains:
        candidates = None if domains is None else _list_candidates(domains, one.name)
        yield _make_domain_leader(status.at, one.name, one.leader, candidates, one.queues)


def _make_listed_lease(now: datetime, lease: LeaseStatus) -> ListedLease:
    lag = "" if lease.lag is None else describe_lag(lease.lag)
    return ListedLease(lease, _get_lease_expiry_time(now, lease.expires_in), lag)


def _get_lease_expiry_time(now: datetime, seconds: float) -> datetime:
    """Return the expiry time of a lease, cut to whole seconds, so that small differences between
    two reads do not change the page."""
    return (now + timedelta(seconds=seconds)).replace(microsecond=0)


def _make_domain_leader(
    now: datetime,
    domain: str,
    leader: LeaderStatus | None,
    candidates: Sequence[str] | None,
    queues: Sequence[str] | None,
) -> DomainLeader:
    if leader is None or not has_valid_lease(leader):
        return DomainLeader(domain, None, None, None, None, False, candidates, queues)
    return DomainLeader(
        domain,
        leader.leader_id,
        leader.elected_at,
        leader.epoch,
        _get_lease_expiry_time(now, leader.expires_in),
        bool(leader.foreign),
        candidates,
        queues,
    )


def _list_candidates(domains: DomainMap, domain: str) -> list[str]:
    return [one.client_id for one in domains.live_clients(domain) if one.is_candidate]


def _list_default_candidates(
    status: OverallStatus, domains: DomainMap | None
) -> Sequence[str] | None:
    """Return the ids of the live clients that can become leader of the domain `default`. None: not
    known."""
    if domains is not None:
        return _list_candidates(domains, DEFAULT_DOMAIN)
    if status.candidates is None:
        return None
    return [one.client_id for one in status.workers if one.candidate and one.state == "alive"]
