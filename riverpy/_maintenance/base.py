"""MaintenanceService: the base class of the services that a leader runs during its term."""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import TYPE_CHECKING

from riverpy._clock import Backoff
from riverpy._lifecycle import TestSignal
from riverpy._log import RepeatedFailureLog, get_logger
from riverpy._log_events import (
    FLEET_EVENTS_NOT_SENT,
    MAINTENANCE_RUN_FAILED,
    MAINTENANCE_RUN_SUCCEEDED_AGAIN,
)
from riverpy._postgres.driver import DATABASE_ERRORS, describe_error
from riverpy._postgres.fleet import fleet_read_ended_jobs
from riverpy.errors import FencedOutError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractAsyncContextManager

    from anyio.abc import TaskStatus

    from riverpy._leading.term_context import TermContext
    from riverpy._lifecycle import StopScope
    from riverpy._postgres.driver import Connection
    from riverpy._postgres.skipped_rows import SkippedRowReport

ENDED_JOB_EVENTS_MAX = 1_000
"""The maximum number of events that a service sends after one statement. Further events are dropped
and counted."""
FIRST_RUN_DELAY_MAX = 1.0
"""The longest random delay before the first run of a service, in seconds."""
READ_STATEMENT_TIMEOUT = 5.0
"""The timeout of a statement that only reads, in seconds."""
SERVICE_RETRY_DELAY_MIN = timedelta(seconds=1)
SERVICE_RETRY_DELAY_MAX = timedelta(seconds=8)
"""The longest delay after a failed run. The delay is `SERVICE_RETRY_DELAY_MIN` after the first
failure, and doubles with each further one. The number of retries has no limit."""


class MaintenanceService(ABC):
    """The base class of a service that a leader runs repeatedly during one term (a client's time as
    leader)."""

    name: str

    def __init__(self, context: TermContext) -> None:
        self.context, self.schema = context, context.schema
        self.log = get_logger(service=self.name)
        self._wake_event = asyncio.Event()
        self._backoff = Backoff(SERVICE_RETRY_DELAY_MIN, SERVICE_RETRY_DELAY_MAX)
        self._failure_log = RepeatedFailureLog(self.log)
        self.skipped_row_reporters: list[Callable[[], list[SkippedRowReport]]] = []
        """Functions that report the rows that this service skips for a while, because the
        statements for these rows fail."""
        self.run_once_succeeded = TestSignal(f"{type(self).__name__}.run_once_succeeded")
        """A signal for tests, emitted after each successful run."""

    async def prepare(self) -> None:  # noqa: B027 (most services prepare nothing)
        """Prepare the service, once, before its first run. If this method raises an error, no
        maintenance service of this term starts its work."""

    @abstractmethod
    async def run_once(self, scope: StopScope) -> float:
        """Run the service once. Return the seconds until the next run.

        Raises:
            FencedOutError: the term has ended.
            Exception: one of DATABASE_ERRORS. `run` calls this method again after a short delay.
        """

    def wake(self) -> None:
        """Start the next run now, instead of at its planned time."""
        self._wake_event.set()

    def acquire_read_connection(self, purpose: str) -> AbstractAsyncContextManager[Connection]:
        """Return a context manager that provides a connection for reads. Errors and log lines
        contain `purpose`."""
        return self.context.connection.acquire(purpose, READ_STATEMENT_TIMEOUT)

    async def publish_ended_jobs(self, state_by_id: Mapping[int, str]) -> None:
        """Send events about the jobs that this service has ended, if a client follows these events.
        `state_by_id` has the new state of each job."""
        publisher = self.context.ended_job_publisher
        if publisher is None or not publisher.has_followers or not state_by_id:
            return
        ids = list(state_by_id)[:ENDED_JOB_EVENTS_MAX]
        publisher.count_dropped_events(len(state_by_id) - len(ids))
        try:
            async with self.acquire_read_connection("reading ended jobs") as connection:
                jobs = await fleet_read_ended_jobs(connection, self.schema, ids)
        except DATABASE_ERRORS as error:  # the jobs have ended: only their events are lost
            publisher.count_dropped_events(len(ids))
            self.log.debug(FLEET_EVENTS_NOT_SENT, events=len(ids), reason=describe_error(error))
            return
        publisher.publish_jobs_ended_by_leader(jobs, state_by_id)

    async def run(self, scope: StopScope, *, task_status: TaskStatus[None]) -> None:
        """Prepare the service, and wait until all services of the term have started. Then call
        `run_once` repeatedly until this service is stopped."""
        await self.prepare()
        task_status.started()
        await self.context.all_services_started.wait()
        await self.context.timer.sleep(random.uniform(0, FIRST_RUN_DELAY_MAX))  # noqa: S311 (no secret)
        while True:
            self._wake_event.clear()
            delay = await self._run_once_and_log_errors(scope)
            await self.context.timer.wait_for_event(self._wake_event, delay)

    async def _run_once_and_log_errors(self, scope: StopScope) -> float:
        try:
            self.context.fence.expect_held()  # the term may have ended while the process was frozen
            delay = await self.run_once(scope)
        except FencedOutError:  # the election ends the term
            return SERVICE_RETRY_DELAY_MIN.total_seconds()
        except Exception as error:
            self._log_failure(error)
            return self._backoff.next_delay()
        self._failure_log.log_recovery(MAINTENANCE_RUN_SUCCEEDED_AGAIN)
        self._backoff.reset()
        self.run_once_succeeded.emit()
        return delay

    def _log_failure(self, error: Exception) -> None:
        is_outage = isinstance(error, DATABASE_ERRORS)
        self._failure_log.log_failure(
            MAINTENANCE_RUN_FAILED,
            level="warning" if is_outage else "error",
            cause="outage" if is_outage else type(error).__name__,
            is_cause_logged=is_outage and self.context.connection.outage_tracker.is_outage_logged,
            exc_info=None if is_outage else error,
            error=describe_error(error),
        )
