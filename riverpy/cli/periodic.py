"""`riverpy periodic`: list periodic jobs, foretell, run, pause and resume them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeVar
from zoneinfo import ZoneInfo

import anyio
import click
import msgspec

from riverpy._db import periodic as table
from riverpy._db.schema import check_schema
from riverpy.cli._options import database_options
from riverpy.cli._output import print_json, print_note, print_table
from riverpy.cli._run import run
from riverpy.cli._types import TEXT
from riverpy.drivers.asyncpg import close, connect
from riverpy.periodic import CronSchedule, PeriodicJobState, next_time, parse_schedule

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from datetime import datetime

    from riverpy.cli._options import DatabaseSettings
    from riverpy.drivers.asyncpg import Connection, Transaction

ResultT = TypeVar("ResultT")

COUNT_DEFAULT = 5
COUNT_MAX = 1000
STATEMENT_TIMEOUT = 10.0
"""Seconds that reading or changing the table may take."""

_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
_id_argument = click.argument("job_id", metavar="ID", type=TEXT)


class NextOutput(msgspec.Struct, frozen=True):
    """The coming slots of a periodic job, as `--json` prints them."""

    id: str
    schedule: str
    paused: bool
    slots: list[datetime]


class ChangeOutput(msgspec.Struct, frozen=True):
    """What was done, as `--json` prints it."""

    id: str
    action: str


@click.group
def periodic() -> None:
    """List periodic jobs, foretell, run, pause and resume them."""


@periodic.command("list")
@_json_option
@database_options
def list_(database: DatabaseSettings, *, as_json: bool) -> None:
    """List the periodic jobs that leaders have had. Times are UTC."""
    states = run(_connected, database, table.periodic_list)
    if as_json:
        print_json({"periodic_jobs": states})
        return
    print_table(
        ("ID", "SCHEDULE", "NEXT", "LAST", "PAUSED SINCE"),
        [
            (
                state.id,
                state.schedule,
                _time(state.next_run_at),
                _time(state.last_run_at),
                _time(state.paused_at),
            )
            for state in states
        ],
    )


@periodic.command("next")
@_id_argument
@click.option(
    "-n",
    "count",
    type=click.IntRange(1, COUNT_MAX),
    default=COUNT_DEFAULT,
    show_default=True,
    help="How many.",
)
@_json_option
@database_options
def next_(database: DatabaseSettings, *, job_id: str, count: int, as_json: bool) -> None:
    """Show the next slots of a periodic job.

    Of a schedule that your own code makes only the very next one is known.
    """
    state = run(_connected, database, partial(_get, job_id=job_id))
    schedule = parse_schedule(state.schedule)
    slots = [] if state.next_run_at is None else [state.next_run_at]
    while schedule is not None and slots and len(slots) < count:
        following = next_time(schedule, slots[-1])
        if following is None:
            break
        slots.append(following)
    if as_json:
        print_json(NextOutput(state.id, state.schedule, state.paused_at is not None, slots))
        return
    zone = ZoneInfo(schedule.timezone) if isinstance(schedule, CronSchedule) else None
    columns = ("UTC",) if zone is None else ("UTC", str(zone).upper())
    print_table(
        columns,
        [(_time(slot), _time(slot.astimezone(zone)))[: len(columns)] for slot in slots],
    )
    if state.paused_at is not None:
        print_note(f"{state.id} is paused: these slots are passed over")
    if schedule is None and slots:
        print_note(f"later slots are known only to the code of {state.schedule}")


@periodic.command("run")
@_id_argument
@_json_option
@database_options
def run_(database: DatabaseSettings, *, job_id: str, as_json: bool) -> None:
    """Ask the leader to insert one job now, beside those of the schedule.

    One that listens does at once, one that polls within 5 seconds.
    """
    _change(database, table.periodic_run, job_id, "run requested", as_json=as_json)


@periodic.command
@_id_argument
@_json_option
@database_options
def pause(database: DatabaseSettings, *, job_id: str, as_json: bool) -> None:
    """Let its slots pass without a job, whoever leads, until it is resumed."""
    _change(database, table.periodic_pause, job_id, "paused", as_json=as_json)


@periodic.command
@_id_argument
@_json_option
@database_options
def resume(database: DatabaseSettings, *, job_id: str, as_json: bool) -> None:
    """Undo `pause`. What passed meanwhile is not caught up with."""
    _change(database, table.periodic_resume, job_id, "resumed", as_json=as_json)


def _change(
    database: DatabaseSettings,
    change: Callable[[Transaction, str | None, str], Awaitable[None]],
    job_id: str,
    action: str,
    *,
    as_json: bool,
) -> None:
    async def apply(connection: Connection, schema: str | None) -> None:
        await change(connection, schema, job_id)

    run(_connected, database, apply)
    if as_json:
        print_json(ChangeOutput(job_id, action))
    else:
        click.echo(f"{job_id}: {action}")


async def _get(connection: Connection, schema: str | None, *, job_id: str) -> PeriodicJobState:
    return await table.periodic_get(connection, schema, job_id)


def _time(value: datetime | None) -> str | None:
    """Whole seconds, unless it has parts of one; an offset, unless it is UTC."""
    if value is None:
        return None
    spec = "milliseconds" if value.microsecond else "seconds"
    return value.isoformat(sep=" ", timespec=spec).removesuffix("+00:00")


async def _connected(
    database: DatabaseSettings, act: Callable[[Connection, str | None], Awaitable[ResultT]]
) -> ResultT:
    """What `act` returns on a connection to a database that has River's tables."""
    url = database.required_url()
    connection = await connect(url)
    try:
        await check_schema(connection, database.schema, url=url)
        with anyio.fail_after(STATEMENT_TIMEOUT, reason="the table of periodic jobs"):
            return await act(connection, database.schema)
    finally:
        await close(connection)
