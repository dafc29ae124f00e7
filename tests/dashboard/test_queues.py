"""The pages of queues: which is behind and why, pause, resume and clear."""

from __future__ import annotations

import re
from html import unescape
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from riverpy._dashboard.changes import queue_changes
from riverpy._dashboard.pages import queue_list_page
from riverpy._dashboard.paths import make_queue_path
from riverpy._log_events import DASHBOARD_CHANGED_JOBS, DASHBOARD_MADE_A_CHANGE
from riverpy._tools.top import status
from tests.dashboard.site_kit import insert_client, insert_job, insert_queue, open_site

if TYPE_CHECKING:
    import pytest

    from tests._database import Schema
    from tests.dashboard.site_kit import Browser

OLD = "now() - interval '5 h'"
SILENT = "now() - interval '3 h'"
QUIET = "now() - interval '25 min'"
"""A worker with such a heartbeat takes no jobs, but does not count as dead."""
STRANGE_NAMES = [
    "a/b",
    "..",
    "a//b?c=d&e#f",
    "%2e",
    "back\\slash",
    " space ",
    "line\r\nend\nx",
    "<img src=x onerror=alert(1)>\"'",
    "\u202eabc",
    "ü" * 100 + "x" * 27,
]


async def test_why_a_queue_is_behind(schema: Schema) -> None:
    """For each queue a sentence says why it is behind: it is paused; no worker works it; all are
    silent; a kind has no worker; no slot is free; something else; or it is not behind. The worst
    comes first. The page of the queue says the same, with the kinds that wait and the workers. So
    does home, which names paused queues and paused periodic jobs."""
    for name in ("paused", "alone", "gone", "kinds", "full", "slow", "late"):
        await insert_job(schema, queue=f"'{name}'", scheduled_at=OLD)
    await insert_job(schema, "scheduled", queue="'late'", scheduled_at=OLD)
    await insert_queue(schema, "paused", is_paused=True)
    await insert_queue(schema, "idle")
    await insert_client(schema, "dead", queues="array['gone','full']", heartbeat_at=SILENT)
    await insert_client(schema, "other", queues="array['kinds']", kinds="array['x']")
    queues = "array['full','slow','late','paused','idle']"
    await insert_client(schema, "host-1", queues=queues, slots="array[2,50,50,50,50]")
    for _ in range(2):
        await insert_job(schema, "running", queue="'full'", attempted_at="now()")
    await insert_job(schema, queue="'new'")
    await insert_client(schema, "quiet", queues="array['new']", heartbeat_at=QUIET)
    sentences = {
        "kinds": ("act", 'No worker of this queue can run the kind "k"'),
        "paused": ("look", "The queue has been paused for 2h, so no worker takes jobs of it."),
        "alone": (
            "act",
            "No worker works this queue. Start one: `riverpy worker MODULE:ATTR -q alone:50`.",
        ),
        "gone": ("act", 'No worker of this queue sends a heartbeat ("dead")'),
        "new": ("act", 'No worker of this queue sends a heartbeat ("quiet")'),
        "full": ("look", "No slot is free: 2 jobs run in 2 slots. 1 job waits, for 5h"),
        "slow": ("look", "Jobs wait although 50 slots are free. 1 job waits, for 5h."),
        "late": ("act", "1 scheduled job or retry is late, because there is no leader"),
        "idle": ("ok", "Not behind: no due job waits."),
    }
    async with open_site(schema) as browser:
        listed = unescape(await browser.see("/queues"))
        await check_home(browser)
        for name, (health, text) in sentences.items():
            page = unescape(await browser.see(make_queue_path(name)))
            first = re.search(r'<li class="state-(\w+)">.*?class="text">([^<]*)', page, re.DOTALL)
            assert first, page
            assert first[1] == health
            assert text in first[2]
            assert text in listed
        assert listed.index(">alone<") < listed.index(">slow<") < listed.index(">idle<")
        assert "no worker</span>" in await browser.see(make_queue_path("kinds"))
        page = unescape(await browser.see(make_queue_path("full")))
        assert '1 worker of this queue sends no heartbeat: "dead".' in page
        assert 'href="/worker?id=host-1"' in page
        assert ">alone<" not in await browser.see("/queues?find=slow")
        assert "no queue 'none'" in unescape(await browser.see(make_queue_path("none"), status=404))
        assert len(await browser.see(make_queue_path("x" * 5_000), status=404)) < 2_000
        await browser.see("/queue?name=%00", status=404)


async def check_home(browser: Browser) -> None:
    """Home gives the reason for each queue that is behind, also in the first minute, and one
    sentence for what is paused."""
    home = unescape(await browser.see("/"))
    for text in (
        "1 job waits in alone, for 5h. No worker works this queue.",
        "1 job waits in gone, for 5h. No worker of this queue sends a heartbeat",
        "1 job waits in new, for ",
        "Jobs wait too long in 2 more queues.",
        "The queue paused is paused. 1 job waits, for 5h.",
        ">Queue alone</a>",
    ):
        assert text in home, text
    assert f'href="{make_queue_path("alone")}"' in home
    assert "No due job waits longer" not in home


async def test_pause_and_resume(schema: Schema, log: list[dict[str, Any]]) -> None:
    """A user pauses and resumes a queue, or all queues after a question. A second user who does the
    same learns that it was done before. A queue that no worker has worked cannot be paused. A user
    who may only read sees no buttons, and is refused."""
    await insert_queue(schema, "a")
    await insert_queue(schema, "b")
    await insert_job(schema, queue="'jobs only'")
    paused = "SELECT array_agg(name ORDER BY name) FROM river_queue WHERE paused_at IS NOT NULL"
    async with open_site(schema) as browser:
        page = await browser.see("/queues")
        assert 'value="jobs%20only"' not in page
        for text in ("The queue a is paused.", "The queue a has been paused since"):
            answer = await browser.submit(page, "/queues/change", pause="a", back="/queue?name=a")
            assert text in answer.text
            assert answer.url.query == b"name=a"
        for text in ("The queue a is resumed", "The queue a was not paused"):
            answer = await browser.submit(page, "/queues/change", resume="a")
            assert text in answer.text
        question = await browser.submit(page, "/queues/change", pause="*")
        assert "Pause all queues?" in question.text
        assert await schema.fetchval(paused) is None
        answer = await browser.submit(page, "/queues/change", pause="*", confirmed="yes")
        assert "All queues are paused" in answer.text
        assert await schema.fetchval(paused) == ["a", "b"]
        home = unescape(await browser.see("/"))
        assert '2 queues are paused: "a", "b". 0 jobs wait in them.' in home
        for fields, status in (
            ({"pause": "jobs%20only"}, 404),
            ({}, 400),
            ({"pause": "a", "resume": "a"}, 400),
            ({"pause": ""}, 400),
            ({"pause": "%00"}, 400),
            ({"clear": "*"}, 400),
            ({"clear": "b"}, 404),
        ):
            answer = await browser.submit(page, "/queues/change", **fields)
            assert answer.status_code == status, fields
        for path in ("/queues?as=read", "/queue?name=a&as=read"):
            assert 'form="change"' not in await browser.see(path)
        answer = await browser.submit(page, "/queues/change?as=read", resume="a")
        assert answer.status_code == 403
        assert await schema.fetchval(paused) == ["a", "b"]
    events = [one for one in log if one["event"] == DASHBOARD_MADE_A_CHANGE]
    assert [(one["action"], one["target"], one["user"]) for one in events[:2]] == [
        ("pause queue", "a", "ann"),
        ("pause queue", "a", "ann"),
    ]
    assert (events[-1]["action"], events[-1]["target"]) == ("pause queue", "*")


async def test_clear(
    schema: Schema, log: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question before clearing names the queue and the number of jobs, `10k+` if there are
    more. Running jobs, ended jobs, other queues, and unless they were chosen scheduled jobs and
    retries stay. One form deletes a limited number of jobs, and says that there may be more."""
    await schema.execute(
        "INSERT INTO river_job (kind, args, max_attempts, queue)"
        " SELECT 'k', '{}', 25, 'big' FROM generate_series(1, 10001)"
    )
    await insert_job(schema)
    for state in ("running", "scheduled", "retryable", "completed"):
        await insert_job(schema, state, queue="'big'", attempted_at="now()")
    states = "SELECT array_agg(state::text ORDER BY state::text) FROM river_job WHERE queue = 'big'"
    monkeypatch.setattr(queue_changes, "CLEARED_JOBS_MAX", 10_000)
    async with open_site(schema) as browser:
        page = await browser.see("/queue?name=big")
        assert "10k+" in page
        assert "first 1,000 waiting jobs" in page
        question = await browser.submit(page, "/queues/change", clear="big")
        assert "Delete waiting jobs of the queue big?" in question.text
        assert "10k+ waiting" in question.text
        assert "At most 10,000 jobs are deleted at once" in question.text
        confirmed = {"confirmed": "yes"}
        answer = await browser.submit(page, "/queues/change", clear="big", **confirmed)
        assert "10,000 waiting jobs of the queue big deleted. There may be more" in answer.text
        answer = await browser.submit(page, "/queues/change", clear="big", **confirmed)
        assert "1 waiting job of the queue big deleted." in answer.text
        rest = ["completed", "retryable", "running", "scheduled"]
        assert await schema.fetchval(states) == rest
        question = await browser.submit(page, "/queues/change", clear_all="big")
        assert "Delete waiting, scheduled and retrying jobs of the queue big?" in question.text
        assert "0 waiting and 1 scheduled and 1 retrying" in question.text
        answer = await browser.submit(page, "/queues/change", clear_all="big", **confirmed)
        assert "2 waiting, scheduled and retrying jobs of the queue big deleted." in answer.text
        assert await schema.fetchval(states) == ["completed", "running"]
        assert await schema.fetchval("SELECT count(*) FROM river_job") == 3
    events = [one for one in log if one["event"] == DASHBOARD_CHANGED_JOBS]
    assert [(one["action"], one["changed"], one["user"]) for one in events] == [
        ("delete waiting jobs", 10_000, "ann"),
        ("delete waiting jobs", 1, "ann"),
        ("delete waiting, scheduled and retrying jobs", 2, "ann"),
    ]


async def test_many_queues(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """If there are more queues than the status reads, the list says so, and each queue still has
    its page."""
    monkeypatch.setattr(status, "QUEUES_MAX", 1)
    monkeypatch.setattr(queue_list_page, "QUEUES_MAX", 1)
    for name in ("a", "b"):
        await insert_job(schema, queue=f"'{name}'", scheduled_at=OLD)
    async with open_site(schema) as browser:
        listed = await browser.see("/queues")
        assert "Only the first 1 queues by name were read." in listed
        assert ">b<" not in listed
        assert "1 job waits, for 5h" in await browser.see(make_queue_path("b"))
        question = await browser.submit(listed, "/queues/change", clear="b")
        assert "1 waiting" in question.text


async def test_strange_names(schema: Schema) -> None:
    """A queue may have any name. Its page, its buttons and its live updates find it, and no text of
    a name is taken as HTML or turns the direction of other text."""
    for name in STRANGE_NAMES:
        await insert_queue(schema, name)
    async with open_site(schema) as browser:
        listed = await browser.see("/queues")
        assert "<img" not in listed
        assert "\u202e" not in listed
        paths = {unescape(path) for path in re.findall(r'href="(/queue\?[^"]*)"', listed)}
        assert paths == {make_queue_path(name) for name in STRANGE_NAMES}
        for name in STRANGE_NAMES:
            page = await browser.see(make_queue_path(name))
            assert "<img" not in page
            assert "\u202e" not in page
            value = re.search(r'name="pause" value="([^"]*)"', page)
            assert value, name
            back = re.search(r'name="back" value="([^"]*)"', page)
            assert back
            answer = await browser.submit(
                page, "/queues/change", pause=unescape(value[1]), back=unescape(back[1])
            )
            assert answer.status_code == 200
            assert 'name="resume"' in answer.text
            assert "No job waits." in answer.text
            live = re.search(r'data-live="([^"]*)"', page)
            assert live
            followed = parse_qs(urlsplit(unescape(live[1])).query)["path"][0]
            assert parse_qs(urlsplit(followed).query)["name"] == [name]
        unpaused = "SELECT count(*) FROM river_queue WHERE paused_at IS NULL"
        assert await schema.fetchval(unpaused) == 0
