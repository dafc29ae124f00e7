"""`riverpy periodic`: list, preview, run, pause and resume periodic jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import click

from riverpy._postgres import periodic as table
from riverpy._postgres.domains import domain_list_leaders
from riverpy._postgres.leaders import leader_get
from riverpy._postgres.schema import PERIODIC_JOBS_MIGRATION
from riverpy.cli._connected import open_command_connection
from riverpy.cli._options import database_options, json_option
from riverpy.cli._output import format_time, print_json, print_note, print_table
from riverpy.cli._run import run_async
from riverpy.cli._types import NONEMPTY_TEXT_TYPE, IntegerType
from riverpy.schedules import CronSchedule, find_next_due_time, parse_schedule

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from riverpy._postgres.driver import Connection, Transaction
    from riverpy.cli._options import DatabaseSettings

ResultT = TypeVar("ResultT")

NEXT_TIME_COUNT_DEFAULT = 5
NEXT_TIME_COUNT_MAX = 1000

_periodic_job_id_argument = click.argument("job_id", metavar="ID", type=NONEMPTY_TEXT_TYPE)


@click.group
def periodic() -> None:
    """List periodic jobs, show their next times, run, pause and resume them."""


@periodic.command("list")
@json_option
@database_options
def list_(database: DatabaseSettings, *, as_json: bool) -> None:
    """List the periodic jobs that leaders have registered. Times are UTC.

    RUN REQUESTED is the time of a `periodic run` whose job no leader has inserted yet.
    """
    states = run_async(_connect_and_run_statement, database, table.periodic_list)
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
@_periodic_job_id_argument
@click.option(
    "-n",
    "count",
    type=IntegerType(1, NEXT_TIME_COUNT_MAX),
    default=NEXT_TIME_COUNT_DEFAULT,
    show_default=True,
    help="Number of times.",
)
@json_option
@database_options
def next_(database: DatabaseSettings, *, job_id: str, count: int, as_json: bool) -> None:
    """Show the next times at which a periodic job is due.

    For a schedule in your own code, only the next one is known.
    """
    state = run_async(_connect_and_run_statement, database, table.periodic_get, job_id)
    schedule = parse_schedule(state.schedule)
    due_times = [] if state.next_run_at is None else [state.next_run_at]
    while schedule is not None and due_times and len(due_times) < count:
        following = find_next_due_time(schedule, due_times[-1])
        if following is None:
            break
        due_times.append(following)
    if as_json:
        is_paused = state.paused_at is not None
        print_json(
            {
                "id": state.id,
                "schedule": state.schedule,
                "paused": is_paused,
                "due_times": due_times,
            }
        )
        return
    is_cron = isinstance(schedule, CronSchedule)
    zone = schedule.zone if is_cron else None
    columns = ("UTC", schedule.timezone.upper()) if is_cron else ("UTC",)
    print_table(
        columns,
        [
            (format_time(due_at), format_time(due_at.astimezone(zone)))[: len(columns)]
            for due_at in due_times
        ],
    )
    if state.paused_at is not None:
        print_note(f"{state.id} is paused: no jobs are inserted for these times")
    if schedule is None and due_times:
        print_note(f"only the code of {state.schedule} can compute later times")


@periodic.command("run")
@_periodic_job_id_argument
@json_option
@database_options
def run_(database: DatabaseSettings, *, job_id: str, as_json: bool) -> None:
    """Request that the leader inserts one job now.

    The schedule does not change. A leader that listens does this at once. A leader that only polls
    does it within 5 seconds. If the leader does not have this periodic job, the next leader that
    has it inserts the job.
    """
    leader_id = run_async(_connect_and_run_statement, database, _request_periodic_run, job_id)
    if as_json:
        print_json({"id": job_id, "action": "run requested", "leader_id": leader_id})
    elif leader_id is None:
        click.echo(
            f"{job_id}: run requested; there is no leader now, so the next leader inserts the job"
        )
    else:
        click.echo(f"{job_id}: run requested; the leader {leader_id} inserts it if it has this job")


@periodic.command
@_periodic_job_id_argument
@json_option
@database_options
def pause(database: DatabaseSettings, *, job_id: str, as_json: bool) -> None:
    """Pause a periodic job: no leader inserts it until it is resumed."""
    _change_periodic_job(database, table.periodic_pause, job_id, "paused", as_json=as_json)


@periodic.command
@_periodic_job_id_argument
@json_option
@database_options
def resume(database: DatabaseSettings, *, job_id: str, as_json: bool) -> None:
    """Resume a paused periodic job. No job is inserted later for the due times during the
    pause."""
    _change_periodic_job(database, table.periodic_resume, job_id, "resumed", as_json=as_json)


def _change_periodic_job(
    database: DatabaseSettings,
    statement: Callable[[Transaction, str | None, str], Awaitable[None]],
    job_id: str,
    action: str,
    *,
    as_json: bool,
) -> None:
    run_async(_connect_and_run_statement, database, statement, job_id)
    if as_json:
        print_json({"id": job_id, "action": action})
    else:
        click.echo(f"{job_id}: {action}")


async def _request_periodic_run(
    connection: Connection, schema: str | None, job_id: str
) -> str | None:
    """Request that the leader of the job's domain inserts a periodic job now. Return the id of this
    leader, or None if the domain has no leader now."""
    async with connection.transaction():
        await table.periodic_request_run(connection, schema, job_id)
    _, _, domain = job_id.partition("@")
    if domain:
        leads = await domain_list_leaders(connection, schema)
        return next(
            (one.holder for one in leads if one.domain == domain and not one.has_lease_ended), None
        )
    leader = await leader_get(connection, schema)
    return None if leader is None or leader.seconds_until_expiry < 0 else leader.leader_id


async def _connect_and_run_statement(
    database: DatabaseSettings, statement: Callable[..., Awaitable[ResultT]], *args: str
) -> ResultT:
    """Connect to the database, check that it has the table of periodic jobs, and return the result
    of a statement."""
    async with open_command_connection(database) as found:
        found.require_riverpy_migration(PERIODIC_JOBS_MIGRATION, "table of periodic jobs")
        return await found.run_read_statement(statement, *args)
