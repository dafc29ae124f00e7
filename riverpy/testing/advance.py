"""advance: lets time pass for the jobs and periodic jobs of a test."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, overload
from weakref import WeakKeyDictionary

from riverpy._postgres.moved_times import (
    get_time_until_next_periodic_run,
    move_times_of_jobs,
    move_times_of_periodic_jobs,
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

SLOTS_MAX = 1_000
"""The maximum number of due times of periodic jobs in one call of `advance`."""
CLOCK_DRIFT_MAX = timedelta(minutes=1)
"""A FixedClock that differs by less than this from the time of the test counts as not moved by the
test itself."""
_offset_by_client: WeakKeyDictionary[Client, timedelta] = WeakKeyDictionary()
"""How far `advance` has moved the time of each client so far."""


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
    """Let time pass: move all times of all jobs and periodic jobs into the past, and insert the
    jobs of periodic jobs that become due.

    The server's clock cannot be changed, so the rows are moved: `scheduled_at`, `created_at`,
    `attempted_at`, `finalized_at`, the time at which a job expires, and the next runs of periodic
    jobs. After that, jobs that are due now are available. They are not worked: `drain` does that. A
    `FixedClock` in the client's `Config.clock` is moved too, so that unique periods end. Use this
    only in a database for tests. With a blocking session as `tx` the call needs no `await`.

    Args:
        by: the time that passes, zero or more. At most 1,000 runs of periodic jobs may be due in
            it.
        client: the client whose periodic jobs insert jobs, and whose schema has the tables. Without
            `tx` it is open. Give the same client to each call of a test, so that its schedules
            continue. Default None: there are no periodic jobs.
        tx: your connection or session, in a transaction. Nothing is committed. Default None: the
            client's pool.

    Raises:
        ConfigError: `by` is negative, there is neither `client` nor `tx`, or a periodic job fails.
        ClientStateError: the client is not open, and there is no `tx`.
        TransactionError: `tx` is not usable.
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
            await _TimeAdvancer(given, source, time).pass_time(by)
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
    """Return the distance of the client's time from the server's time."""
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
        """`client` has the periodic jobs. `source` gives the connection."""
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

    async def pass_time(self, duration: timedelta) -> None:
        """Let time pass from one due time of a periodic job to the next, and then to the end.

        The rows of jobs are moved once, at the end: a move at each due time would rewrite all rows.
        """
        async with self._open_transaction(isolation="autocommit") as connection:
            self._has_periodic_table = await periodic_table_exists(connection, self._schema)
        end = self._time.offset + duration
        await self._periodic_run.insert_due_jobs()
        slot_count = 0
        while left := end - self._time.offset:
            if slot_count >= SLOTS_MAX:
                raise ConfigError(
                    f"more than {SLOTS_MAX:,} slots of periodic jobs are due in this time, {left} "
                    "of it is left: advance in shorter steps"
                )
            slot_count += 1
            await self._move_to_next_slot(min(left, await self._get_time_until_next_slot(left)))
        if duration:
            offsets = self._periodic_run.offset_by_job_id.items()
            async with self._open_transaction(isolation="autocommit") as connection:
                await move_times_of_jobs(
                    connection,
                    self._schema,
                    duration,
                    distance_by_job_id={job_id: end - offset for job_id, offset in offsets},
                )
        await self._periodic_run.make_due_jobs_available()

    async def _get_time_until_next_slot(self, time_max: timedelta) -> timedelta:
        if not self._has_periodic_table or not self._periodic_run.row_ids:
            return time_max
        async with self._open_transaction(isolation="autocommit") as connection:
            time = await get_time_until_next_periodic_run(
                connection, self._schema, self._periodic_run.row_ids
            )
        return time_max if time is None else max(time, timedelta(microseconds=1))

    async def _move_to_next_slot(self, step: timedelta) -> None:
        if self._has_periodic_table:
            async with self._open_transaction(isolation="autocommit") as connection:
                await move_times_of_periodic_jobs(connection, self._schema, step)
        self._time.offset += step
        if isinstance(self._clock, FixedClock):
            self._clock.advance(step)
        await self._periodic_run.insert_due_jobs()
