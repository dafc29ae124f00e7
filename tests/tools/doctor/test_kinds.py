"""What doctor reports of kinds without a worker."""

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


async def test_kinds_without_worker(schema: Schema, doctor: Doctor) -> None:
    """A kind of waiting jobs that no live client has is a warning, in whatever state the jobs
    wait."""
    await register(schema, "alive", kinds=("known",))
    await register(schema, "dead", kinds=("resize",), silent=100)
    await set_leader(schema, "alive")
    await insert_job(schema, kind="known")
    for state in ("available", "retryable", "scheduled"):
        job_id = await insert_job(schema, state, kind="resize", due=-100)
    report = await doctor()
    found = report.one("kinds", "warn")
    assert (
        'no riverpy worker has kind "resize". 3 jobs of this kind wait in queue "default"'
        in found["text"]
    )
    assert "another language" not in found["text"]
    assert found["data"]["job_id"] == job_id - 2
    assert "deploy a worker" in found["fix"]
    assert "wait unchanged" in found["fix"]
    assert report.one("kinds", "ok")["data"]["kinds"] == {"known": True, "resize": False}


async def test_kind_that_workers_fail(schema: Schema, doctor: Doctor) -> None:
    """It is a failure if clients claim jobs of a kind that they lack. The finding has the
    attempts left and the command that pauses the queue. Other kinds without a worker are a
    warning."""
    await register(schema, "alive", kinds=("known",))
    await set_leader(schema, "alive")
    unknown = "job kind is not registered in the client's Workers bundle: resize"
    for attempts in (3, 24):
        await insert_job(schema, "retryable", kind="resize", error=unknown, attempts=attempts)
    await insert_job(schema, "retryable", kind="shrink", error="no space left")
    await insert_job(schema, queue="images", kind="crop")
    await schema.execute("INSERT INTO river_queue (name, updated_at) VALUES ('images', now())")
    report = await doctor()
    found = report.one("kinds", "fail")
    assert "All of them failed already, and one has only 1 attempt left" in found["text"]
    assert f"The newest error: {unknown}" in found["text"]
    assert "riverpy queue pause default" in found["fix"]
    found, shrink = [one for one in report.named("kinds") if one["level"] == "warn"]
    assert "(a client in another language may have the kind)" in found["text"]
    assert "wait unchanged" in found["fix"]
    assert 'kind "shrink"' in shrink["text"]
    assert [one["level"] for one in report.named("failing")] == ["ok"]
