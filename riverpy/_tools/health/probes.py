"""The probes of a worker: whether it is alive, whether it is ready, and whether each leader domain
has a leader."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from riverpy._duration import format_duration
from riverpy._names import DEFAULT_DOMAIN

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import timedelta

    from riverpy._tools.domain_map import DomainMap
    from riverpy.stats import ClientStats, QueueStats

CLAIM_AGE_MAX_POLL_INTERVALS = 3
"""A worker with free slots is ready only if its last claim is at most this many poll intervals
old."""
CLAIM_AGE_MARGIN_SECONDS = 1.0
"""Seconds that are added to the maximum age of the last claim, because poll intervals may be very
short."""


class CheckResult(msgspec.Struct, frozen=True):
    """The result of one check: whether it is ok, and the reason."""

    ok: bool
    reason: str


class ProbeResult(msgspec.Struct, frozen=True):
    """The checks of a probe, and whether all of them are ok."""

    ok: bool
    checks: dict[str, CheckResult]

    @classmethod
    def from_checks(cls, checks: dict[str, CheckResult]) -> ProbeResult:
        """Return a result that is ok if all checks are ok."""
        return cls(all(check.ok for check in checks.values()), checks)

    @property
    def summary(self) -> str:
        """The names and reasons of the failed checks, or `ok`."""
        failed = [f"{name}: {check.reason}" for name, check in self.checks.items() if not check.ok]
        return "; ".join(failed) or "ok"


def check_liveness(stats: ClientStats | None) -> ProbeResult:
    """Check that no service of the worker is stuck. The check `event_loop` always succeeds, because
    a blocked event loop could not answer the probe. The database is not checked. `stats` is None if
    there is no client yet."""
    stuck = stats.stuck if stats is not None else ()
    reason = f"stuck: {', '.join(stuck)}; restart the worker" if stuck else "all run"
    services = CheckResult(not stuck, reason)
    return ProbeResult.from_checks({"event_loop": CheckResult(True, "runs"), "services": services})


def check_readiness(stats: ClientStats | None, lag_check: CheckResult | None = None) -> ProbeResult:
    """Check that the worker works jobs. `stats` is None if there is no client yet. `lag_check` is
    the result of `check_queue_lags`, or None if the request has no parameter `max_lag`."""
    state = "starting" if stats is None else stats.state
    checks = {"state": CheckResult(state == "working", state)}
    if stats is not None and stats.state not in {"starting", "stopped"}:
        checks["schema"] = CheckResult(True, "as expected")  # the worker checked this at its start
        checks["listener"] = _check_notification_listener(stats)
        for name, queue in stats.queues.items():
            checks[f"queue {name}"] = _check_queue_claims(queue)
    if lag_check is not None:
        checks["lag"] = lag_check
    return ProbeResult.from_checks(checks)


def check_queue_lags(
    max_lag: timedelta, queue_lags: Mapping[str, timedelta] | None, stats: ClientStats | None
) -> CheckResult:
    """Check that no due job waits for longer than `max_lag`. Paused queues are ignored.

    `queue_lags` contains how long the oldest due job of each queue has waited. It is None if this
    is not known.
    """
    if queue_lags is None:
        return CheckResult(False, "the wait of due jobs is not known: the database did not answer")
    queues = list(stats.queues.items()) if stats is not None else []
    paused = {name for name, queue in queues if queue.paused}
    late = ", ".join(
        f"{name} {format_duration(age)}"
        for name, age in queue_lags.items()
        if age > max_lag and name not in paused
    )
    return CheckResult(not late, f"due jobs wait too long: {late}" if late else "short")


def check_leaders(max_leader_gap: timedelta, domains: DomainMap) -> CheckResult:
    """Check that no domain with live clients has been without a leader for longer than
    `max_leader_gap`. If the check succeeds, its reason describes the leader of each of these
    domains, and of `default` even if `default` has no live client.

    The time without a leader counts from the expiry of the last leader's lease, or from the start
    of the domain's oldest live client if that was later. If the last leader released its lease, or
    if no leader is recorded, the time counts from the start of that client. Clients that are
    stopping are ignored.
    """
    missing: list[str] = []
    facts: list[str] = []
    for domain in sorted({member.domain for member in domains.live_members} | {DEFAULT_DOMAIN}):
        lead = domains.last_leader(domain)
        if lead is not None and not lead.has_lease_ended:
            facts.append(f"{lead.holder} is the leader of {domain}")
            continue
        members = domains.live_clients(domain)
        candidates = [member for member in members if not member.is_stopping]
        reason = ""
        if not candidates:
            reason = ", whose clients are stopping" if members else ", which has no client"
        facts.append(f"no leader of {domain}{reason}")
        seconds = max((member.uptime for member in candidates), default=0.0)
        if lead is not None and lead.seconds_until_expiry is not None:
            seconds = min(seconds, -lead.seconds_until_expiry)
        if seconds > max_leader_gap.total_seconds():
            missing.append(domain)
    if not missing:
        return CheckResult(True, ", ".join(facts))
    return CheckResult(
        False,
        f"no leader of {', '.join(missing)} for more than {format_duration(max_leader_gap)}: "
        "scheduled jobs and retries do not become available; see `riverpy doctor`",
    )


def _check_notification_listener(stats: ClientStats) -> CheckResult:
    match stats.listener:
        case "proven":
            return CheckResult(True, "notifications arrive")
        case "off":
            return CheckResult(True, "polling, as configured")
        case "unproven":  # the worker is ready, but slower: it finds jobs by polling only
            reason = "no notification arrives, jobs are found by polling: see `riverpy doctor`"
            return CheckResult(True, reason)


def _check_queue_claims(queue: QueueStats) -> CheckResult:
    if queue.paused:
        return CheckResult(True, "paused")
    if queue.running >= queue.slots:
        return CheckResult(True, "all slots are in use")
    age = queue.claim_age
    if age is None:
        return CheckResult(False, "no claim yet")
    limit = CLAIM_AGE_MAX_POLL_INTERVALS * queue.poll_interval + CLAIM_AGE_MARGIN_SECONDS
    return CheckResult(age <= limit, f"last claim {age:.1f} s ago, the limit is {limit:g} s")
