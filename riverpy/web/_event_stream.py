"""`riverpy.web.event_stream`: streams of server-sent events about all workers or about one job."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import closing
from typing import TYPE_CHECKING, TypeVar

import anyio
import anyio.lowlevel
import msgspec

from riverpy._dsn import mask_passwords
from riverpy._fleet.event_line import build_dropped_events_line, build_event_line
from riverpy._fleet.messages import ERROR_LENGTH_MAX
from riverpy._fleet.row_reader import WatchClosedError
from riverpy._fleet.subscription import take_waiting_events
from riverpy._fleet.watch import get_row_reader
from riverpy._postgres.jobs import FINAL_STATES
from riverpy._server_events import (
    SERVER_STOP_POLL_INTERVAL,
    encode_server_sent_event,
    is_uvicorn_stopping,
)
from riverpy.errors import ConfigError, NotFoundError
from riverpy.events import EventKind, FleetEventKind, LeaseEventKind

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable
    from typing import Any

    from riverpy._fleet.row_reader import RowReader
    from riverpy._fleet.subscription import FleetSubscription
    from riverpy.client import Client
    from riverpy.job import JobRow

ItemT = TypeVar("ItemT")

EVENTS_BUFFERED_MAX = 1_000
"""The maximum number of events that wait until a slow browser reads them. Further events are
dropped."""
EVENTS_PER_PART_MAX = 100
"""The maximum number of events that are sent together."""
HEARTBEAT_INTERVAL = 15.0
"""If there is no event for this number of seconds, a comment is sent, so that proxies keep the
connection open."""
SENT_OUTPUT_LENGTH_MAX = 1024 * 1024
"""The maximum size of an output as JSON, in bytes. A larger output is not sent."""
_HEARTBEAT = b": heartbeat\n\n"
_STREAM_START = b": riverpy\n\n"
"""The first bytes of a stream. They show the browser that the connection works."""


def event_stream(
    client: Client,
    *,
    event_kinds: Collection[EventKind | LeaseEventKind | FleetEventKind] | None = None,
    kinds: Collection[str] | None = None,
    queues: Collection[str] | None = None,
    job_id: int | None = None,
    last_event_id: str | None = None,
) -> AsyncGenerator[bytes, None]:
    """Return the bytes of a stream of server-sent events. Send them in a streaming response of any
    web framework, with `Content-Type: text/event-stream`. For FastAPI and Starlette,
    `riverpy.web.events` returns a complete endpoint.

    With `job_id`, the stream contains the changes of this job, as in `riverpy.web.events`, and ends
    when the job has ended. Without `job_id`, it contains the events of all workers, as
    `client.subscribe(…, fleet=True)` returns them. The stream also ends when the client is closed
    or uvicorn stops.

    Args:
        client: the client. It must be open while the stream is read.
        event_kinds: the kinds of events to send. Default None: all kinds. Not with `job_id`.
        kinds: send only events of jobs of these kinds. Default None: all. Not with `job_id`.
        queues: send only events of these queues. Default None: all. Not with `job_id`.
        job_id: the id of a job. Default None: send the events of all workers.
        last_event_id: the header `Last-Event-ID` of the request. It names the last version of the
            job's row that the browser has received, which is not sent again. Only with `job_id`.

    Raises:
        ConfigError: a value is not allowed.
    """
    if job_id is not None:
        if event_kinds is not None or kinds is not None or queues is not None:
            raise ConfigError("job_id follows one job: leave out event_kinds, kinds and queues")
        return stream_job_changes(get_row_reader(client.watch(job_id)), last_event_id)
    if event_kinds is None:
        event_kinds = (*EventKind, *LeaseEventKind, *FleetEventKind)
    elif isinstance(event_kinds, str) or not isinstance(event_kinds, Collection):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"event_kinds is a list of kinds of events, got {event_kinds!r}")
    subscription = client.subscribe(
        *event_kinds,
        size=EVENTS_BUFFERED_MAX,
        fleet=True,
        job_kinds=kinds,
        queues=queues,
    )
    return _stream_fleet_events(subscription)


async def _stream_fleet_events(subscription: FleetSubscription) -> AsyncGenerator[bytes, None]:
    dropped = 0
    reader = _StreamReader()
    async with subscription:
        yield _STREAM_START
        while True:
            try:
                event = await reader.read_item(subscription.__anext__)
            except _StreamEndedError:
                return
            if event is None:
                yield _HEARTBEAT
                continue
            lines = [
                build_event_line(one)
                for one in (event, *take_waiting_events(subscription, EVENTS_PER_PART_MAX - 1))
            ]
            if subscription.dropped > dropped:
                dropped, count = subscription.dropped, subscription.dropped - dropped
                lines.insert(0, build_dropped_events_line(count))
            yield b"".join(
                encode_server_sent_event(line.event, msgspec.json.encode(line)) for line in lines
            )
            await anyio.lowlevel.checkpoint()  # let other requests run


async def stream_job_changes(
    rows: RowReader, last_event_id: str | None, first_row: JobRow | None = None
) -> AsyncGenerator[bytes, None]:
    """Yield server-sent events with each new version of a job's row, until the job has ended.

    Args:
        rows: reads the versions of the row.
        last_event_id: the version that the browser has already received. It is not sent again.
        first_row: the first version, if the caller has already read it.
    """
    reader, encoder = _StreamReader(), _JobEventEncoder(last_event_id)
    with closing(rows):
        yield _STREAM_START
        if first_row is not None:
            for message in encoder.encode_row(first_row, rows.read_version):
                yield message
        while True:
            try:
                row = await reader.read_item(rows.receive_row)
            except NotFoundError:
                yield encode_server_sent_event("deleted", msgspec.json.encode({"id": rows.job_id}))
                return
            except (_StreamEndedError, WatchClosedError):  # the job has ended, or client is closed
                return
            if row is None:
                yield _HEARTBEAT
                continue
            for message in encoder.encode_row(row, rows.read_version):
                yield message


class _JobEventEncoder:
    """Encodes the versions of a job's row as server-sent events. It does not send the same version
    or output twice."""

    def __init__(self, last_event_id: str | None) -> None:
        self._sent_version = last_event_id
        self._sent_output: object = None

    def encode_row(self, row: JobRow, version: str) -> list[bytes]:
        """Return the server-sent events for a version of the row. They contain the output only if
        it has changed."""
        if version == self._sent_version:
            return []
        self._sent_version = version
        data, output = _make_job_data(row), row.output
        if output != self._sent_output:
            _add_output(data, output)
            self._sent_output = output
        encoded = msgspec.json.encode(data)
        messages = [encode_server_sent_event("job", encoded, version)]
        if data["is_final"]:
            messages.append(encode_server_sent_event("end", encoded, version))
        return messages


def _make_job_data(row: JobRow) -> dict[str, Any]:
    errors = row.errors
    return {
        "id": row.id,
        "kind": row.kind,
        "queue": row.queue,
        "state": row.state.value,
        "is_final": row.state in FINAL_STATES,
        "attempt": row.attempt,
        "max_attempts": row.max_attempts,
        "scheduled_at": row.scheduled_at,
        "attempted_at": row.attempted_at,
        "finalized_at": row.finalized_at,
        "progress": row.last_progress,
        "error": mask_passwords(errors[-1].error)[:ERROR_LENGTH_MAX] if errors else None,
    }


def _add_output(data: dict[str, Any], output: object) -> None:
    """Add the output to the data of the event, or a flag if the output is too large."""
    encoded = msgspec.json.encode(output)
    if len(encoded) > SENT_OUTPUT_LENGTH_MAX:
        data["is_output_too_large"] = True
    else:
        data["output"] = msgspec.Raw(encoded)


class _StreamEndedError(Exception):
    """The stream has no more items, or the web server is stopping."""


class _StreamReader:
    """Reads the items of a stream. While it waits for an item, it checks regularly whether a
    heartbeat must be sent and whether the web server is stopping."""

    def __init__(self) -> None:
        self._heartbeat_at = anyio.current_time() + HEARTBEAT_INTERVAL

    async def read_item(self, read: Callable[[], Awaitable[ItemT]]) -> ItemT | None:
        """Return the next item, or None if the caller must send a heartbeat.

        Raises:
            _StreamEndedError: there are no more items, or the web server is stopping.
        """
        while True:
            if is_uvicorn_stopping():
                raise _StreamEndedError
            if anyio.current_time() >= self._heartbeat_at:
                self._heartbeat_at = anyio.current_time() + HEARTBEAT_INTERVAL
                return None
            with anyio.move_on_after(SERVER_STOP_POLL_INTERVAL):
                try:
                    item = await read()
                except StopAsyncIteration:
                    raise _StreamEndedError from None
                self._heartbeat_at = anyio.current_time() + HEARTBEAT_INTERVAL
                return item
