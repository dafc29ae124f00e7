"""The pages of the dashboard, and its changes, without a browser."""

from __future__ import annotations

import json
import re
from html import unescape
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import httpx
import pytest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException

from riverpy import Client, Config, ConfigError
from riverpy._dashboard import job_errors, job_search, status_cache
from riverpy._dashboard.pages import job_list_page
from riverpy._log_events import DASHBOARD_CHANGED_JOBS, DASHBOARD_MASK_FAILED
from riverpy.cli._job_output import job_to_json_object
from riverpy.migrate import migrate_all
from riverpy.web import Access, dashboard
from tests._database import connected
from tests.dashboard.site_kit import LOCAL, SAME_SITE, Browser, insert_client, insert_job
from tests.kit.damaged_rows import damage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.requests import Request

    from tests._database import Schema


@pytest.fixture
async def client(schema: Schema) -> AsyncGenerator[Client]:
    """An open client."""
    async with Client(schema.url, config=Config(schema=schema.name, pool_size=2)) as client:
        yield client


def literal(text: str) -> str:
    """Return a text as SQL."""
    return "'" + text.replace("'", "''") + "'"


async def test_pages(schema: Schema, client: Client) -> None:
    """Home says what is wrong, first what needs action. The list has tabs of states and pages of
    jobs. The page of a job has its timeline, errors, args with exact numbers, log, steps and
    output. Text that could be code, or that could turn the direction of text, is shown as text."""
    error = (
        "jsonb_build_object('at', '2026-01-02T03:04:05Z', 'attempt', 1,"
        " 'error', '<img src=x onerror=alert(1)>', 'trace', 'File \"a.py\", line 3')"
    )
    metadata = (
        '\'{"river:log": [{"attempt": 1, "log": "read 3 rows"}, 7], "output": {"n": 0.10},'
        ' "riverpy:progress": {"done": 1, "total": 4, "text": "half"}, "riverpy:steps": {"a": 1}}\''
    )
    job_id = await insert_job(
        schema,
        "discarded",
        kind="'<b>k</b>'",
        args="jsonb_build_object('n', 12345678901234567890123, 'r', E'a\\u202eb', 's', '</pre>')",
        attempt="1",
        attempted_by="array['worker-1']",
        attempted_at="now()",
        errors=f"array[{error}]",
        metadata=metadata,
        tags="array['tag_1']",
    )
    waiting_id = await insert_job(schema, queue="'slow'", scheduled_at="now() - interval '2 min'")
    async with Browser(dashboard(client)) as browser:
        home = await browser.see("/")
        assert "Something needs action now" in home
        assert "1 job waits in slow, for 2m. No worker works this queue." in home
        assert home.index("1 job waits") < home.index("No attempt failed")
        listed = await browser.see("/jobs")
        assert f'/jobs/{job_id}"' in listed
        assert f'/jobs/{waiting_id}"' in listed
        only = await browser.see("/jobs?state=discarded")
        assert f'/jobs/{job_id}"' in only
        assert f'/jobs/{waiting_id}"' not in only
        page = await browser.see(f"/jobs/{job_id}")
        for text in (
            *("12345678901234567890123", "a\\u202eb", "0.10", "read 3 rows", "in worker-1"),
            *("&lt;img src=x onerror=alert(1)&gt;", "&lt;/pre&gt;", "tag_1", "1 of 4 (25 %): half"),
        ):
            assert text in page
        assert "<img" not in page
        assert "<b>k</b>" not in page
        args = await browser.get(f"/jobs/{job_id}/args")
        assert args.headers["content-type"] == "text/plain; charset=utf-8"
        for path, status in (("/jobs/99", 404), ("/jobs?state=x", 400), ("/jobs?after=x", 400)):
            assert "<h1>" in await browser.see(path, status=status)
        for path, text in (
            ("/queue?name=", "This address names no queue."),
            ("/jobs/change", "GET is not possible here, so nothing was changed."),
        ):
            assert text in await browser.see(path, status=405 if "change" in path else 404)
        for path in ("/", "/jobs", "/jobs/99", "/none", "/static/dashboard.css"):
            headers = (await browser.get(path)).headers
            assert "default-src 'none'" in headers["content-security-policy"]
            assert "unsafe" not in headers["content-security-policy"]
            assert headers["x-content-type-options"] == "nosniff"
        assert "no-store" in (await browser.get("/")).headers["cache-control"]


async def test_many_jobs(schema: Schema, client: Client) -> None:
    """A list is read page by page: no job is left out or shown twice. A large value is cut, and the
    page links to the whole."""
    await schema.execute(
        "INSERT INTO river_job (kind, args, max_attempts)"
        " SELECT 'k', jsonb_build_object('x', repeat('y', 100 * i)), 25"
        " FROM generate_series(1, 230) AS i"
    )
    async with Browser(dashboard(client)) as browser:
        for state in ("", "available"):
            path: str | None = f"/jobs?state={state}"
            seen: list[int] = []
            while path is not None:
                page = await browser.see(path)
                seen += [int(one) for one in re.findall(r'id="job-(\d+)"', page)]
                found = re.search(r'href="([^"]*)">Next page', page)
                path = None if found is None else unescape(found[1])
            assert sorted(seen) == list(range(1, 231))
        page = await browser.see("/jobs/230")
        assert len(page) < 30_000
        assert "Show the whole text" in page
        assert len(await browser.see("/jobs/230/args")) > 23_000


async def test_filters(schema: Schema, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list has filters, alone and together. It searches a limited number of jobs, and says so
    if there may be more. A wrong filter gives the form, with what was typed and what to write."""
    error = "array[jsonb_build_object('error', 'no answer from x', 'attempt', 1)]"
    tagged = await insert_job(
        schema, "discarded", kind="'mail'", tags="array['a','b']", errors=error, priority="2"
    )
    tenant = await insert_job(schema, queue="'slow'", metadata="'{\"tenant\": 7}'", priority="3")
    running = await insert_job(
        schema, "running", kind="'mail'", attempted_at="now()", args='\'{"to": {"id": 1}, "n": 2}\''
    )
    cases: list[tuple[dict[str, object], set[int]]] = [
        ({}, {tagged, tenant, running}),
        ({"kind": "mail"}, {tagged, running}),
        ({"kind": "mail", "state": "running"}, {running}),
        ({"kind": "none"}, set()),
        ({"state": "discarded", "tag": "a", "error": "no answer", "priority": 2}, {tagged}),
        ({"tag": "b"}, {tagged}),
        ({"queue": "slow"}, {tenant}),
        ({"queue": "slow", "state": "available"}, {tenant}),
        ({"queue": "slow", "state": "running"}, set()),
        ({"metadata": '{"tenant": 7}'}, {tenant}),
        ({"metadata": '{"tenant": 8}', "state": "available"}, set()),
        ({"error": "answer from x"}, {tagged}),
        ({"args": '{"to": {"id": 1}}'}, {running}),
        ({"args": '{"n": 3}', "state": "running"}, set()),
        ({"id": f"{tagged}, {running} 99"}, {tagged, running}),
        ({"id": tagged, "state": "available"}, set()),
    ]
    async with Browser(dashboard(client)) as browser:
        for filters, expected in cases:
            page = await browser.see(f"/jobs?{urlencode(filters)}")
            assert {int(one) for one in re.findall(r'id="job-(\d+)"', page)} == expected, filters
            assert "This list searched" not in page
        assert "checked" in await browser.see("/jobs?tick=all")
        for wrong, text in (
            ("id=x", "Ids: write whole numbers"),
            ("priority=9", "Priority: choose a whole number from 1 to 4"),
            ("metadata=7", "Metadata: not a JSON object with a key. Write"),
            ("args={", "Args: not valid JSON. Write an object, such as"),
            ("args=" + "[" * 999, "Args: not valid JSON"),
            ("state=foo", "There is no state foo. Choose one of available, running,"),
            ("state=", "There is no filter &#39;customer&#39;. The filters are state, kind,"),
            ("kind=a&kind=b", "Kind is given twice."),
            (f"tag={'x' * 2000}", "Tag: the text has more than 1,000 characters."),
            ("after=x", "This page link is not valid. Open the first page."),
            ("tick=bad", "`tick` cannot be &#39;bad&#39;. The only value is `all`."),
        ):
            query = f"/jobs?queue=typed&{wrong}" + "&customer=acme" * (wrong == "state=")
            page = await browser.see(query, status=400)
            assert text in page
            assert '<details class="search" open>' in page
            assert 'value="typed"' in page
            assert ("aria-invalid" in page) == (wrong not in {"state=", "after=x", "tick=bad"})
            assert "No job is in this list" not in page
        monkeypatch.setattr(job_search, "SEARCHED_JOBS_MAX", 1)
        monkeypatch.setattr(job_search, "SORTED_JOBS_MAX", 1)
        for filters in ("kind=mail", "state=available", "state=running&queue=default", "tag=a"):
            assert "This list searched" in await browser.see(f"/jobs?{filters}")


async def test_failed_jobs(schema: Schema, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list says which jobs failed, and why: each row has the start of the args and the first
    line of the last error. Above are groups by kind and this line, each with a link to its jobs.
    Passwords are masked, and errors that are large or damaged are left out of the groups. The list
    offers only changes that its state allows."""
    text = "no answer from postgres://u:secret@db" + "/x" * 100
    for number, (kind, error) in enumerate(
        [("mail", text), ("mail", text), ("mail", "bad\nname"), ("'", "bad\nname")]
    ):
        errors = f'array[\'{{"error": "old"}}\', {literal(json.dumps({"error": error}))}]::jsonb[]'
        args = f"jsonb_build_object('customer', {number}, 'much_text', repeat('y', 200))"
        await insert_job(schema, "retryable", kind=literal(kind), errors=errors, args=args)
    monkeypatch.setattr(job_list_page, "JOBS_PER_PAGE", 1)
    async with Browser(dashboard(client)) as browser:
        page = await browser.see("/jobs?state=retryable")
        assert len(re.findall(r'id="job-', page)) == 1
        assert "&#34;customer&#34;: 0" in page
        assert "y" * 90 not in page
        assert "no answer from postgres://u:***@db" in page
        assert "secret" not in page
        assert "4 jobs by kind and last error" in page
        monkeypatch.setattr(job_list_page, "JOBS_PER_PAGE", 50)
        groups = re.findall(r'<span class="number">(\d+)</span> (\S+): <a href="([^"]*)">', page)
        for count, _, path in groups:
            listed = await browser.see(unescape(path))
            assert len(re.findall(r'id="job-', listed)) == int(count)
        assert [(one[0], unescape(one[1])) for one in groups] == [
            *[("2", "mail"), ("1", "'"), ("1", "mail")]
        ]
        await damage(schema, 1, "errors")
        page = await browser.see("/jobs?state=retryable")
        assert "3 jobs by kind and last error" in page
        monkeypatch.setattr(job_errors, "ERRORS_BYTES_MAX", 150)
        page = await browser.see("/jobs?state=retryable")
        assert "2 jobs by kind and last error" in page
        assert "very long or missing: 2 jobs." in page
        for state, offered in (
            ("running", {"Cancel"}),
            ("discarded", {"Retry", "Delete"}),
            ("available", {"Cancel", "Delete"}),
        ):
            await insert_job(schema, state, attempted_at="now()", args="'{\"a\": 1}'")
            page = await browser.see(f"/jobs?state={state}")
            assert set(re.findall(r">(Retry|Cancel|Delete)<", page)) == offered
            assert f"The {state} job:" in page


async def test_changes(schema: Schema, client: Client, log: list[dict[str, Any]]) -> None:
    """Jobs are retried, cancelled and deleted. A question comes before each change that is hard to
    undo. The next page says what was done, once. Each change is logged with its user."""

    async def authorize(request: Request) -> Access:
        return Access("write", user="ann")

    ended = await insert_job(schema, "discarded")
    taken = await insert_job(schema, "discarded", unique_key="'x'", unique_states="b'11111111'")
    running = await insert_job(schema, "running", attempted_by="array['c']", attempted_at="now()")
    async with Browser(dashboard(client, authorize=authorize)) as browser:
        page = await browser.see(f"/jobs/{ended}")
        change = {"id": ended, "back": f"/jobs/{ended}"}
        answer = await browser.submit(page, "/jobs/change", action="retry", **change)
        assert f"Job {ended} was retried." in answer.text
        assert answer.url.path == f"/jobs/{ended}"
        assert "was retried" not in await browser.see(f"/jobs/{ended}")
        question = await browser.submit(page, "/jobs/change", action="cancel", **change)
        assert f"Cancel job {ended}?" in question.text
        assert "It is not worked again." in question.text
        change |= {"confirmed": "yes"}
        answer = await browser.submit(question.text, "/jobs/change", action="cancel", **change)
        assert f"Job {ended} was cancelled." in answer.text
        several = {"id": [ended, taken, running, 99], "back": "/jobs"}
        question = await browser.submit(page, "/jobs/change", action="delete", **several)
        assert "Delete these 4 jobs?" in question.text
        several |= {"confirmed": "yes"}
        answer = await browser.submit(page, "/jobs/change", action="delete", **several)
        for text in ("2 jobs deleted.", "1 needed no change (1 of them run)", "1 do not exist"):
            assert text in answer.text
        several |= {"back": "//example.org"}
        answer = await browser.submit(page, "/jobs/change", action="cancel", **several)
        assert answer.url.path == "/jobs"
        for wrong in ({}, {"id": "x"}, {"id": [1] * 1001}, {"id": 1, "action": "drop"}):
            fields = {"action": "retry", **wrong}
            assert (await browser.submit(page, "/jobs/change", **fields)).status_code == 400
    events = [one for one in log if one["event"] == DASHBOARD_CHANGED_JOBS]
    assert [(one["action"], one["user"], one["changed"]) for one in events] == [
        *[("retry", "ann", 1), ("cancel", "ann", 1), ("delete", "ann", 2), ("cancel", "ann", 1)],
    ]


async def test_cancelled_runs(
    schema: Schema, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first cancellation of a running job tells its worker. If the job still runs, the job
    page, a further cancellation and home say whether the job ignores it, since when, and what to
    do, with a link to the worker. After a deletion the user gets to the list."""
    monkeypatch.setattr(status_cache, "STATUS_AGE_MAX", 0.0)
    monkeypatch.setattr(status_cache, "STATUS_PAUSE_FACTOR", 0.0)
    columns = {"attempted_by": "array['w']", "attempted_at": "now()"}
    job_id = await insert_job(schema, "running", **columns)
    change = {"id": job_id, "back": f"/jobs/{job_id}", "action": "cancel", "confirmed": "yes"}
    await insert_client(schema, "w", slots="array[5]")
    async with Browser(dashboard(client)) as browser:
        page = await browser.see(f"/jobs/{job_id}")
        assert 'in <a href="/worker?id=w">w</a>' in page
        answer = await browser.submit(page, "/jobs/change", **change)
        assert f"Job {job_id} runs: its worker was notified of the cancellation." in answer.text
        assert f"Job {job_id} still runs. Worker w was notified of the cancellation" in answer.text
        for update, text in (
            (f"stuck = array[{job_id}]", f"Job {job_id} (k) ignores its cancellation, which was"),
            ("heartbeat_at = now() - interval '2 h'", "Worker w sends no heartbeat"),
        ):
            await schema.execute(f"UPDATE riverpy_client SET {update}")
            answer = await browser.submit(page, "/jobs/change", **change)
            assert re.search(f'role="status">[^<]*{re.escape(text)}', answer.text), answer.text
            assert '<a href="/worker?id=w">Worker w</a></p>' in answer.text
            home = await browser.see("/")
            restart = f"Job {job_id} (k) ignores its cancellation. Restart worker w"
            assert (restart in home) is ("stuck" in update)
            assert '<a href="/worker?id=w">Worker w</a>' in home
        await schema.execute("UPDATE river_job SET state = 'cancelled', finalized_at = now()")
        change |= {"action": "delete", "confirmed": "no"}
        question = await browser.submit(page, "/jobs/change", **change)
        assert "It is gone for good." in question.text
        change["confirmed"] = "yes"
        answer = await browser.submit(page, "/jobs/change", **change)
        assert f"Job {job_id} was deleted." in answer.text
        assert answer.url.path == "/jobs"


async def test_job_that_timed_out_still_runs(
    schema: Schema, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page of a job that ignores its timeout says so, also if no user requested a cancellation.
    A job that runs in another worker now is not meant."""
    monkeypatch.setattr(status_cache, "STATUS_AGE_MAX", 0.0)
    monkeypatch.setattr(status_cache, "STATUS_PAUSE_FACTOR", 0.0)
    columns = {"attempted_by": "array['w']", "attempted_at": "now()"}
    job_id = await insert_job(schema, "running", **columns)
    await insert_client(schema, "w", slots="array[5]", stuck=f"array[{job_id}]")
    text = f"Job {job_id} (k) ignores its cancellation. Restart worker w"
    async with Browser(dashboard(client)) as browser:
        assert text in await browser.see(f"/jobs/{job_id}")
        await schema.execute("UPDATE river_job SET attempted_by = array['w', 'other']")
        assert text not in await browser.see(f"/jobs/{job_id}")


async def test_retry_of_a_completed_job(schema: Schema, client: Client) -> None:
    """A retry of a completed job repeats its effects, so it needs a confirmation, on the page of
    the job and in the list of completed jobs. That of a discarded job needs none."""
    ids = [await insert_job(schema, state) for state in ("completed", "completed", "discarded")]
    async with Browser(dashboard(client)) as browser:
        for job_id, path in zip(ids, (f"/jobs/{ids[0]}", "/jobs?state=completed"), strict=False):
            page = await browser.see(path)
            state = re.search(r'name="state" value="(\w+)"', page)
            assert state is not None
            change = {"id": job_id, "back": path, "action": "retry", "state": state[1]}
            question = await browser.submit(page, "/jobs/change", **change)
            assert f"Retry completed job {job_id}?" in question.text
            assert (await client.job_get(job_id)).state == "completed"
            await browser.submit(page, "/jobs/change", **change, confirmed="yes")
            assert (await client.job_get(job_id)).state == "available"
        page = await browser.see(f"/jobs/{ids[2]}")
        change = {"id": ids[2], "back": "/jobs", "action": "retry", "state": "discarded"}
        await browser.submit(page, "/jobs/change", **change)
        assert (await client.job_get(ids[2])).state == "available"


async def test_access(schema: Schema, client: Client) -> None:
    """`authorize` decides who may see and change jobs. A change needs the right to it, a request of
    the same site, and the token of the page. Without `authorize`, only the own machine is
    answered: no other peer, no other name, and no proxy."""
    job_id = await insert_job(schema, "discarded")
    change = {"id": job_id, "action": "retry", "back": "/jobs"}

    def choose(request: Request) -> Any:
        match request.query_params.get("as", "write"):
            case "nobody":
                return None
            case "stranger":
                raise HTTPException(303, headers={"Location": "/login"})
            case other:
                return other

    async with Browser(dashboard(client, authorize=choose), base_url="https://x.org") as browser:
        assert "You may not use" in await browser.see("/?as=nobody", status=403)
        answer = await browser.get("/?as=stranger")
        assert (answer.status_code, answer.headers["location"]) == (303, "/login")
        page = await browser.see(f"/jobs/{job_id}")
        assert ">Retry<" in page
        assert ">Retry<" not in await browser.see(f"/jobs/{job_id}?as=read")
        cookie = browser.cookies["riverpy_token"]
        for headers, fields in (
            ({"Sec-Fetch-Site": "cross-site"}, {"token": cookie}),
            ({"Sec-Fetch-Site": "same-site", "Origin": "https://x.org"}, {"token": cookie}),
            ({"Origin": "https://evil.org"}, {"token": cookie}),
            ({"Origin": "null"}, {"token": cookie}),
            ({"Origin": "https://x.org", "Host": "127.0.0.1:8080"}, {"token": cookie}),
            ({"Origin": "https://evil.org", "X-Forwarded-Host": "x.org"}, {"token": cookie}),
            ({"Origin": "https://x.org", "Host": "x.org:80"}, {"token": cookie}),
            ({}, {"token": cookie}),
            (SAME_SITE, {"token": cookie[:-1] + "é"}),
            (SAME_SITE, {}),
        ):
            data = change | fields
            assert (
                await browser.post("/jobs/change", data=data, headers=headers)
            ).status_code == 403
        answer = await browser.submit(page, "/jobs/change?as=read", **change)
        assert answer.status_code == 403
        browser.cookies.clear()
        assert (await browser.submit(page, "/jobs/change", **change)).status_code == 403
        assert await schema.fetchval("SELECT state FROM river_job") == "discarded"
        data = {**change, "token": cookie}
        browser.cookies["riverpy_token"] = cookie
        headers = {"Origin": "https://x.org"}
        assert (await browser.post("/jobs/change", data=data, headers=headers)).status_code == 303
        assert await schema.fetchval("SELECT state FROM river_job") == "available"
        for proxied in (
            {"Host": "x.org:443"},
            {"Host": "127.0.0.1:8080", "X-Forwarded-Host": "x.org"},
            {"Host": "127.0.0.1:8080", "X-Forwarded-Host": "x.org:443, inner"},
        ):
            answer = await browser.post("/jobs/change", data=data, headers=headers | proxied)
            assert answer.status_code == 303, proxied
        answer = await browser.post("/jobs/change", content=b"x" * 300_000, headers=headers)
        assert answer.status_code == 413
    async with Browser(dashboard(client, authorize=choose, read_only=True)) as browser:
        assert ">Retry<" not in await browser.see(f"/jobs/{job_id}")
    for peer, base_url, headers in (
        ("10.0.0.1", LOCAL, {}),
        ("127.0.0.1", "http://evil.org", {}),
        ("127.0.0.1", LOCAL, {"X-Forwarded-For": "10.0.0.1"}),
    ):
        async with Browser(dashboard(client), base_url=base_url, peer=peer) as browser:
            answer = await browser.get("/", headers=headers)
            assert answer.status_code == 403
            assert "authorize=" in answer.text
    async with Browser(dashboard(client), base_url="http://[::1]:80", peer="::1") as browser:
        await browser.see("/")


async def test_hidden_args(schema: Schema, client: Client, log: list[dict[str, Any]]) -> None:
    """Args are hidden, or changed by a function. If the function fails, they are hidden."""
    job_id = await insert_job(schema, args='\'{"card": "4242", "n": 1}\'')

    def mask(kind: str, args: Any) -> object:
        return {**args, "card": "***"}

    def fail(kind: str, args: Any) -> object:
        raise ValueError(args["card"])

    for options, shown in (
        ({"hide_args": True}, ["hide_args"]),
        ({"mask": mask}, ["***"]),
        ({"mask": fail}, ["function `mask` failed"]),
    ):
        async with Browser(dashboard(client, **options)) as browser:
            for path in (f"/jobs/{job_id}", f"/jobs/{job_id}/args"):
                page = await browser.see(path)
                assert "4242" not in page
                assert all(text in page for text in shown)
            listed = await browser.see("/jobs")
            assert "4242" not in listed
            assert ("***" in listed) == (shown == ["***"])
            refused = await browser.see('/jobs?args={"card": "4242"}', status=400)
            assert "a filter would reveal" in refused
            fields = {"action": "delete", "state": "available", "args": '{"card": "4242"}'}
            for confirmed in ("", "yes"):
                answer = await browser.submit(
                    listed, "/jobs/change-all", confirmed=confirmed, **fields
                )
                assert "a filter would reveal" in answer.text
    assert DASHBOARD_MASK_FAILED in {one["event"] for one in log}


async def test_damaged_job(schema: Schema, client: Client) -> None:
    """A job that the server cannot read breaks no page. The list and its page say so. A list with
    filters that the server cannot check for this job has the others, and names it."""
    job_id, other_id = await insert_job(schema), await insert_job(schema)
    await damage(schema, job_id, "metadata")
    async with Browser(dashboard(client)) as browser:
        listed = await browser.see("/jobs")
        assert "The server cannot read this job" in listed
        assert f'/jobs/{other_id}"' in listed
        assert "the server cannot read job" in await browser.see(f"/jobs/{job_id}")
        await schema.execute("UPDATE river_job SET metadata = '{\"n\": 1}' WHERE id = $1", other_id)
        for filters in ("", "&state=available", "&kind=k"):
            listed = await browser.see(f'/jobs?metadata={{"n": 1}}{filters}')
            assert f'id="job-{other_id}"' in listed
            assert re.findall(
                r"/jobs/(\d+)\">\d+</a></th>\s*<td role=\"cell\" colspan", listed
            ) == [str(job_id)]
        await damage(schema, other_id, "args")
        listed = await browser.see('/jobs?args={"n": 1}')
        assert set(
            re.findall(r"/jobs/(\d+)\">\d+</a></th>\s*<td role=\"cell\" colspan", listed)
        ) >= {str(other_id)}


async def test_state_of_newer_river(fresh_database_url: str) -> None:
    """A job in a state that only a newer version of River knows breaks no page, not the API, and
    not the command `riverpy job`. It is shown as it is, without buttons."""
    async with connected(fresh_database_url) as connection:
        await migrate_all(connection)
        await connection.execute("ALTER TYPE river_job_state ADD VALUE 'hibernating'")
        job_id = await connection.fetchval(
            "INSERT INTO river_job (kind, args, max_attempts, state)"
            " VALUES ('k', '{}', 1, 'hibernating') RETURNING id"
        )
    async with (
        Client(fresh_database_url, config=Config(pool_size=2)) as client,
        Browser(dashboard(client)) as browser,
    ):
        for path in ("/jobs", "/jobs?kind=k", f"/jobs/{job_id}"):
            assert ">hibernating<" in await browser.see(path)
        assert "does not know this state" in (page := await browser.see(f"/jobs/{job_id}"))
        assert 'value="delete"' not in page
        for path in ("/", f"/jobs/{job_id}/neighbors", "/queues"):
            await browser.see(path)
        assert (await browser.get(f"/api/jobs/{job_id}")).json()["state"] == "hibernating"
        job = await client.job_get(job_id)
        assert "hibernating" in repr(job)
        assert job_to_json_object(job)["state"] == "hibernating"


async def test_read_only_server(schema: Schema) -> None:
    """A dashboard on a read-only server, such as a replica, shows all pages. A change fails, and
    the page says why."""
    job_id = await insert_job(schema)
    separator = "&" if "?" in schema.url else "?"
    url = f"{schema.url}{separator}options=-cdefault_transaction_read_only%3Don"
    async with (
        Client(url, config=Config(schema=schema.name, pool_size=2)) as client,
        Browser(dashboard(client)) as browser,
    ):
        for path in ("/", "/jobs", "/queues", "/workers", "/leader", "/periodic"):
            await browser.see(path)
        page = await browser.see(f"/jobs/{job_id}")
        fields = {"id": job_id, "action": "cancel", "back": "/", "confirmed": "yes"}
        answer = await browser.submit(page, "/jobs/change", **fields)
        assert answer.status_code == 503
        for text in ("The change failed:", "read-only transaction", "to the primary server"):
            assert text in answer.text


async def test_internal_error(schema: Schema, client: Client) -> None:
    """If the dashboard or `authorize` fails, a page with the usual headers says so, and the server
    gets the error. The API answers with JSON."""

    def fail(request: Request) -> Any:
        raise ZeroDivisionError

    app = Starlette()
    app.mount("/admin/jobs", dashboard(client, authorize=fail))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url=LOCAL) as browser:
        page = await browser.get("/admin/jobs/")
        assert (page.status_code, "The dashboard failed." in page.text) == (500, True)
        assert 'href="/admin/jobs/"' in page.text
        assert "default-src 'none'" in page.headers["content-security-policy"]
        answer = await browser.get("/admin/jobs/api/states")
        assert (answer.status_code, list(answer.json())) == (500, ["message"])
    async with Browser(app) as raising:
        with pytest.raises(ZeroDivisionError):
            await raising.get("/admin/jobs/")


async def test_mounted(schema: Schema, client: Client) -> None:
    """In an application the dashboard has a path of its own. A client that is not open, and a
    database that does not answer, give a page that says what to do."""
    await insert_job(schema)
    app = Starlette()
    app.mount("/admin/jobs", dashboard(client))
    async with Browser(app) as browser:
        page = await browser.see("/admin/jobs/")
        for path in set(re.findall(r'(?:href|src|action)="(/[^"]*)"', page)):
            assert path.startswith("/admin/jobs/")
            assert (await browser.get(unescape(path))).status_code == 200
        assert browser.cookies.jar is not None
        assert {one.path for one in browser.cookies.jar} == {"/admin/jobs"}
    async with Browser(dashboard(Client(schema.url))) as browser:
        assert "lifespan=riverpy.web.lifespan(client)" in await browser.see("/", status=503)
    await schema.execute("ALTER TABLE river_job RENAME TO moved")
    try:
        async with Browser(dashboard(client)) as browser:
            assert "riverpy doctor" in await browser.see("/jobs", status=503)
    finally:
        await schema.execute("ALTER TABLE moved RENAME TO river_job")


def test_wrong_arguments() -> None:
    """Wrong arguments are refused when the application starts."""
    client = Client("postgres://x")
    for values in (
        {"client": "x"},
        {"client": client, "authorize": "x"},
        {"client": client, "mask": 1},
    ):
        with pytest.raises(ConfigError):
            dashboard(**values)  # type: ignore[arg-type]
