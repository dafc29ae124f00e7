"""Damaged jobs: finds jobs that the server cannot read, and reads all others.

A value that is damaged on the disk makes every statement fail that reads the value, for all rows of
the statement. So after such an error, riverpy searches for the damaged jobs, and sends the
statement again without the wide columns of these jobs."""

from __future__ import annotations

import math
import time
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from riverpy._log_events import DAMAGED_JOB_SKIPPED
from riverpy._postgres.batch_sender import BatchSender, BatchSize, BatchStatement
from riverpy._postgres.driver import (
    PostgresError,
    describe,
    is_damage,
    is_in_transaction,
    is_unreadable,
)
from riverpy._postgres.set_aside import SetAsideRow
from riverpy._postgres.sql_files import query
from riverpy.errors import JobDamagedError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence

    from riverpy._postgres.driver import Transaction

CANDIDATES_MAX = 100_000
"""The largest number of jobs of each state that are searched for damaged ones."""
PAGE = 1_000
"""The number of jobs that are read at a time."""

REMEDY = (
    "if this does not change, delete the row, or restore its values from a backup "
    "(docs/faults.md#damaged-rows)"
)
"""The advice for a damaged job."""

T = TypeVar("T")

_FILE = "river_job_damage"


async def job_damage_candidates(
    connection: Transaction, schema: str | None, *, states: Sequence[str], limit: int
) -> list[int]:
    """Return the ids of the first `limit` jobs in each of these states."""
    statement = query(_FILE, "job_damage_candidates", schema)
    rows = await statement.fetch(connection, state=list(states), limit=limit)
    return [row[0] for row in rows]


async def job_damage_check(connection: Transaction, schema: str | None, ids: Sequence[int]) -> None:
    """Read the wide columns of jobs. The statement fails if a job is damaged.

    Raises:
        PostgresError: a job is damaged: `is_damage` of the error is True.
    """
    await query(_FILE, "job_damage_check", schema).fetch(connection, id=list(ids))


@contextmanager
def naming_damage(job_id: int) -> Generator[None]:
    """Raise JobDamagedError with the job's id if the block fails to read the job."""
    try:
        yield
    except PostgresError as error:
        if not is_unreadable(error):
            raise
        raise damage_error({job_id: describe(error)}) from error


def damage_error(damaged: Mapping[int, str]) -> JobDamagedError:
    """Return one error for damaged jobs. `damaged` has the error of each job by id."""
    ids, error = ", ".join(map(str, damaged)), next(iter(damaged.values()))
    noun = "job" if len(damaged) == 1 else "jobs"
    return JobDamagedError(f"the server cannot read {noun} {ids} ({error}); {REMEDY}")


async def read_undamaged(
    connection: Transaction,
    schema: str | None,
    states: Sequence[str],
    read: Callable[[list[int]], Awaitable[T]],
    known: Mapping[int, str] | None = None,
) -> tuple[T, dict[int, str]]:
    """Read jobs, without the wide columns of damaged jobs.

    Args:
        connection: in a transaction or not.
        schema: the schema of River's tables.
        states: the states of the jobs that `read` reads.
        read: sends a statement that reads no wide column of the jobs with the given ids.
        known: the errors of jobs that an earlier read has found damaged, by id.

    Returns:
        The result of `read`, and the errors of all damaged jobs by id.

    Raises:
        Exception: one of DATABASE_ERRORS.
    """
    known = dict(known or {})
    try:
        async with _savepoint(connection):
            return await read(list(known)), known
    except PostgresError as error:
        if not is_damage(error):
            raise
        ids = await job_damage_candidates(connection, schema, states=states, limit=CANDIDATES_MAX)
        damaged = known | await damaged_of(connection, schema, ids)
        if damaged.keys() == known.keys():
            raise
    return await read(list(damaged)), damaged


async def damaged_of(
    connection: Transaction, schema: str | None, ids: Sequence[int]
) -> dict[int, str]:
    """Return the errors of the given jobs that are damaged, by id.

    Raises:
        Exception: one of DATABASE_ERRORS.
    """
    _, damaged = await read_parts(
        connection, ids, lambda part: job_damage_check(connection, schema, part)
    )
    return damaged


async def read_parts(
    connection: Transaction, ids: Sequence[int], read: Callable[[list[int]], Awaitable[T]]
) -> tuple[list[T], dict[int, str]]:
    """Read jobs in parts. A part that fails for a damaged job is read in smaller parts.

    Returns:
        The result of `read` for each part, in the order of the ids, and the errors of damaged jobs
        by id.

    Raises:
        Exception: one of DATABASE_ERRORS.
    """
    results: dict[int, T] = {}
    damaged: dict[int, str] = {}
    position = {job_id: index for index, job_id in enumerate(ids)}

    async def read_part(part: list[int]) -> None:
        async with _savepoint(connection):
            results[position[part[0]]] = await read(part)

    sender = BatchSender(
        BatchStatement(read_part, row_id=int, is_row_error=is_unreadable),
        size=BatchSize(PAGE, math.inf),
        aside=None,
        set_aside=lambda job_id, error: damaged.update({job_id: describe(error)}),
        failures_max=len(ids),
    )
    for job_id in ids:
        sender.add(job_id)
    await sender.send_all()
    return [results[index] for index in sorted(results)], damaged


@asynccontextmanager
async def _savepoint(connection: Transaction) -> AsyncGenerator[None]:
    """Run the block in a savepoint if a transaction is open, so that the transaction stays usable
    after an error."""
    if not is_in_transaction(connection):
        yield
        return
    async with connection.transaction():
        yield


class DamagedJobs:
    """The damaged jobs that one service skips, for the log and for reports."""

    def __init__(self, what: str, log: Any) -> None:
        """Create an empty list of damaged jobs.

        Args:
            what: the purpose of the reads, for the log.
            log: the logger of the service.
        """
        self._what = what
        self._limited_log = log.limited()
        self._known: dict[int, SetAsideRow] = {}

    @property
    def set_aside(self) -> list[SetAsideRow]:
        """The damaged jobs that the last read has skipped."""
        return list(self._known.values())

    async def read(
        self,
        connection: Transaction,
        schema: str | None,
        states: Sequence[str],
        read: Callable[[list[int]], Awaitable[T]],
    ) -> T:
        """Read jobs like `read_undamaged`, and log each damaged job once.

        Raises:
            Exception: one of DATABASE_ERRORS.
        """
        result, damaged = await read_undamaged(connection, schema, states, read)
        for job_id in damaged.keys() - self._known.keys():
            self._limited_log.warning(
                DAMAGED_JOB_SKIPPED,
                purpose=self._what,
                job_id=job_id,
                error=damaged[job_id],
            )
        now, known = time.monotonic(), self._known
        self._known = {
            job_id: SetAsideRow(
                self._what,
                str(job_id),
                error,
                known[job_id].tries + 1 if job_id in known else 1,
                known[job_id].since if job_id in known else now,
            )
            for job_id, error in damaged.items()
        }
        return result
