"""ResultNotifier: notifies other clients after results were stored. It reports which
queues have available jobs again, and which awaited jobs have ended."""

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
"""Seconds for one statement."""


class ResultNotifier:
    """Notifies other clients of the results of one client.

    The notifications are separate statements after the results, because NOTIFY may fail, and holds
    a lock until its commit is on disk. So a result is stored whatever happens to its notification.
    """

    def __init__(self, connection: DedicatedConnection, schema: str | None) -> None:
        """`connection` is the one that stores the results."""
        self._connection, self._schema = connection, schema
        self._queues: set[str] = set()
        """The queues that have jobs available again, and whose clients were not notified yet."""
        self._ended_jobs: list[tuple[int, str]] = []
        """The ids and states of ended jobs whose ends are not notified to waiting clients yet."""
        self._log = get_logger()

    def add_queues_with_available_jobs(self, queues: Iterable[str]) -> None:
        """Add queues that have jobs available again."""
        self._queues.update(queues)

    def add_awaited_ended_jobs(self, attempts: Iterable[Attempt]) -> None:
        """Add the ended jobs for which clients wait. Most jobs have empty metadata, so that is
        checked first."""
        for attempt in attempts:
            if (
                (text := attempt.metadata_text) != "{}"
                and NOTIFY_END_METADATA_KEY in text
                and attempt.stored_state in FINAL_STATES
            ):
                self._ended_jobs.append((attempt.id, attempt.stored_state))

    async def send_notifications(self) -> None:
        """Send the notifications, if there are any. A failed notification of queues is sent again
        with the next results. A failed notification of ended jobs is dropped, because clients that
        wait for jobs also poll."""
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
