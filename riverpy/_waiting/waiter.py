"""JobWaiter: reads the states of the jobs that a client waits for.

A wait first listens for notifications, then reads the states of its jobs, and then waits. So it
cannot miss the end of a job. All waits of a client share one task, which reads all jobs with one
statement.

The task reads a new job at once. It reads a job again when a notification reports the end of the
job, when the client listens again after an interruption, and by polling. The first delay between
polls is 50 ms, and it doubles up to 1 s. If a notification is expected when the job ends, the delay
is 1 s from the start.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import ExitStack, asynccontextmanager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import anyio

from riverpy._clock import Backoff
from riverpy._insert.errors import sqlstate, translate_insert_errors
from riverpy._log import get_logger
from riverpy._log_events import WAITER_FAILED
from riverpy._postgres import waits
from riverpy._postgres.damaged_jobs import make_damaged_jobs_error, read_jobs_in_parts
from riverpy._postgres.driver import (
    DATABASE_ERRORS,
    InsufficientPrivilegeError,
    describe_error,
    is_permanent_statement_error,
)
from riverpy._postgres.jobs import FINAL_STATES, job_get_many
from riverpy._postgres.tracing import suppress_tracing
from riverpy._waiting.background_task import BackgroundTask
from riverpy._waiting.job_wait import JobWaitCall, make_missing_job_error
from riverpy._waiting.pool_connection import make_read_error
from riverpy.errors import ClientStateError, RiverError
from riverpy.job import JobColumn, JobRow, JobState

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Iterable, Iterator

    from riverpy._postgres.driver import Transaction
    from riverpy._postgres.waits import WaitedJobState
    from riverpy._waiting.listener import SharedListener
    from riverpy._waiting.pool_connection import SharedPoolConnection

POLL_DELAY_MIN = 0.05
"""The shortest delay between two reads of the same job, in seconds."""
POLL_DELAY_MAX = 1.0
"""The longest delay between two reads of the same job, in seconds."""
EARLY_READ_SHARE_OF_DELAY = 0.25
"""A job may be read early, by at most this fraction of its delay. When one job is due for a read,
the same statement also reads the jobs that are due soon. So fewer statements are needed."""
LAST_READ_LEAD_MAX, LAST_READ_LEAD_SHARE = 0.1, 0.2
"""How long before the timeout of a wait its jobs are read for the last time: `LAST_READ_LEAD_MAX`
seconds, or the fraction `LAST_READ_LEAD_SHARE` of the timeout if that is shorter."""
JOBS_PER_STATEMENT_MAX = 10_000
READ_TIMEOUT = 10.0
"""The timeout of one round of reads, in seconds. It includes the wait for a connection."""
READ_RETRY_DELAY_MIN = timedelta(milliseconds=50)
READ_RETRY_DELAY_MAX = timedelta(seconds=1)
_READ_ONLY_SQLSTATE = "25006"


class _WaitedJob:
    """A job for which at least one call waits."""

    __slots__ = ("delay", "id", "is_marked", "is_new", "read_at", "state", "waits")

    def __init__(self, job_id: int, now: float) -> None:
        self.id = job_id
        self.waits: list[JobWaitCall] = []
        self.state: JobState | None = None
        """The state at the last read."""
        self.is_new, self.is_marked = True, False
        """`is_new`: the job was not read yet. `is_marked`: the job has the metadata key
        `NOTIFY_END_METADATA_KEY`, so a riverpy client that works the job sends a notification when
        the job ends."""
        self.delay, self.read_at = 0.0, now

    def schedule_read(self, now: float, *, is_notified: bool) -> None:
        """Set the time of the next read. `is_notified`: whether notifications about ended jobs
        arrive now."""
        is_notified = is_notified and self.is_marked
        self.delay = POLL_DELAY_MAX if is_notified else min(self.delay * 2, POLL_DELAY_MAX)
        self.delay = max(self.delay, POLL_DELAY_MIN)
        self.read_at = now + self.delay


class JobWaiter:
    """Waits until jobs have ended, for all calls of one client. While no call waits, the waiter
    uses no connection."""

    def __init__(
        self,
        connection: SharedPoolConnection,
        listener: SharedListener,
        *,
        schema: str | None,
        trace_internal: bool,
        can_notify: bool,
    ) -> None:
        """`can_notify`: whether the server allows NOTIFY."""
        self._connection, self._listener = connection, listener
        self._schema, self._trace_internal = schema, trace_internal
        self._job_by_id: dict[int, _WaitedJob] = {}
        self._notified_ids: set[int] = set()
        """The ids of jobs whose end was reported by a notification, but whose rows were not read
        since then."""
        self._next_read_at = math.inf
        self._woken = asyncio.Event()
        self._user_count = 0
        """The number of calls that wait, or will wait soon."""
        self._listening = ExitStack()
        self._can_mark_jobs = can_notify
        """Whether the waiter may mark jobs in the database. The client that works a marked job
        sends a notification when the job ends. False if the server does not allow NOTIFY, or has
        refused to mark jobs."""
        self._read_error: str | None = None
        self._backoff = Backoff(READ_RETRY_DELAY_MIN, READ_RETRY_DELAY_MAX)
        self._task = BackgroundTask(
            "waiter", self._read_jobs_until_no_waits, self._end_waits_after_task_failure
        )
        self._log = get_logger()

    async def wait(self, job_ids: Iterable[int], timeout: float) -> dict[int, JobRow]:
        """Wait until all jobs have ended, for at most `timeout` seconds. Return their rows by id.

        Raises:
            NotFoundError: a job does not exist, or was deleted.
            WaitTimeoutError: a job did not end in time.
            JobDamagedError: the server cannot read a job.
            ClientStateError: the client was closed.
            Exception: the server refuses the statements that read the jobs.
        """
        wait = JobWaitCall(job_ids)
        if not wait.waiting_ids:
            return {}
        with self.listening_for_job_ends(), self._scheduling_last_read(wait, timeout):
            self._add_wait(wait)
            try:
                with anyio.move_on_after(timeout):
                    await wait.ended.wait()
                states = {
                    job_id: job.state
                    for job_id in wait.waiting_ids
                    if (job := self._job_by_id.get(job_id)) is not None and job.state is not None
                }
            finally:
                self._remove_wait(wait)
        return wait.get_rows_or_raise(timeout, states, self._read_error)

    @contextmanager
    def listening_for_job_ends(self) -> Generator[None]:
        """Listen for the ends of jobs during the `with` block. Use this block around an insert if a
        wait for the inserted job follows."""
        self._user_count += 1
        if self._user_count == 1:
            self._listening.enter_context(
                self._listener.listening(
                    waits.JOB_END_TOPIC, self._record_notified_jobs, self._request_all_job_reads
                )
            )
        try:
            yield
        finally:
            self._user_count -= 1
            if not self._user_count:
                self._listening.close()

    @contextmanager
    def _scheduling_last_read(self, wait: JobWaitCall, timeout: float) -> Generator[None]:
        """Read the jobs of `wait` once more shortly before its timeout, if the `with` block still
        runs. This read finds jobs that have ended without a notification."""
        if timeout == math.inf:
            yield
            return
        lead = min(LAST_READ_LEAD_MAX, timeout * LAST_READ_LEAD_SHARE)
        timer = asyncio.get_running_loop().call_later(timeout - lead, self._request_job_reads, wait)
        try:
            yield
        finally:
            timer.cancel()

    def _request_job_reads(self, wait: JobWaitCall) -> None:
        for job_id in wait.waiting_ids:
            if (job := self._job_by_id.get(job_id)) is not None:
                job.read_at = 0.0
        self._next_read_at = 0.0
        self._woken.set()

    def _add_wait(self, wait: JobWaitCall) -> None:
        now = asyncio.get_running_loop().time()
        for job_id in wait.waiting_ids:
            job = self._job_by_id.setdefault(job_id, _WaitedJob(job_id, now))
            job.waits.append(wait)
            # Read a job again if another call waits for it: it may have been deleted since.
            job.delay, job.read_at = 0.0, now
        self._next_read_at = now
        self._woken.set()
        self._task.start()

    def _remove_wait(self, wait: JobWaitCall) -> None:
        for job_id in wait.waiting_ids:
            job = self._job_by_id.get(job_id)
            if job is not None and wait in job.waits:
                job.waits.remove(wait)
                if not job.waits:
                    del self._job_by_id[job_id]
        if not self._job_by_id:
            self._woken.set()

    def _record_notified_jobs(self, payload: str) -> None:
        ids = [job_id for job_id, _ in waits.decode_job_ends(payload) if job_id in self._job_by_id]
        if ids:
            self._notified_ids.update(ids)
            self._woken.set()

    def _request_all_job_reads(self) -> None:
        """Read all jobs soon, because notifications may have been lost."""
        if self._job_by_id:
            self._next_read_at = 0.0
            for job in self._job_by_id.values():
                job.read_at = 0.0
            self._woken.set()

    # -- the task that reads the jobs

    async def _read_jobs_until_no_waits(self) -> None:
        loop = asyncio.get_running_loop()
        while self._job_by_id:
            self._woken.clear()
            delay = 0.0
            try:
                if self._notified_ids or self._next_read_at <= loop.time():
                    await self._read_jobs()
            except DATABASE_ERRORS as error:
                if self._can_mark_jobs and _is_write_refused(error):
                    self._can_mark_jobs = False
                    continue
                if is_permanent_statement_error(error):
                    self._fail_all_waits(make_read_error(error))
                self._read_error, delay = describe_error(error), self._backoff.next_delay()
            except RiverError as error:
                self._fail_all_waits(error)
            if delay:
                await anyio.sleep(delay)
            elif not self._notified_ids:
                with anyio.move_on_after(self._next_read_at - loop.time()):
                    await self._woken.wait()

    def _end_waits_after_task_failure(self, error: Exception) -> None:
        """End all waits with an error, because the task that reads the jobs has failed. Otherwise
        the calls would wait forever."""
        self._log.error(WAITER_FAILED, exc_info=error)
        self._fail_all_waits(error)

    def _fail_all_waits(self, error: Exception) -> None:
        for job in self._job_by_id.values():
            for wait in job.waits:
                wait.fail(error)
        self._job_by_id.clear()

    async def _read_jobs(self) -> None:
        """Read the states of the jobs that are due for a read, and the rows of the jobs that have
        ended."""
        now = asyncio.get_running_loop().time()
        due = self._choose_jobs_to_read(now)
        ended_ids = self._notified_ids & self._job_by_id.keys()
        with suppress_tracing(trace_internal=self._trace_internal):
            async with self._acquire_connection() as connection:
                for job, state in await self._read_states(connection, due):
                    if state is None:
                        self._end_waits_for_job(job, make_missing_job_error(job.id))
                    elif state.state in FINAL_STATES:
                        ended_ids.add(job.id)
                    else:
                        self._schedule_next_read(job, state, now)
                await self._read_ended_jobs(connection, sorted(ended_ids), now)
        self._notified_ids.difference_update(ended_ids)
        self._notified_ids.intersection_update(self._job_by_id)
        self._next_read_at = min((job.read_at for job in self._job_by_id.values()), default=0.0)
        self._read_error = None
        self._backoff.reset()

    @asynccontextmanager
    async def _acquire_connection(self) -> AsyncGenerator[Transaction]:
        with translate_insert_errors(None):
            async with self._connection.acquire(
                "reading the states of jobs", READ_TIMEOUT
            ) as connection:
                yield connection

    def _choose_jobs_to_read(self, now: float) -> list[_WaitedJob]:
        if self._next_read_at > now:
            return []
        return [
            job
            for job in self._job_by_id.values()
            if job.read_at <= now + job.delay * EARLY_READ_SHARE_OF_DELAY
        ]

    async def _read_states(
        self, connection: Transaction, jobs: list[_WaitedJob]
    ) -> list[tuple[_WaitedJob, WaitedJobState | None]]:
        """Read the states of jobs. If notifications can be received, also mark the jobs that were
        not read before and that no client has claimed. The client that works a marked job sends a
        notification when the job ends."""
        found: dict[int, WaitedJobState] = {}
        for is_new in (True, False):
            read = waits.job_get_states
            if is_new and self._can_mark_jobs and self._listener.is_listening_or_connecting:
                read = waits.job_get_states_and_mark_waited
            ids = [job.id for job in jobs if job.is_new is is_new]
            for part in _split_ids(ids, JOBS_PER_STATEMENT_MAX):
                found.update(
                    (state.id, state) for state in await read(connection, self._schema, part)
                )
        return [(job, found.get(job.id)) for job in jobs]

    async def _read_ended_jobs(
        self, connection: Transaction, job_ids: list[int], now: float
    ) -> None:
        """Read the rows of jobs that have ended, and report them to the waits for these jobs."""
        parts, damaged = await read_jobs_in_parts(
            connection, job_ids, lambda part: job_get_many(connection, self._schema, part)
        )
        row_by_id = {row[JobColumn.ID]: row for part in parts for row in part}
        for job_id in job_ids:
            job = self._job_by_id.get(job_id)
            if job is None:  # no call waits for it any more
                continue
            row = row_by_id.get(job_id)
            if job_id in damaged:
                self._end_waits_for_job(job, make_damaged_jobs_error({job_id: damaged[job_id]}))
            elif row is None:
                self._end_waits_for_job(job, make_missing_job_error(job_id))
            elif row[JobColumn.STATE] in FINAL_STATES:
                self._end_waits_for_job(job, JobRow(tuple(row)))
            else:  # another session has retried the job
                job.state = JobState(row[JobColumn.STATE])
                job.schedule_read(now, is_notified=self._is_listening)

    def _schedule_next_read(self, job: _WaitedJob, state: WaitedJobState, now: float) -> None:
        job.is_new, job.is_marked, job.state = False, state.is_marked, JobState(state.state)
        job.schedule_read(now, is_notified=self._is_listening)

    @property
    def _is_listening(self) -> bool:
        return self._listener.is_listening_on(waits.JOB_END_TOPIC)

    def _end_waits_for_job(self, job: _WaitedJob, result: JobRow | Exception) -> None:
        """Report the row of an ended job, or an error, to all waits for the job."""
        self._job_by_id.pop(job.id, None)
        for wait in job.waits:
            if isinstance(result, JobRow):
                wait.add_row(result)
            else:
                wait.fail(result)

    async def close(self) -> None:
        """End all waits with ClientStateError, because the client is closed."""
        self._fail_all_waits(ClientStateError("the client was closed during the wait"))
        await self._task.close()


def _is_write_refused(error: Exception) -> bool:
    """Whether the role of the client may not write, or the server is a standby."""
    is_read_only = sqlstate(error) == _READ_ONLY_SQLSTATE
    return is_read_only or isinstance(error, InsufficientPrivilegeError)


def _split_ids(ids: list[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(ids), size):
        yield ids[start : start + size]
