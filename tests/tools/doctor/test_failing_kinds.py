"""What doctor reports of kinds that fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.tools.doctor.conftest import (
    insert_job,
    register,
    set_leader,
)

if TYPE_CHECKING:
    from tests._database import Schema
    from tests.tools.doctor.conftest import Doctor


async def test_failing_kinds(schema: Schema, doctor: Doctor) -> None:
    """A kind is reported if its jobs are discarded, have one attempt left, or many of them
    failed. The finding shows no password. One or two failed jobs are only counted."""
    await register(schema, "alive", kinds=("odd", "close", "lost", "many"))
    await set_leader(schema, "alive")
    await insert_job(schema, "retryable", kind="odd", due=-60, error="once")
    report = await doctor()
    assert report.problems() == []
    assert report.one("failing", "ok")["data"] == {"failed": {"odd": 1}, "discarded": {}}
    error = "cannot reach postgres://me:secret@host/db"
    await insert_job(schema, "retryable", kind="close", due=-60, attempts=24, error=error)
    for _ in range(2):
        await insert_job(schema, "discarded", kind="lost", attempts=25, error="boom")
    for _ in range(10):
        await insert_job(schema, "available", kind="many", error="again")
    report = await doctor()
    found = {one["data"]["kind"]: one for one in report.named("failing", "warn")}
    assert list(found) == ["close", "lost", "many"]
    assert (
        "1 job failed and waits for the next attempt, and one has only 1 attempt left"
        in (found["close"]["text"])
    )
    assert "secret" not in found["close"]["text"]
    assert 'kind "lost" fails: 2 jobs were discarded in the last hour' in found["lost"]["text"]
    for verb in ("list", "retry"):
        assert f"riverpy job {verb} --state discarded --kind lost" in found["lost"]["fix"]
    assert "10 jobs failed" in found["many"]["text"]
