"""ProgressWriter: stores the progress of running jobs, for all jobs of a client at once."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio

from riverpy._log import get_logger
from riverpy._log_events import PROGRESS_WRITE_FAILED
from riverpy._postgres.driver import (
    DATABASE_ERRORS,
    describe_error,
    is_permanent_statement_error,
)
from riverpy._postgres.jobs import job_store_progress

if TYPE_CHECKING:
    from anyio.abc import TaskStatus

    from riverpy._lifecycle import StopScope
    from riverpy._work.run_context import RunContext
    from riverpy._work.running_attempts import RunningAttempts

PROGRESS_WRITE_INTERVAL = 1.0
"""The minimum time between two writes, in seconds."""
PROGRESS_WRITE_TIMEOUT = 2.0
"""The timeout of one write, in seconds."""


class ProgressWriter:
    """Stores reported progress with at most one statement per `PROGRESS_WRITE_INTERVAL`. While no
    job reports progress, it sleeps without a timer."""

    name = "progress writer"

    def __init__(self, context: RunContext, running: RunningAttempts) -> None:
        """`running` contains the jobs that may report progress."""
        self._reports, self._running = context.client.attempt_store.progress_reports, running
        self._subscriptions = context.client.subscriptions
        self._connection, self._schema = context.connections.reserved, context.schema
        self._log = get_logger().with_rate_limit()

    async def run(self, scope: StopScope, *, task_status: TaskStatus[None]) -> None:
        """Write progress until stopped. Progress that is not written before the stop is stored
        later, with the result of its job."""
        loop, wakeup = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(wakeup.set)

        self._reports.wake_writer = wake
        task_status.started()
        try:
            while True:
                scope.clear_progress_deadline()
                await wakeup.wait()
                scope.set_progress_deadline(within=PROGRESS_WRITE_TIMEOUT + PROGRESS_WRITE_INTERVAL)
                wakeup.clear()
                await self._write_reports()
                await anyio.sleep(PROGRESS_WRITE_INTERVAL)
        finally:
            if self._reports.wake_writer is wake:
                self._reports.wake_writer = None

    async def _write_reports(self) -> None:
        texts = self._reports.take_reports()
        if not texts:
            return
        try:
            async with self._connection.acquire(
                "storing progress", PROGRESS_WRITE_TIMEOUT
            ) as connection:
                found_ids = await job_store_progress(
                    connection,
                    self._schema,
                    claim_keys=list(texts),
                    progress_texts=list(texts.values()),
                )
        except DATABASE_ERRORS as error:
            self._log.debug(PROGRESS_WRITE_FAILED, jobs=len(texts), error=describe_error(error))
            if is_permanent_statement_error(error):
                return
            found_ids = set[int]()
        if found_ids and self._subscriptions.fleet_outbox is not None:
            for attempt in self._running:
                if attempt.id in found_ids and (text := texts.get(attempt.claim_key)) is not None:
                    self._subscriptions.publish_progress(attempt, text)
        unstored = {key: text for key, text in texts.items() if key.id not in found_ids}
        if unstored:  # another session has locked these rows, or their attempts have ended
            self._reports.add_unstored_reports(unstored, self._running.collect_claim_keys())
