"""Live updates: streams of server-sent events that contain the changing part of a page.

A region is the changing part of one page, for users with the same rights. All followers, i.e. the
open streams of a region, share its content. No background task renders a region: when a new
rendering is due, one follower renders the region, and the others wait for the result.
"""

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
from riverpy._server_events import (
    SERVER_STOP_POLL_INTERVAL,
    encode_server_sent_event,
    is_uvicorn_stopping,
)
from riverpy.errors import RiverError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator

    from starlette.types import Receive, Scope, Send

RENDER_INTERVAL = 2.0
"""The minimum pause between two renderings of a region, in seconds."""
RENDER_PAUSE_FACTOR = 9.0
"""The minimum pause after a rendering, as a multiple of its duration. So the renderings of a region
use at most a tenth of the time."""
FOLLOWERS_MAX = 200
"""The maximum number of open streams of a dashboard. Further requests get the status 503. The page
reports this to the user, and the browser tries again later."""
REGIONS_MAX = 50
"""The maximum number of regions with open streams. Requests for further regions get the status
503."""
STREAM_SECONDS_MAX = 300.0
"""The maximum duration of a stream in seconds. Then the browser connects again, so that the rights
of its user are checked again."""
RETRY_AFTER_SECONDS = 30
_AGE_PATTERN = re.compile(rb'(<time datetime="[^"]*")[^>]*>[^<]*')
_STREAM_HEADERS = {"X-Accel-Buffering": "no"}  # nginx must not buffer events


class LiveRegionKey(NamedTuple):
    """Identifies a region: the page, and the rights of the users that see it."""

    path_and_query: str
    access_level: str
    root_path: str


class LiveRegion:
    """The changing part of a page, for users with the same rights."""

    def __init__(self, render: Callable[[], Awaitable[bytes]]) -> None:
        self._render = render
        self._lock = anyio.Lock()
        self._fingerprint: bytes | None = None
        self.due_at = 0.0
        """The monotonic time at which the region must be rendered again."""
        self.rendered_at = self._changed_at = -math.inf
        """`rendered_at` is the time at which the last rendering started. `_changed_at` is the time
        of the last known change in the database. Both are monotonic times."""
        self.version = 0
        """The version number of the content. It stays the same if only ages such as `5m ago` have
        changed."""
        self.content = b""
        self.problem: str | None = None
        """Why the last rendering failed. None: it succeeded."""
        self.follower_count = 0

    async def render_if_due(self) -> None:
        """Render the region if `due_at` has passed."""
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
        """Make the region due for a new rendering if its last rendering began before `changed_at`,
        the monotonic time of a change in the database."""
        self._changed_at = max(self._changed_at, changed_at)
        if self.rendered_at < changed_at:
            self.due_at = 0.0


class LiveRegions:
    """All regions with open streams."""

    def __init__(self) -> None:
        self._region_by_key: dict[LiveRegionKey, LiveRegion] = {}
        self._follower_count = 0

    def invalidate_before(self, changed_at: float) -> None:
        """Make each region due for a new rendering if its last rendering began before `changed_at`,
        the monotonic time of a change in the database."""
        for region in self._region_by_key.values():
            region.invalidate_before(changed_at)

    def open_stream(
        self, key: LiveRegionKey, render: Callable[[], Awaitable[bytes]], page_age: float
    ) -> LiveResponse:
        """Return a response that streams the changes of a region. `page_age` is the age in seconds
        of the page in the browser.

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
    def follow_region(
        self, key: LiveRegionKey, render: Callable[[], Awaitable[bytes]]
    ) -> Generator[LiveRegion]:
        """Return the region with this key, and count one follower for it during the `with`
        block."""
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
    """A response that streams the changes of a region as server-sent events."""

    def __init__(
        self,
        regions: LiveRegions,
        key: LiveRegionKey,
        render: Callable[[], Awaitable[bytes]],
        page_rendered_at: float,
    ) -> None:
        super().__init__((), media_type="text/event-stream", headers=_STREAM_HEADERS)
        self._regions, self._key, self._render_region = regions, key, render
        self._page_rendered_at = page_rendered_at
        self.run_while_open: Callable[[], Coroutine[Any, Any, None]] | None = None
        """A background function of the page, which runs while the stream is open. For example, it
        refreshes the findings of doctor."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._regions.follow_region(self._key, self._render_region) as region:
            self.body_iterator = _stream_region(region, self._page_rendered_at)
            async with anyio.create_task_group() as tasks:
                if self.run_while_open is not None:
                    tasks.start_soon(self.run_while_open)
                await super().__call__(scope, receive, send)
                tasks.cancel_scope.cancel()


async def _stream_region(
    region: LiveRegion, page_rendered_at: float
) -> AsyncGenerator[bytes, None]:
    """Yield an event after each rendering.

    The event is `region` with the new content, `fresh` if the content has not changed, or `problem`
    if the rendering failed. Content that is older than the page in the browser is not sent.
    """
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
