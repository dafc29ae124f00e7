"""The events of a client as JSON lines.

The lines contain no args, metadata or tags of jobs. So a reader of the stream needs no permission
to read the data of jobs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import msgspec

from riverpy._dsn import mask_passwords
from riverpy._postgres.driver import describe_error
from riverpy._work.subscriptions import parse_event_kind
from riverpy.errors import ConfigError
from riverpy.events import EventKind, LeaseEventKind

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from riverpy._work.subscriptions import Subscription
    from riverpy.client import Client
    from riverpy.events import Event, LeaseChange
    from riverpy.job import JobRow

BUFFERED_EVENTS_MAX = 1_000
"""The maximum number of events that are buffered for a slow reader. Further events are dropped and
counted."""
KEEPALIVE_INTERVAL = 10.0
"""Seconds without a line after which the server sends an empty line."""
ERROR_LENGTH_MAX = 500
"""The maximum number of characters of an error."""
QUERY_PARAMETERS = ("event", "kind", "lease", "queue", "state")
"""The query parameters. A parameter may occur more than once. A line is sent only if, for each
given parameter, it has one of the values. Lines about a queue have no kind and no state, and lines
about a lease have only `lease`."""


class EventLine(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One line of the stream."""

    event: str
    """The kind of event, or `dropped` if events were dropped because the reader was too slow."""
    queue: str = ""
    job_id: int = 0
    kind: str = ""
    state: str = ""
    attempt: int = 0
    max_attempts: int = 0
    wait: float | None = None
    """Seconds from the time at which the job was due to the start of the attempt."""
    run: float | None = None
    """The run time of the attempt, in seconds."""
    lease: str = ""
    use: str = ""
    """What the lease is used for: `lease`, `singleton` or `leader`."""
    epoch: int = 0
    reason: str = ""
    """Why the term of the lease ended."""
    error: str = ""
    """The first `ERROR_LENGTH_MAX` characters of the error of a failed or cancelled attempt, or of
    the code under a lease. Passwords in URLs are masked."""
    dropped: int = 0
    """The number of dropped events."""


def stream_events(
    client: Client, query_params: Mapping[str, Sequence[str]]
) -> AsyncGenerator[bytes, None]:
    """Return the lines of the events that match `query_params`, from now on until the client stops.

    Raises:
        ValueError: a parameter or a kind of event is not known.
    """
    kinds = parse_requested_kinds(query_params)
    return _encode_event_lines(client.subscribe(*kinds, size=BUFFERED_EVENTS_MAX), query_params)


def parse_requested_kinds(
    query_params: Mapping[str, Sequence[str]],
) -> list[EventKind | LeaseEventKind]:
    """Return the kinds of events that `query_params` requests.

    Raises:
        ValueError: a parameter or a kind of event is not known.
    """
    if unknown := set(query_params) - set(QUERY_PARAMETERS):
        raise ValueError(
            f"unknown parameter {min(unknown)}: the parameters are {', '.join(QUERY_PARAMETERS)}"
        )
    try:
        return [
            parse_event_kind(kind)
            for kind in query_params.get("event") or (*EventKind, *LeaseEventKind)
        ]
    except ConfigError as error:
        raise ValueError(str(error)) from None


async def _encode_event_lines(
    subscription: Subscription, query_params: Mapping[str, Sequence[str]]
) -> AsyncGenerator[bytes, None]:
    accepted = {name: set(values) for name, values in query_params.items() if name != "event"}
    async with subscription:
        yield b"\n"  # this shows the reader that the connection works
        dropped, keepalive_at = 0, anyio.current_time() + KEEPALIVE_INTERVAL
        while True:
            line: EventLine | None = None
            try:
                with anyio.CancelScope(deadline=keepalive_at):
                    line = build_event_line(await anext(subscription))
            except StopAsyncIteration:
                return
            if subscription.dropped > dropped:
                dropped, count = subscription.dropped, subscription.dropped - dropped
                yield _encode_line(EventLine(event="dropped", dropped=count))
            if line and all(getattr(line, name) in values for name, values in accepted.items()):
                yield _encode_line(line)
            elif anyio.current_time() >= keepalive_at:
                yield b"\n"
            else:
                continue
            keepalive_at = anyio.current_time() + KEEPALIVE_INTERVAL


def build_event_line(event: Event) -> EventLine:
    """Return the line that describes an event."""
    job, times = event.job, event.statistics
    if event.lease is not None:
        return _build_lease_line(event.kind, event.lease)
    if job is None or times is None:
        return EventLine(event=event.kind.value, queue=event.queue or "")
    return EventLine(
        event=event.kind.value,
        queue=job.queue,
        job_id=job.id,
        kind=job.kind,
        state=job.state,
        attempt=job.attempt,
        max_attempts=job.max_attempts,
        wait=round(times.queue_wait.total_seconds(), 6),
        run=round(times.run.total_seconds(), 6),
        error=_job_error_text(event.kind, job),
    )


def _build_lease_line(kind: EventKind | LeaseEventKind, lease: LeaseChange) -> EventLine:
    error = "" if lease.error is None else describe_error(lease.error)
    return EventLine(
        event=kind.value,
        lease=lease.name,
        use=lease.use.value,
        epoch=lease.epoch,
        reason=lease.reason or "",
        error=mask_passwords(error)[:ERROR_LENGTH_MAX],
    )


def _job_error_text(event_kind: EventKind | LeaseEventKind, job: JobRow) -> str:
    if event_kind not in {EventKind.JOB_FAILED, EventKind.JOB_CANCELLED} or not job.errors:
        return ""
    return mask_passwords(job.errors[-1].error)[:ERROR_LENGTH_MAX]


def _encode_line(line: EventLine) -> bytes:
    return msgspec.json.encode(line) + b"\n"
