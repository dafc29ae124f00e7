"""The check that each domain with live clients has a leader."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._duration import format_duration
from riverpy._names import DEFAULT_DOMAIN
from riverpy._tools.health.probes import Check

if TYPE_CHECKING:
    from datetime import timedelta

    from riverpy._tools.domain_map import DomainMap


def check_leaders(limit: timedelta, domains: DomainMap) -> Check:
    """Check that no domain with live clients lacks a leader for longer than `limit`.

    The time without a leader starts at the end of the last lease. If the last leader has released
    its lease, the end is not known, and the time starts at the start of the oldest client. Clients
    that are stopping are ignored.
    """
    missing: list[str] = []
    facts: list[str] = []
    for domain in sorted({member.domain for member in domains.members} | {DEFAULT_DOMAIN}):
        lead = domains.lead(domain)
        if lead is not None and not lead.is_over:
            facts.append(f"{lead.holder} is the leader of {domain}")
            continue
        members = domains.live_clients(domain)
        candidates = [member for member in members if not member.is_stopping]
        reason = ""
        if not candidates:
            reason = ", whose clients are stopping" if members else ", which has no client"
        facts.append(f"no leader of {domain}{reason}")
        seconds = max((member.running for member in candidates), default=0.0)
        if lead is not None and lead.remaining is not None:
            seconds = min(seconds, -lead.remaining)
        if seconds > limit.total_seconds():
            missing.append(domain)
    if not missing:
        return Check(True, ", ".join(facts))
    return Check(
        False,
        f"no leader of {', '.join(missing)} for more than {format_duration(limit)}: scheduled jobs "
        "and retries do not become available; see `riverpy doctor`",
    )
