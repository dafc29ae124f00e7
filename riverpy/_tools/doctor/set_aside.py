"""Set aside: rows that clients cannot claim, store or maintain, because each fails alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._tools.doctor.finding import Finding, Level, count, names, one_error, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from riverpy._tools.doctor.snapshot import DatabaseSnapshot
    from riverpy._tools.doctor.statements import AsideRow, ClientRow

_FIX = (
    "remove the cause that the error names: a trigger, a foreign key, a lock, a damaged value "
    "(docs/faults.md#damaged-rows). No other row waits, and the client tries these again by "
    "itself, at least every 5 minutes (docs/doctor.md)"
)


async def check_set_aside(patient: DatabaseSnapshot) -> list[Finding]:
    """Which rows living clients have set aside.

    Raises:
        Exception: one of DATABASE_ERRORS.
    """
    clients = await patient.clients()
    if clients is None or not patient.has_state:
        text = "not known: clients have no place to report them (see `schema`)"
        return [Finding(Level.OK, "set aside", text, data={"rows": None})]
    findings = [found for one in clients if one.is_alive for found in _findings(one)]
    if not findings:
        text = "no client has set a row aside"
        return [Finding(Level.OK, "set aside", text, data={"rows": 0})]
    return shown(findings)


def _findings(one: ClientRow) -> list[Finding]:
    """One for each error of each kind of statement."""
    if one.aside is None:
        return []
    groups: dict[tuple[str, str], list[AsideRow]] = {}
    for row in one.aside.rows:
        groups.setdefault((row.what, row.error), []).append(row)
    unnamed = one.aside.count - len(one.aside.rows)
    return [_finding(one.client_id, rows, unnamed) for rows in groups.values()]


def _finding(client_id: str, rows: Sequence[AsideRow], unnamed: int) -> Finding:
    first, tries = min(rows, key=lambda row: row.since), max(row.tries for row in rows)
    which = names(row.row for row in rows)
    text = (
        f"{client_id}: {count(len(rows), 'row')} set aside ({first.what}): {which}, since "
        f"{first.since}, {'up to ' if len(rows) > 1 else ''}{count(tries, 'try', plural='tries')}: "
        f"{one_error(first.error)}"
    )
    if unnamed:
        text += f". This client has set {count(unnamed, 'more row')} aside"
    return Finding(
        Level.WARN,
        "set aside",
        text,
        _FIX,
        {
            "client_id": client_id,
            "what": first.what,
            "rows": [row.row for row in rows],
            "since": first.since,
            "tries": tries,
            "error": first.error,
            "unnamed": unnamed,
        },
    )
