"""The pages of workers: what each does, and what is wrong with it."""

from __future__ import annotations

from html import unescape
from typing import TYPE_CHECKING

from riverpy._dashboard.pages import worker_page
from riverpy._dashboard.paths import make_worker_path
from tests.dashboard.site_kit import insert_client, insert_job, insert_queue, open_site
from tests.kit.damaged_rows import damage

if TYPE_CHECKING:
    import pytest

    from tests._database import Schema

SILENT = "now() - interval '3 h'"


def find_row(page: str, name: str) -> str:
    """Return the row of a worker in the list."""
    return page.partition(f'id="worker-{name}"')[2].partition("</tr>")[0]


async def test_workers(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each worker a sentence says what it does or what is wrong: it works, has no free slot, is
    silent, stops, has stuck jobs, skips rows, or is not registered, as a client of River in Go. The
    worst comes first. The page of a worker has its running and stuck jobs, the rows that it skips,
    its queues, its leases, and whether it is the leader."""
    running = {"attempted_at": "now() - interval '90 min'", "attempt": "1"}
    stuck = await insert_job(schema, "running", attempted_by="array['stuck']", **running)
    for name in ("full", "silent", "in Go"):
        by = f"array['x','{name}']"
        await insert_job(schema, "running", kind="'<b>'", attempted_by=by, **running)
    await insert_job(schema, "running", attempted_by="array['full']", attempted_at="now()")
    await insert_job(schema, "running", attempted_at="now()")
    await insert_client(schema, "idle", slots="array[5]", candidate="false")
    await insert_client(schema, "full", slots="array[2]", queues="array['a/b']")
    for name in ("silent", "dead"):
        await insert_client(schema, name, heartbeat_at=SILENT)
    await insert_client(schema, "quiet", heartbeat_at="now() - interval '25 min'", slots="array[9]")
    await insert_client(schema, "stopping", state="'stopping'", queues="'{}'")
    await insert_client(schema, "stuck", slots="array[1]", stuck=f"array[{stuck}]")
    row = '"what": "complete", "row": "<7>", "error": "no postgres://u:pw@h", "tries": 2'
    skipped = f'{{"count": 3, "rows": [{{{row}, "since": "2026-01-31T18:00:00Z"}}]}}'
    await insert_client(schema, "skips", set_aside=f"'{skipped}'")
    await schema.execute(
        "INSERT INTO river_leader (leader_id, elected_at, expires_at)"
        " VALUES ('full', now(), now() + interval '1 h')"
    )
    await schema.execute(
        "INSERT INTO riverpy_lease (name, epoch, holder, ttl, expires_at)"
        " VALUES ('s:nightly', 1, 'full', '1 h', now() + interval '1 h'),"
        " ('s:other', 1, 'idle', '1 h', now() + interval '1 h')"
    )
    sentences = {
        "idle": "It runs 0 jobs in 5 slots.",
        "full": "It runs 2 jobs in 2 slots, the longest for 1h30m: no slot is free.",
        "silent": "No heartbeat for 3h: probably dead. The leader rescues its 1 job",
        "dead": "No heartbeat for 3h: probably dead. The leader removes it from this list when it "
        "has seen no heartbeat for 10 minutes.",
        "quiet": "No heartbeat for 25m: it stopped without a notice, or cannot reach the database.",
        "stopping": "It stops: it takes no new jobs, and waits for 0 jobs.",
        "stuck": "and uses a slot. It can work no other job. Restart the worker, and correct",
        "skips": "It skips 3 rows for a while",
        "in Go": "It is not registered, but runs 1 job. It may be a client of River in Go",
        "": "It is not registered, but runs 1 job.",
    }
    async with open_site(schema) as browser:
        listed = unescape(await browser.see("/workers"))
        for name, text in sentences.items():
            assert text in listed
            assert text in unescape(await browser.see(make_worker_path(name)))
        assert listed.index(">stuck<") < listed.index(">silent<") < listed.index(">idle<")
        assert "(unknown client)" in listed
        slots = "3 workers take jobs. 3 of 8 slots in use, 5 free."
        assert f"{slots} The slots of 1 other worker are not known." in listed
        for name, leadership in (("dead", "–"), ("quiet", "–"), ("idle", "cannot become leader")):
            assert f'data-label="Leader">{leadership}</td>' in find_row(listed, name)
            page = unescape(await browser.see(make_worker_path(name)))
            assert f"<dt>Leader</dt><dd>{leadership}</dd>" in page
        assert 'badge">no heartbeat<' in find_row(listed, "quiet")
        home = unescape(await browser.see("/"))
        assert "4 workers are alive, and 1 more stop." in home
        assert "3 workers send no heartbeat: " in home
        assert 'href="/queue?name=a%2Fb"' in listed
        page = await browser.see(make_worker_path("full"))
        for text in ("leader of default", "It holds nightly.", "&lt;b&gt;", 'href="/jobs/2"'):
            assert text in page
        assert "<b>" not in page
        assert "stuck</span>" in await browser.see(make_worker_path("stuck"))
        page = await browser.see(make_worker_path("skips"))
        assert "&lt;7&gt;" in page
        assert "2 more rows are not named" in page
        assert "pw@" not in page
        monkeypatch.setattr(worker_page, "JOBS_SHOWN_MAX", 1)
        assert "1 jobs of 2 that run longest" in await browser.see(make_worker_path("full"))
        for path in (make_worker_path("none"), "/worker?id=%00"):
            assert "The page Workers lists all" in await browser.see(path, status=404)


async def test_report_of_newer_riverpy(schema: Schema) -> None:
    """A client of another version of riverpy, which reports in a form that this version cannot
    read, breaks no page."""
    await insert_client(schema, "newer", set_aside="'{\"form\": 2}'", version="'99'")
    async with open_site(schema) as browser:
        for path in ("/", "/queues", "/leader", "/worker?id=newer"):
            await browser.see(path)
        assert "newer" in await browser.see("/workers")


async def test_tables_missing(schema: Schema) -> None:
    """If only River's tables exist, the pages of workers and queues show what these tables know,
    and name the command that adds the others."""
    await insert_job(schema, "running", attempted_by="array['go']", attempted_at="now()")
    await insert_queue(schema, "default")
    for name in ("riverpy_lease", "riverpy_client"):
        await schema.execute(f"DROP TABLE {name} CASCADE")
    await schema.execute("DELETE FROM river_migration WHERE line = 'riverpy'")
    async with open_site(schema) as browser:
        for path in ("/workers", "/worker?id=go", "/queues", "/queue?name=default"):
            page = await browser.see(path)
            if path != "/worker?id=go":
                assert "<code>riverpy migrate up</code>" in page
        assert 'name="pause" value="default"' in await browser.see("/queue?name=default")
        assert "It is not registered" in await browser.see("/worker?id=go")


async def test_damaged_jobs(schema: Schema) -> None:
    """Jobs that the server cannot read break no page of queues, workers and periodic jobs."""
    await schema.execute(
        "INSERT INTO riverpy_periodic (id, schedule, next_run_at, last_run_at)"
        " VALUES ('pp', 'every 1h', now(), now() - interval '1 h')"
    )
    await insert_client(schema, "c")
    running = await insert_job(
        schema, "running", attempted_by="array['c']", attempted_at="now()", attempt="1"
    )
    waiting = await insert_job(schema, scheduled_at="now() - interval '1 h'")
    for job_id, column in ((running, "attempted_by"), (waiting, "metadata")):
        await damage(schema, job_id, column)
    async with open_site(schema) as browser:
        for path in ("/queues", "/workers", "/periodic", "/periodic-job?id=pp"):
            await browser.see(path)
        assert "It runs no job" in await browser.see("/worker?id=c")
        page = await browser.see("/queue?name=default")
        answer = await browser.submit(page, "/queues/change", clear="default", confirmed="yes")
        assert "1 waiting job of the queue default deleted." in answer.text
