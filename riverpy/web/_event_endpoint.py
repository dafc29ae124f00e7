"""`riverpy.web.events`: an endpoint that sends server-sent events, for FastAPI and Starlette."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import anyio

try:
    # FastAPI reads the annotations when the program starts, so these imports are needed then.
    from starlette.requests import Request  # noqa: TC002
    from starlette.responses import PlainTextResponse, Response, StreamingResponse
except ImportError as error:
    raise ImportError("riverpy.web.events needs Starlette: pip install starlette") from error

from riverpy._calls.job_page import check_job_id
from riverpy._fleet.watch import get_row_reader
from riverpy._postgres.jobs import FINAL_STATES
from riverpy.client import Client
from riverpy.errors import ConfigError, NotFoundError
from riverpy.web._event_stream import event_stream, stream_job_changes

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Collection

    from riverpy.events import EventKind, FleetEventKind, LeaseEventKind

STREAMS_MAX_DEFAULT = 200
"""The default maximum number of open streams of an endpoint in one process."""
FIRST_READ_TIMEOUT = 5.0
"""How long the endpoint waits until it has read the row of the job, in seconds. After that, the
stream begins without the row. The endpoint does not answer with an error status, because a browser
does not connect again after an error status."""
_NO_JOB_TEXT = "there is no such job"
_RESPONSE_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""Response headers: browsers must not cache the response, and nginx must not buffer it."""


def events(
    client: Client,
    *,
    event_kinds: Collection[EventKind | LeaseEventKind | FleetEventKind] | None = None,
    kinds: Collection[str] | None = None,
    queues: Collection[str] | None = None,
    job_id: int | str | None = None,
    max_streams: int = STREAMS_MAX_DEFAULT,
) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that sends server-sent events, for Starlette and FastAPI:
    `app.add_api_route("/jobs/{id}/events", riverpy.web.events(client, job_id="id"))`.

    With `job_id`, the endpoint sends the row of one job without its args: first the current row,
    then the row after each change of its state, attempt, progress or output. The stream ends when
    the job has ended. Without `job_id`, it sends the new events of all workers.

    The client must be open: `riverpy.web.lifespan` can open it. The endpoint does not check its
    users: add a dependency that does.

    Args:
        client: the client that reads the events.
        event_kinds: the kinds of events to send. Default None: all kinds. Not with `job_id`.
        kinds: send only events of jobs of these kinds. Default None: all. Not with `job_id`.
        queues: send only events of these queues. Default None: all. Not with `job_id`.
        job_id: the id of the job, or the name of the path parameter that has the id. Default None:
            send the events of all workers.
        max_streams: the maximum number of open streams of this endpoint in one process. Further
            requests get the status 503. Default 200.

    Raises:
        ConfigError: a value is not allowed.

    The endpoint raises `ClientStateError` if the client is not open.
    """
    if not isinstance(client, Client):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"the client is a riverpy.Client, got {type(client).__name__}")
    if type(max_streams) is not int or max_streams < 1:
        raise ConfigError(f"max_streams is a whole number from 1, got {max_streams!r}")
    if job_id is None:
        # Check the values now. The returned generator is never started, so it need not be closed.
        event_stream(client, event_kinds=event_kinds, kinds=kinds, queues=queues)
    elif event_kinds is not None or kinds is not None or queues is not None:
        raise ConfigError("job_id follows one job: leave out event_kinds, kinds and queues")
    elif not isinstance(job_id, str):
        check_job_id(job_id)
    elif not job_id.isidentifier():
        raise ConfigError(f"job_id is an id, or the name of a path parameter, got {job_id!r}")
    filters = partial(event_stream, client, event_kinds=event_kinds, kinds=kinds, queues=queues)
    return _EventEndpoint(client, filters, job_id, max_streams).send_events


class _EventEndpoint:
    """An endpoint that sends server-sent events, and limits the number of its open streams."""

    def __init__(
        self,
        client: Client,
        open_fleet_stream: Callable[[], AsyncGenerator[bytes, None]],
        job_id: int | str | None,
        streams_max: int,
    ) -> None:
        self._client, self._job_id, self._streams_max = client, job_id, streams_max
        self._open_fleet_stream = open_fleet_stream
        self._stream_count = 0
        """The number of streams that are open or being opened."""

    async def send_events(self, request: Request) -> Response:
        """Handle a request: return a response that sends events until the browser disconnects, the
        job ends or the server stops."""
        if self._stream_count >= self._streams_max:
            return PlainTextResponse("too many streams", 503, headers={"Retry-After": "5"})
        self._stream_count += 1
        try:
            if self._job_id is None:
                return await self._make_stream_response(self._open_fleet_stream())
            return await self._send_job_events(request, self._job_id)
        finally:
            self._stream_count -= 1

    async def _send_job_events(self, request: Request, job_id: int | str) -> Response:
        found_id = _get_requested_job_id(request, job_id)
        if found_id is None:
            return PlainTextResponse(_NO_JOB_TEXT, 404)
        last_event_id = request.headers.get("last-event-id")
        rows, row = get_row_reader(self._client.watch(found_id)), None
        try:
            with anyio.move_on_after(FIRST_READ_TIMEOUT):
                row = await rows.receive_row()
        except NotFoundError:
            return PlainTextResponse(_NO_JOB_TEXT, 404)
        if row is not None and row.state in FINAL_STATES and rows.read_version == last_event_id:
            return Response(status_code=204)  # 204: the browser must not connect again
        return await self._make_stream_response(stream_job_changes(rows, last_event_id, row))

    async def _make_stream_response(self, stream: AsyncGenerator[bytes, None]) -> Response:
        """Return a response that sends a stream. The first part of the stream is read before the
        response starts, so that the response has an error status if reading this part fails."""
        parts = self._count_open_stream(await anext(stream), stream)
        return StreamingResponse(parts, media_type="text/event-stream", headers=_RESPONSE_HEADERS)

    async def _count_open_stream(
        self, first: bytes, stream: AsyncGenerator[bytes, None]
    ) -> AsyncGenerator[bytes, None]:
        """Yield the parts of the stream, and count the stream as open until it ends."""
        self._stream_count += 1
        try:
            yield first
            async for part in stream:
                yield part
        finally:
            self._stream_count -= 1
            await stream.aclose()


def _get_requested_job_id(request: Request, job_id: int | str) -> int | None:
    """Return the id of the requested job, or None if the value in the path is not an id."""
    if isinstance(job_id, int):
        return job_id
    if job_id not in request.path_params:
        raise ConfigError(
            f"job_id names the path parameter {job_id!r}: add the route with a path such as "
            f"/jobs/{{{job_id}}}/events"
        )
    text = str(request.path_params[job_id])
    is_id = text.isascii() and text.isdigit() and len(text) < 20 and int(text) < 2**63
    return int(text) if is_id else None
