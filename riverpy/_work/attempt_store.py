"""AttemptStore: writes into the rows of running jobs, before their attempts end.

Each write checks the claim key. So a write changes nothing if the attempt no longer belongs to this
client.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import anyio
import msgspec

from riverpy._clock import Backoff
from riverpy._postgres import jobs
from riverpy._postgres.driver import (
    DATABASE_ERRORS,
    LockNotAvailableError,
    UniqueViolationError,
    is_permanent_statement_error,
)
from riverpy._postgres.transactions import validate_and_adapt_tx
from riverpy._work.output_saver import OutputSaver
from riverpy._work.progress_reports import ProgressReports
from riverpy.errors import AttemptLostError, TransactionError, UniqueConflictError
from riverpy.job import JobRow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from contextlib import AbstractAsyncContextManager

    from riverpy._fleet.outbox import FleetOutbox
    from riverpy._postgres.driver import Transaction
    from riverpy._postgres.jobs import ClaimKey
    from riverpy._postgres.sessions.protocols import CallerTransaction

METADATA_MERGE_RETRY_DELAY_MIN = timedelta(milliseconds=50)
METADATA_MERGE_RETRY_DELAY_MAX = timedelta(seconds=2)
ROW_LOCK_TIMEOUT = "5s"
"""How long a statement on the client's pool may wait for a transaction that has locked the job's
row. The value is a `lock_timeout` of PostgreSQL, with its unit."""


class RunningJobEventPublisher(Protocol):
    """Publishes events of running jobs to the clients that follow this client, i.e. receive its
    events."""

    fleet_outbox: FleetOutbox | None
    """The events that are not yet sent to the clients that follow this client. None if no client
    follows this client."""

    def publish_started_jobs(self, jobs: Iterable[JobRow]) -> None:
        """Publish that attempts have started."""

    def publish_saved_output(self, job: JobRow) -> None:
        """Publish that a running job has stored its output."""


class AttemptStore:
    """Writes into the rows of running jobs of one client."""

    def __init__(
        self,
        transaction: Callable[[CallerTransaction | None], AbstractAsyncContextManager[Transaction]],
        schema: str | None,
        events: RunningJobEventPublisher,
        client_id: str,
    ) -> None:
        """Create a store.

        Args:
            transaction: takes a caller's transaction and opens a savepoint in it. If it gets None,
                it opens a transaction on the client's pool.
            client_id: the id under which the client claims jobs.
        """
        self._transaction, self._schema = transaction, schema
        self.events = events
        self.client_id = client_id
        self.progress_reports = ProgressReports()
        """The progress that jobs have reported and that is not stored yet."""
        self.output_saver = OutputSaver(
            self.merge_metadata_with_retries, events.publish_saved_output
        )

    async def merge_metadata(
        self,
        claim_key: ClaimKey,
        updates: Mapping[str, str],
        *,
        tx: CallerTransaction | None = None,
    ) -> None:
        """Merge metadata keys and their values (JSON texts) into the row of a running job.

        Raises:
            AttemptLostError: the attempt no longer belongs to this client. Nothing was written.
            Exception: one of DATABASE_ERRORS.
        """
        async with self._transaction(tx) as connection:
            is_stored = await jobs.job_merge_running_metadata(
                connection,
                self._schema,
                claim_key,
                updates=encode_json_object(updates),
                lock_timeout=ROW_LOCK_TIMEOUT if tx is None else None,
            )
            if not is_stored:
                raise _make_attempt_lost_error(claim_key)

    async def merge_metadata_with_retries(
        self, claim_key: ClaimKey, updates: Mapping[str, str], *, timeout: float
    ) -> None:
        """Call `merge_metadata` on the client's pool. After a lost connection or another temporary
        error, retry for at most `timeout` seconds.

        Raises:
            AttemptLostError: the attempt no longer belongs to this client. Nothing was written.
            TransactionError: at the last try, another transaction still locked the row.
            Exception: one of DATABASE_ERRORS, after the last try.
        """
        give_up_at = time.monotonic() + timeout
        backoff = Backoff(METADATA_MERGE_RETRY_DELAY_MIN, METADATA_MERGE_RETRY_DELAY_MAX)
        while True:
            try:
                await self.merge_metadata(claim_key, updates)
            except DATABASE_ERRORS as error:
                if is_permanent_statement_error(error) or time.monotonic() > give_up_at:
                    if isinstance(error, LockNotAvailableError):
                        raise _make_row_locked_error(claim_key) from None
                    raise
            else:
                return
            await anyio.sleep(backoff.next_delay())

    async def complete_job(
        self, claim_key: ClaimKey, updates: str | None, tx: CallerTransaction
    ) -> JobRow:
        """Complete a running job in the caller's transaction, and return its row. `updates` is a
        JSON object that is merged into the job's metadata, or None.

        Raises:
            AttemptLostError: the attempt no longer belongs to this client. The transaction stays
                usable.
            UniqueConflictError: another job has the same unique key.
            TypeError: riverpy does not know the type of `tx`.
        """
        validate_and_adapt_tx(tx)  # None would open a transaction on the client's pool
        try:
            async with self._transaction(tx) as connection:
                row = await jobs.job_complete_with_metadata(
                    connection, self._schema, claim_key, updates=updates
                )
                if row is None:
                    raise _make_attempt_lost_error(claim_key)
        except UniqueViolationError:
            raise UniqueConflictError(
                f"job {claim_key.id} cannot be completed: another job has the same unique key"
            ) from None
        return JobRow(tuple(row))


def encode_json_object(members: Mapping[str, str]) -> str:
    """Return the text of a JSON object. `members` contains the JSON text of each value, by key."""
    texts = (f"{msgspec.json.encode(key).decode()}:{text}" for key, text in members.items())
    return "{" + ",".join(texts) + "}"


def _make_row_locked_error(claim_key: ClaimKey) -> TransactionError:
    return TransactionError(
        f"the row of job {claim_key.id} is locked by another transaction, perhaps the job's own: "
        "after job.checkpoint(tx) or job.complete_tx(tx), end the transaction before a step with "
        "keep=True, and before job.checkpoint() without tx"
    )


def _make_attempt_lost_error(claim_key: ClaimKey) -> AttemptLostError:
    return AttemptLostError(
        f"attempt {claim_key.attempt} of job {claim_key.id} has ended in the database: the job was "
        "completed already, rescued, changed or deleted. Nothing was written: end the job, and "
        "roll back what belongs to it"
    )
