"""The pages of periodic jobs: when each runs next, pause, resume and run now."""

from __future__ import annotations

import json
import re
from html import unescape
from typing import TYPE_CHECKING, Any

from riverpy._dashboard import job_search
from riverpy._dashboard.pages import periodic_job_page, periodic_list_page
from riverpy._dashboard.paths import make_periodic_job_path
from riverpy._log_events import DASHBOARD_MADE_A_CHANGE
from tests.dashboard.site_kit import insert_client, insert_job, open_site

if TYPE_CHECKING:
    import pytest

    from tests._database import Schema


async def insert_periodic_job(schema: Schema, job_id: str, **columns: str) -> None:
    """Insert the row of a periodic job. The values of the columns are SQL."""
    values = {"schedule": "'every 1h'", "next_run_at": "now() + interval '30 min'", **columns}
    await schema.execute(
        f"INSERT INTO riverpy_periodic (id, {', '.join(values)})"
        f" VALUES ($1, {', '.join(values.values())})",
        job_id,
    )


async def set_leader(schema: Schema, leader_id: str) -> None:
    """Let a client be the leader of `default`."""
    await schema.execute(
        "INSERT INTO river_leader (leader_id, elected_at, expires_at)"
        " VALUES ($1, now(), now() + interval '1 h')"
        " ON CONFLICT (name) DO UPDATE SET leader_id = excluded.leader_id",
        leader_id,
    )


async def test_periodic_jobs(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each periodic job the page says when it runs next, or why it does not: it is paused, not
    in use, late, has no schedule, or there is no leader, or the leader is River in Go. It shows the
    last run, and the last job with its state if it is among the newest jobs. The page of a
    periodic job has the next times, also in the time zone of its schedule."""
    nightly = {"schedule": "'cron 0 2 * * * Europe/Berlin'", "last_run_at": "'2026-01-31 01:00Z'"}
    await insert_periodic_job(schema, "nightly", **nightly, next_run_at="'2040-01-01 01:00Z'")
    await insert_periodic_job(schema, "paused", paused_at="now() - interval '2 h'")
    await insert_periodic_job(schema, "gone", updated_at="now() - interval '3 h'")
    await insert_periodic_job(schema, "late", next_run_at="now() - interval '5 h'")
    await insert_periodic_job(schema, "never", schedule="'never'", next_run_at="NULL")
    await insert_periodic_job(schema, "own", schedule="'<i>'", next_run_at="now()")
    await insert_periodic_job(schema, "lost", last_run_at="now() - interval '1 h'")
    await insert_periodic_job(schema, "asked", run_requested_at="now()")
    await insert_periodic_job(schema, "bills@eu")
    await insert_periodic_job(schema, "late@eu")
    metadata = '\'{"river:periodic_job_id": "nightly"}\''
    await insert_job(schema, "completed", metadata=metadata)
    await insert_job(schema, metadata='\'{"river:periodic_job_id": "late"}\'')
    last = await insert_job(schema, "discarded", metadata=metadata, kind="'<b>'", queue="'q'")
    await insert_client(schema, "host-1")
    await set_leader(schema, "host-1")
    sentences = {
        "nightly": "at 2040-01-01 01:00:00 UTC.",
        "paused": "Paused for 2h: no job is inserted until it is resumed.",
        "gone": "Not in use: no leader has used it for two hours or longer.",
        "late": "Late by 5h, although host-1 is the leader.",
        "never": "It has no schedule: it runs only with `Run now`.",
        "own": "It runs now.",
        "asked": "A run was requested. The leader inserts its job within seconds.",
        "lost": "It runs next in",
        "bills@eu": "but there is no leader of the domain eu now.",
        "late@eu": "but there is no leader of the domain eu now.",
    }
    async with open_site(schema) as browser:
        listed = unescape(await browser.see("/periodic"))
        rows = {
            unescape(row[1]): row[0]
            for row in re.finditer(
                r'<tr [^>]*id="periodic-.*?<a [^>]*>([^<]*)</a>.*?</tr>', listed, re.DOTALL
            )
        }
        assert set(rows) == set(sentences)
        first_run = "none known: It has not run since it was added. Its first run is due at 2"
        for name, text in (
            ("bills@eu", first_run),
            ("paused", "none known: It has not run since it was added, and is paused."),
            ("never", "none known: It has not run since it was added.</td>"),
            ("late", 'Kind">not known yet</td>'),
        ):
            assert text in rows[name], name
        lost = await browser.see(make_periodic_job_path("lost"))
        assert "It ran, but its job was not found: the leader deletes jobs" in lost
        assert "The periodic job paused is paused." in await browser.see("/")
        for name, text in sentences.items():
            assert text in unescape(await browser.see(make_periodic_job_path(name)))
            if name not in {"nightly", "own", "lost"}:
                assert text in rows[name]
        for text in ("2040-01-01 01:00:00 UTC", "2026-01-31 01:00:00 UTC", f"/jobs/{last}"):
            assert text in rows["nightly"]
        assert "discarded</span>" in rows["nightly"]
        assert "/jobs/" not in rows["late"] + rows["late@eu"]
        assert "<i>" not in await browser.see("/periodic")
        page = await browser.see(make_periodic_job_path("nightly"))
        for text in (
            *("Sun 2040-01-01 02:00:00 in Europe/Berlin", "2040-01-05 01:00:00 UTC"),
            *("&lt;b&gt;", 'href="/queue?name=q"', f'id="job-{last}"'),
        ):
            assert text in page
        monkeypatch.setattr(job_search, "SEARCHED_JOBS_MAX", 1)
        await insert_job(schema, "completed", scheduled_at="'2026-01-31 01:00Z'", metadata=metadata)
        await insert_job(schema)
        page = await browser.see(make_periodic_job_path("nightly"))
        assert f'id="job-{last + 1}"' in page  # found by its slot, and so by its kind
        assert "This list searched" not in page
        monkeypatch.setattr(job_search, "SORTED_JOBS_MAX", 1)
        page = await browser.see(make_periodic_job_path("nightly"))
        assert f'href="/jobs/{last + 1}"' in page
        assert "This list searched the newest 1 jobs" in page
        own = await browser.see(make_periodic_job_path("own"))
        assert "Only the code of the schedule can compute later times." in own
        monkeypatch.setattr(periodic_list_page, "PERIODIC_JOBS_SHOWN_MAX", 1)
        assert "Only the first 1 by id" in await browser.see("/periodic")
        for path in (make_periodic_job_path("none"), "/periodic-job?id=%00"):
            await browser.see(path, status=404)
        assert "names no periodic job" in await browser.see("/periodic-job", status=404)
        await set_leader(schema, "in-go")
    async with open_site(schema) as browser:
        page = unescape(await browser.see(make_periodic_job_path("late")))
        assert "although in-go is the leader. It is not a riverpy client" in page
        await schema.execute("DELETE FROM river_leader")
    async with open_site(schema) as browser:
        assert "There is no leader now." in await browser.see("/periodic")
        page = await browser.see(make_periodic_job_path("late"))
        assert "Late by 5h, because there is no leader." in page


async def test_changes(schema: Schema, log: list[dict[str, Any]]) -> None:
    """A user pauses and resumes a periodic job, and after a question runs it now. A second user who
    does the same learns that it was done before. A user who may only read is refused, and so is a
    periodic job that no leader knows, or whose table is missing."""
    await insert_periodic_job(schema, "a/b@eu")
    stored = "SELECT (paused_at IS NOT NULL, run_requested_at IS NOT NULL)::text FROM"
    stored += " riverpy_periodic"
    async with open_site(schema) as browser:
        page = await browser.see("/periodic")
        value = re.search(r'name="pause" value="([^"]*)"', page)
        assert value
        job_id = unescape(value[1])
        back = make_periodic_job_path("a/b@eu")
        for text in ("a/b@eu is paused", "a/b@eu has been paused since"):
            answer = await browser.submit(page, "/periodic/change", pause=job_id, back=back)
            assert text in answer.text
        assert ">Resume<" in answer.text
        for text in ("a/b@eu is resumed", "a/b@eu was not paused"):
            answer = await browser.submit(page, "/periodic/change", resume=job_id)
            assert text in answer.text
        question = await browser.submit(page, "/periodic/change", run=job_id)
        assert "Run a/b@eu now?" in question.text
        assert await schema.fetchval(stored) == "(f,f)"
        for text in ("There is no leader now: the next leader", "was requested at"):
            answer = await browser.submit(page, "/periodic/change", run=job_id, confirmed="yes")
            assert text in answer.text
        assert await schema.fetchval(stored) == "(f,t)"
        note = await schema.fetchval("SELECT run_request::text FROM riverpy_periodic")
        assert json.loads(note)["user"] == "ann"
        for fields, status in (
            ({"pause": "none"}, 404),
            ({"run": "none"}, 404),
            ({}, 400),
            ({"pause": "%00"}, 400),
            ({"pause": job_id, "run": job_id}, 400),
        ):
            answer = await browser.submit(page, "/periodic/change", **fields)
            assert answer.status_code == status, fields
        for path in ("/periodic?as=read", f"{back}&as=read"):
            assert 'form="change"' not in await browser.see(path)
        answer = await browser.submit(page, "/periodic/change?as=read", pause=job_id)
        assert answer.status_code == 403
        await schema.execute("DELETE FROM riverpy_periodic")
        assert "There is no periodic job." in await browser.see("/periodic")
        await schema.execute("DROP TABLE riverpy_periodic")
        assert "riverpy migrate up --line riverpy" in await browser.see("/periodic")
        assert "is missing" in await browser.see(back, status=404)
        answer = await browser.submit(page, "/periodic/change", pause=job_id)
        assert answer.status_code == 404
    events = [one for one in log if one["event"] == DASHBOARD_MADE_A_CHANGE]
    assert [one["action"].split()[0] for one in events] == [
        *("pause", "pause", "resume", "resume", "run", "run")
    ]
    assert {(one["target"], one["user"]) for one in events} == {("a/b@eu", "ann")}


async def insert_run(schema: Schema, state: str, run: object, **columns: str) -> int:
    """Insert a job of the periodic job `nightly`, as the leader does. Return its id."""
    metadata = {"river:periodic_job_id": "nightly", "riverpy:periodic_run": run}
    quoted = json.dumps(metadata).replace("'", "''")
    return await insert_job(schema, state, metadata=f"'{quoted}'", **columns)


async def test_last_runs(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list and the page of a periodic job say whether it ran by its schedule, and what became
    of that run, although it was run by hand since. Each run has its cause, also with a hostile user
    name, or the page says that the cause is not known. Other jobs, of which there may be more than
    are searched, do not hide the run."""
    await insert_periodic_job(schema, "nightly", last_run_at="'2026-01-31 09:00Z'")
    night = {"cause": "schedule", "due_at": "2026-01-31T02:00:00Z"}
    asked = {"cause": "request", "due_at": "2026-01-31T09:00:00Z"}
    at_night = await insert_run(schema, "completed", night)
    await insert_client(schema, "host-1")
    await set_leader(schema, "host-1")
    path = make_periodic_job_path("nightly")
    sentence = "The last run by schedule was due at 2026-01-31 02:00:00 UTC. It completed."
    async with open_site(schema) as browser:
        assert "last by schedule" not in await browser.see("/periodic")
        assert sentence in await browser.see(path)
        assert "Why is not known" not in await browser.see(path)
        await insert_run(schema, "available", asked)
        by_hand = await insert_run(schema, "running", {**asked, "user": "<b>ann"})
        listed = await browser.see("/periodic")
        assert f'by hand: &lt;b&gt;ann: job <a href="/jobs/{by_hand}">' in listed
        assert re.search(
            f"last by schedule: <span[^>]*>2026-01-31 02:00:00 UTC.*/jobs/{at_night}.*completed",
            listed,
        )
        await insert_run(schema, "completed", {"cause": "start", "due_at": "2026-01-31T10:00:00Z"})
        for run in (None, 5, {"cause": "x"}, {"cause": "request"}):
            await insert_run(schema, "completed", run)
        page = await browser.see(path)
        assert re.findall('data-label="Why">([^<]*)<', page) == [
            *["not known"] * 4,
            *["by run_on_start", "by hand: &lt;b&gt;ann", "by hand", "by schedule"],
        ]
        assert "Why is not known" in page
        assert sentence in page
        assert "why is not known: job" in await browser.see("/periodic")
        monkeypatch.setattr(periodic_job_page, "JOBS_SHOWN_MAX", 3)
        assert sentence in await browser.see(path)
        failed = await insert_run(schema, "discarded", {**night, "due_at": "2026-02-01T02:00:00Z"})
        page = await browser.see(path)
        assert "2026-02-01 02:00:00 UTC. It failed every attempt." in page
        assert f'<a href="/jobs/{failed}">Job {failed}</a>' in page
        await schema.execute("DELETE FROM river_job")
        slot = {"kind": "'night'", "scheduled_at": "'2026-01-31 09:00Z'"}
        for number in range(3):
            at = "'2026-01-31 09:00Z'" if number == 2 else "'2026-01-30 09:00Z'"
            await insert_run(schema, "completed", night, **{**slot, "scheduled_at": at})
        monkeypatch.setattr(job_search, "SEARCHED_JOBS_MAX", 1)
        await insert_job(schema)
        assert (await browser.see(path)).count('data-label="Why">by schedule') == 3
