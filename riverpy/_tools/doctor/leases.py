"""Check of the leases of user code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._names import USER_LEASE_NAME_PREFIX
from riverpy._postgres.leases import lease_list
from riverpy._postgres.schema import LEASES_MIGRATION
from riverpy._tools.doctor.finding import Finding, ok, warn
from riverpy._tools.text import format_count, format_names, format_seconds

if TYPE_CHECKING:
    from riverpy._tools.doctor.snapshot import DatabaseSnapshot

EXPIRED_LEASE_AGE_MIN = 60.0
"""A lease that expired at least this many seconds ago is reported. A process that waits for a lease
acquires it before that."""
EXPIRED_LEASE_AGE_MAX = 86_400.0
"""A lease that expired this many seconds ago or earlier is no longer reported: probably no process
needs it."""


async def check_leases(snapshot: DatabaseSnapshot) -> list[Finding]:
    """Report the leases that have a holder, and the leases that have expired."""
    if not snapshot.has_migration(LEASES_MIGRATION):
        return [ok("off: their table is missing (see `schema`)", leases=None)]
    rows = await snapshot.session.read(lease_list, snapshot.schema)
    holders: dict[str, str] = {}
    expired: dict[str, float] = {}
    last_holders: dict[str, None] = {}
    for row in rows:
        if not row.name.startswith(USER_LEASE_NAME_PREFIX) or row.seconds_until_expiry is None:
            continue
        name = row.name.removeprefix(USER_LEASE_NAME_PREFIX)
        if row.seconds_until_expiry >= 0:
            holders[name] = row.holder
        elif EXPIRED_LEASE_AGE_MIN <= -row.seconds_until_expiry < EXPIRED_LEASE_AGE_MAX:
            expired[name] = -row.seconds_until_expiry
            last_holders[row.holder] = None
    text = format_count(len(holders), "lease") + " of user code"
    text += f": {format_names(sorted(holders))}" if holders else ""
    findings = [ok(text, leases=holders)]
    if expired:
        findings.append(
            warn(
                f"expired up to {format_seconds(max(expired.values()))} ago and not acquired "
                f"again: {format_names(expired)}. Last holder: {format_names(last_holders)}",
                "start a process that uses the lease or runs the singleton. If it is no longer "
                "needed, do nothing: this warning ends after a day",
                expired={name: round(seconds, 3) for name, seconds in expired.items()},
            )
        )
    return findings
