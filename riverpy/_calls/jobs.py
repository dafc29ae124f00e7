"""JobMethods: the methods of a client that read or change one job."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from riverpy._calls.base import ClientMethods
from riverpy._calls.job_page import check_job_id
from riverpy._postgres import jobs
from riverpy._postgres.damaged_jobs import translate_damage_error
from riverpy._postgres.driver import UniqueViolationError
from riverpy.errors import NotFoundError, UniqueConflictError
from riverpy.job import JobRow, encode_metadata_value

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from riverpy._calls.base import TransactionIsolation
    from riverpy._postgres.driver import Transaction
    from riverpy._postgres.sessions.protocols import CallerTransaction


class JobMethods(ClientMethods):
    """The methods of a client that read or change one job."""

    async def job_get(self, job_id: int, *, tx: CallerTransaction | None = None) -> JobRow:
        """Return one job.

        Raises:
            ConfigError: the id is not an integer of 64 bits.
            NotFoundError: there is no job with this id.
            JobDamagedError: the server cannot read the job.
        """
        return await self._execute_job_statement(jobs.job_get, job_id, tx, "autocommit")

    async def job_cancel(self, job_id: int, *, tx: CallerTransaction | None = None) -> JobRow:
        """Cancel a job. Return the job.

        If the job is running, the client that runs the job receives the request and cancels the
        job's task. The state becomes `cancelled` when the worker's code has ended. A completed,
        cancelled or discarded job does not change.

        Raises:
            ConfigError, NotFoundError, JobDamagedError: as `job_get`.
        """
        return await self._execute_job_statement(jobs.job_cancel, job_id, tx)

    async def job_retry(self, job_id: int, *, tx: CallerTransaction | None = None) -> JobRow:
        """Make a job available now. Return the job. If the job has no attempts left, it gets one
        more. A running job does not change.

        Raises:
            ConfigError, NotFoundError, JobDamagedError: as `job_get`.
            UniqueConflictError: another job has the same unique key now.
        """
        try:
            return await self._execute_job_statement(jobs.job_retry, job_id, tx)
        except UniqueViolationError:
            raise UniqueConflictError(
                f"job {job_id} cannot be retried: another job has the same unique key"
            ) from None

    async def job_update(
        self, job_id: int, *, output: object, tx: CallerTransaction | None = None
    ) -> JobRow:
        """Set the output of a job in any state (metadata key `output`). Return the job.

        If the job is running and records an output itself, its own output replaces this one when
        the attempt ends.

        Raises:
            ArgsError: the output cannot be encoded as JSON, or is larger than 32 MiB as JSON.
            ConfigError, NotFoundError, JobDamagedError: as `job_get`.
        """
        updates = f'{{"output":{encode_metadata_value(output)}}}'
        statement = partial(jobs.job_update_metadata, metadata_updates=updates)
        return await self._execute_job_statement(statement, job_id, tx)

    async def _execute_job_statement(
        self,
        statement: Callable[[Transaction, str | None, int], Awaitable[Any]],
        job_id: int,
        tx: CallerTransaction | None,
        isolation: TransactionIsolation = "read_committed",
    ) -> JobRow:
        check_job_id(job_id)
        with translate_damage_error(job_id):
            async with self._transaction(tx, isolation=isolation) as connection:
                row = await statement(connection, self._config.schema, job_id)
        if row is None:
            raise NotFoundError(f"there is no job {job_id}")
        return JobRow(row)
