"""advance: lets a test act as if time has passed for its jobs and periodic jobs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, overload
from weakref import WeakKeyDictionary

from riverpy._postgres.moved_times import (
    get_time_until_next_periodic_run,
    move_times_of_jobs_into_past,
    move_times_of_periodic_jobs_into_past,
)
from riverpy._postgres.periodic import periodic_table_exists
from riverpy.client import Client
from riverpy.errors import ConfigError
from riverpy.testing._inline_client import InlineClient
from riverpy.testing._periodic_run import PeriodicServiceRunner, TestTime
from riverpy.testing._test_transaction import TestTransaction, run_in_transaction
from riverpy.testing.clock import FixedClock
from riverpy.worker import Workers

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from riverpy._postgres.sessions.protocols import BlockingTransaction, CallerTransaction

DUE_TIMES_MAX = 1_000
"""The maximum number of due times of periodic jobs in one call of `advance`."""
CLOCK_DRIFT_MAX = timedelta(minutes=1)
"""If a FixedClock differs by more than this from the time of the test, the test itself has moved
the clock. Then `advance` uses the time of the clock."""
_offset_by_client: WeakKeyDictionary[Client, timedelta] = WeakKeyDictionary()
"""By how much `advance` has moved the time of each client so far."""


@overload
def advance(by: timedelta, *, client: Client | None = None, tx: BlockingTransaction) -> None: ...
@overload
def advance(
    by: timedelta, *, client: Client | None = None, tx: CallerTransaction | None = None
) -> Coroutine[object, None, None]: ...
def advance(
    by: timedelta,
    *,
    client: Client | None = None,
    tx: BlockingTransaction | CallerTransaction | None = None,
) -> Coroutine[object, None, None] | None:
    """Act as if time has passed: jobs become due or expire, and periodic jobs insert their jobs.

    A test cannot change the server's clock. So this function moves the times in all rows into the
    past: `scheduled_at`, `created_at`, `attempted_at`, `finalized_at`, the time at which a job
    expires, and the next runs of periodic jobs. Use it only in a database for tests.

    Then `advance` makes due jobs available. It does not work them: `drain` does. If the client's
    `Config.clock` is a `FixedClock`, this clock is moved too, so that the periods of
    `UniqueOpts.by_period` end. With a blocking session as `tx` the call needs no `await`.

    Args:
        by: the time that passes, zero or more. At most 1,000 runs of periodic jobs may be due in
            it.
        client: the client with the periodic jobs and the schema of the tables. Without `tx` it must
            be open. Pass the same client to each call in a test, so that its schedules continue.
            Default None: there are no periodic jobs.
        tx: your connection or session, in a transaction. Nothing is committed. Default None: use
            the client's pool.

    Raises:
        ConfigError: `by` is negative, there is neither `client` nor `tx`, or a periodic job fails.
        ClientStateError: the client is not open, and there is no `tx`.
        TransactionError: `tx` is closed, aborted or not in a transaction.
        SchemaMissingError: the database has no River tables.
    """

    async def advance_in(transaction: TestTransaction | None) -> None:
        _check_duration(by)
        given = Client() if client is None else client
        source: Client = given
        if transaction is not None:
            source = InlineClient(transaction, given.workers, given.config)
        time = TestTime(_get_clock_offset(given))
        try:
            await _TimeAdvancer(given, source, time).advance_by(by)
        finally:
            if client is not None:
                _offset_by_client[client] = time.offset

    if client is None and tx is None:
        raise ConfigError("advance needs client= or tx=, which lead to the database")
    return advance_in(None) if tx is None else run_in_transaction(tx, advance_in)


def _check_duration(by: object) -> None:
    if not isinstance(by, timedelta):
        raise ConfigError(f"advance takes a timedelta, got {type(by).__name__}")
    if by < timedelta(0):
        raise ConfigError(f"time cannot go back, got {by}: advance takes a duration of 0 or more")


def _get_clock_offset(client: Client) -> timedelta:
    """Return how far the time of the client is ahead of the server's time."""
    offset = _offset_by_client.get(client, timedelta(0))
    clock = client.config.clock
    if isinstance(clock, FixedClock):
        difference = clock() - datetime.now(UTC)
        if abs(difference - offset) > CLOCK_DRIFT_MAX:
            return difference
    return offset


class _TimeAdvancer:
    """Moves the times of jobs and periodic jobs for one call of `advance`."""

    def __init__(self, client: Client, source: Client, time: TestTime) -> None:
        """Prepare to move the times. `client` has the periodic jobs. `source` is the client whose
        connections are used."""
        self._open_transaction, self._time = InlineClient.get_transaction_opener(source), time
        self._schema, self._clock = client.config.schema, client.config.clock
        self._periodic_run = PeriodicServiceRunner(
            client.config,
            client.workers or Workers(),
            self._open_transaction,
            InlineClient.get_inserter(source),
            client.periodic_jobs,
            time,
        )
        self._has_periodic_table = False

    async def advance_by(self, duration: timedelta) -> None:
        """Move the test's time to each due time of a periodic job in `duration`, and insert the
        jobs that are due. Then move the time to the end of `duration`.

        The rows of jobs are moved only once, at the end, because each move rewrites all rows.
        """
        async with self._open_transaction(isolation="autocommit") as connection:
            self._has_periodic_table = await periodic_table_exists(connection, self._schema)
        end = self._time.offset + duration
        await self._periodic_run.insert_due_jobs()
        due_time_count = 0
        while left := end - self._time.offset:
            if due_time_count >= DUE_TIMES_MAX:
                raise ConfigError(
                    f"more than {DUE_TIMES_MAX:,} due times of periodic jobs are in this time: "
                    f"{left} of it is left. Advance in shorter steps"
                )
            due_time_count += 1
            await self._move_to_next_due_time(
                min(left, await self._get_time_until_next_due_time(left))
            )
        if duration:
            offsets = self._periodic_run.offset_by_job_id.items()
            async with self._open_transaction(isolation="autocommit") as connection:
                await move_times_of_jobs_into_past(
                    connection,
                    self._schema,
                    duration,
                    distance_by_job_id={job_id: end - offset for job_id, offset in offsets},
                )
        await self._periodic_run.make_due_jobs_available()

    async def _get_time_until_next_due_time(self, time_max: timedelta) -> timedelta:
        if not self._has_periodic_table or not self._periodic_run.row_ids:
            return time_max
        async with self._open_transaction(isolation="autocommit") as connection:
            time = await get_time_until_next_periodic_run(
                connection, self._schema, self._periodic_run.row_ids
            )
        return time_max if time is None else max(time, timedelta(microseconds=1))

    async def _move_to_next_due_time(self, step: timedelta) -> None:
        if self._has_periodic_table:
            async with self._open_transaction(isolation="autocommit") as connection:
                await move_times_of_periodic_jobs_into_past(connection, self._schema, step)
        self._time.offset += step
        if isinstance(self._clock, FixedClock):
            self._clock.advance(step)
        await self._periodic_run.insert_due_jobs()
