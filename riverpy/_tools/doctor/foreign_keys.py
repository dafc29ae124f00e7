"""Check of the application's foreign keys that prevent the deletion of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._log_events import ROW_SET_ASIDE
from riverpy._tools.doctor.finding import Finding, limited, ok, warn
from riverpy._tools.doctor.statements import doctor_references

if TYPE_CHECKING:
    from riverpy._tools.doctor.snapshot import DatabaseSnapshot


async def check_references(snapshot: DatabaseSnapshot) -> list[Finding]:
    """Report the tables whose foreign keys refer to rows that a leader deletes."""
    async with snapshot.session.reading() as connection:
        rows = await doctor_references(connection, snapshot.schema)
    if not rows:
        return [ok("references", "no foreign key prevents a deletion", {"references": 0})]
    return limited(
        [
            warn(
                "references",
                f'table {row.referring} refers to {row.table} by "{row.name}". The leader cannot '
                "delete the rows that it refers to, and tries again and again",
                "add ON DELETE CASCADE or SET NULL to the foreign key, or drop it. The leader's "
                f"log names the rows (`{ROW_SET_ASIDE}`)",
                {"table": row.table, "referring": row.referring, "constraint": row.name},
            )
            for row in rows
        ]
    )
