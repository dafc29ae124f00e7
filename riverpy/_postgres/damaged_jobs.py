"""Damaged jobs: finds jobs that the server cannot read, and reads all others.

If a value is damaged on the disk, each statement that reads the value fails for all its rows. After
such an error riverpy searches for the damaged jobs. Then it sends the statement again, without the
wide columns of these jobs: args, errors, metadata."""

from __future__ import annotations

import time
from collections import deque
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from riverpy._log_events import DAMAGED_JOB_SKIPPED
from riverpy._postgres.batch_sender import split_batch
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
    from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from riverpy._postgres.driver import Transaction

CANDIDATES_MAX = 100_000
"""The maximum number of jobs of each state among which riverpy searches for damaged jobs."""
PAGE_JOBS = 1_000
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
    """Read the wide columns of jobs. If a job is damaged, raise an error for which `is_damage` is
    True."""
    await query(_FILE, "job_damage_check", schema).fetch(connection, id=list(ids))


@contextmanager
def translate_damage_error(job_id: int) -> Generator[None]:
    """Raise JobDamagedError with the job's id if the `with` block fails to read the job."""
    try:
        yield
    except PostgresError as error:
        if not is_unreadable(error):
            raise
        raise damage_error({job_id: describe(error)}) from error


def damage_error(damaged: Mapping[int, str]) -> JobDamagedError:
    """Return one error for all damaged jobs. `damaged` maps their ids to the server's errors."""
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
        connection: either in a transaction or not.
        schema: the schema of River's tables.
        states: the states of the jobs that `read` reads.
        read: sends a statement that leaves out the wide columns of the jobs with the given ids.
        known: the jobs that an earlier read found damaged, as a mapping from id to error.

    Returns:
        The result of `read`, and the errors of all damaged jobs by id.
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
    """Find the damaged jobs among the given ones. Return their errors by id."""
    _, damaged = await read_parts(
        connection, ids, lambda part: job_damage_check(connection, schema, part)
    )
    return damaged


async def read_parts(
    connection: Transaction, ids: Sequence[int], read: Callable[[list[int]], Awaitable[T]]
) -> tuple[list[T], dict[int, str]]:
    """Read jobs in parts. A part that fails for a damaged job is read again in smaller parts.

    Returns:
        The results of `read`, in the order of the ids, and the errors of damaged jobs by id.
    """
    results: list[T] = []
    damaged: dict[int, str] = {}
    parts = deque(list(ids[start : start + PAGE_JOBS]) for start in range(0, len(ids), PAGE_JOBS))
    while parts:
        part = parts.popleft()
        try:
            async with _savepoint(connection):
                results.append(await read(part))
        except PostgresError as error:
            if not is_unreadable(error):
                raise
            if len(part) > 1:
                parts.extendleft(reversed(split_batch(part)))
            else:
                damaged[part[0]] = describe(error)
    return results, damaged


def _savepoint(connection: Transaction) -> AbstractAsyncContextManager[object]:
    """If a transaction is open, run the `async with` block in a savepoint, so that the transaction
    stays usable after an error."""
    return connection.transaction() if is_in_transaction(connection) else nullcontext()


class DamagedJobs:
    """The damaged jobs that one service skips, for the log and for reports."""

    def __init__(self, purpose: str, log: Any) -> None:
        """Start without damaged jobs. `purpose` describes the reads, for the log."""
        self._purpose = purpose
        self._limited_log = log.with_rate_limit()
        self._known: dict[int, SetAsideRow] = {}

    @property
    def skipped_jobs(self) -> list[SetAsideRow]:
        """The damaged jobs that the last read has skipped."""
        return list(self._known.values())

    async def read(
        self,
        connection: Transaction,
        schema: str | None,
        states: Sequence[str],
        read: Callable[[list[int]], Awaitable[T]],
    ) -> T:
        """Read jobs like `read_undamaged`, and log each damaged job once."""
        result, damaged = await read_undamaged(connection, schema, states, read)
        known: dict[int, SetAsideRow] = {}
        for job_id, error in damaged.items():
            tries, since = 1, time.monotonic()
            if (before := self._known.get(job_id)) is not None:
                tries, since = before.tries + 1, before.since
            else:
                self._limited_log.warning(
                    DAMAGED_JOB_SKIPPED, purpose=self._purpose, job_id=job_id, error=error
                )
            known[job_id] = SetAsideRow(self._purpose, str(job_id), error, tries, since)
        self._known = known
        return result
