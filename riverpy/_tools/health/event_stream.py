"""The stream of a client's events, as JSON lines.

The lines contain no args, metadata or tags of jobs. So a reader of the stream needs no permission
to read the data of jobs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import msgspec

from riverpy._fleet.event_line import EventLine, build_dropped_events_line, build_event_line
from riverpy._work.subscriptions import parse_event_kind
from riverpy.errors import ConfigError
from riverpy.events import EventKind, LeaseEventKind

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from riverpy._work.subscriptions import Subscription
    from riverpy.client import Client

BUFFERED_EVENTS_MAX = 1_000
"""The maximum number of events that are buffered for a slow reader. Further events are dropped and
counted."""
KEEPALIVE_INTERVAL = 10.0
"""Seconds without a line after which the server sends an empty line."""
QUERY_PARAMETERS = ("event", "kind", "lease", "queue", "state")
"""The names of the query parameters, which filter the stream. A request may have a parameter more
than once.

The server sends a line only if, for each parameter in the request, the line has one of the
requested values. Lines about a queue have no kind and no state. Lines about a lease have no kind,
queue or state. So, for example, a request with `kind` receives no lines about queues or leases.
"""


def stream_events(
    client: Client, query_params: Mapping[str, Sequence[str]]
) -> AsyncGenerator[bytes, None]:
    """Return the lines of the events that match `query_params`. The stream contains the events from
    the first read of the returned generator until the client stops.

    Raises:
        ValueError: a parameter or a kind of event is not known.
    """
    kinds = parse_requested_event_kinds(query_params)
    return _generate_event_lines(client.subscribe(*kinds, size=BUFFERED_EVENTS_MAX), query_params)


def parse_requested_event_kinds(
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


async def _generate_event_lines(
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
                yield _encode_event_line(build_dropped_events_line(count))
            if line and all(getattr(line, name) in values for name, values in accepted.items()):
                yield _encode_event_line(line)
            elif anyio.current_time() >= keepalive_at:
                yield b"\n"
            else:
                continue
            keepalive_at = anyio.current_time() + KEEPALIVE_INTERVAL


def _encode_event_line(line: EventLine) -> bytes:
    return msgspec.json.encode(line) + b"\n"
