"""What doctor reports of running jobs."""

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


async def test_long_job(schema: Schema, doctor: Doctor) -> None:
    """A job that runs for long is reported with the command that cancels it, and with the number of
    other such jobs."""
    await register(schema, "alive", kinds=("task",))
    await set_leader(schema, "alive")
    await insert_job(schema, "running", client_id="alive", since=361)
    report = await doctor()
    assert report.exit_code == 0
    assert "1 job, the longest for 6m" in report.one("running", "ok")["text"]
    job_id = await insert_job(schema, "running", client_id="alive", since=3670)
    found = (await doctor()).one("running", "warn")
    assert f'job {job_id} of kind "task" in queue "default" runs for 1h1m in alive' in found["text"]
    assert f"riverpy job cancel {job_id}" in found["fix"]
    await insert_job(schema, "running", client_id="alive", since=3600)
    assert f"job {job_id}" in (text := (await doctor()).one("running", "warn")["text"])
    assert "(and 1 more like it)" in text
    assert (await doctor("--stuck-after", "2h")).exit_code == 0


async def test_unregistered_clients(schema: Schema, doctor: Doctor) -> None:
    """Running jobs of unregistered clients are counted. Those of an unknown kind that run for
    more than an hour are a warning, because no leader rescues them."""
    await register(schema, "alive", kinds=("known",))
    await set_leader(schema, "alive")
    await insert_job(schema, "running", kind="known", client_id="go_1", since=3601)
    await insert_job(schema, "running", kind="foreign", client_id="go_2", since=3000)
    report = await doctor()
    assert (
        '2 jobs of clients that are not registered: "go_1", "go_2"'
        in (report.one("unregistered", "ok")["text"])
    )
    assert report.exit_code == 0
    await insert_job(schema, "running", kind="foreign", client_id="go_1", since=3670)
    found = (await doctor()).one("unregistered", "warn")
    assert 'Those of kind "foreign" run for up to 1h1m' in found["text"]
    assert found["data"]["unknown_kinds"] == {"foreign": 2}
    assert "stub" in found["fix"]
