"""`riverpy events`: follow the events of a worker, or of all workers."""

from __future__ import annotations

import sys
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlencode

import anyio
import click
import msgspec
from click.core import ParameterSource

from riverpy._clock import Backoff
from riverpy._dsn import url_for_display
from riverpy._fleet.event_line import EventLine, build_dropped_events_line, build_event_line
from riverpy._tools.health.event_stream import KEEPALIVE_INTERVAL
from riverpy._tools.health.http_client import (
    HEALTH_PORT_DEFAULT,
    LINE_BYTES_MAX,
    NO_HEALTH_SERVER_ERROR,
    http_get,
    parse_address_or_url,
)
from riverpy.cli._connected import open_command_connection
from riverpy.cli._options import database_options, kinds_option, queues_option, states_option
from riverpy.cli._output import make_printable, print_note, redirect_stdout_to_devnull
from riverpy.cli._run import CommandError, error_to_one_line, run_async
from riverpy.cli._types import TEXT_TYPE, IntegerType, ParsedType
from riverpy.client import Client
from riverpy.config import Config
from riverpy.events import EventKind, FleetEventKind, LeaseEventKind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from typing import Any

    from riverpy._tools.health.http import Address
    from riverpy.cli._options import DatabaseSettings

ALL_EVENT_KINDS = (*EventKind, *LeaseEventKind, *FleetEventKind)
FLEET_EVENTS_BUFFERED_MAX = 10_000
"""The maximum number of events that can wait until they are printed. Further events are dropped."""
EVENT_LINE_TIMEOUT = 3 * KEEPALIVE_INTERVAL
"""If the worker sends no line for this number of seconds, the command connects again."""
RECONNECT_DELAY_MIN, RECONNECT_DELAY_MAX = timedelta(milliseconds=200), timedelta(seconds=5)
_CONNECTION_END_ERRORS = (anyio.IncompleteRead, anyio.BrokenResourceError)


@click.command
@click.option(
    "--url",
    "address",
    metavar="URL",
    default=f":{HEALTH_PORT_DEFAULT}",
    show_default=True,
    type=ParsedType("url", parse_address_or_url),
    help="URL of the worker's health server (riverpy worker --health).",
)
@click.option(
    "--event",
    "events",
    type=click.Choice([kind.value for kind in ALL_EVENT_KINDS]),
    multiple=True,
    help="Show only these events. Can be repeated. job_started, job_progress and "
    "job_output_saved need --fleet.",
)
@states_option
@kinds_option
@queues_option
@click.option(
    "--lease",
    "leases",
    type=TEXT_TYPE,
    multiple=True,
    help="Show only events of this lease, singleton or leader domain. Can be repeated.",
)
@click.option(
    "--job",
    "job_ids",
    type=IntegerType(1, 2**63 - 1),
    multiple=True,
    help="Show only events of the job with this id. Can be repeated. Needs --fleet.",
)
@click.option(
    "--fleet",
    is_flag=True,
    help="Show the events of all workers of the database. No worker needs a health server.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@database_options
@click.pass_context
def events(
    context: click.Context,
    address: Address,
    *,
    database: DatabaseSettings,
    events: tuple[str, ...],
    job_ids: tuple[int, ...],
    fleet: bool,
    as_json: bool,
    **filters: tuple[str, ...],
) -> None:
    """Show the events of a worker as they happen, until interrupted.

    The events are those of its jobs, its queues, and the leases that it holds: its singletons, its
    blocks of `client.lease`, and its leadership. A worker that was killed or frozen sends no
    events, not even about the loss of its leases. The worker that acquires such a lease next sends
    an event, so follow the other workers too.

    If the worker ends, the command waits for the next one. If events are read too slowly, the
    worker drops some and reports their number.

    The names of --kind and --queue are not checked. For a kind that has no jobs, no event is shown
    until its first job runs.

    With --fleet, the command shows the events of all workers of the database. It also shows when a
    job starts, reports progress or saves its output. Events may be lost; the number of dropped
    events is shown. Workers with poll-only, and River in Go, send no events. A new worker begins to
    send events within 10 seconds after its start.
    """
    kinds = _choose_event_kinds(events, {**filters, "jobs": job_ids})
    if fleet:
        if context.get_parameter_source("address") is ParameterSource.COMMANDLINE:
            raise click.UsageError("--fleet follows all workers of a database: omit --url")
        follow = partial(_follow_fleet_events, database, kinds, job_ids, filters)
    else:
        _refuse_fleet_options(database, events, job_ids)
        params = [*(("event", one) for one in events), *_iterate_filter_values(filters)]
        target = f"/events?{urlencode(params)}" if params else "/events"
        follow = partial(_follow_worker_events, address, target)
    try:
        run_async(follow, _print_event_as_json if as_json else _print_event_as_text)
    except KeyboardInterrupt:
        sys.exit(0)
    except BrokenPipeError:  # the reader of stdout has ended
        redirect_stdout_to_devnull()
        sys.exit(0)


def _choose_event_kinds(
    events: tuple[str, ...], filters: Mapping[str, tuple[object, ...]]
) -> list[EventKind | LeaseEventKind | FleetEventKind]:
    """Return the kinds of events that can match the options. `filters` has the values of each
    filter option. Its keys are plural: `queues` has the values of `--queue`. Raise UsageError if no
    event can match."""
    kinds = [kind for kind in ALL_EVENT_KINDS if not events or kind.value in events]
    for name, values in filters.items():
        matching = [kind for kind in kinds if name in _get_filters_of_event(kind)]
        if values and not matching:
            option = name.removesuffix("s")
            others = "the other filters" if not events else f"--event {', --event '.join(events)}"
            raise click.UsageError(f"no event matches --{option} and {others}")
        kinds = matching if values else kinds
    return kinds


def _get_filters_of_event(kind: EventKind | LeaseEventKind | FleetEventKind) -> Collection[str]:
    """Return the keys of the filters that apply to events of this kind, such as `queues`."""
    if isinstance(kind, LeaseEventKind):
        return {"leases"}
    if kind in {EventKind.QUEUE_PAUSED, EventKind.QUEUE_RESUMED}:
        return {"queues"}
    return {"jobs", "kinds", "queues", "states"}


def _refuse_fleet_options(
    database: DatabaseSettings, events: tuple[str, ...], job_ids: tuple[int, ...]
) -> None:
    """Raise UsageError if an option that needs --fleet is given."""
    needing = [f"--event {kind}" for kind in events if kind in list(FleetEventKind)]
    if job_ids:
        needing.append("--job")
    sources = (database.url_source, database.schema_source)
    needing += [source for source in sources if source.startswith("--")]
    if needing:
        raise click.UsageError(f"{needing[0]} needs --fleet")


def _iterate_filter_values(filters: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[str, str]]:
    """Yield a pair for each value of each filter: the name of the filter in the singular, and the
    value."""
    for name, values in filters.items():
        for value in values:
            yield name.removesuffix("s"), value


async def _follow_fleet_events(
    database: DatabaseSettings,
    kinds: list[EventKind | LeaseEventKind | FleetEventKind],
    job_ids: tuple[int, ...],
    filters: Mapping[str, tuple[str, ...]],
    print_line: Callable[[bytes], Any],
) -> None:
    """Print the events of all workers of the database until the command is interrupted."""
    async with open_command_connection(database) as checked:
        url, schema = checked.database_url, checked.schema
    client = Client(url, config=Config(schema=schema, pool_size=1))
    dropped = 0
    async with (
        client,
        client.subscribe(
            *kinds,
            size=FLEET_EVENTS_BUFFERED_MAX,
            fleet=True,
            job_kinds=filters["kinds"] or None,
            queues=filters["queues"] or None,
            job_ids=job_ids or None,
        ) as subscription,
    ):
        print_note(f"riverpy follows all workers of {url_for_display(url)}")
        async for event in subscription:
            if subscription.dropped > dropped:
                dropped, count = subscription.dropped, subscription.dropped - dropped
                print_line(msgspec.json.encode(build_dropped_events_line(count)))
            line = build_event_line(event)
            if (not filters["states"] or line.state in filters["states"]) and (
                not filters["leases"] or line.lease in filters["leases"]
            ):
                print_line(msgspec.json.encode(line))


async def _follow_worker_events(
    address: Address, path: str, print_line: Callable[[bytes], Any]
) -> None:
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
                print_note(
                    f"{address}: {_describe_event_stream_error(error)}; waiting for a worker there"
                )
                is_noted = True
        await anyio.sleep(backoff.next_delay())


def _describe_event_stream_error(error: Exception) -> str:
    if isinstance(error, _CONNECTION_END_ERRORS):
        return "the worker has ended"
    return error_to_one_line(error) if isinstance(error, OSError) else NO_HEALTH_SERVER_ERROR


def _print_event_as_json(line: bytes) -> None:
    click.echo(line.decode())


def _print_event_as_text(line: bytes) -> None:
    event = msgspec.json.decode(line, type=EventLine)
    at = event.at.astimezone().strftime("%H:%M:%S")
    if event.event == "dropped":
        click.echo(f"{at} … {event.dropped} events were dropped: there were too many")
        return
    parts = [at, event.event]
    if event.job_id:
        parts += [
            f"{event.kind} id={event.job_id} queue={event.queue} state={event.state}",
            f"attempt={event.attempt}/{event.max_attempts}",
        ]
        if event.run is not None:
            parts.append(f"wait={_format_seconds(event.wait)} run={_format_seconds(event.run)}")
        if event.progress is not None:
            parts.append(f"progress={str(event.progress)!r}")
    elif event.lease:
        parts.append(f"{event.lease} use={event.use} epoch={event.epoch}")
        if event.reason:
            parts.append(f"reason={event.reason!r}")
    else:
        parts.append(f"queue={event.queue}")
    if event.error:
        parts.append(f"error={event.error!r}")
    if event.client:
        parts.append(f"client={event.client}")
    click.echo(make_printable(" ".join(parts)))


def _format_seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.1f}ms" if seconds < 1 else f"{seconds:.1f}s"
