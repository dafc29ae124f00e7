"""DueJobs: makes sure that available jobs start when they are due, and not at the next poll.

A retry that is due within 5 seconds is stored as `available`, as in River, and the leader makes
scheduled jobs available up to 5 seconds early. PostgreSQL sends no notification when such a job
becomes due. The clients that know the time plan a claim. A client reads the times from the
database when it may have missed them: at its start, when a queue was added, and after a reconnect.
When it stops, it notifies other clients of the times that only it knows.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING

import anyio

from riverpy._log import get_logger
from riverpy._log_events import DUE_TIMES_NOT_EXCHANGED
from riverpy._postgres.driver import DATABASE_ERRORS, describe_error
from riverpy._postgres.jobs import QueueDueTime, job_get_due_times, job_notify_due_times

if TYPE_CHECKING:
    from collections.abc import Mapping

    from anyio.abc import TaskStatus

    from riverpy._lifecycle import StopScope
    from riverpy._work.producer import Producer
    from riverpy._work.run_context import RunContext

READ_TIMEOUT = 10.0
"""The timeout of the statement that reads due times, in seconds."""
NOTIFY_TIMEOUT = 1.0
"""The timeout of the statement that notifies other clients at a stop, in seconds."""
RETRY_DELAY = 2.0
"""Seconds until the due times are read again after a database error."""
_DUE_TIMES_KEPT = 1_000
"""The number of due times of own retries above which `DueJobs` removes the past ones."""


class DueJobs:
    """Plans the claims of one run for available jobs that become due soon."""

    name = "due jobs"

    def __init__(self, run: RunContext, producers: Mapping[str, Producer]) -> None:
        self._connection, self._schema = run.connections.results, run.schema
        self._producers = producers
        self._read_requested = asyncio.Event()
        self._own_due_times: set[QueueDueTime] = set()
        """The times at which retries and snoozed jobs of this run become due, in seconds of the
        monotonic clock, rounded up to half a second."""

    def plan_claim(self, queue: str, delay: float) -> None:
        """Plan a claim for a queue in `delay` seconds, if this client works the queue."""
        if queue in self._producers:
            self._producers[queue].schedule_claim(delay)

    def plan_claim_of_retry(self, queue: str, delay: float) -> None:
        """Plan a claim of a job that this client has made available, and that becomes due in
        `delay` seconds. Other clients do not know this time."""
        self.plan_claim(queue, delay)
        if delay > 0:
            due_at = math.ceil(2 * (time.monotonic() + delay)) / 2
            self._own_due_times.add(QueueDueTime(queue, due_at))
            if len(self._own_due_times) > _DUE_TIMES_KEPT:
                self._own_due_times = set(self._list_future_due_times())

    def request_read(self) -> None:
        """Read the due times soon, because this client may have missed some."""
        self._read_requested.set()

    async def run(self, scope: StopScope, *, task_status: TaskStatus[None]) -> None:
        """Read due times when requested, until stopped."""
        task_status.started()
        while True:
            scope.clear_progress_deadline()
            await self._read_requested.wait()
            self._read_requested.clear()
            scope.set_progress_deadline(within=READ_TIMEOUT + RETRY_DELAY)
            try:
                await self._read_due_times()
            except DATABASE_ERRORS as error:
                get_logger().debug(DUE_TIMES_NOT_EXCHANGED, error=describe_error(error))
                self._read_requested.set()
                await anyio.sleep(RETRY_DELAY)

    async def _read_due_times(self) -> None:
        async with self._connection.acquire("reading due times", READ_TIMEOUT) as connection:
            times = await job_get_due_times(connection, self._schema, list(self._producers))
        for queue, seconds in times:
            self.plan_claim(queue, seconds)

    async def notify_other_clients(self) -> None:
        """Notify other clients of due times that only this client knows, at the end of the run.
        During an outage, other clients find these jobs by polling."""
        now = time.monotonic()
        times = [one._replace(seconds=one.seconds - now) for one in self._list_future_due_times()]
        if not times or self._connection.outage_tracker.is_outage_logged:
            return
        try:
            with anyio.CancelScope(shield=True):
                async with self._connection.acquire(
                    "notifying clients of due times", NOTIFY_TIMEOUT
                ) as connection:
                    await job_notify_due_times(connection, self._schema, times)
        except DATABASE_ERRORS as error:
            get_logger().debug(DUE_TIMES_NOT_EXCHANGED, error=describe_error(error))

    def _list_future_due_times(self) -> list[QueueDueTime]:
        now = time.monotonic()
        return [one for one in self._own_due_times if one.seconds > now]
