"""What doctor reports of foreign keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests._database import Schema
    from tests.tools.doctor.conftest import Doctor


async def test_foreign_key_that_prevents_deletion(schema: Schema, doctor: Doctor) -> None:
    """A foreign key that prevents the deletion of jobs is a warning with both tables. One with
    ON DELETE CASCADE is not (FR-03)."""
    await schema.execute(
        "CREATE TABLE invoice (job_id bigint CONSTRAINT invoice_job REFERENCES river_job,"
        " other_id bigint REFERENCES river_job ON DELETE CASCADE)"
    )
    try:
        report = await doctor()
        found = report.one("references", "warn")
        assert found["data"]["constraint"] == "invoice_job"
        assert "invoice" in found["text"]
    finally:
        await schema.execute("DROP TABLE invoice")
    assert (await doctor()).one("references", "ok")
