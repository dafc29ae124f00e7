"""BatchedJobChange: retries, cancels or deletes many jobs in batches."""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from itertools import chain
from typing import TYPE_CHECKING, Protocol

import msgspec

from riverpy._lifecycle import run_despite_cancellation
from riverpy._postgres import job_lists
from riverpy._postgres.batch_sender import split_batch
from riverpy._postgres.driver import (
    PostgresError,
    UniqueViolationError,
    describe_error,
    is_damaged_or_untranslatable_error,
    is_permanent_statement_error,
)
from riverpy._postgres.job_maintenance import job_set_lock_timeout
from riverpy._without_loop import sleep
from riverpy.job_list import JobChanges

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from riverpy._calls.job_filters import CheckedFilters
    from riverpy._postgres.driver import Transaction
    from riverpy._postgres.job_lists import BatchChangeResult
    from riverpy._postgres.sessions.protocols import CallerTransaction

JOBS_PER_BATCH = 1_000
"""The number of jobs that one statement changes."""
JOB_IDS_PER_READ = 50_000
"""The number of job ids that one statement reads. It is large because each such statement may scan
all jobs that pass the filters."""
REFUSAL_REASONS_MAX = 100
"""The maximum number of refused jobs for which `JobChanges.reasons` has an entry."""
LOCKED_JOB_RETRY_DELAYS = (0.1, 0.2, 0.4, 0.8, 1.5, 2.0)
"""The delays, in seconds, before the change is tried again on jobs that other sessions have locked.
The delays add up to 5 seconds."""
UNIQUE_KEY_LOCK_TIMEOUT = timedelta(milliseconds=500)
"""The lock timeout of a statement that changes jobs, unless it runs in the caller's transaction.
The statement skips locked rows. It waits for another open transaction that has taken the unique key
of one of the jobs, for example by an insert, or that has locked the whole table."""
LOCK_WAITS_PER_BATCH_MAX = 30
"""The maximum number of statements of one batch that may fail because of a lock. If one more fails,
the batch ends, and its remaining jobs are tried again later. If no statement of the batch has
succeeded, the whole call fails instead, because the table may be locked."""
UNIQUE_CONFLICT_REASON = "another job has the same unique key"
JOB_LOCKED_REASON = "another session has locked the job, or takes its unique key"
_LOCK_CONFLICT_SQLSTATES = {"40P01", "55P03"}
"""The SQLSTATEs of a deadlock and of a lock timeout. The statements skip locked rows, so the usual
cause is another open transaction that has taken the unique key of one of the jobs."""
_ACCESS_ERROR_SQLSTATE_CLASS = "42"
"""The SQLSTATE class of errors such as a missing permission or table. Such an error affects all
jobs."""


class JobBatchFunction(Protocol):
    """A function that executes the statement for one batch of jobs, for example
    `job_retry_batch`."""

    async def __call__(
        self,
        connection: Transaction,
        schema: str | None,
        filters: Mapping[str, object],
        batch: Sequence[int],
    ) -> BatchChangeResult:
        """Change the jobs that pass `filters` and whose ids are in `batch`."""
        ...


class TransactionOpener(Protocol):
    """A function that opens a savepoint in the caller's transaction, or a new transaction."""

    def __call__(self, tx: CallerTransaction | None) -> AbstractAsyncContextManager[Transaction]:
        """Open a savepoint in `tx`. If `tx` is None, open a new transaction."""
        ...


class BatchedJobChange:
    """Applies one change, for example a cancellation, to all jobs that pass the filters, in
    batches."""

    def __init__(
        self,
        transaction: TransactionOpener,
        schema: str | None,
        statement: JobBatchFunction,
        filters: CheckedFilters,
        limit: int | None,
        tx: CallerTransaction | None,
    ) -> None:
        """Prepare the change without starting it.

        `limit` is the maximum number of jobs, in the order of their ids; None means no limit. `tx`
        is the caller's transaction; None means that each batch has its own transaction.
        """
        self._open_transaction = transaction
        self._schema = schema
        self._statement = statement
        self._filters = filters
        self._filters_without_ids = filters.without_filter("ids").values
        """The filters without `ids`. The statements receive the job ids in a separate parameter."""
        self._limit = limit
        self._tx = tx
        self._changes = JobChanges()
        self._locked_job_ids: list[int] = []

    async def run(self, on_progress: Callable[[JobChanges], object] | None) -> JobChanges:
        """Change all jobs in batches. Return how many jobs were changed, unchanged, missing and
        refused."""
        async for ids in self._iterate_job_ids():
            await self._change_in_batches(ids, on_progress)
        for delay in LOCKED_JOB_RETRY_DELAYS:
            if not self._locked_job_ids:
                break
            await sleep(delay)
            ids, self._locked_job_ids = self._locked_job_ids, []
            await self._change_in_batches(ids, on_progress)
        if self._locked_job_ids:
            self._record_refusals(dict.fromkeys(self._locked_job_ids, JOB_LOCKED_REASON))
            self._locked_job_ids = []
            if on_progress is not None:
                on_progress(self._changes)
        return self._changes

    async def _iterate_job_ids(self) -> AsyncGenerator[list[int]]:
        """Yield lists of the ids of the jobs to change, in ascending order."""
        if (ids := self._filters.ids) is not None:
            yield ids[: self._limit]
            return
        async with self._open_transaction(self._tx) as connection:
            last_id = await job_lists.job_get_last_id(connection, self._schema)
        after_id = 0
        left = last_id if self._limit is None else self._limit
        while after_id < last_id and left:
            limit = min(JOB_IDS_PER_READ, left)
            async with self._open_transaction(self._tx) as connection:
                ids = await job_lists.job_list_ids_in_range(
                    connection,
                    self._schema,
                    self._filters.values,
                    after_id=after_id,
                    last_id=last_id,
                    limit=limit,
                )
            yield ids
            if len(ids) < limit:
                return
            after_id = ids[-1]
            left -= limit

    async def _change_in_batches(
        self, ids: Sequence[int], on_progress: Callable[[JobChanges], object] | None
    ) -> None:
        for start in range(0, len(ids), JOBS_PER_BATCH):
            batch = list(ids[start : start + JOBS_PER_BATCH])
            # A cancellation does not interrupt the statement. If it did, the server could still
            # commit the statement, and the changed jobs would be missing in the counts.
            await run_despite_cancellation(lambda batch=batch: self._change_batch(batch))
            if on_progress is not None:
                on_progress(self._changes)

    async def _change_batch(self, batch: list[int]) -> None:
        """Change the jobs of a batch. If one job makes the statement fail, split the batch and
        change the parts, so that only this job is refused."""
        parts = deque([batch])
        waits = 0
        has_changed_part = False
        while parts:
            part = parts.popleft()
            try:
                async with self._open_transaction(self._tx) as connection:
                    if self._tx is None:
                        await job_set_lock_timeout(connection, UNIQUE_KEY_LOCK_TIMEOUT)
                    row = await self._statement(
                        connection, self._schema, self._filters_without_ids, part
                    )
            except PostgresError as error:
                is_waiting = error.sqlstate in _LOCK_CONFLICT_SQLSTATES
                waits += is_waiting
                if waits > LOCK_WAITS_PER_BATCH_MAX and has_changed_part:
                    self._locked_job_ids += [*part, *chain.from_iterable(parts)]
                    return
                if waits > LOCK_WAITS_PER_BATCH_MAX or not (is_waiting or _is_job_refused(error)):
                    raise  # the table is locked, or the error affects all jobs
                if len(part) > 1:
                    parts.extendleft(reversed(split_batch(part)))
                elif is_waiting:
                    self._locked_job_ids += part
                else:
                    is_unique = isinstance(error, UniqueViolationError)
                    reason = UNIQUE_CONFLICT_REASON if is_unique else describe_error(error)
                    self._record_refusals({part[0]: reason})
            else:
                has_changed_part = True
                await self._count_changes(part, row)

    async def _count_changes(self, part: list[int], row: BatchChangeResult) -> None:
        unchanged = len(row.found_job_ids) - row.changed_count - len(row.refused_job_ids)
        missing = 0
        if len(row.found_job_ids) < len(part):
            rest = set(part).difference(row.found_job_ids)
            async with self._open_transaction(self._tx) as connection:
                passing = await job_lists.job_match_filters(
                    connection, self._schema, self._filters_without_ids, list(rest)
                )
            missing = len(rest) - len(passing)
            locked = [job_id for job_id, passes in passing.items() if passes]
            self._locked_job_ids += locked
            unchanged += len(passing) - len(locked)
        before = self._changes
        self._changes = msgspec.structs.replace(
            before,
            changed=before.changed + row.changed_count,
            running=before.running + row.running_count,
            unchanged=before.unchanged + unchanged,
            missing=before.missing + missing,
        )
        self._record_refusals(dict.fromkeys(row.refused_job_ids, UNIQUE_CONFLICT_REASON))

    def _record_refusals(self, reasons: dict[int, str]) -> None:
        before = self._changes
        kept = dict(before.reasons)
        for job_id, reason in reasons.items():
            if len(kept) < REFUSAL_REASONS_MAX:
                kept[job_id] = reason
        self._changes = msgspec.structs.replace(
            before, refused=before.refused + len(reasons), reasons=kept
        )


def _is_job_refused(error: PostgresError) -> bool:
    """Return whether one job of the statement caused `error`. That job must then be refused."""
    sqlstate: str = getattr(error, "sqlstate", None) or ""
    return (
        is_permanent_statement_error(error) or is_damaged_or_untranslatable_error(error)
    ) and not sqlstate.startswith(_ACCESS_ERROR_SQLSTATE_CLASS)
