"""The page of the jobs that ran in the same client at the same time as one job."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from riverpy import Client, Config
from riverpy._dashboard.pages import job_neighbors_page
from riverpy.web import dashboard
from tests.dashboard.site_kit import Browser, insert_job
from tests.kit.damaged_rows import damage

if TYPE_CHECKING:
    import pytest

    from tests._database import Schema


async def run_job(
    schema: Schema, state: str, began: int, ended: int | None, client_id: str = "c", **columns: str
) -> int:
    """Insert a job whose last attempt began and ended so many seconds ago."""
    times = {"attempted_at": f"now() - interval '{began} s'"}
    if ended is not None:
        times["finalized_at"] = f"now() - interval '{ended} s'"
    ran = {"attempted_by": f"array['x', '{client_id}']", "attempt": "2"}
    return await insert_job(schema, state, **(ran | times | columns))


async def test_neighbors(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page of a job links to the jobs whose last attempt ran in the same client at the same
    time: running, ended or tried again. The page says what it searched. A damaged job breaks
    nothing, and a job that has not run, or does not exist, has a page that says so."""
    job_id = await run_job(schema, "discarded", 100, 50)
    error = "array[jsonb_build_object('attempt', 2, 'at', now() - interval '90 s', 'error', 'x')]"
    retried_id = await run_job(schema, "retryable", 100, None, errors=error)
    cancelled_id = await run_job(schema, "cancelled", 80, 70)
    beside = {
        retried_id,
        await run_job(schema, "completed", 120, 99),
        cancelled_id,
        await run_job(schema, "completed", 51, 10),
        await run_job(schema, "running", 500, None),
    }
    await run_job(schema, "completed", 120, 101)
    await run_job(schema, "completed", 49, 20)
    await run_job(schema, "running", 80, None, "d")
    late_id = await run_job(schema, "running", 40, None)
    waiting_id = await insert_job(schema)
    await damage(schema, await run_job(schema, "running", 90, None), "attempted_by")
    async with (
        Client(schema.url, config=Config(schema=schema.name, pool_size=2)) as client,
        Browser(dashboard(client)) as browser,
    ):
        assert f'href="/jobs/{job_id}/neighbors"' in await browser.see(f"/jobs/{job_id}")

        async def find(of: int) -> tuple[set[int], str]:
            page = await browser.see(f"/jobs/{of}/neighbors")
            return {int(one) for one in re.findall(r'id="job-(\d+)"', page)}, page

        found, page = await find(job_id)
        assert found == beside
        assert "There may be more" not in page
        found, _ = await find(retried_id)  # it ran until 90 s ago
        assert job_id in found
        assert cancelled_id not in found
        found, page = await find(late_id)
        assert "still runs" in page
        assert job_id not in found
        assert "No attempt" in (await find(waiting_id))[1]
        await browser.see("/jobs/999/neighbors", status=404)
        monkeypatch.setattr(job_neighbors_page, "SEARCHED_JOBS_MAX", 1)
        monkeypatch.setattr(job_neighbors_page, "JOBS_SHOWN_MAX", 1)
        found, page = await find(job_id)
        assert len(found) == 1
        assert "There may be more" in page
        assert "left out" in page
