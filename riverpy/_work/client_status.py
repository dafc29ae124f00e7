"""ClientStatusReporter: writes the state of a client into its row of `riverpy_client`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

import anyio

from riverpy._clients.process import get_own_process_name
from riverpy._log import get_logger
from riverpy._log_events import CLIENT_STATUS_REPORT_FAILED
from riverpy._postgres.clients import client_set_slot_counts, client_set_state
from riverpy._postgres.domains import member_mark_supports_domains
from riverpy._postgres.driver import DATABASE_ERRORS, describe_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from anyio.abc import TaskStatus

    from riverpy._lifecycle import StopScope
    from riverpy._postgres.skipped_rows import SkippedRowReport
    from riverpy._work.run_context import RunContext
    from riverpy._work.running_attempts import RunningAttempts

STATUS_CHECK_INTERVAL = 1.0
"""Seconds between two checks for changed values."""
STATUS_RETRY_DELAY = 30.0
"""Seconds until the reporter tries again after a database error."""
STATUS_WRITE_TIMEOUT = 2.0
"""The timeout of one write, in seconds."""
REPORTED_STUCK_JOBS_MAX = 1_000
"""The maximum number of stuck jobs in the client's row."""
REPORTED_SKIPPED_ROWS_MAX = 20
"""The maximum number of skipped rows that are written into the client's row. If there are more, the
rows that failed first are written. A skipped row is a row, for example of a job, that the client
skips for a while because a statement on this row failed."""
REPORTED_ERROR_LENGTH_MAX = 200
"""The maximum number of characters of a skipped row's error in the client's row."""


class _ClientStatus(NamedTuple):
    """The values that the reporter writes into the client's row."""

    queues: list[str]
    slots_per_queue: list[int]
    """The number of slots of each queue, plus one for each stuck job whose slot was freed for
    another job."""
    stuck_job_ids: list[int]
    """The ids of the stuck jobs."""
    skipped_rows: list[SkippedRowReport]
    skipped_row_count: int
    heartbeat_contact_count: int
    """How many times the heartbeat has connected to the server. A reconnect increases it."""
    is_stopping: bool


class ClientStatusReporter:
    """Writes the client's state at the start of a run and after each change. It writes the state
    again after each reconnect, because the row may be new: the leader deletes the row of a client
    without heartbeats."""

    name = "client status reporter"

    def __init__(
        self,
        run: RunContext,
        running_attempts: RunningAttempts,
        get_skipped_rows: Callable[[], list[SkippedRowReport]],
        *,
        has_state_columns: bool,
        supports_domains: bool,
    ) -> None:
        """Create the client status reporter.

        Args:
            run: the context of the run.
            running_attempts: the running jobs.
            get_skipped_rows: returns the rows that the client skips for a while, because statements
                on these rows fail.
            has_state_columns: whether the table `riverpy_client` has columns for the state and for
                skipped rows.
            supports_domains: whether to write that the client supports leader domains.
        """
        self._running_attempts, self._heartbeat, self._get_skipped_rows = (
            running_attempts,
            run.heartbeat,
            get_skipped_rows,
        )
        self._connection, self._schema = run.connections.reserved, run.schema
        self._client = run.client
        self._has_state_columns, self._supports_domains = has_state_columns, supports_domains
        self._reported_status: _ClientStatus | None = None
        self._is_stopping = False
        self._wakeup = asyncio.Event()
        self._log = get_logger()

    def report_changed_queues(self) -> None:
        """Write at once that the queues or their slots have changed."""
        self._wakeup.set()

    def report_stopping(self) -> None:
        """Write at once that the client is stopping. Then other clients no longer count it as a
        leader candidate."""
        self._is_stopping = True
        self._wakeup.set()

    async def run(self, scope: StopScope, *, task_status: TaskStatus[None]) -> None:
        """Report until stopped."""
        delay = await self._write_changed_status()
        task_status.started()
        while True:
            scope.set_progress_deadline(within=delay + STATUS_WRITE_TIMEOUT)
            with anyio.move_on_after(delay):
                await self._wakeup.wait()
            self._wakeup.clear()
            delay = await self._write_changed_status()

    async def _write_changed_status(self) -> float:
        """Write the status if it has changed. Returns the seconds until the next check."""
        now = self._make_status()
        registered_at = self._heartbeat.registered_at
        if now == self._reported_status or registered_at is None:
            return STATUS_CHECK_INTERVAL
        try:
            async with self._connection.acquire(
                "reporting the client status", STATUS_WRITE_TIMEOUT
            ) as connection:
                if self._has_state_columns:
                    state = "stopping" if now.is_stopping else "working"
                    await client_set_state(
                        connection,
                        self._schema,
                        client_id=self._client.id,
                        registered_at=registered_at,
                        state=state,
                        process_name=get_own_process_name(),
                        skipped_rows=now.skipped_rows,
                        skipped_row_count=now.skipped_row_count,
                    )
                await client_set_slot_counts(
                    connection,
                    self._schema,
                    client_id=self._client.id,
                    registered_at=registered_at,
                    queues=now.queues,
                    slot_counts=now.slots_per_queue,
                    stuck_job_ids=now.stuck_job_ids,
                )
                if self._supports_domains and (
                    self._reported_status is None
                    or self._reported_status.heartbeat_contact_count != now.heartbeat_contact_count
                ):
                    await member_mark_supports_domains(
                        connection,
                        self._schema,
                        client_id=self._client.id,
                        registered_at=registered_at,
                    )
        except DATABASE_ERRORS as error:  # no client depends on the status, so try again later
            self._log.debug(CLIENT_STATUS_REPORT_FAILED, error=describe_error(error))
            return STATUS_RETRY_DELAY
        self._reported_status = now
        return STATUS_CHECK_INTERVAL

    def _make_status(self) -> _ClientStatus:
        slots = self._client.slots_per_queue
        for attempt, keeps_slot in self._running_attempts.stuck_attempts.items():
            if attempt.queue in slots:  # the queue may have been removed
                slots[attempt.queue] += not keeps_slot
        ids = sorted(attempt.id for attempt in self._running_attempts.stuck_attempts)
        skipped = self._get_skipped_rows() if self._has_state_columns else []
        rows = sorted(skipped, key=lambda row: row.first_failed_at)[:REPORTED_SKIPPED_ROWS_MAX]
        return _ClientStatus(
            queues=list(slots),
            slots_per_queue=list(slots.values()),
            stuck_job_ids=ids[:REPORTED_STUCK_JOBS_MAX],
            skipped_rows=[
                row._replace(error=row.error[:REPORTED_ERROR_LENGTH_MAX]) for row in rows
            ],
            skipped_row_count=len(skipped),
            heartbeat_contact_count=self._heartbeat.contact_start_count,
            is_stopping=self._is_stopping,
        )
