"""Leading: whether each domain that has living clients has had a leader of late."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._duration import format_duration
from riverpy._names import DEFAULT_DOMAIN
from riverpy._tools.health.probes import Check

if TYPE_CHECKING:
    from datetime import timedelta

    from riverpy._tools.domain_map import DomainMap


def check_leaders(most: timedelta, seen: DomainMap) -> Check:
    """Whether no domain with living clients goes without a leader for longer than `most`: then its
    scheduled jobs and retries are not moved on. Since when that is so, the last lease says; if it
    was released, as in a stop, there is another leader at once, or none that could: clients that
    are stopping could not.

    Args:
        most: how long it may go without one.
        seen: the domains.
    """
    domains = sorted({one.domain for one in seen.members} | {DEFAULT_DOMAIN})
    missing: list[str] = []
    told: list[str] = []
    for domain in domains:
        lead = seen.lead(domain)
        if lead is not None and not lead.is_over:
            told.append(f"{lead.holder} leads {domain}")
            continue
        members = seen.living(domain)
        living = [one for one in members if not one.is_stopping]
        others = ", whose clients are stopping" if members else ", which has no client"
        told.append(f"nobody leads {domain}" + ("" if living else others))
        running = max((one.running for one in living), default=0.0)
        ago = running if lead is None or lead.remaining is None else min(-lead.remaining, running)
        if ago > most.total_seconds():
            missing.append(domain)
    if not missing:
        return Check(True, ", ".join(told))
    return Check(
        False,
        f"nobody leads {', '.join(missing)} for more than {format_duration(most)}: scheduled jobs "
        "and retries are not moved on; see `riverpy doctor`",
    )
