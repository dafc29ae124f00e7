"""WaitMethods: the methods of a client that wait for the end of jobs."""

from __future__ import annotations

import asyncio
import math
from abc import abstractmethod
from collections.abc import Iterable
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING

import anyio
import msgspec

from riverpy._calls.job_page import check_job_id
from riverpy._calls.listening import ListeningMethods
from riverpy._insert.recorder import require_no_recorder
from riverpy._lifecycle import run_despite_cancellation
from riverpy.errors import ConfigError
from riverpy.insert_opts import InsertOpts
from riverpy.job_result import WaitTimeoutError

if TYPE_CHECKING:
    from riverpy._waiting.listener import SharedListener
    from riverpy._waiting.waiter import JobWaiter
    from riverpy.insert_opts import InsertResult
    from riverpy.job import JobArgs, JobRow, RawArgs

WAIT_TIMEOUT_DEFAULT = timedelta(seconds=60)


class WaitMethods(ListeningMethods):
    """The methods of a client that wait for the end of jobs."""

    @abstractmethod
    async def insert(self, args: JobArgs | RawArgs, opts: InsertOpts | None = None) -> InsertResult:
        """Insert a job. The client class implements this method, and `insert_and_wait` calls
        it."""

    async def wait(
        self, job_id: int, *, timeout: timedelta | None = WAIT_TIMEOUT_DEFAULT
    ) -> JobRow:
        """Wait until a job has ended, i.e. is completed, cancelled or discarded. Return its row
        with the state, the errors and the output. `riverpy.result(row)` returns the output, or
        raises JobNotCompletedError if the job is not completed.

        The wait continues while a job is snoozed, or fails and is retried. Any process may wait for
        a job, and any client may work it, also River in Go. All waits of a client share one
        connection for LISTEN. They continue after an outage of the database. A client without such
        a connection polls.

        Args:
            job_id: the id of the job. The transaction that inserts it must be committed.
            timeout: how long to wait. Default 60 seconds. None: no limit.

        Raises:
            WaitTimeoutError: the job did not end in time. It is not changed.
            NotFoundError: there is no job with this id, or it was deleted.
            ConfigError: the id is not an integer of 64 bits, or the timeout is not above zero.
            ClientStateError: the client is not open, or was closed during the wait.
            JobDamagedError: the server cannot read the job.
        """
        return (await self.wait_many([job_id], timeout=timeout))[0]

    async def wait_many(
        self, job_ids: Iterable[int], *, timeout: timedelta | None = WAIT_TIMEOUT_DEFAULT
    ) -> list[JobRow]:
        """Wait until all of these jobs have ended. Return their rows in the order of `job_ids`. An
        id may occur more than once.

        Args:
            job_ids: the ids of the jobs.
            timeout: how long to wait for all of them. Default 60 seconds. None: no limit.

        Raises:
            WaitTimeoutError: a job did not end in time. The error contains the rows of the jobs
                that ended.
            NotFoundError: one of the jobs does not exist, or was deleted. The error is raised
                without waiting for the other jobs.
            ConfigError, ClientStateError, JobDamagedError: as `wait`.
        """
        ids, seconds = check_job_ids(job_ids), check_wait_timeout(timeout)
        self._get_open_pool()
        row_by_id = await self._waiter.wait(ids, seconds)
        return [row_by_id[job_id] for job_id in ids]

    async def insert_and_wait(
        self,
        args: JobArgs | RawArgs,
        opts: InsertOpts | None = None,
        *,
        timeout: timedelta | None = WAIT_TIMEOUT_DEFAULT,
    ) -> JobRow:
        """Insert a job on the client's pool and wait until it has ended. Return its row, as `wait`
        does.

        There is no argument `tx`, because other clients see a job only after its transaction
        commits. In your own transaction, insert the job with `InsertOpts(notify_end=True)`, and
        call `wait` after the commit. If the job is a duplicate of a unique job, this method waits
        for the existing job.

        Args:
            args: the args of the job.
            opts: the insert options of the job.
            timeout: how long the insert and the wait may take together. Default 60 seconds. None:
                no limit.

        Raises:
            WaitTimeoutError: the job did not end in time. The job is not changed, and
                `error.job_ids` contains its id. If the insert did not end in time, `error.job_ids`
                is empty, and the job may be stored.
            InsertError, SchemaMissingError: as `insert`. Nothing was inserted.
            NotFoundError, ConfigError, ClientStateError, JobDamagedError: as `wait`.
        """
        seconds = check_wait_timeout(timeout)
        require_no_recorder("insert_and_wait")
        self._get_open_pool()
        loop, waiter = asyncio.get_running_loop(), self._waiter
        deadline = loop.time() + seconds
        with waiter.listening_for_job_ends():
            inserted: InsertResult | None = None
            with anyio.move_on_after(seconds):
                inserted = await self.insert(args, with_end_notification(opts))
            if inserted is None:
                raise WaitTimeoutError([], last_states={}, timeout=seconds)
            job_id = inserted.job.id
            rows = await waiter.wait([job_id], max(deadline - loop.time(), 0.0))
        return rows[job_id]

    @cached_property
    def _waiter(self) -> JobWaiter:
        """The JobWaiter that all waits of this client share, created at its first use."""
        from riverpy._waiting.waiter import JobWaiter  # most clients do not need it

        return JobWaiter(
            self._shared_pool_connection,
            self._listener,
            schema=self._config.schema,
            trace_internal=self._config.trace_internal,
            can_notify=self._config.insert_notify,
        )

    async def _close_waiter_and_listener(self) -> None:
        """End all waits and close the connection for LISTEN. A cancellation of the caller does not
        interrupt this method."""

        # Forget the waiter and the listener, because the next ones may run in another event loop.
        waiter: JobWaiter | None = vars(self).pop("_waiter", None)
        listener: SharedListener | None = vars(self).pop("_listener", None)

        async def close() -> None:
            if waiter is not None:
                await waiter.close()
            if listener is not None:
                await listener.close()

        if waiter is not None or listener is not None:
            await run_despite_cancellation(close)


def with_end_notification(opts: InsertOpts | None) -> InsertOpts | None:
    """Return the options with `notify_end=True`. If `opts` is not InsertOpts, return it unchanged,
    because the insert raises an error for it."""
    if opts is None:
        return InsertOpts(notify_end=True)
    if not isinstance(opts, InsertOpts):  # pyright: ignore[reportUnnecessaryIsInstance]
        return opts
    return msgspec.structs.replace(opts, notify_end=True)


def check_job_ids(job_ids: Iterable[int]) -> list[int]:
    """Return the ids as a list. Raise ConfigError if an id is not an integer of 64 bits."""
    if not isinstance(job_ids, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"job_ids is a list of ids of jobs, got {job_ids!r}")
    ids = list(job_ids)
    for job_id in ids:
        check_job_id(job_id)
    return ids


def check_wait_timeout(timeout: timedelta | None) -> float:
    """Return a timeout in seconds. None becomes infinity. Raise ConfigError if the timeout is not
    above zero."""
    if timeout is None:
        return math.inf
    if not isinstance(timeout, timedelta) or timeout <= timedelta(0):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"the timeout of a wait is a timedelta above zero or None, got {timeout!r}"
        )
    return timeout.total_seconds()
