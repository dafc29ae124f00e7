"""HealthRequestHandler: answers the requests to one worker's health server."""

from __future__ import annotations

import time
from datetime import timedelta
from http import HTTPStatus
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import msgspec

from riverpy._duration import parse_duration
from riverpy._postgres.driver import DATABASE_ERRORS
from riverpy._tools.health import event_stream
from riverpy._tools.health.http import Address, HttpError, Response
from riverpy._tools.health.metrics import METRICS_CONTENT_TYPE, render_metrics
from riverpy._tools.health.probes import check_liveness, check_queue_lags, check_readiness
from riverpy._tools.health.server import HttpServer
from riverpy.config import HARD_STOP_TIMEOUT_DEFAULT
from riverpy.errors import RiverError
from riverpy.stats import ClientStats

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping

    from riverpy._tools.health.http import Request
    from riverpy._tools.health.probes import ProbeResult
    from riverpy._tools.health.server import ConnectionListener
    from riverpy.client import Client

QUEUE_LAGS_CACHE_SECONDS = 10.0
"""Seconds for which queue lags are cached, so that frequent requests do not load the database. A
queue lag is how long the oldest due job of a queue has waited."""
QUEUE_LAGS_TIMEOUT = 1.0
"""The timeout, in seconds, of the statement that reads the queue lags."""
RENDER_SLICE_SECONDS = 0.002
"""After this many seconds of rendering a page, other tasks may run."""
EVENT_STREAMS_MAX = 8
"""The maximum number of readers of /events at the same time."""
JSON_CONTENT_TYPE = "application/json"
EVENTS_CONTENT_TYPE = "application/x-ndjson"


class WorkerProcessStatus(msgspec.Struct, frozen=True):
    """The status of one worker process. The supervisor reads it from /status."""

    state: str
    """The state of the worker's client: `starting`, `working`, `stopping` or `stopped`."""
    is_alive: bool
    """Whether /livez answers 200."""
    soft_stop_timeout: float | None
    """Seconds for which running jobs may continue after a stop was requested; None: no limit."""
    hard_stop_timeout: float
    """Seconds that a stop waits at most until cancelled jobs have ended and results are stored."""


class HealthRequestHandler:
    """Answers /livez, /readyz, /metrics and /events and, for the worker's supervisor, /status. It
    answers requests even before the client starts and after the client has stopped.

    Args:
        source: the address to listen on, or a `SupervisorConnectionListener`, which accepts
            connections from the worker's supervisor.
    """

    def __init__(self, source: Address | ConnectionListener) -> None:
        self.client: Client | None = None
        """The client of the worker; None: there is no client yet."""
        self._process_started_at = time.time()
        self._queue_lags: Mapping[str, timedelta] | None = None
        self._queue_lags_read_at = -QUEUE_LAGS_CACHE_SECONDS
        self._queue_lags_lock = anyio.Lock()
        self._open_stream_count = 0
        routes: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/livez": self._answer_livez,
            "/readyz": self._answer_readyz,
            "/metrics": self._answer_metrics,
            "/events": self._answer_events,
        }
        if not isinstance(source, Address):
            routes["/status"] = self._answer_status
        self.server = HttpServer(source, routes)

    def _client_stats(self) -> ClientStats | None:
        """Return the stats of the client; None: the client does not run yet."""
        stats = None if self.client is None else self.client.stats()
        return stats if stats is not None and stats.uptime else None

    async def _answer_livez(self, request: Request) -> Response:
        # If the event loop was blocked until now, let other tasks run before the check.
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        return build_probe_response(check_liveness(self._client_stats()))

    async def _answer_status(self, request: Request) -> Response:
        stats = self._client_stats()
        soft_stop: timedelta | None = timedelta(0)
        hard_stop = HARD_STOP_TIMEOUT_DEFAULT
        if self.client is not None:
            soft_stop = self.client.config.soft_stop_timeout
            hard_stop = self.client.config.hard_stop_timeout
        status = WorkerProcessStatus(
            state="starting" if stats is None else stats.state,
            is_alive=check_liveness(stats).ok,
            soft_stop_timeout=None if soft_stop is None else soft_stop.total_seconds(),
            hard_stop_timeout=hard_stop.total_seconds(),
        )
        return Response(HTTPStatus.OK, JSON_CONTENT_TYPE, msgspec.json.encode(status))

    async def _answer_readyz(self, request: Request) -> Response:
        await anyio.lowlevel.checkpoint()
        lag = None
        if (limit := parse_max_lag(request)) is not None:
            lags = await self._read_queue_lags()
            lag = check_queue_lags(limit, lags, self._client_stats())
        return build_probe_response(check_readiness(self._client_stats(), lag))

    async def _answer_metrics(self, request: Request) -> Response:
        lags = await self._read_queue_lags()
        parts = render_metrics(
            self._client_stats() or ClientStats(client_id="", state="starting"),
            process_started_at=self._process_started_at,
            queue_lags=lags,
        )
        return Response(HTTPStatus.OK, METRICS_CONTENT_TYPE, await _join_page_parts(parts))

    async def _read_queue_lags(self) -> Mapping[str, timedelta] | None:
        """Return how long the oldest due job of each queue has waited; None: not known."""
        async with self._queue_lags_lock:
            age = time.monotonic() - self._queue_lags_read_at
            if self.client is None or age < QUEUE_LAGS_CACHE_SECONDS:
                return self._queue_lags
            self._queue_lags = None
            try:
                with anyio.move_on_after(QUEUE_LAGS_TIMEOUT):
                    self._queue_lags = await self.client.queue_lags(list(self.client.queues))
            except (RiverError, *DATABASE_ERRORS):  # the client is closed, or the database is down
                pass
            self._queue_lags_read_at = time.monotonic()
            return self._queue_lags

    async def _answer_events(self, request: Request) -> Response:
        if self.client is None or self._open_stream_count >= EVENT_STREAMS_MAX:
            reason = (
                "no client yet" if self.client is None else f"{EVENT_STREAMS_MAX} readers already"
            )
            raise HttpError(HTTPStatus.SERVICE_UNAVAILABLE, f"{reason}: try again later")
        try:
            lines = event_stream.stream_events(self.client, request.query_params)
        except ValueError as error:
            raise HttpError(HTTPStatus.BAD_REQUEST, str(error)) from None
        counted = self._yield_lines_and_count_stream(lines)
        await anext(counted)  # count this stream before another request runs
        return Response(HTTPStatus.OK, EVENTS_CONTENT_TYPE, counted)

    async def _yield_lines_and_count_stream(
        self, lines: AsyncGenerator[bytes, None]
    ) -> AsyncGenerator[bytes, None]:
        """Yield an empty part, then `lines`. Count this stream as open until the generator ends.

        The code of a generator starts at the first read. The caller must read the empty part at
        once, so that the stream is counted before another request checks `EVENT_STREAMS_MAX`."""
        self._open_stream_count += 1
        try:
            yield b""
            async for line in lines:
                yield line
        finally:
            self._open_stream_count -= 1
            await lines.aclose()


def parse_max_lag(request: Request) -> timedelta | None:
    """Return the value of the query parameter `max_lag`, or None if the request does not have it.

    Raises:
        HttpError: the value is not a duration.
    """
    values = request.query_params.get("max_lag")
    if not values:
        return None
    try:
        return parse_duration(values[0])
    except ValueError as error:
        raise HttpError(HTTPStatus.BAD_REQUEST, f"max_lag: {error}") from None


async def _join_page_parts(parts: Iterator[str]) -> bytes:
    """Join the parts of a page. Other tasks may run between two parts."""
    page, until = list[str](), time.monotonic() + RENDER_SLICE_SECONDS
    for piece in parts:
        page.append(piece)
        if time.monotonic() >= until:
            await anyio.lowlevel.checkpoint()
            until = time.monotonic() + RENDER_SLICE_SECONDS
    return "".join(page).encode()


def build_probe_response(result: ProbeResult) -> Response:
    """Return the response for the result of a probe: status 200 if the result is ok, otherwise
    503."""
    status = HTTPStatus.OK if result.ok else HTTPStatus.SERVICE_UNAVAILABLE
    return Response(status, JSON_CONTENT_TYPE, msgspec.json.encode(result) + b"\n")
