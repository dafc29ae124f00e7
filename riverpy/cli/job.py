"""`riverpy job`: list and show jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import anyio
import click

from riverpy._db import jobs
from riverpy._db.schema import check_schema
from riverpy.cli._job_output import JobOutput, print_job, print_jobs
from riverpy.cli._options import database_options
from riverpy.cli._output import print_json
from riverpy.cli._run import run
from riverpy.cli._types import TEXT
from riverpy.drivers.asyncpg import close, connect
from riverpy.errors import NotFoundError
from riverpy.job import JobRow, JobState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from riverpy.cli._options import DatabaseSettings
    from riverpy.drivers.asyncpg import Connection

ResultT = TypeVar("ResultT")

LIMIT_DEFAULT = 100
LIMIT_MAX = 10_000
READ_TIMEOUT = 30.0
"""Seconds that a read of the table may take."""
_ID_MAX = 2**63 - 1

_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.group
def job() -> None:
    """List and show jobs."""


@job.command("list")
@click.option(
    "--state",
    "states",
    type=click.Choice([state.value for state in JobState]),
    multiple=True,
    help="Only in this state; repeatable.",
)
@click.option("--kind", "kinds", type=TEXT, multiple=True, help="Only of this kind; repeatable.")
@click.option("--queue", "queues", type=TEXT, multiple=True, help="Only in this queue; repeatable.")
@click.option(
    "--limit",
    type=click.IntRange(1, LIMIT_MAX),
    default=LIMIT_DEFAULT,
    show_default=True,
    help="At most so many.",
)
@_json_option
@database_options
def list_(
    database: DatabaseSettings,
    *,
    states: Sequence[str],
    kinds: Sequence[str],
    queues: Sequence[str],
    limit: int,
    as_json: bool,
) -> None:
    """List jobs, the newest first."""

    async def read(connection: Connection) -> list[JobOutput]:
        rows = await jobs.job_list(
            connection,
            database.schema,
            states=[JobState(state) for state in states] or list(JobState),
            kinds=kinds or None,
            queues=queues or None,
            limit=limit,
        )
        return [JobOutput.of(JobRow(tuple(row))) for row in rows]

    found = run(_read, database, read)
    if as_json:
        print_json({"jobs": found})
    else:
        print_jobs(found)


@job.command
@click.argument("job_id", metavar="ID", type=click.IntRange(1, _ID_MAX))
@_json_option
@database_options
def show(database: DatabaseSettings, *, job_id: int, as_json: bool) -> None:
    """Show one job with all of its columns. Exit code 1 if there is none."""

    async def read(connection: Connection) -> JobOutput:
        row = await jobs.job_get(connection, database.schema, job_id)
        if row is None:
            raise NotFoundError(f"there is no job {job_id}")
        return JobOutput.of(JobRow(tuple(row)))

    found = run(_read, database, read)
    (print_json if as_json else print_job)(found)


async def _read(
    database: DatabaseSettings, read: Callable[[Connection], Awaitable[ResultT]]
) -> ResultT:
    """What `read` finds on a connection to a database that has River's tables."""
    url = database.required_url()
    connection = await connect(url)
    try:
        await check_schema(connection, database.schema, url=url)
        reason = f"reading jobs took longer than {READ_TIMEOUT:g} s"
        with anyio.fail_after(READ_TIMEOUT, reason=reason):
            return await read(connection)
    finally:
        await close(connection)
