"""`riverpy events`: the events of a worker on this machine, as they happen."""

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
    LINE_MAX,
    NO_HEALTH_SERVER,
    PORT_DEFAULT,
    http_get,
    parse_address,
)
from riverpy.cli._options import kinds_option, queues_option
from riverpy.cli._output import drop_output, print_note, printable
from riverpy.cli._run import CommandError, describe, run
from riverpy.events import EventKind
from riverpy.job import JobState

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from riverpy._tools.health.address import Address

SILENCE_MAX = 3 * KEEPALIVE_INTERVAL
"""Seconds without any line after which a worker is taken for gone."""
RETRY_FIRST, RETRY_MOST = timedelta(milliseconds=200), timedelta(seconds=5)
_ENDS = (anyio.IncompleteRead, anyio.BrokenResourceError)


def _address(ctx: click.Context, param: click.Parameter, value: str) -> Address:
    try:
        return parse_address(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None


@click.command
@click.option(
    "--url",
    "address",
    metavar="URL",
    default=f":{PORT_DEFAULT}",
    show_default=True,
    callback=_address,
    help="Where the worker serves health (riverpy worker --health).",
)
@click.option(
    "--event",
    "events",
    type=click.Choice([kind.value for kind in EventKind]),
    multiple=True,
    help="Only these; repeatable.",
)
@click.option(
    "--state",
    "states",
    type=click.Choice([state.value for state in JobState]),
    multiple=True,
    help="Only jobs that are in this state afterwards; repeatable.",
)
@kinds_option
@queues_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def events(
    address: Address,
    *,
    events: tuple[str, ...],
    states: tuple[str, ...],
    kinds: tuple[str, ...],
    queues: tuple[str, ...],
    as_json: bool,
) -> None:
    """Follow the events of a worker until interrupted.

    When the worker ends, it is waited for. A worker that has more to tell than is read drops
    events and says how many.
    """
    params = [
        *(("event", one) for one in events),
        *(("state", one) for one in states),
        *(("kind", one) for one in kinds),
        *(("queue", one) for one in queues),
    ]
    target = f"/events?{urlencode(params)}" if params else "/events"
    try:
        run(_follow, address, target, _print_json if as_json else _print_line)
    except KeyboardInterrupt:
        sys.exit(0)
    except BrokenPipeError:  # whoever read has seen enough
        drop_output()
        sys.exit(0)


async def _follow(address: Address, target: str, show: Callable[[bytes], Any]) -> None:
    backoff = Backoff(RETRY_FIRST, RETRY_MOST)
    is_told = False
    while True:
        try:
            async with http_get(address, target) as answer:
                if answer.status == 400:
                    raise CommandError((await answer.body()).decode().strip())
                if answer.status != 200:
                    raise ConnectionError((await answer.body()).decode().strip())
                print_note(f"riverpy follows {address}")
                is_told = False
                backoff.reset()
                while True:
                    with anyio.fail_after(SILENCE_MAX, reason="nothing was heard for long"):
                        line = await answer.stream.receive_until(b"\n", LINE_MAX)
                    if line:
                        show(line)
        except (OSError, ValueError, anyio.IncompleteRead, anyio.BrokenResourceError) as error:
            if isinstance(error, BrokenPipeError):
                raise
            if not is_told:
                print_note(f"{address}: {_why(error)}; waiting for a worker there")
                is_told = True
        await anyio.sleep(backoff.next())


def _why(error: Exception) -> str:
    if isinstance(error, _ENDS):
        return "the worker has ended"
    return describe(error) if isinstance(error, OSError) else NO_HEALTH_SERVER


def _print_json(line: bytes) -> None:
    click.echo(line.decode())


def _print_line(line: bytes) -> None:
    event = msgspec.json.decode(line, type=EventLine)
    now = datetime.now().astimezone().strftime("%H:%M:%S")
    if event.event == "dropped":
        click.echo(f"{now} … {event.dropped} events were dropped: too many to show")
        return
    parts = [now, event.event]
    if event.job_id:
        parts += [
            f"{event.kind} id={event.job_id} queue={event.queue} state={event.state}",
            f"attempt={event.attempt}/{event.max_attempts}",
            f"wait={_seconds(event.wait)} run={_seconds(event.run)}",
        ]
    else:
        parts.append(f"queue={event.queue}")
    if event.error:
        parts.append(f"error={event.error!r}")
    click.echo(printable(" ".join(parts)))


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:.1f}ms" if value < 1 else f"{value:.1f}s"
