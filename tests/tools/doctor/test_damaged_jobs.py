"""What doctor reports of damaged jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from riverpy._tools.doctor import snapshot
from tests.kit.damaged_rows import DAMAGE, damage
from tests.tools.doctor.conftest import (
    insert_job,
    register,
)

if TYPE_CHECKING:
    import pytest

    from tests._database import Schema
    from tests.tools.doctor.conftest import Doctor


async def test_damaged_rows(schema: Schema, doctor: Doctor) -> None:
    """Jobs that the server cannot read are one finding with their ids. All checks still run and
    see the other jobs."""
    await register(schema, "alive", kinds=("task",), silent=1)
    damaged = [
        await insert_job(schema, "running", client_id="alive"),
        await insert_job(schema, "available", error="e"),
        await insert_job(schema, "retryable", error="e"),
    ]
    await insert_job(schema, "running", client_id="alive", since=900)
    await insert_job(schema, "available", kind="rare", error="e")
    for job_id, column in zip(damaged, ("attempted_by", "errors", "errors"), strict=True):
        await damage(schema, job_id, column)
    report = await doctor()
    found = report.one("damaged", "fail")
    assert found["data"] == {"job_ids": damaged}
    assert "cannot read jobs 1, 2, 3 (" in found["text"]
    assert DAMAGE in found["text"]
    assert "delete the row" in found["fix"]
    assert not [one for one in report.findings if "this check failed" in one["text"]]
    assert report.one("running", "ok")["data"]["running"] == 2
    assert report.one("running", "warn")["data"]["job_id"] == 4
    assert report.one("kinds", "warn")["data"]["kind"] == "rare"


async def test_another_table(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged row of another table fails the checks that read it. Their fix names the disk and
    not a busy database."""

    async def broken(connection: Any, *_: object) -> None:
        await connection.execute("DO $$ BEGIN RAISE 'bad' USING ERRCODE = 'XX001'; END $$")

    monkeypatch.setattr(snapshot, "read_periodic_jobs", broken)
    found = (await doctor()).one("periodic", "warn")
    assert "this check failed: bad" in found["text"]
    assert "damages its disk" in found["fix"]
