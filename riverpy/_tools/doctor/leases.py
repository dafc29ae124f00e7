"""Leases: those of user code, and whether one has lapsed that nobody took over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._names import USER_PREFIX
from riverpy._postgres.leases import lease_list
from riverpy._postgres.schema import LEASES_VERSION, OWN_LINE
from riverpy._tools.doctor.finding import Finding, Level, count, names, span

if TYPE_CHECKING:
    from riverpy._tools.doctor.snapshot import DatabaseSnapshot

LAPSED_LIMIT = 60.0
"""Seconds within which somebody who stands by takes a lapsed lease over."""
LAPSED_MOST = 86_400.0
"""Seconds after which a lapsed lease is taken for one that nobody wants any more."""


async def check_leases(patient: DatabaseSnapshot) -> list[Finding]:
    """Which leases are held, and which lapsed for want of a renewal and were left.

    Raises:
        Exception: one of DATABASE_ERRORS.
    """
    if LEASES_VERSION not in patient.state.versions(OWN_LINE):
        text = "off: their table is not there (see `schema`)"
        return [Finding(Level.OK, "leases", text, data={"leases": None})]
    async with patient.session.reading() as connection:
        rows = await lease_list(connection, patient.schema)
    left = {
        row.name.removeprefix(USER_PREFIX): (row.holder, row.remaining)
        for row in rows
        if row.name.startswith(USER_PREFIX) and row.remaining is not None
    }
    held = sorted(name for name, (_, remaining) in left.items() if remaining >= 0)
    lapsed = {
        name: -remaining
        for name, (_, remaining) in left.items()
        if LAPSED_LIMIT <= -remaining < LAPSED_MOST
    }
    data: dict[str, object] = {"leases": {name: left[name][0] for name in held}}
    text = count(len(held), "lease") + " of user code" + (f": {names(held)}" if held else "")
    findings = [Finding(Level.OK, "leases", text, data=data)]
    if lapsed:
        longest, last = max(lapsed.values()), names({left[name][0]: None for name in lapsed})
        findings.append(
            Finding(
                Level.WARN,
                "leases",
                f"lapsed, for up to {span(longest)}, and taken over by nobody: {names(lapsed)}, "
                f"last held by {last}",
                "start a process that has them, as a singleton or a lease; if nobody is to have "
                "them any more, nothing: they are told of for a day",
                {"lapsed": {name: round(seconds, 3) for name, seconds in lapsed.items()}},
            )
        )
    return findings
