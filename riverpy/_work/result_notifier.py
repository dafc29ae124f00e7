"""ResultNotifier: sends notifications to other clients after results were stored: which queues have
jobs available again, and which jobs that a client waits for have ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._log import get_logger
from riverpy._log_events import JOB_END_NOTIFICATION_FAILED, QUEUE_NOTIFICATION_FAILED
from riverpy._postgres.driver import DATABASE_ERRORS, describe_error
from riverpy._postgres.jobs import FINAL_STATES, job_notify_queues
from riverpy._postgres.waits import NOTIFY_END_METADATA_KEY, job_notify_ends

if TYPE_CHECKING:
    from collections.abc import Iterable

    from riverpy._postgres.connection import DedicatedConnection
    from riverpy._work.attempt import Attempt

NOTIFY_TIMEOUT = 10.0
"""The timeout of one statement, in seconds."""


class ResultNotifier:
    """Notifies other clients after one client has stored results.

    A notification is a separate statement after the results are stored, because NOTIFY can fail,
    and because it holds a lock until its transaction is on disk. So a failed notification does not
    affect the results.
    """

    def __init__(self, connection: DedicatedConnection, schema: str | None) -> None:
        """`connection` is the connection that also stores the results."""
        self._connection, self._schema = connection, schema
        self._queues: set[str] = set()
        """The queues with jobs that are available again and for which no notification was sent
        yet."""
        self._ended_jobs: list[tuple[int, str]] = []
        """The ids and states of ended jobs for which no notification was sent yet."""
        self._log = get_logger()

    def add_queues_with_available_jobs(self, queues: Iterable[str]) -> None:
        """Add queues that have jobs available again."""
        self._queues.update(queues)

    def add_awaited_ended_jobs(self, attempts: Iterable[Attempt]) -> None:
        """Add the jobs that have ended and for whose end a client waits. The metadata of such a job
        contains the key `NOTIFY_END_METADATA_KEY`. Most jobs have empty metadata, so the method
        checks for empty metadata first."""
        for attempt in attempts:
            if (
                (text := attempt.metadata_text) != "{}"
                and NOTIFY_END_METADATA_KEY in text
                and attempt.stored_state in FINAL_STATES
            ):
                self._ended_jobs.append((attempt.id, attempt.stored_state))

    async def send_notifications(self) -> None:
        """Send the notifications of the added queues and jobs. If the notification of queues fails,
        the queues are kept for the next call. If the notification of ended jobs fails, it is
        dropped, because clients that wait for jobs also poll."""
        if self._ended_jobs:
            ended, self._ended_jobs = self._ended_jobs, []
            try:
                async with self._connection.acquire(
                    "notifying clients of ended jobs", NOTIFY_TIMEOUT
                ) as connection:
                    await job_notify_ends(connection, self._schema, ended)
            except DATABASE_ERRORS as error:
                self._log.debug(JOB_END_NOTIFICATION_FAILED, error=describe_error(error))
        if self._queues:
            try:
                async with self._connection.acquire(
                    "notifying queues of available jobs", NOTIFY_TIMEOUT
                ) as connection:
                    await job_notify_queues(connection, self._schema, sorted(self._queues))
            except DATABASE_ERRORS as error:
                self._log.debug(QUEUE_NOTIFICATION_FAILED, error=describe_error(error))
            else:
                self._queues.clear()
