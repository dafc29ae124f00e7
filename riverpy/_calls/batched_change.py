"""BatchedChange: changes many jobs, some of them in each transaction."""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from itertools import chain
from typing import TYPE_CHECKING, Protocol

import anyio
import msgspec

from riverpy._lifecycle import run_despite_cancellation
from riverpy._postgres import job_lists
from riverpy._postgres.batch_sender import split_batch
from riverpy._postgres.driver import (
    PostgresError,
    UniqueViolationError,
    describe_error,
    is_permanent_statement_error,
    is_unreadable_value_error,
)
from riverpy._postgres.job_maintenance import job_set_lock_timeout
from riverpy.job_list import JobChanges

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from riverpy._calls.job_filters import CheckedFilters
    from riverpy._postgres.driver import Transaction
    from riverpy._postgres.job_lists import BatchRow

BATCH_JOBS = 1_000
"""The number of jobs that one statement changes."""
CHUNK_JOBS = 50_000
"""The number of ids that are read at a time. A statement may have to read all ids that pass the
filters to find the next ones, so few statements are better."""
REASONS_MAX = 100
"""The maximum number of refused jobs whose reasons are kept."""
LOCK_DELAYS = (0.1, 0.2, 0.4, 0.8, 1.5, 2.0)
"""Seconds before each new try at the jobs that other sessions have locked: 5 in all."""
LOCK_TIMEOUT = timedelta(milliseconds=500)
"""The timeout of a wait for a session that takes the unique key of one of the jobs. Locked rows are
not waited for."""
LOCK_WAITS_MAX = 30
"""The maximum number of such waits for one batch. After more, the other jobs of the batch are tried
again later. If none could be changed, the table may be locked, so the change fails."""
UNIQUE_REASON = "another job has the same unique key"
LOCKED_REASON = "another session has locked the job, or takes its unique key"
_WAIT_SQLSTATES = {"40P01", "55P03"}
"""The SQLSTATEs of a deadlock and of a lock timeout: another session has taken the unique key of
one of the jobs, and has not committed."""
_FORBIDDEN_CLASS = "42"
"""The SQLSTATE class of a missing permission or table. Such an error affects all jobs."""


class BatchStatement(Protocol):
    """A statement that changes some jobs, for example `job_retry_batch`."""

    async def __call__(
        self,
        connection: Transaction,
        schema: str | None,
        filters: Mapping[str, object],
        batch: Sequence[int],
    ) -> BatchRow:
        """Change these jobs if they pass the filters."""
        ...


class OpenTransaction(Protocol):
    """Opens a transaction of a client, or a savepoint in `tx`."""

    def __call__(self, tx: Transaction | None) -> AbstractAsyncContextManager[Transaction]:
        """Open it."""
        ...


class BatchedChange:
    """One change of many jobs, in batches."""

    def __init__(
        self,
        transaction: OpenTransaction,
        schema: str | None,
        statement: BatchStatement,
        filters: CheckedFilters,
        limit: int | None,
        tx: Transaction | None,
    ) -> None:
        """Prepare the change of the first `limit` jobs (None: of all). `tx` is the caller's
        transaction; None: each batch is a transaction of its own."""
        self._transaction = transaction
        self._schema = schema
        self._statement = statement
        self._filters = filters
        self._other_filters = filters.without("ids").values
        """The filters for jobs whose ids are given."""
        self._limit = limit
        self._tx = tx
        self._changes = JobChanges()
        self._locked: list[int] = []

    async def run(self, on_progress: Callable[[JobChanges], object] | None) -> JobChanges:
        """Change all jobs, and return what was done."""
        async for ids in self._chunks():
            await self._change_all(ids, on_progress)
        for delay in LOCK_DELAYS:
            if not self._locked:
                break
            await anyio.sleep(delay)
            ids, self._locked = self._locked, []
            await self._change_all(ids, on_progress)
        if self._locked:
            self._refuse(dict.fromkeys(self._locked, LOCKED_REASON))
            self._locked = []
            if on_progress is not None:
                on_progress(self._changes)
        return self._changes

    async def _chunks(self) -> AsyncGenerator[list[int]]:
        """Yield the ids of the jobs, sorted."""
        if (ids := self._filters.ids) is not None:
            yield ids[: self._limit]
            return
        async with self._transaction(self._tx) as connection:
            last_id = await job_lists.job_last_id(connection, self._schema)
        after_id = 0
        left = last_id if self._limit is None else self._limit
        while after_id < last_id and left:
            limit = min(CHUNK_JOBS, left)
            async with self._transaction(self._tx) as connection:
                ids = await job_lists.job_ids(
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

    async def _change_all(
        self, ids: Sequence[int], on_progress: Callable[[JobChanges], object] | None
    ) -> None:
        for start in range(0, len(ids), BATCH_JOBS):
            batch = list(ids[start : start + BATCH_JOBS])
            # A cancelled statement may have been committed: then the counts would be wrong.
            await run_despite_cancellation(lambda batch=batch: self._change(batch))
            if on_progress is not None:
                on_progress(self._changes)

    async def _change(self, batch: list[int]) -> None:
        """Change some jobs. If one of them makes the statement fail, the others are changed in
        smaller and smaller parts. The number of waits for other sessions is limited."""
        parts = deque([batch])
        waits = 0
        has_changed_part = False
        while parts:
            part = parts.popleft()
            try:
                async with self._transaction(self._tx) as connection:
                    if self._tx is None:
                        await job_set_lock_timeout(connection, LOCK_TIMEOUT)
                    row = await self._statement(connection, self._schema, self._other_filters, part)
            except PostgresError as error:
                is_waiting = error.sqlstate in _WAIT_SQLSTATES
                waits += is_waiting
                if waits > LOCK_WAITS_MAX and has_changed_part:
                    self._locked += [*part, *chain.from_iterable(parts)]
                    return
                if waits > LOCK_WAITS_MAX or not (is_waiting or _is_job_refused(error)):
                    raise  # the table is locked, or the error affects all jobs
                if len(part) > 1:
                    parts.extendleft(reversed(split_batch(part)))
                elif is_waiting:
                    self._locked += part
                else:
                    is_unique = isinstance(error, UniqueViolationError)
                    reason = UNIQUE_REASON if is_unique else describe_error(error)
                    self._refuse({part[0]: reason})
            else:
                has_changed_part = True
                await self._count(part, row)

    async def _count(self, part: list[int], row: BatchRow) -> None:
        unchanged = len(row.found) - row.changed - len(row.refused)
        missing = 0
        if len(row.found) < len(part):
            rest = set(part).difference(row.found)
            async with self._transaction(self._tx) as connection:
                passing = await job_lists.job_batch_rest(
                    connection, self._schema, self._other_filters, list(rest)
                )
            missing = len(rest) - len(passing)
            locked = [job_id for job_id, passes in passing.items() if passes]
            self._locked += locked
            unchanged += len(passing) - len(locked)
        before = self._changes
        self._changes = msgspec.structs.replace(
            before,
            changed=before.changed + row.changed,
            running=before.running + row.running,
            unchanged=before.unchanged + unchanged,
            missing=before.missing + missing,
        )
        self._refuse(dict.fromkeys(row.refused, UNIQUE_REASON))

    def _refuse(self, reasons: dict[int, str]) -> None:
        before = self._changes
        kept = dict(before.reasons)
        for job_id, reason in reasons.items():
            if len(kept) < REASONS_MAX:
                kept[job_id] = reason
        self._changes = msgspec.structs.replace(
            before, refused=before.refused + len(reasons), reasons=kept
        )


def _is_job_refused(error: PostgresError) -> bool:
    """Whether one of the jobs makes the statement fail, and not the database."""
    sqlstate: str = getattr(error, "sqlstate", None) or ""
    return (
        is_permanent_statement_error(error) or is_unreadable_value_error(error)
    ) and not sqlstate.startswith(_FORBIDDEN_CLASS)
