"""`riverpy job`: list, show, retry, cancel and delete jobs."""

from __future__ import annotations

import sys
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast, get_args

import anyio
import click

from riverpy._postgres.damaged_jobs import make_damaged_jobs_error
from riverpy._postgres.transactions import read_server_time
from riverpy._tools.text import format_count
from riverpy.cli._changes import ACTION_UNCHANGED, ItemChangeResult, change_items
from riverpy.cli._connected import open_command_connection
from riverpy.cli._job_batches import change_matching_jobs
from riverpy.cli._job_filters import JOB_ID_TYPE, job_filter_options, job_ids_option
from riverpy.cli._job_log import decode_job_log, print_job_log
from riverpy.cli._job_output import job_to_json_object, print_job, print_job_table
from riverpy.cli._options import database_options, json_option, limit_option
from riverpy.cli._output import print_json, print_note
from riverpy.cli._run import run_async, translate_to_command_errors
from riverpy.cli._types import NONEMPTY_TEXT_TYPE, IntegerType
from riverpy.client import Client
from riverpy.config import Config
from riverpy.job import JobState, get_raw_state
from riverpy.job_list import JobFilters, JobOrder

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from datetime import datetime

    from riverpy._postgres.driver import Transaction
    from riverpy.cli._job_batches import BatchVerb
    from riverpy.cli._options import DatabaseSettings
    from riverpy.job import JobRow
    from riverpy.job_list import JobPage

ResultT = TypeVar("ResultT")

JOB_READ_TIMEOUT = 30.0
"""The timeout in seconds for reading jobs."""

_ids_argument = click.argument("job_ids", metavar="ID...", type=JOB_ID_TYPE, nargs=-1)
_change_limit_option = click.option(
    "--limit",
    type=IntegerType(1, 2**63 - 1),
    metavar="N",
    help="With options that choose jobs: only the first N jobs, by id. Default: all of them.",
)
_yes_option = click.option("--yes", is_flag=True, help="Do not ask for confirmation.")


class _ChosenJobs(NamedTuple):
    """The jobs that a command changes: either jobs with these ids, or jobs that match these
    filters."""

    ids: Sequence[int]
    filters: JobFilters
    limit: int | None
    """The maximum number of jobs that are changed, if the jobs are chosen by filters. None: no
    limit."""
    yes: bool
    """Whether to change the jobs without asking for confirmation."""
    as_json: bool


def _job_change_options(
    command: Callable[[DatabaseSettings, _ChosenJobs], None],
) -> Callable[..., None]:
    """Decorate a command with the argument for job ids, and with the options that choose jobs. The
    command function receives their values as one `_ChosenJobs`."""

    @_ids_argument
    @job_filter_options
    @_change_limit_option
    @_yes_option
    @json_option
    @database_options
    @wraps(command)
    def call_with_chosen_jobs(database: DatabaseSettings, **options: Any) -> None:
        chosen = _ChosenJobs(ids=options.pop("job_ids"), **options)
        if chosen.ids and (chosen.filters or chosen.limit):
            raise click.UsageError("give either ids or options that choose jobs, not both")
        if not chosen.ids and not chosen.filters:
            raise click.UsageError(
                "Missing argument 'ID...': give ids, or options that choose jobs, such as --kind"
            )
        command(database, chosen)

    return call_with_chosen_jobs


@click.group
def job() -> None:
    """List, show, retry, cancel and delete jobs."""


@job.command("list")
@job_ids_option
@job_filter_options
@click.option(
    "--order",
    type=click.Choice(get_args(JobOrder)),
    default="id",
    show_default=True,
    help="Sort by this. `time` depends on the first --state: attempted_at for running, "
    "finalized_at for a final state, otherwise scheduled_at.",
)
@click.option("--ascending", is_flag=True, help="The oldest first. Default: the newest first.")
@limit_option
@click.option(
    "--after",
    type=NONEMPTY_TEXT_TYPE,
    metavar="CURSOR",
    help="Continue after the cursor of an earlier list.",
)
@json_option
@database_options
def list_(
    database: DatabaseSettings,
    *,
    ids: Sequence[int],
    filters: JobFilters,
    order: JobOrder,
    ascending: bool,
    limit: int,
    after: str | None,
    as_json: bool,
) -> None:
    """List jobs, the newest first.

    A job is listed if it passes all filters. If a filter is repeated, one of its values is enough,
    except for --tag. Without --kind, --state, --metadata or --id, the other filters may read the
    whole table.

    If there may be more jobs, the command prints the option --after for the next page to stderr.
    With --json, the key `cursor` has the value of this option.

    \b
    riverpy job list --state discarded --kind welcome
    riverpy job list --state retryable --error TimeoutError --order scheduled_at
    riverpy job list --metadata '{"tenant": 7}' --limit 10 --json

    The exit code is 1 if some jobs are damaged: the server cannot read them. The other jobs are
    listed.
    """
    chosen = cast("JobFilters", {**filters, **({"ids": ids} if ids else {})})

    async def read_page(client: Client, tx: Transaction) -> JobPage:
        return await client.job_list(
            order_by=order, descending=not ascending, limit=limit, after=after, tx=tx, **chosen
        )

    page = run_async(_read_in_transaction, database, read_page)
    if as_json:
        errors = [{"id": job_id, "error": error} for job_id, error in page.damaged.items()]
        jobs = [*map(job_to_json_object, page.jobs)]
        print_json({"jobs": jobs, "damaged": errors, "cursor": page.cursor})
    else:
        print_job_table(page.jobs)
        if len(page.jobs) + len(page.damaged) == limit:
            print_note(f"riverpy: there may be more jobs: add --after {page.cursor}")
    if page.damaged:
        with translate_to_command_errors():
            raise make_damaged_jobs_error(page.damaged)


@job.command
@click.argument("job_id", metavar="ID", type=JOB_ID_TYPE)
@click.option("--log", "shows_log", is_flag=True, help="Show only the stored log of its attempts.")
@json_option
@database_options
def show(database: DatabaseSettings, *, job_id: int, shows_log: bool, as_json: bool) -> None:
    """Show one job, with its progress and the errors of its attempts.

    With --log, show the log that the worker, or River in Go, has stored for each attempt. With
    --log and --json, print the list of the log entries.

    The exit code is 1 if the job does not exist, or if it is damaged: the server cannot read it.
    """

    async def read_job(client: Client, tx: Transaction) -> tuple[JobRow, datetime]:
        found = await client.job_get(job_id, tx=tx)
        return found, await read_server_time(tx)

    found, now = run_async(_read_in_transaction, database, read_job)
    if shows_log:
        entries = decode_job_log(found)
        if as_json:
            print_json(entries)
        else:
            print_job_log(found.id, entries)
        return
    shown = job_to_json_object(found) | {"progress": found.last_progress}
    if as_json:
        print_json(shown)
    else:
        print_job(shown, now)


@job.command
@_job_change_options
def cancel(database: DatabaseSettings, chosen: _ChosenJobs) -> None:
    """Cancel jobs, so that they are not worked (again).

    The worker of a running job is notified. The worker cancels the attempt, and stores the job as
    cancelled when the job's code has ended. A job that has already ended is not changed. The exit
    code is 1 if a job does not exist; the others are cancelled.

    Without ids, the options choose the jobs. The command counts the jobs and asks first. It changes
    1,000 jobs at a time. After Ctrl-C it finishes these, prints what was done, and exits with code
    130. The exit code is 1 if jobs were refused, i.e. could not be changed, for example because
    another session has locked them.

    \b
    riverpy job cancel 12 13
    riverpy job cancel --state available --kind report --yes
    """
    _change_jobs(database, chosen, "cancel", _cancel_job)


@job.command
@_job_change_options
def retry(database: DatabaseSettings, chosen: _ChosenJobs) -> None:
    """Make waiting or ended jobs available now.

    A job without attempts left gets one more. A running job is not changed. The exit code is 1 if a
    job does not exist, or if another job has the same unique key; the others are retried.

    Without ids, the options choose the jobs. The command counts the jobs and asks first. It changes
    1,000 jobs at a time. After Ctrl-C it finishes these, prints what was done, and exits with code
    130. The exit code is 1 if jobs were refused, i.e. could not be changed, for example because
    other jobs have the same unique keys.

    \b
    riverpy job retry 12 13
    riverpy job retry --state discarded --kind welcome
    riverpy job retry --state retryable --error TimeoutError --yes --json
    """
    _change_jobs(database, chosen, "retry", _retry_job)


@job.command
@_job_change_options
def delete(database: DatabaseSettings, chosen: _ChosenJobs) -> None:
    """Delete jobs. A running job is not deleted: cancel it first.

    The command asks first. The exit code is 1 if a job does not exist or is running; the others are
    deleted.

    Without ids, the options choose the jobs, and running jobs are left out. The command counts the
    jobs and asks first. It deletes 1,000 jobs at a time. After Ctrl-C it finishes these, prints
    what was done, and exits with code 130. The exit code is 1 if jobs were refused, i.e. could not
    be deleted, for example because another session has locked them.

    \b
    riverpy job delete 12 13 --yes
    riverpy job delete --state discarded --kind welcome
    """
    if chosen.ids and not chosen.yes:
        if not sys.stdin.isatty():
            raise click.UsageError(
                "this deletes jobs, and there is no terminal to ask for confirmation: add --yes"
            )
        click.confirm(f"Delete {format_count(len(chosen.ids), 'job')}?", abort=True, err=True)
    _change_jobs(database, chosen, "delete", _delete_job)


def _change_jobs(
    database: DatabaseSettings,
    chosen: _ChosenJobs,
    verb: BatchVerb,
    change_job: Callable[[Client, int, Transaction], Awaitable[ItemChangeResult]],
) -> None:
    """Change the chosen jobs. Jobs with ids are changed one by one, jobs that match filters in
    batches."""
    if chosen.ids:
        change_items(database, "job", "id", chosen.ids, change_job, as_json=chosen.as_json)
    else:
        change_matching_jobs(
            database,
            verb,
            chosen.filters,
            limit=chosen.limit,
            is_confirmed=chosen.yes,
            as_json=chosen.as_json,
        )


async def _cancel_job(client: Client, job_id: int, tx: Transaction) -> ItemChangeResult:
    before = await client.job_get(job_id, tx=tx)
    after = await client.job_cancel(job_id, tx=tx)
    state = get_raw_state(after)
    if state == JobState.RUNNING:
        message = f"job {job_id} is running: its worker is notified to cancel it"
        return ItemChangeResult("cancel requested", message)
    if before.finalized_at is not None or state != JobState.CANCELLED:
        return ItemChangeResult(
            ACTION_UNCHANGED, f"job {job_id} is {state} already: nothing was changed"
        )
    return ItemChangeResult("cancelled", f"job {job_id} is cancelled")


async def _retry_job(client: Client, job_id: int, tx: Transaction) -> ItemChangeResult:
    before = await client.job_get(job_id, tx=tx)
    after = await client.job_retry(job_id, tx=tx)
    old_state, state = get_raw_state(before), get_raw_state(after)
    if state == JobState.RUNNING:
        return ItemChangeResult(ACTION_UNCHANGED, f"job {job_id} is running: nothing was changed")
    if (old_state, before.scheduled_at) == (state, after.scheduled_at):
        return ItemChangeResult(
            ACTION_UNCHANGED, f"job {job_id} is {state} already: nothing was changed"
        )
    one_more = ", with one more attempt" if after.max_attempts > before.max_attempts else ""
    message = f"job {job_id} was {old_state}: it is available now{one_more}"
    return ItemChangeResult("retried", message)


async def _delete_job(client: Client, job_id: int, tx: Transaction) -> ItemChangeResult:
    deleted = await client.job_delete(job_id, tx=tx)
    return ItemChangeResult("deleted", f"job {job_id} was {get_raw_state(deleted)}: it is deleted")


async def _read_in_transaction(
    database: DatabaseSettings, read: Callable[[Client, Transaction], Awaitable[ResultT]]
) -> ResultT:
    """Call `read` with a client and a read-only transaction, and return the result of `read`."""
    async with open_command_connection(database) as found:
        client = Client(config=Config(schema=found.schema))
        reason = f"reading jobs took longer than {JOB_READ_TIMEOUT:g} s"
        with anyio.fail_after(JOB_READ_TIMEOUT, reason=reason):
            async with found.connection.transaction(isolation="repeatable_read", readonly=True):
                return await read(client, found.connection)
