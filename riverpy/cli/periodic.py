"""`riverpy periodic`: list periodic jobs, foretell, run, pause and resume them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeVar

import click
import msgspec

from riverpy._postgres import periodic as table
from riverpy._postgres.domains import domain_leaders
from riverpy._postgres.leaders import leader_get
from riverpy._postgres.schema import OWN_LINE, migrate_command
from riverpy.cli._connected import bounded, connected
from riverpy.cli._options import database_options, json_option
from riverpy.cli._output import format_time, print_json, print_note, print_table
from riverpy.cli._run import run
from riverpy.cli._types import NAME, IntegerType
from riverpy.errors import SchemaMissingError
from riverpy.schedules import CronSchedule, next_time, parse_schedule

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from datetime import datetime

    from riverpy._postgres.driver import Connection, Transaction
    from riverpy.cli._options import DatabaseSettings
    from riverpy.periodic import PeriodicJobState

ResultT = TypeVar("ResultT")

COUNT_DEFAULT = 5
COUNT_MAX = 1000

_id_argument = click.argument("job_id", metavar="ID", type=NAME)


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


class RunOutput(msgspec.Struct, frozen=True):
    """What was asked for, as `--json` prints it."""

    id: str
    action: str
    leader_id: str | None
    """Who is to insert the job. None: nobody leads now; who leads next does it."""


@click.group
def periodic() -> None:
    """List periodic jobs, foretell, run, pause and resume them."""


@periodic.command("list")
@json_option
@database_options
def list_(database: DatabaseSettings, *, as_json: bool) -> None:
    """List the periodic jobs that leaders have had. Times are UTC.

    RUN REQUESTED: since when a run is asked for that no leader has inserted yet.
    """
    states = run(_call, database, table.periodic_list)
    if as_json:
        print_json({"periodic_jobs": states})
        return
    print_table(
        ("ID", "SCHEDULE", "NEXT", "LAST", "PAUSED SINCE", "RUN REQUESTED"),
        [
            (
                state.id,
                state.schedule,
                format_time(state.next_run_at),
                format_time(state.last_run_at),
                format_time(state.paused_at),
                format_time(state.run_requested_at),
            )
            for state in states
        ],
    )


@periodic.command("next")
@_id_argument
@click.option(
    "-n",
    "count",
    type=IntegerType(1, COUNT_MAX),
    default=COUNT_DEFAULT,
    show_default=True,
    help="How many.",
)
@json_option
@database_options
def next_(database: DatabaseSettings, *, job_id: str, count: int, as_json: bool) -> None:
    """Show the next slots of a periodic job.

    Of a schedule that your own code makes only the very next one is known.
    """
    state = run(_call, database, partial(_get, job_id=job_id))
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
    is_cron = isinstance(schedule, CronSchedule)
    zone = schedule.zone if is_cron else None
    columns = ("UTC", schedule.timezone.upper()) if is_cron else ("UTC",)
    print_table(
        columns,
        [(format_time(slot), format_time(slot.astimezone(zone)))[: len(columns)] for slot in slots],
    )
    if state.paused_at is not None:
        print_note(f"{state.id} is paused: these slots are passed over")
    if schedule is None and slots:
        print_note(f"later slots are known only to the code of {state.schedule}")


@periodic.command("run")
@_id_argument
@json_option
@database_options
def run_(database: DatabaseSettings, *, job_id: str, as_json: bool) -> None:
    """Ask the leader to insert one job now, in addition to its schedule.

    A leader that listens does so at once, one that polls within 5 seconds. One that does not have
    this periodic job leaves the request to the next leader that has it.
    """
    leader_id = run(_call, database, partial(_run, job_id=job_id))
    if as_json:
        print_json(RunOutput(job_id, "run requested", leader_id))
    elif leader_id is None:
        click.echo(f"{job_id}: run requested; nobody leads now: it runs when somebody does")
    else:
        click.echo(f"{job_id}: run requested; {leader_id} leads and inserts it if it has this job")


@periodic.command
@_id_argument
@json_option
@database_options
def pause(database: DatabaseSettings, *, job_id: str, as_json: bool) -> None:
    """Let its slots pass without a job until it is resumed.

    This holds whoever leads.
    """
    _change(database, table.periodic_pause, job_id, "paused", as_json=as_json)


@periodic.command
@_id_argument
@json_option
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

    run(_call, database, apply)
    if as_json:
        print_json(ChangeOutput(job_id, action))
    else:
        click.echo(f"{job_id}: {action}")


async def _run(connection: Connection, schema: str | None, *, job_id: str) -> str | None:
    """Ask for a run; returns who leads the domain that the id names."""
    await table.periodic_run(connection, schema, job_id)
    _, _, domain = job_id.partition("@")
    if domain:
        leads = await domain_leaders(connection, schema)
        return next((one.holder for one in leads if one.domain == domain and not one.is_over), None)
    leader = await leader_get(connection, schema)
    return None if leader is None or leader.remaining < 0 else leader.leader_id


async def _get(connection: Connection, schema: str | None, *, job_id: str) -> PeriodicJobState:
    return await table.periodic_get(connection, schema, job_id)


async def _call(
    database: DatabaseSettings, act: Callable[[Connection, str | None], Awaitable[ResultT]]
) -> ResultT:
    """What `act` returns on a connection to a database that has the table of periodic jobs."""
    async with connected(database) as (connection, schema, _state):
        is_there = table.periodic_exists(connection, schema)
        if not await bounded("looking for the table of periodic jobs", is_there):
            command = f"riverpy migrate up --line {OWN_LINE}"
            command = migrate_command(command, schema, database.required_url())
            raise SchemaMissingError(
                f"the database lacks the table of periodic jobs: run `{command}`"
            )
        return await bounded("the table of periodic jobs", act(connection, schema))
