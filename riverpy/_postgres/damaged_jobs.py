"""Reads jobs although the server cannot read some of them, because their data is damaged.

If a value is damaged on the disk, a statement that reads the value fails, even if its other rows
are not damaged. After the failure, riverpy searches for the damaged jobs. Then riverpy sends the
statement again, but does not read the columns `attempted_by` and `errors` of the damaged jobs.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from riverpy._log_events import DAMAGED_JOB_SKIPPED
from riverpy._postgres.batch_sender import split_batch
from riverpy._postgres.driver import (
    PostgresError,
    describe_error,
    is_asyncpg_connection,
    is_damaged_data_error,
    is_damaged_or_untranslatable_error,
    is_in_transaction,
)
from riverpy._postgres.skipped_rows import SkippedRowReport
from riverpy._postgres.sql_files import get_query
from riverpy._postgres.transactions import savepoint
from riverpy.errors import JobDamagedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from riverpy._postgres.driver import Transaction

DAMAGE_SEARCH_JOBS_MAX = 100_000
"""When riverpy searches for damaged jobs, it reads at most this number of jobs of each state."""
DAMAGE_SEARCH_JOBS_PER_READ = 1_000
"""The number of jobs that one statement of the search reads."""

DAMAGED_JOB_REMEDY = (
    "if this does not change, delete the row, or restore its values from a backup "
    "(docs/faults.md#damaged-rows)"
)
"""The advice for a damaged job."""

ResultT = TypeVar("ResultT")

_SQL_FILE = "river_job_damage"


async def job_list_ids_by_state(
    connection: Transaction, schema: str | None, *, states: Sequence[str], limit: int
) -> list[int]:
    """Return the ids of up to `limit` jobs in each of `states`: finished jobs newest first, other
    jobs in the order of claims."""
    statement = get_query(_SQL_FILE, "job_damage_candidates", schema)
    rows = await statement.fetch(connection, state=list(states), limit=limit)
    return [row[0] for row in rows]


async def job_check_damage(connection: Transaction, schema: str | None, ids: Sequence[int]) -> None:
    """Read the columns `attempted_by` and `errors` of jobs. If one of the jobs is damaged, raise an
    error for which `is_damaged_data_error` is True."""
    await get_query(_SQL_FILE, "job_damage_check", schema).fetch(connection, id=list(ids))


@contextmanager
def translate_damage_error(job_id: int) -> Generator[None]:
    """Raise JobDamagedError with the job's id if the server cannot read the job in the `with`
    block."""
    try:
        yield
    except PostgresError as error:
        if not is_damaged_or_untranslatable_error(error):
            raise
        raise make_damaged_jobs_error({job_id: describe_error(error)}) from error


def make_damaged_jobs_error(errors_by_job_id: Mapping[int, str]) -> JobDamagedError:
    """Return one error for all damaged jobs. `errors_by_job_id` maps their ids to the server's
    errors."""
    ids, error = ", ".join(map(str, errors_by_job_id)), next(iter(errors_by_job_id.values()))
    noun = "job" if len(errors_by_job_id) == 1 else "jobs"
    return JobDamagedError(f"the server cannot read {noun} {ids} ({error}); {DAMAGED_JOB_REMEDY}")


async def read_jobs_despite_damage(
    connection: Transaction,
    schema: str | None,
    states: Sequence[str],
    read_jobs: Callable[[list[int]], Awaitable[ResultT]],
    known_errors_by_job_id: Mapping[int, str] | None = None,
) -> tuple[ResultT, dict[int, str]]:
    """Read jobs with `read_jobs`. If this call fails because of damaged jobs, find these jobs, and
    call `read_jobs` again with the ids of all damaged jobs.

    Args:
        connection: the connection to use. It may be in a transaction.
        schema: the schema of River's tables.
        states: the states of the jobs that `read_jobs` reads.
        read_jobs: reads the jobs. It receives the ids of the damaged jobs, and must not read the
            columns `attempted_by` and `errors` of these jobs.
        known_errors_by_job_id: the damaged jobs that an earlier read found, as a mapping from id to
            error.

    Returns:
        The result of `read_jobs`, and the errors of all damaged jobs by id.
    """
    known_errors_by_job_id = dict(known_errors_by_job_id or {})
    try:
        async with _savepoint_if_in_transaction(connection):
            return await read_jobs(list(known_errors_by_job_id)), known_errors_by_job_id
    except PostgresError as error:
        if not is_damaged_data_error(error):
            raise
        ids = await job_list_ids_by_state(
            connection, schema, states=states, limit=DAMAGE_SEARCH_JOBS_MAX
        )
        damaged = known_errors_by_job_id | await find_damaged_jobs(connection, schema, ids)
        if damaged.keys() == known_errors_by_job_id.keys():
            raise
    return await read_jobs(list(damaged)), damaged


async def find_damaged_jobs(
    connection: Transaction, schema: str | None, ids: Sequence[int]
) -> dict[int, str]:
    """Find the damaged jobs among the jobs with these ids. Return the errors of the damaged jobs by
    id."""
    _, damaged = await read_jobs_in_parts(
        connection, ids, lambda part: job_check_damage(connection, schema, part)
    )
    return damaged


async def read_jobs_in_parts(
    connection: Transaction,
    ids: Sequence[int],
    read_jobs: Callable[[list[int]], Awaitable[ResultT]],
) -> tuple[list[ResultT], dict[int, str]]:
    """Read jobs in parts. If a part fails because of a damaged job, it is read again in smaller
    parts.

    Returns:
        The results of `read_jobs`, in the order of the ids, and the errors of damaged jobs by id.
    """
    results: list[ResultT] = []
    damaged: dict[int, str] = {}
    parts = deque(
        list(ids[start : start + DAMAGE_SEARCH_JOBS_PER_READ])
        for start in range(0, len(ids), DAMAGE_SEARCH_JOBS_PER_READ)
    )
    while parts:
        part = parts.popleft()
        try:
            async with _savepoint_if_in_transaction(connection):
                results.append(await read_jobs(part))
        except PostgresError as error:
            if not is_damaged_or_untranslatable_error(error):
                raise
            if len(part) > 1:
                parts.extendleft(reversed(split_batch(part)))
            else:
                damaged[part[0]] = describe_error(error)
    return results, damaged


def _savepoint_if_in_transaction(connection: Transaction) -> AbstractAsyncContextManager[object]:
    """If a transaction is open, run the `async with` block in a savepoint, so that the transaction
    stays usable after an error."""
    if not is_in_transaction(connection):
        return nullcontext()
    return connection.transaction() if is_asyncpg_connection(connection) else savepoint(connection)


class DamagedJobTracker:
    """Reads jobs for one service, and remembers the damaged jobs that were skipped. Each of them is
    logged once, and can be reported to operators."""

    def __init__(self, read_purpose: str, log: Any) -> None:
        """Create the tracker. `read_purpose` says in log lines and reports why the service reads
        jobs."""
        self._read_purpose = read_purpose
        self._rate_limited_log = log.with_rate_limit()
        self._known_damaged_jobs: dict[int, SkippedRowReport] = {}

    @property
    def skipped_job_reports(self) -> list[SkippedRowReport]:
        """The damaged jobs that the last read has skipped."""
        return list(self._known_damaged_jobs.values())

    async def read_jobs(
        self,
        connection: Transaction,
        schema: str | None,
        states: Sequence[str],
        read_jobs: Callable[[list[int]], Awaitable[ResultT]],
    ) -> ResultT:
        """Read jobs like `read_jobs_despite_damage`, and log each damaged job once."""
        result, damaged = await read_jobs_despite_damage(connection, schema, states, read_jobs)
        known: dict[int, SkippedRowReport] = {}
        for job_id, error in damaged.items():
            tries, since = 1, time.monotonic()
            if (before := self._known_damaged_jobs.get(job_id)) is not None:
                tries, since = before.failure_count + 1, before.first_failed_at
            else:
                self._rate_limited_log.warning(
                    DAMAGED_JOB_SKIPPED, purpose=self._read_purpose, job_id=job_id, error=error
                )
            known[job_id] = SkippedRowReport(self._read_purpose, str(job_id), error, tries, since)
        self._known_damaged_jobs = known
        return result
