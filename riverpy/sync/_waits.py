"""The methods of `riverpy.sync.Client` that wait for the end of jobs. They poll the jobs' states,
because a blocking client has no connection that listens for notifications."""

from __future__ import annotations

import time
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, TypeVar

from riverpy._calls.base import ClientMethods
from riverpy._calls.waits import WAIT_TIMEOUT_DEFAULT, check_job_ids, check_wait_timeout
from riverpy._insert.errors import translate_insert_errors
from riverpy._insert.recorder import require_no_recorder
from riverpy._postgres.damaged_jobs import make_damaged_jobs_error, read_jobs_in_parts
from riverpy._postgres.driver import (
    DATABASE_ERRORS,
    describe_error,
    is_permanent_statement_error,
)
from riverpy._postgres.jobs import FINAL_STATES, job_get_many
from riverpy._postgres.waits import job_get_states
from riverpy._waiting.job_wait import JobWaitCall, make_missing_job_error
from riverpy._without_loop import sleep
from riverpy.job import JobRow, JobState

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable
    from datetime import timedelta

    from riverpy._insert.inserter import Args
    from riverpy._postgres.driver import Transaction
    from riverpy._postgres.sessions.protocols import BlockingTransaction, CallerTransaction
    from riverpy.insert_opts import InsertOpts, InsertResult
    from riverpy.job import JobArgs, RawArgs

POLL_DELAY_MIN = 0.02
POLL_DELAY_MAX = 1.0
"""The longest delay between two polls, in seconds. The first delay is `POLL_DELAY_MIN` seconds, and
each further delay is twice the one before."""
JOBS_PER_STATEMENT_MAX = 10_000

ResultT = TypeVar("ResultT")


class PollingWaitMethods(ClientMethods):
    """The methods of a blocking client that wait for jobs, as coroutines. They use no connection
    while they sleep between two polls."""

    @abstractmethod
    async def insert(
        self, args: Args, opts: InsertOpts | None, *, tx: CallerTransaction | None
    ) -> InsertResult:
        """Insert a job."""

    def require_no_open_transaction(self) -> None:
        """Check that the caller may wait. By default, do nothing.

        A subclass raises TransactionError if calls without `tx` would run in an open transaction of
        the caller, because the wait would keep this transaction open. It also raises this error if
        the caller must not block its thread."""

    def close_lost_connection(self) -> None:
        """Close a lost connection after a failed poll, so that the next poll opens a new one.
        Subclasses implement this. By default, do nothing."""

    async def wait(self, job_id: int, *, timeout: timedelta | None) -> JobRow:
        """Wait for a job, as `riverpy.Client.wait` does."""
        return (await self.wait_many([job_id], timeout=timeout))[0]

    async def wait_many(self, job_ids: Iterable[int], *, timeout: timedelta | None) -> list[JobRow]:
        """Wait for jobs, as `riverpy.Client.wait_many` does."""
        ids, seconds = check_job_ids(job_ids), check_wait_timeout(timeout)
        self.require_no_open_transaction()
        return await self._poll_until_ended(ids, seconds, time.monotonic())

    async def insert_and_wait(
        self, args: Args, opts: InsertOpts | None, *, timeout: timedelta | None
    ) -> JobRow:
        """Insert a job and wait for it, as `riverpy.Client.insert_and_wait` does."""
        seconds, began_at = check_wait_timeout(timeout), time.monotonic()
        require_no_recorder("insert_and_wait")
        self.require_no_open_transaction()
        inserted = await self.insert(args, opts, tx=None)
        return (await self._poll_until_ended([inserted.job.id], seconds, began_at))[0]

    async def _poll_until_ended(
        self, ids: list[int], timeout: float, began_at: float
    ) -> list[JobRow]:
        wait, delay = JobWaitCall(ids), POLL_DELAY_MIN
        states: dict[int, JobState] = {}
        read_error: str | None = None
        while wait.waiting_ids:
            try:
                await self._poll_jobs(wait, states)
                read_error = None
            except DATABASE_ERRORS as error:
                if is_permanent_statement_error(error):
                    raise
                self.close_lost_connection()
                read_error = describe_error(error)
            seconds_left = began_at + timeout - time.monotonic()
            if wait.error is not None or seconds_left <= 0:
                break
            if wait.waiting_ids:
                await sleep(min(delay, seconds_left))
                delay = min(delay * 2, POLL_DELAY_MAX)
        row_by_id = wait.get_rows_or_raise(timeout, states, read_error)
        return [row_by_id[job_id] for job_id in ids]

    async def _poll_jobs(self, wait: JobWaitCall, states: dict[int, JobState]) -> None:
        """Poll once: read the states of the jobs that had not ended before, and the rows of those
        that have ended since."""
        schema, ids = self._config.schema, list(wait.waiting_ids)
        with translate_insert_errors(None, in_savepoint=True):
            async with self._transaction(None) as connection:
                ended: list[int] = []
                for start in range(0, len(ids), JOBS_PER_STATEMENT_MAX):
                    part = ids[start : start + JOBS_PER_STATEMENT_MAX]
                    found = await job_get_states(connection, schema, part)
                    states.update((one.id, JobState(one.state)) for one in found)
                    ended += [one.id for one in found if one.state in FINAL_STATES]
                    for job_id in set(part).difference(one.id for one in found):
                        wait.fail(make_missing_job_error(job_id))
                await self._read_ended_jobs(connection, wait, ended)

    async def _read_ended_jobs(
        self, connection: Transaction, wait: JobWaitCall, ids: list[int]
    ) -> None:
        parts, damaged = await read_jobs_in_parts(
            connection, ids, lambda part: job_get_many(connection, self._config.schema, part)
        )
        if damaged:
            wait.fail(make_damaged_jobs_error(damaged))
        for row in (JobRow(tuple(row)) for part in parts for row in part):
            if row.finalized_at is not None:
                wait.add_row(row)


class BlockingWaitMethods:
    """The methods of `riverpy.sync.Client` that wait for the end of jobs."""

    _calls: Any

    @abstractmethod
    def _run_coroutine(
        self, call: Coroutine[Any, Any, ResultT], tx: BlockingTransaction | None
    ) -> ResultT:
        """Run a coroutine of `_calls` to its end, and return its result."""

    def wait(self, job_id: int, *, timeout: timedelta | None = WAIT_TIMEOUT_DEFAULT) -> JobRow:
        """Wait until a job has ended: completed, cancelled or discarded. Returns its row, as
        `riverpy.Client.wait` does.

        This call polls the state of the job: at once, after 20 ms, and then after delays that
        double up to 1 second. It uses no connection between two polls. Each waiting thread polls
        separately.

        Args:
            job_id: the id of the job. Its insert must be committed.
            timeout: how long to wait. Default 60 seconds. None: no limit.

        Raises:
            WaitTimeoutError: the job did not end in time. It is not changed.
            NotFoundError: there is no job with this id, or it was deleted.
            ConfigError: the id is not a 64-bit integer, or the timeout is not above zero.
            TransactionError: the client would wait inside your open transaction, for instance in
                Django's `atomic()` or on a psycopg connection that is in a transaction.
            ClientStateError: the client has no database, or is closed.
            JobDamagedError: the server cannot read the job.
        """
        return self._run_coroutine(self._calls.wait(job_id, timeout=timeout), None)

    def wait_many(
        self, job_ids: Iterable[int], *, timeout: timedelta | None = WAIT_TIMEOUT_DEFAULT
    ) -> list[JobRow]:
        """Wait until several jobs have ended. Returns their rows in the order of `job_ids`, as
        `riverpy.Client.wait_many` does.

        Raises:
            WaitTimeoutError: a job did not end in time. `error.ended_jobs` has the rows of the jobs
                that ended.
            NotFoundError: one of the jobs does not exist, or was deleted. This is raised at once.
            RiverError: as `wait`.
        """
        return self._run_coroutine(self._calls.wait_many(job_ids, timeout=timeout), None)

    def insert_and_wait(
        self,
        args: JobArgs | RawArgs,
        opts: InsertOpts | None = None,
        *,
        timeout: timedelta | None = WAIT_TIMEOUT_DEFAULT,
    ) -> JobRow:
        """Insert a job, and wait until it has ended. Returns its row, as
        `riverpy.Client.insert_and_wait` does. This method takes no `tx`, because the insert must be
        committed before the wait.

        Raises:
            WaitTimeoutError: the job did not end in time. It is not removed, and `error.job_ids`
                has its id.
            InsertError, SchemaMissingError: as `insert`; nothing was inserted.
            RiverError: as `wait`.
        """
        return self._run_coroutine(self._calls.insert_and_wait(args, opts, timeout=timeout), None)
