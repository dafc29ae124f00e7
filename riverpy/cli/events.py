"""`riverpy events`: follow the events of a worker."""

from __future__ import annotations

import sys
from datetime import datetime, timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlencode

import anyio
import click
import msgspec

from riverpy._clock import Backoff
from riverpy._tools.health.event_stream import KEEPALIVE_INTERVAL, EventLine
from riverpy._tools.health.http_client import (
    HEALTH_PORT_DEFAULT,
    LINE_BYTES_MAX,
    NO_HEALTH_SERVER_ERROR,
    http_get,
    parse_address,
)
from riverpy.cli._options import kinds_option, queues_option, states_option
from riverpy.cli._output import make_printable, print_note, redirect_stdout_to_devnull
from riverpy.cli._run import CommandError, error_to_one_line, run_async
from riverpy.cli._types import TEXT, ParsedType
from riverpy.events import EventKind, LeaseEventKind

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from riverpy._tools.health.http import Address

EVENT_LINE_TIMEOUT = 3 * KEEPALIVE_INTERVAL
"""If the worker sends no line for this many seconds, the connection counts as lost."""
RECONNECT_DELAY_MIN, RECONNECT_DELAY_MAX = timedelta(milliseconds=200), timedelta(seconds=5)
_CONNECTION_END_ERRORS = (anyio.IncompleteRead, anyio.BrokenResourceError)


@click.command
@click.option(
    "--url",
    "address",
    metavar="URL",
    default=f":{HEALTH_PORT_DEFAULT}",
    show_default=True,
    type=ParsedType("url", parse_address),
    help="URL of the worker's health server (riverpy worker --health).",
)
@click.option(
    "--event",
    "events",
    type=click.Choice([kind.value for kind in (*EventKind, *LeaseEventKind)]),
    multiple=True,
    help="Show only these events. Can be repeated.",
)
@states_option
@kinds_option
@queues_option
@click.option(
    "--lease",
    "leases",
    type=TEXT,
    multiple=True,
    help="Show only events of this lease, singleton or leader domain. Can be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def events(
    address: Address,
    *,
    events: tuple[str, ...],
    states: tuple[str, ...],
    kinds: tuple[str, ...],
    queues: tuple[str, ...],
    leases: tuple[str, ...],
    as_json: bool,
) -> None:
    """Show the events of a worker as they happen, until interrupted.

    The events are those of its jobs, its queues, and the leases that it holds: its singletons, its
    blocks of `client.lease`, and its leadership. A worker that was killed or frozen sends no event;
    follow the other workers too.

    If the worker ends, the command waits for the next one. If events are read too slowly, the
    worker drops some and reports their number.
    """
    params = [
        *(("event", one) for one in events),
        *(("state", one) for one in states),
        *(("kind", one) for one in kinds),
        *(("queue", one) for one in queues),
        *(("lease", one) for one in leases),
    ]
    target = f"/events?{urlencode(params)}" if params else "/events"
    try:
        run_async(_follow_events, address, target, _print_as_json if as_json else _print_as_text)
    except KeyboardInterrupt:
        sys.exit(0)
    except BrokenPipeError:  # the reader of stdout has ended
        redirect_stdout_to_devnull()
        sys.exit(0)


async def _follow_events(address: Address, path: str, print_line: Callable[[bytes], Any]) -> None:
    backoff = Backoff(RECONNECT_DELAY_MIN, RECONNECT_DELAY_MAX)
    is_noted = False
    while True:
        try:
            async with http_get(address, path) as answer:
                if answer.status == 400:
                    raise CommandError((await answer.read_body()).decode().strip())
                if answer.status != 200:
                    raise ConnectionError((await answer.read_body()).decode().strip())
                print_note(f"riverpy follows {address}")
                is_noted = False
                backoff.reset()
                while True:
                    with anyio.fail_after(EVENT_LINE_TIMEOUT, reason="no line received"):
                        line = await answer.body_stream.receive_until(b"\n", LINE_BYTES_MAX)
                    if line:
                        print_line(line)
        except (OSError, ValueError, anyio.IncompleteRead, anyio.BrokenResourceError) as error:
            if isinstance(error, BrokenPipeError):
                raise
            if not is_noted:
                print_note(f"{address}: {_failure_reason(error)}; waiting for a worker there")
                is_noted = True
        await anyio.sleep(backoff.next_delay())


def _failure_reason(error: Exception) -> str:
    if isinstance(error, _CONNECTION_END_ERRORS):
        return "the worker has ended"
    return error_to_one_line(error) if isinstance(error, OSError) else NO_HEALTH_SERVER_ERROR


def _print_as_json(line: bytes) -> None:
    click.echo(line.decode())


def _print_as_text(line: bytes) -> None:
    event = msgspec.json.decode(line, type=EventLine)
    now = datetime.now().astimezone().strftime("%H:%M:%S")
    if event.event == "dropped":
        click.echo(f"{now} … {event.dropped} events were dropped: they were read too slowly")
        return
    parts = [now, event.event]
    if event.job_id:
        parts += [
            f"{event.kind} id={event.job_id} queue={event.queue} state={event.state}",
            f"attempt={event.attempt}/{event.max_attempts}",
            f"wait={_format_seconds(event.wait)} run={_format_seconds(event.run)}",
        ]
    elif event.lease:
        parts.append(f"{event.lease} use={event.use} epoch={event.epoch}")
        if event.reason:
            parts.append(f"reason={event.reason!r}")
    else:
        parts.append(f"queue={event.queue}")
    if event.error:
        parts.append(f"error={event.error!r}")
    click.echo(make_printable(" ".join(parts)))


def _format_seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.1f}ms" if seconds < 1 else f"{seconds:.1f}s"
