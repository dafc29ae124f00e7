"""Live updates: regions that followers share, their limits, their errors, and changes."""

from __future__ import annotations

import re
import time
from html import unescape
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import pytest

from riverpy import Client, Config
from riverpy._dashboard import live, status_cache
from riverpy._dashboard.errors import PageError
from riverpy._dashboard.live import LiveRegion, LiveRegionKey, LiveRegions
from riverpy._dashboard.messages import MESSAGE_COOKIE
from riverpy.web import dashboard
from tests.dashboard.site_kit import Browser, insert_job, insert_queue

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests._database import Schema

KEY = LiveRegionKey("/", "read", "")


class Source:
    """Renders a region, and counts how often."""

    def __init__(self) -> None:
        self.content = b"first"
        self.error: Exception | None = None
        self.count = 0

    async def render(self) -> bytes:
        """Return the content, after a moment in which other followers can run."""
        self.count += 1
        await anyio.lowlevel.checkpoint()
        if self.error is not None:
            raise self.error
        return self.content


async def next_event(stream: AsyncGenerator[bytes, None]) -> str:
    """Return the name of the next event, and its data."""
    with anyio.fail_after(60):
        return (
            (await anext(stream)).decode().replace("event: ", "").replace("\ndata: ", " ").strip()
        )


async def test_followers_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Followers share each rendering. They get the content only if more than an age in it has
    changed, and the error of a rendering as text. The region recovers."""
    monkeypatch.setattr(live, "RENDER_PAUSE_FACTOR", 0.0)
    monkeypatch.setattr(live, "RENDER_INTERVAL", 0.0)
    source = Source()
    region = LiveRegion(source.render)
    first, second = live._stream_region(region, 0.0), live._stream_region(region, 0.0)
    assert [await anext(first), await anext(second)] == [b": riverpy\n\n"] * 2
    assert await next_event(first) == "region first"
    assert await next_event(first) == "fresh -"
    assert await next_event(second) == "region first"
    age = '<time datetime="x" title="y" data-age="{0}">{0}s ago</time>'
    source.content = age.format(1).encode()
    assert await next_event(first) == f"region {age.format(1)}"
    source.content = age.format(2).encode()
    assert await next_event(first) == "fresh -"
    source.error = OSError("no route")
    assert await next_event(first) == "problem no route"
    source.error = None
    assert await next_event(first) == "fresh -"
    region.due_at = time.monotonic() + 3600
    count = source.count
    async with anyio.create_task_group() as tasks:
        for _ in range(100):
            tasks.start_soon(region.render_if_due)
    assert source.count == count
    region.due_at = 0.0
    monkeypatch.setattr(live, "RENDER_INTERVAL", 3600.0)
    async with anyio.create_task_group() as tasks:
        for _ in range(100):
            tasks.start_soon(region.render_if_due)
    assert source.count == count + 1


async def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams and regions beyond their limits are refused with the status 503. A region ends with
    its last follower. A stream ends after its time, so that rights are checked again."""
    monkeypatch.setattr(live, "FOLLOWERS_MAX", 3)
    monkeypatch.setattr(live, "REGIONS_MAX", 1)
    regions, source = LiveRegions(), Source()
    other = KEY._replace(access_level="write")
    with regions.follow_region(KEY, source.render) as region:
        with regions.follow_region(KEY, source.render) as same:
            assert same is region
            with pytest.raises(PageError) as refused:
                regions.open_stream(other, source.render, 0.0)
            assert refused.value.status_code == 503
            with regions.follow_region(KEY, source.render), pytest.raises(PageError):
                regions.open_stream(KEY, source.render, 0.0)
        assert region.follower_count == 1
    with regions.follow_region(KEY, source.render) as new:
        assert new is not region
    monkeypatch.setattr(live, "STREAM_SECONDS_MAX", 0.0)
    assert [part async for part in live._stream_region(region, 0.0)] == [b": riverpy\n\n"]


async def test_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page gets no content that was rendered before the page itself. A change makes regions due
    at once, also one whose rendering runs."""
    monkeypatch.setattr(live, "SERVER_STOP_POLL_INTERVAL", 0.01)
    source, regions = Source(), LiveRegions()
    with regions.follow_region(KEY, source.render) as region:
        await region.render_if_due()
        page = live._stream_region(region, time.monotonic())
        assert await anext(page) == b": riverpy\n\n"
        source.content = b"second"
        region.due_at = time.monotonic() + 0.05
        assert await next_event(page) == "region second"
        regions.invalidate_before(region.rendered_at)
        assert region.due_at > time.monotonic()  # its rendering began after this change

        async def change_meanwhile() -> bytes:
            regions.invalidate_before(time.monotonic())
            return b"third"

        monkeypatch.setattr(region, "_render", change_meanwhile)
        regions.invalidate_before(time.monotonic())
        await region.render_if_due()
        assert region.due_at <= time.monotonic()


async def test_processes(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a change, the page and its first live event show the new state, also if they come from
    another process of the web server, which has read the old state a moment before."""
    monkeypatch.setattr(status_cache, "STATUS_AGE_MAX", 3600.0)
    monkeypatch.setattr(live, "STREAM_SECONDS_MAX", 0.1)
    await insert_queue(schema, "mail")
    await insert_job(schema, queue="'mail'")
    config = Config(schema=schema.name, pool_size=2)
    async with (
        Client(schema.url, config=config) as client,
        Browser(dashboard(client)) as first,
        Browser(dashboard(client)) as second,
        Browser(dashboard(client)) as third,
    ):
        for browser in (first, second, third):
            assert ">paused<" not in await browser.see("/")
        change = {"pause": "mail", "back": "/"}
        answer = await first.submit(await first.see("/queues"), "/queues/change", **change)
        assert ">paused<" in answer.text
        assert ">paused<" not in await second.see("/")
        second.cookies[MESSAGE_COOKIE] = answer.history[0].cookies[MESSAGE_COOKIE]
        page = await second.see("/")
        assert ">paused<" in page
        live_path = re.search(r'data-live="([^"]*)"', page)
        assert live_path
        assert ">paused<" in await third.see(unescape(live_path[1]))
