"""Jobs that the server cannot read: doctor names them, and sees all others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from riverpy._tools.doctor import snapshot as patient
from tests.kit.damaged_rows import DAMAGE, damage
from tests.tools.doctor.conftest import put, register

if TYPE_CHECKING:
    import pytest

    from tests._database import Schema
    from tests.tools.doctor.conftest import Doctor


async def test_damaged_rows(schema: Schema, doctor: Doctor) -> None:
    """A running job whose claimer, and waiting ones whose errors cannot be read are one finding
    with their ids, and no look fails for them: other jobs are seen as before."""
    await register(schema, "alive", kinds=("task",), silent=1)
    damaged = [
        await put(schema, "running", client_id="alive"),
        await put(schema, "available", error="e"),
        await put(schema, "retryable", error="e"),
    ]
    await put(schema, "running", client_id="alive", since=900)
    await put(schema, "available", kind="rare", error="e")
    for job_id, column in zip(damaged, ("attempted_by", "errors", "errors"), strict=True):
        await damage(schema, job_id, column)
    report = await doctor()
    found = report.one("damaged", "fail")
    assert found["data"] == {"job_ids": damaged}
    assert "cannot read jobs 1, 2, 3 (" in found["text"]
    assert DAMAGE in found["text"]
    assert "delete the row" in found["fix"]
    assert not [one for one in report.findings if "could not be looked at" in one["text"]]
    assert report.one("running", "ok")["data"]["running"] == 2
    assert report.one("running", "warn")["data"]["job_id"] == 4
    assert report.one("kinds", "warn")["data"]["kind"] == "rare"


async def test_another_table(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of another table that cannot be read fails the looks that need it. To look again when
    the database is less busy would not help, so that is not said."""

    async def broken(connection: Any, *_: object) -> None:
        await connection.execute("DO $$ BEGIN RAISE 'bad' USING ERRCODE = 'XX001'; END $$")

    monkeypatch.setattr(patient, "doctor_periodic", broken)
    found = (await doctor()).one("periodic", "warn")
    assert "could not be looked at: bad" in found["text"]
    assert "damages its disk" in found["fix"]
