"""Live updates: streams of server-sent events with the part of a page that changes.

All followers of a page with the same rights share one region. A region has no task of its own: the
first follower that finds it old renders it, and the others wait for the result."""

from __future__ import annotations

import math
import re
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
from starlette.exceptions import HTTPException
from starlette.responses import StreamingResponse

from riverpy._dashboard.errors import PageError
from riverpy._postgres.driver import DATABASE_ERRORS, describe_error
from riverpy._server_events import encode_server_sent_event, is_uvicorn_stopping
from riverpy.errors import RiverError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator

    from starlette.types import Receive, Scope, Send

RENDER_INTERVAL = 2.0
"""Seconds between two renderings of a region, if rendering is fast."""
RENDER_PAUSE_FACTOR = 9.0
"""The minimum pause after a rendering, as a multiple of the time that it took. So the renderings of
a region use at most a tenth of the time."""
FOLLOWERS_MAX = 200
"""The maximum number of open streams of a dashboard. Further requests get the status 503. The page
says so, and its browser tries again later."""
REGIONS_MAX = 50
"""The maximum number of different pages that are followed. Then the same applies."""
STREAM_SECONDS_MAX = 300.0
"""The length of a stream. Then the browser connects again, which checks its rights again."""
SERVER_STOP_POLL_INTERVAL = 0.5
"""Seconds between two checks whether the web server stops."""
RETRY_AFTER_SECONDS = 30
_AGE_PATTERN = re.compile(rb'(<time datetime="[^"]*")[^>]*>[^<]*')
_STREAM_HEADERS = {"X-Accel-Buffering": "no"}  # nginx must pass each event on at once


class RegionKey(NamedTuple):
    """What a region shows, and to whom."""

    path_and_query: str
    access_level: str
    root_path: str


class LiveRegion:
    """The part of a page that changes, as its followers with the same rights see it."""

    def __init__(self, render: Callable[[], Awaitable[bytes]]) -> None:
        self._render = render
        self._lock = anyio.Lock()
        self._fingerprint: bytes | None = None
        self.due_at = 0.0
        """The monotonic time at which the region is rendered again."""
        self.rendered_at = self._changed_at = -math.inf
        """Monotonic times: the start of the last rendering, and the last known change."""
        self.version = 0
        """The number of the content. It changes when more than the ages in the content change."""
        self.content = b""
        self.problem: str | None = None
        """Why the last rendering failed. None: it did not fail."""
        self.follower_count = 0

    async def render_if_due(self) -> None:
        """Render the region if it is due."""
        async with self._lock:
            began = time.monotonic()
            if began < self.due_at:
                return
            self.rendered_at = began
            try:
                content = await self._render()
            except (RiverError, HTTPException, *DATABASE_ERRORS) as error:
                is_page_error = isinstance(error, PageError)
                self.problem = error.problem if is_page_error else describe_error(error)
            else:
                self.problem = None
                fingerprint = _AGE_PATTERN.sub(rb"\1", content)
                if fingerprint != self._fingerprint:
                    self.version += 1
                    self.content, self._fingerprint = content, fingerprint
            ended = time.monotonic()
            pause = max(RENDER_INTERVAL, RENDER_PAUSE_FACTOR * (ended - began))
            was_changed_since = began < self._changed_at
            self.due_at = ended if was_changed_since else ended + pause

    def invalidate_before(self, changed_at: float) -> None:
        """Make the region due if its last rendering began before `changed_at`, the monotonic time
        of a change."""
        self._changed_at = max(self._changed_at, changed_at)
        if self.rendered_at < changed_at:
            self.due_at = 0.0


class LiveRegions:
    """The regions that are followed."""

    def __init__(self) -> None:
        self._region_by_key: dict[RegionKey, LiveRegion] = {}
        self._follower_count = 0

    def invalidate_before(self, changed_at: float) -> None:
        """Make all regions due whose last rendering began before `changed_at`, the monotonic time
        of a change."""
        for region in self._region_by_key.values():
            region.invalidate_before(changed_at)

    def open_stream(
        self, key: RegionKey, render: Callable[[], Awaitable[bytes]], page_age: float
    ) -> LiveResponse:
        """Return the response with the changes of a region. `page_age` is the age in seconds of the
        page that shows the region.

        Raises:
            PageError: there are too many streams or regions.
        """
        is_full = len(self._region_by_key) >= REGIONS_MAX and key not in self._region_by_key
        if is_full or self._follower_count >= FOLLOWERS_MAX:
            raise PageError(
                503,
                "Too many pages are open.",
                "Load this page again to see the newest state.",
                {"Retry-After": str(RETRY_AFTER_SECONDS)},
            )
        return LiveResponse(self, key, render, time.monotonic() - page_age)

    @contextmanager
    def follow(
        self, key: RegionKey, render: Callable[[], Awaitable[bytes]]
    ) -> Generator[LiveRegion]:
        """Count a follower during the block."""
        region = self._region_by_key.setdefault(key, LiveRegion(render))
        region.follower_count += 1
        self._follower_count += 1
        try:
            yield region
        finally:
            region.follower_count -= 1
            self._follower_count -= 1
            if not region.follower_count:
                self._region_by_key.pop(key, None)


class LiveResponse(StreamingResponse):
    """A stream of the changes of a region."""

    def __init__(
        self,
        regions: LiveRegions,
        key: RegionKey,
        render: Callable[[], Awaitable[bytes]],
        page_rendered_at: float,
    ) -> None:
        super().__init__((), media_type="text/event-stream", headers=_STREAM_HEADERS)
        self._regions, self._key, self._render_region = regions, key, render
        self._page_rendered_at = page_rendered_at
        self.run_while_open: Callable[[], Coroutine[Any, Any, None]] | None = None
        """Work for the page, such as reads that take long. It runs while the stream is open."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._regions.follow(self._key, self._render_region) as region:
            self.body_iterator = _stream_region(region, self._page_rendered_at)
            async with anyio.create_task_group() as tasks:
                if self.run_while_open is not None:
                    tasks.start_soon(self.run_while_open)
                await super().__call__(scope, receive, send)
                tasks.cancel_scope.cancel()


async def _stream_region(
    region: LiveRegion, page_rendered_at: float
) -> AsyncGenerator[bytes, None]:
    """Yield an event after each rendering: `region` with the new content, `fresh` if it has not
    changed, `problem` if the rendering failed. A rendering that is older than the page is not sent:
    the page would go back to an older state."""
    sent_version = 0
    ends_at = time.monotonic() + STREAM_SECONDS_MAX
    yield b": riverpy\n\n"
    while time.monotonic() < ends_at and not is_uvicorn_stopping():
        await region.render_if_due()
        if region.problem is not None:
            yield encode_server_sent_event("problem", region.problem.encode("utf-8", "replace"))
        elif region.rendered_at >= page_rendered_at:
            is_known = region.version == sent_version
            sent_version = region.version
            yield (
                encode_server_sent_event("fresh", b"-")
                if is_known
                else encode_server_sent_event("region", region.content)
            )
        while time.monotonic() < min(region.due_at, ends_at) and not is_uvicorn_stopping():
            left = region.due_at - time.monotonic()
            await anyio.sleep(max(0.0, min(SERVER_STOP_POLL_INTERVAL, left)))
