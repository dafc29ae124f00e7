"""Live updates: regions that followers share, their limits, and their errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import pytest

from riverpy._dashboard import live
from riverpy._dashboard.errors import PageError
from riverpy._dashboard.live import LiveRegion, LiveRegions, RegionKey

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

KEY = RegionKey("/", "read", "")


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
    first, second = live._stream_region(region), live._stream_region(region)
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
    region.due_at = anyio.current_time() + 3600
    count = source.count
    async with anyio.create_task_group() as tasks:
        for _ in range(100):
            tasks.start_soon(region.refresh)
    assert source.count == count
    region.due_at = 0.0
    monkeypatch.setattr(live, "RENDER_INTERVAL", 3600.0)
    async with anyio.create_task_group() as tasks:
        for _ in range(100):
            tasks.start_soon(region.refresh)
    assert source.count == count + 1


async def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams and regions beyond their limits are refused with the status 503. A region ends with
    its last follower. A stream ends after its time, so that rights are checked again."""
    monkeypatch.setattr(live, "FOLLOWERS_MAX", 3)
    monkeypatch.setattr(live, "REGIONS_MAX", 1)
    regions, source = LiveRegions(), Source()
    other = KEY._replace(access_level="write")
    with regions.follow(KEY, source.render) as region:
        with regions.follow(KEY, source.render) as same:
            assert same is region
            with pytest.raises(PageError) as refused:
                regions.open_stream(other, source.render)
            assert refused.value.status_code == 503
            with regions.follow(KEY, source.render), pytest.raises(PageError):
                regions.open_stream(KEY, source.render)
        assert region.follower_count == 1
    with regions.follow(KEY, source.render) as new:
        assert new is not region
    monkeypatch.setattr(live, "STREAM_SECONDS_MAX", 0.0)
    assert [part async for part in live._stream_region(region)] == [b": riverpy\n\n"]
