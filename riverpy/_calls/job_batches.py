"""JobBatchMethods: the methods of a client that delete one or many jobs, and those that retry or
cancel many jobs."""

from __future__ import annotations

from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, NamedTuple, Unpack

from riverpy._calls.base import ClientMethods
from riverpy._calls.batched_change import BatchedJobChange
from riverpy._calls.job_filters import check_filters, require_filter
from riverpy._calls.job_page import (
    JOB_LIMIT_DEFAULT,
    check_job_id,
    check_limit,
    check_whole_number,
)
from riverpy._postgres import job_lists
from riverpy._postgres.damaged_jobs import translate_damage_error
from riverpy._postgres.driver import (
    PostgresError,
    describe_error,
    is_damaged_or_untranslatable_error,
)
from riverpy.errors import ConfigError, JobDamagedError, JobRunningError, NotFoundError
from riverpy.job import JobColumn, JobRow, JobState, get_raw_state

if TYPE_CHECKING:
    from collections.abc import Callable

    from riverpy._calls.batched_change import JobBatchFunction
    from riverpy._postgres.sessions.protocols import CallerTransaction
    from riverpy.job_list import JobChanges, JobFilters


class BatchMethod(NamedTuple):
    """A method that changes jobs in batches: its name, and the function that executes the statement
    for one batch."""

    method_name: str
    statement: JobBatchFunction


class JobBatchMethods(ClientMethods):
    """The methods of a client that delete one or many jobs, and those that retry or cancel many
    jobs."""

    async def job_delete(self, job_id: int, *, tx: CallerTransaction | None = None) -> JobRow:
        """Delete a job. Return the job as it was before.

        Raises:
            ConfigError: the id is not an integer of 64 bits.
            NotFoundError: there is no job with this id.
            JobRunningError: the job is running. Nothing was changed.
            JobDamagedError: the server cannot read the job. Nothing was changed.
        """
        check_job_id(job_id)
        with translate_damage_error(job_id):
            async with self._transaction(tx) as connection:
                row = await job_lists.job_delete(connection, self._config.schema, job_id)
        if row is None:
            raise NotFoundError(f"there is no job {job_id}")
        job = JobRow(tuple(row))
        if get_raw_state(job) == JobState.RUNNING:
            raise JobRunningError(
                f"job {job_id} is running, so it was not deleted: cancel it, and delete it when it "
                "has ended"
            )
        return job

    async def job_delete_many(
        self,
        *,
        limit: int = JOB_LIMIT_DEFAULT,
        unsafe_all: bool = False,
        tx: CallerTransaction | None = None,
        **filters: Unpack[JobFilters],
    ) -> list[JobRow]:
        """Delete jobs that pass all filters, the lowest ids first. Return the jobs as they were
        before, in the order of their ids.

        Running jobs and jobs that another session has locked are not deleted. They do not count
        toward `limit`.

        Args:
            limit: the maximum number of jobs, from 1 to 10,000. Default 100. To delete more jobs,
                use `job_delete_in_batches`.
            unsafe_all: allow a call without a filter, which deletes jobs of all kinds. Default
                False.
            tx: as for `insert`.
            filters: see `riverpy.JobFilters`.

        Raises:
            ConfigError: a filter or the limit is not allowed. Also raised if no filter is given and
                `unsafe_all` is False.
            JobDamagedError: the server cannot read one of the jobs. Nothing was changed.
        """
        checked = check_filters(filters)
        check_limit(limit)
        if not unsafe_all:
            require_filter(checked, "job_delete_many")
        try:
            async with self._transaction(tx) as connection:
                rows = await job_lists.job_delete_many(
                    connection, self._config.schema, checked.values, limit
                )
        except PostgresError as error:
            if not is_damaged_or_untranslatable_error(error):
                raise
            raise JobDamagedError(
                f"the server cannot read one of the jobs to delete ({describe_error(error)}), so "
                "nothing was deleted: job_list with the same filters names it"
            ) from error
        return [JobRow(tuple(row)) for row in sorted(rows, key=lambda row: row[JobColumn.ID])]

    async def job_retry_many(
        self,
        *,
        limit: int | None = None,
        on_progress: Callable[[JobChanges], object] | None = None,
        tx: CallerTransaction | None = None,
        **filters: Unpack[JobFilters],
    ) -> JobChanges:
        """Make all jobs that pass all filters available now, each in the same way as `job_retry`.
        Return the numbers of changed, unchanged, missing and refused jobs.

        The jobs are changed in batches of 1,000, in the order of their ids. Each batch has its own
        transaction and notifies each queue once. Jobs that were inserted after the call are not
        changed. If the call is cancelled, the current batch is finished first and its changes stay.

        A job is refused, i.e. not retried, if another job has the same unique key. The rest of the
        jobs are still retried. If another session has locked a job, the call tries again for 5
        seconds and then refuses the job. The same applies if another open transaction has inserted
        a job with the same unique key.

        Args:
            limit: the maximum number of jobs to change, the lowest ids first. Default None: no
                limit.
            on_progress: a plain function, not `async def`. It is called after each batch with the
                numbers so far. If it raises, the call ends with this error and starts no further
                batch.
            tx: your connection, in a transaction. All batches run in it. If the call fails, nothing
                was changed.
            filters: see `riverpy.JobFilters`. At least one is needed. `ids` takes up to 1,000,000.

        Raises:
            ConfigError: no filter is given, or a filter, the limit or `on_progress` is not allowed.
        """
        method = BatchMethod("job_retry_many", job_lists.job_retry_batch)
        return await self._change_jobs_in_batches(method, filters, limit, on_progress, tx)

    async def job_cancel_many(
        self,
        *,
        limit: int | None = None,
        on_progress: Callable[[JobChanges], object] | None = None,
        tx: CallerTransaction | None = None,
        **filters: Unpack[JobFilters],
    ) -> JobChanges:
        """Cancel all jobs that pass all filters, each in the same way as `job_cancel`. Return the
        numbers of changed, unchanged, missing and refused jobs.

        The clients that run the jobs are notified. The jobs are cancelled in batches of 1,000, each
        in its own transaction. If another session has locked a job, the call tries again for 5
        seconds and then refuses the job. Details: see `job_retry_many`.

        Args:
            limit, on_progress, tx, filters: as for `job_retry_many`.

        Raises:
            ConfigError: no filter is given, or a filter, the limit or `on_progress` is not allowed.
        """
        method = BatchMethod("job_cancel_many", job_lists.job_cancel_batch)
        return await self._change_jobs_in_batches(method, filters, limit, on_progress, tx)

    async def job_delete_in_batches(
        self,
        *,
        limit: int | None = None,
        on_progress: Callable[[JobChanges], object] | None = None,
        tx: CallerTransaction | None = None,
        **filters: Unpack[JobFilters],
    ) -> JobChanges:
        """Delete all jobs that pass all filters, without reading their content. Return the numbers
        of deleted, unchanged, missing and refused jobs.

        Running jobs are not deleted. The jobs are deleted in batches of 1,000, each in its own
        transaction. If another session has locked a job, the call tries again for 5 seconds and
        then refuses the job. Details: see `job_retry_many`.

        Args:
            limit, on_progress, tx, filters: as for `job_retry_many`.

        Raises:
            ConfigError: no filter is given, or a filter, the limit or `on_progress` is not allowed.
        """
        method = BatchMethod("job_delete_in_batches", job_lists.job_delete_batch)
        return await self._change_jobs_in_batches(method, filters, limit, on_progress, tx)

    async def _change_jobs_in_batches(
        self,
        method: BatchMethod,
        filters: JobFilters,
        limit: int | None,
        on_progress: Callable[[JobChanges], object] | None,
        tx: CallerTransaction | None,
    ) -> JobChanges:
        schema, statement = self._config.schema, method.statement
        checked = check_filters(filters)
        require_filter(checked, method.method_name)
        if limit is not None:
            check_whole_number(limit, "limit", 2**63 - 1)
        if on_progress is not None:
            _check_progress_callback(on_progress)
        if tx is None:
            change = BatchedJobChange(self._transaction, schema, statement, checked, limit, None)
            return await change.run(on_progress)
        async with self._transaction(tx) as connection:
            change = BatchedJobChange(
                self._transaction, schema, statement, checked, limit, connection
            )
            return await change.run(on_progress)


def _check_progress_callback(on_progress: object) -> None:
    """Raise ConfigError if `on_progress` is not a plain function, i.e. one that is called without
    `await`."""
    if not callable(on_progress):
        raise ConfigError(f"on_progress must be a function, got {type(on_progress).__name__}")
    if iscoroutinefunction(on_progress) or iscoroutinefunction(type(on_progress).__call__):
        raise ConfigError(
            "on_progress must be a plain function: an `async def` function would not be awaited"
        )
