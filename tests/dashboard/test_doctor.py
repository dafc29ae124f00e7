"""The page of doctor's findings: one run of the checks for all viewers, after the page is sent."""

from __future__ import annotations

import re
from html import unescape
from typing import TYPE_CHECKING

from riverpy import Client, Config
from riverpy.web import dashboard
from tests.dashboard.site_kit import Browser, insert_job

if TYPE_CHECKING:
    from tests._database import Schema


async def test_findings(schema: Schema) -> None:
    """The first page says that the checks run, and the next one shows their findings, first the
    most severe one, with its remedy. Home has a sentence about failures. Both
    agree about queues without workers."""
    await schema.execute(
        "INSERT INTO riverpy_client"
        " (client_id, queues, kinds, candidate, poll_only, version, dead_after)"
        " VALUES ('c', '{}', '{}', false, false, '1', '60 s')"
    )
    await insert_job(schema, scheduled_at="now() - interval '1 h'")
    await insert_job(schema, queue="'new'", scheduled_at="now() - interval '2 min'")
    await insert_job(schema, queue="'old'", scheduled_at="now() - interval '20 min'")
    async with (
        Client(schema.url, config=Config(schema=schema.name, pool_size=2)) as client,
        Browser(dashboard(client)) as browser,
    ):
        assert "The checks run now" in await browser.see("/doctor")
        page = await browser.see("/doctor")
        assert "What to do:" in page
        assert (
            page.index(">act</span>\n    <span")
            < page.index(">look</span>\n    <span")
            < page.index(">ok<")
        )
        assert ">fail<" not in page
        assert ">warn<" not in page
        assert "they run again 1m after their end" in page
        assert "no client takes part in leader election" in page
        assert "The checks found" in await browser.see("/")
        assert [await find_levels(browser, path) for path in ("/", "/doctor")] == [
            {"new": "look", "old": "act"}
        ] * 2
        assert "no problem of leaders" not in await browser.see("/leader")


async def find_levels(browser: Browser, path: str) -> dict[str, str]:
    """Return the word that a page has before its sentence about each of two queues."""
    page = unescape(await browser.see(path))
    lines = re.findall(r'<li class="state-(\w+)">(.*?)</li>', page, re.DOTALL)
    return {
        queue: level
        for queue in ("new", "old")
        for level, text in lines
        if f" in {queue}" in text or f'of queue "{queue}"' in text
    }
