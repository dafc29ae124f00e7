"""References: foreign keys of the application's that stop the clean-up of some rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._tools.doctor.finding import Finding, Level, shown
from riverpy._tools.doctor.statements import doctor_references

if TYPE_CHECKING:
    from riverpy._tools.doctor.snapshot import DatabaseSnapshot


async def check_references(patient: DatabaseSnapshot) -> list[Finding]:
    """Which tables refer to rows that a leader deletes, and so keep it from that.

    Raises:
        Exception: one of DATABASE_ERRORS.
    """
    async with patient.session.reading() as connection:
        rows = await doctor_references(connection, patient.schema)
    if not rows:
        text = "no foreign key keeps rows from being deleted"
        return [Finding(Level.OK, "references", text, data={"references": 0})]
    return shown(
        [
            Finding(
                Level.WARN,
                "references",
                f'table {row.referring} refers to {row.table} by "{row.name}": a leader cannot '
                "delete the rows that it refers to, and keeps trying",
                "let the foreign key have ON DELETE CASCADE or SET NULL, or drop it; the leader's "
                "log names the rows (`row set aside`)",
                {"table": row.table, "referring": row.referring, "constraint": row.name},
            )
            for row in rows
        ]
    )
