"""Changes of all jobs that match: their question, progress, stop and end."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from riverpy import Client, Config
from riverpy._dashboard import bulk_runs, job_search
from riverpy._dashboard.changes import bulk_changes
from riverpy._log_events import DASHBOARD_BULK_CHANGE_ENDED, DASHBOARD_BULK_CHANGE_STARTED
from riverpy.job_list import JobChanges
from riverpy.web import Access, dashboard
from tests.dashboard.site_kit import Browser, insert_job

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from starlette.requests import Request

    from riverpy._postgres.driver import Transaction
    from tests._database import Schema

PATIENCE = 60.0
ALL = "/jobs/change-all"


@pytest.fixture
async def client(schema: Schema) -> AsyncGenerator[Client]:
    """An open client."""
    async with Client(schema.url, config=Config(schema=schema.name, pool_size=2)) as client:
        yield client


def authorize(request: Request) -> Access:
    """Let a user do what the header says."""
    return Access("write", user=request.headers.get("user", "ann"))


async def until_ended(client: Client) -> None:
    """Wait until the changes have ended."""
    tasks = [one._task for one in client._background_tasks if one._task is not None]
    if tasks:
        await asyncio.wait(tasks, timeout=PATIENCE)


async def confirm(browser: Browser, question: str, **fields: Any) -> str:
    """Answer a question, and return the path of the page of the change."""
    run_id = question.partition('name="run" value="')[2].partition('"')[0]
    answer = await browser.submit(question, ALL, **fields, run=run_id, confirmed="yes")
    assert answer.status_code == 200, answer.text
    assert 'role="status">The' not in answer.text  # the page itself says how far it is
    return answer.url.path


async def test_whole_change(schema: Schema, client: Client, log: list[dict[str, Any]]) -> None:
    """After a question with the filters and the number, all jobs that match are changed, in
    batches, and no others. The page shows the progress and, at the end, what was done. The same
    form sent twice starts one change. The start and the end are logged with the user."""
    insert = (
        "INSERT INTO river_job (kind, args, max_attempts, state, finalized_at, attempt)"
        " SELECT {0}, '{{}}', 25, 'discarded', now(), 25 FROM generate_series(1, {1})"
    )
    await schema.execute(insert.format("'a'", 2_300))
    await schema.execute(insert.format("'<b>'", 2))
    refused = await insert_job(
        schema, "discarded", kind="'a'", unique_key="'y'", unique_states="b'00000001'"
    )
    await insert_job(schema, kind="'b'", unique_key="'y'", unique_states="b'11111111'")
    async with Browser(dashboard(client, authorize=authorize)) as browser:
        assert "that match" not in await browser.see("/jobs?kind=a")
        page = await browser.see("/jobs?state=discarded&kind=a")
        assert "All discarded jobs that match:" in page
        assert ">Retry<" in page
        assert ">Cancel<" not in page
        assert "All 2,303 discarded jobs:" in await browser.see("/jobs?state=discarded")
        fields = {"state": "discarded", "kind": "a", "back": "/jobs?state=discarded"}
        question = (await browser.submit(page, ALL, action="retry", **fields)).text
        assert "Retry all 2,301 jobs that match?" in question
        assert "state discarded, kind a" in question
        path = await confirm(browser, question, action="retry", **fields)
        assert await confirm(browser, question, action="retry", **fields) == path
        await until_ended(client)
        done = await browser.see(path)
        for text in (
            "The change is done.",
            "Done: 2,301 of 2,301.",
            "2,300 jobs retried.",
            "1 were",
        ):
            assert text in done
        assert f'/jobs/{refused}"' in done
        assert "Stop after" not in done
        assert path in await browser.see("/jobs")
        states = await schema.fetch(
            "SELECT kind, state::text, count(*) FROM river_job GROUP BY 1, 2"
        )
        assert {tuple(row) for row in states} == {
            *{("a", "available", 2_300), ("a", "discarded", 1)},
            *{("b", "available", 1), ("<b>", "discarded", 2)},
        }
        fields = {"state": "discarded", "kind": "<b>", "back": "/jobs"}
        question = (await browser.submit(page, ALL, action="delete", **fields)).text
        assert "&lt;b&gt;" in question
        await confirm(browser, question, action="delete", **fields)
        await until_ended(client)
        assert await schema.fetchval("SELECT count(*) FROM river_job WHERE kind = '<b>'") == 0
        assert not client._background_tasks
        await insert_job(schema, args='\'{"customer": "acme"}\'', kind="'paid'")
        fields = {"state": "available", "args": '{"customer": "acme"}', "back": "/jobs"}
        question = (await browser.submit(page, ALL, action="delete", **fields)).text
        assert "Delete all 1 job that match?" in question
        assert "state available, args that contain {" in question
        await confirm(browser, question, action="delete", **fields)
        await until_ended(client)
        assert await schema.fetchval("SELECT count(*) FROM river_job WHERE kind = 'paid'") == 0
        answer = await browser.submit(page, ALL, action="delete", state="running")
        assert "Running jobs cannot be deleted." in answer.text
        answer = await browser.submit(page, ALL, action="delete", state="available", customer="x")
        assert "There is no filter" in answer.text
        for wrong, status in (
            ({"action": "retry", "kind": "a"}, 400),
            ({"action": "delete", "state": "running"}, 400),
            ({"action": "drop", "state": "discarded"}, 400),
            ({"action": "retry", "state": "discarded", "kind": "none"}, 400),
            ({"action": "retry", "state": "x"}, 400),
        ):
            answer = await browser.submit(page, ALL, **wrong)
            assert answer.status_code == status, wrong
        assert "not known here" in await browser.see("/bulk-change/none", status=404)
    lines = [one for one in log if one["event"].startswith("dashboard bulk")]
    assert [(one["event"], one["user"], one.get("changed")) for one in lines] == [
        *[
            (DASHBOARD_BULK_CHANGE_STARTED, "ann", None),
            (DASHBOARD_BULK_CHANGE_ENDED, "ann", 2_300),
        ],
        *[(DASHBOARD_BULK_CHANGE_STARTED, "ann", None), (DASHBOARD_BULK_CHANGE_ENDED, "ann", 2)],
        *[(DASHBOARD_BULK_CHANGE_STARTED, "ann", None), (DASHBOARD_BULK_CHANGE_ENDED, "ann", 1)],
    ]
    assert lines[0]["filters"] == "state discarded, kind a"


class SlowChange:
    """A change of two batches, with a pause between them."""

    def __init__(self) -> None:
        self.has_begun, self.goes_on = asyncio.Event(), asyncio.Event()
        self.error: Exception | None = None

    def get_method(self, _client: Client, _action: str) -> Callable[..., Any]:
        """Return the method, as `get_change_method`."""
        return self._change

    async def _change(self, on_progress: Callable[[JobChanges], object], **_: Any) -> JobChanges:
        on_progress(JobChanges(changed=1))
        self.has_begun.set()
        await self.goes_on.wait()
        if self.error is not None:
            raise self.error
        on_progress(JobChanges(changed=2))
        return JobChanges(changed=3)


async def test_early_end(
    schema: Schema, monkeypatch: pytest.MonkeyPatch, log: list[dict[str, Any]]
) -> None:
    """A user stops a change after its present batch. A failure, and the end of the application,
    end it too: the page or the log says so. Only a few changes run at a time."""
    await insert_job(schema, "discarded")
    slow = SlowChange()
    monkeypatch.setattr(bulk_runs, "get_change_method", slow.get_method)
    monkeypatch.setattr(bulk_runs, "RUNS_AT_A_TIME_MAX", 1)
    monkeypatch.setattr(bulk_runs, "KEPT_RUNS_MAX", 2)
    fields = {"action": "delete", "state": "discarded"}
    client = Client(schema.url, config=Config(schema=schema.name, pool_size=2))
    async with client, Browser(dashboard(client, authorize=authorize)) as browser:
        page = await browser.see("/jobs?state=discarded")
        question = (await browser.submit(page, ALL, **fields)).text
        first = await confirm(browser, question, **fields)
        await slow.has_begun.wait()
        running = await browser.see(first)
        assert "Done: 1 of 1. 1 job deleted." in running
        other = (await browser.submit(page, ALL, **fields)).text
        answer = await browser.submit(other, ALL, **fields, confirmed="yes")
        assert answer.status_code == 409
        assert "Stop after this batch" in running
        answer = await browser.submit(running, f"{first}/stop")
        assert "stops after its present batch" in answer.text
        slow.goes_on.set()
        await until_ended(client)
        assert "The change was stopped before its end" in await browser.see(first)
        answer = await browser.submit(running, f"{first}/stop")
        assert "does not run any more" in answer.text
        slow.error = OSError("no route")
        second = await confirm(browser, (await browser.submit(page, ALL, **fields)).text, **fields)
        await until_ended(client)
        assert "failed before its end: no route" in await browser.see(second)
        slow.goes_on.clear()
        slow.has_begun.clear()
        await confirm(browser, (await browser.submit(page, ALL, **fields)).text, **fields)
        await slow.has_begun.wait()
        assert "not known here" in await browser.see(first, status=404)
    ends = [one for one in log if one["event"] == DASHBOARD_BULK_CHANGE_ENDED]
    assert [(one["outcome"], one["problem"]) for one in ends] == [
        *[("stopped", ""), ("failed", "no route"), ("stopped", bulk_runs.SERVER_STOPPED_TEXT)]
    ]


async def test_slow_count(schema: Schema, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the count of the jobs takes too long, the question has the number of jobs that a list
    found, and says that there may be more."""
    for _ in range(3):
        await insert_job(schema, "discarded")
    monkeypatch.setattr(job_search, "SORTED_JOBS_MAX", 2)
    monkeypatch.setattr(bulk_changes, "COUNT_TIMEOUT", timedelta(milliseconds=1))

    async def wait_on_server(tx: Transaction, *_: object) -> int:
        return await tx.fetchval("SELECT 5 FROM pg_sleep(60)")

    monkeypatch.setattr(bulk_changes, "job_count_up_to", wait_on_server)
    async with Browser(dashboard(client, authorize=authorize)) as browser:
        page = await browser.see("/jobs?state=discarded")
        question = await browser.submit(page, ALL, action="delete", state="discarded")
        assert "Delete all at least 2 jobs that match?" in question.text
