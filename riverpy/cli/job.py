"""`riverpy job`: list, show, cancel and retry jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import anyio
import click

from riverpy._postgres import jobs
from riverpy._postgres.damaged_jobs import (
    damaged_jobs_error,
    read_jobs_in_parts,
    translate_damage_error,
)
from riverpy.cli._changes import ACTION_UNCHANGED, ItemChangeResult, change_items
from riverpy.cli._connected import open_connection
from riverpy.cli._job_output import job_to_json_object, print_job, print_job_table
from riverpy.cli._options import (
    database_options,
    json_option,
    kinds_option,
    limit_option,
    queues_option,
    states_option,
)
from riverpy.cli._output import print_json
from riverpy.cli._run import raise_command_errors, run_async
from riverpy.cli._types import IntegerType
from riverpy.errors import NotFoundError
from riverpy.job import JobRow, JobState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from riverpy._postgres.driver import Connection, Transaction
    from riverpy.cli._options import DatabaseSettings
    from riverpy.client import Client

ResultT = TypeVar("ResultT")

JOB_READ_TIMEOUT = 30.0
"""The timeout for reading jobs, in seconds."""
_ID_TYPE = IntegerType(1, 2**63 - 1)

_ids_argument = click.argument("job_ids", metavar="ID...", type=_ID_TYPE, nargs=-1, required=True)


@click.group
def job() -> None:
    """List, show, cancel and retry jobs."""


@job.command("list")
@states_option
@kinds_option
@queues_option
@limit_option
@json_option
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
    """List jobs, the newest first.

    The exit code is 1 if some jobs are damaged: the server cannot read them. The other jobs are
    listed.
    """

    async def read_job_list(connection: Connection) -> tuple[list[JobRow], dict[int, str]]:
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            ids = await jobs.job_list(
                connection,
                database.schema,
                states=[JobState(state) for state in states] or list(JobState),
                kinds=kinds or None,
                queues=queues or None,
                limit=limit,
            )
            parts, damaged = await read_jobs_in_parts(
                connection, ids, lambda part: jobs.job_get_many(connection, database.schema, part)
            )
        return [JobRow(tuple(row)) for part in parts for row in part], damaged

    found, damaged = run_async(_connect_and_read, database, read_job_list)
    if as_json:
        errors = [{"id": job_id, "error": error} for job_id, error in damaged.items()]
        print_json({"jobs": list(map(job_to_json_object, found)), "damaged": errors})
    else:
        print_job_table(found)
    if damaged:
        with raise_command_errors():
            raise damaged_jobs_error(damaged)


@job.command
@click.argument("job_id", metavar="ID", type=_ID_TYPE)
@json_option
@database_options
def show(database: DatabaseSettings, *, job_id: int, as_json: bool) -> None:
    """Show all columns of one job.

    The exit code is 1 if the job does not exist, or if it is damaged: the server cannot read it.
    """

    async def read_one_job(connection: Connection) -> JobRow:
        with translate_damage_error(job_id):
            row = await jobs.job_get(connection, database.schema, job_id)
        if row is None:
            raise NotFoundError(f"there is no job {job_id}")
        return JobRow(tuple(row))

    found = job_to_json_object(run_async(_connect_and_read, database, read_one_job))
    (print_json if as_json else print_job)(found)


@job.command
@_ids_argument
@json_option
@database_options
def cancel(database: DatabaseSettings, *, job_ids: Sequence[int], as_json: bool) -> None:
    """Cancel jobs, so that they are not worked (again).

    The worker of a running job is notified. The worker cancels the attempt, and stores the job as
    cancelled when the job's code has ended. A job that has already ended is not changed. The exit
    code is 1 if a job does not exist; the others are cancelled.
    """
    change_items(database, "job", "id", job_ids, _cancel_job, as_json=as_json)


@job.command
@_ids_argument
@json_option
@database_options
def retry(database: DatabaseSettings, *, job_ids: Sequence[int], as_json: bool) -> None:
    """Make waiting or ended jobs available now.

    A job without attempts left gets one more. A running job is not changed. The exit code is 1 if a
    job does not exist, or if another job has the same unique key; the others are retried.
    """
    change_items(database, "job", "id", job_ids, _retry_job, as_json=as_json)


async def _cancel_job(client: Client, job_id: int, tx: Transaction) -> ItemChangeResult:
    before = await client.job_get(job_id, tx=tx)
    after = await client.job_cancel(job_id, tx=tx)
    if after.state is JobState.RUNNING:
        message = f"job {job_id} is running: its worker is notified to cancel it"
        return ItemChangeResult("cancel requested", message)
    if before.finalized_at is not None or after.state is not JobState.CANCELLED:
        return ItemChangeResult(
            ACTION_UNCHANGED, f"job {job_id} is {after.state} already: nothing was changed"
        )
    return ItemChangeResult("cancelled", f"job {job_id} is cancelled")


async def _retry_job(client: Client, job_id: int, tx: Transaction) -> ItemChangeResult:
    before = await client.job_get(job_id, tx=tx)
    after = await client.job_retry(job_id, tx=tx)
    if after.state is JobState.RUNNING:
        return ItemChangeResult(ACTION_UNCHANGED, f"job {job_id} is running: nothing was changed")
    if (before.state, before.scheduled_at) == (after.state, after.scheduled_at):
        return ItemChangeResult(
            ACTION_UNCHANGED, f"job {job_id} is {after.state} already: nothing was changed"
        )
    one_more = ", with one more attempt" if after.max_attempts > before.max_attempts else ""
    message = f"job {job_id} was {before.state}: it is available now{one_more}"
    return ItemChangeResult("retried", message)


async def _connect_and_read(
    database: DatabaseSettings, read: Callable[[Connection], Awaitable[ResultT]]
) -> ResultT:
    async with open_connection(database) as found:
        reason = f"reading jobs took longer than {JOB_READ_TIMEOUT:g} s"
        with anyio.fail_after(JOB_READ_TIMEOUT, reason=reason):
            return await read(found.connection)
