"""Claimer: claims jobs for several queues with one statement.

Each statement has a fixed cost, so one statement for many queues is cheaper than one statement for
each queue. If slots of a queue become free during a statement, the queue waits for the next
statement. A queue that received as many jobs as it requested takes part in the next statement too,
if it has free slots by then.

The claimer passes the claimed rows to their queues before it releases the connection. So the
next user of the connection finds all claimed jobs among the running attempts.

A queue that must be claimed alone does not use the claimer: see `Producer`.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Protocol

import anyio

from riverpy._postgres.driver import DATABASE_ERRORS
from riverpy._postgres.jobs import job_claim, job_claim_queues
from riverpy._work.claim_cursor import WHOLE_QUEUE_RANGE, SlowClaimDetector, SlowQueueFinder
from riverpy._work.poll_schedule import PollSchedule
from riverpy.job import JobColumn

if TYPE_CHECKING:
    from anyio.abc import TaskStatus
    from asyncpg import Record

    from riverpy._lifecycle import StopScope
    from riverpy._postgres.driver import Connection
    from riverpy._work.run_context import RunContext

CLAIM_TIMEOUT = 10.0
"""The timeout of one claim, in seconds. It includes a reconnect."""
QUEUES_PER_CLAIM_MAX = 500
"""The maximum number of queues in one statement. Further queues wait for the next statement."""
JOBS_PER_CLAIM_MAX = 3_000
"""The maximum number of jobs that one statement claims. If the queues request more, each queue gets
fewer jobs."""
LOOP_TURNS_AFTER_CLAIM = 3
"""The number of turns of the event loop between two statements. Jobs whose code never waits end in
the first turn. Their queues then request new jobs in time for the next statement."""
SPEED_CHECK_SECONDS_PER_QUEUE, SPEED_CHECK_INTERVAL_MAX = 1.0, 60.0
"""The minimum time between two speed checks: `SPEED_CHECK_SECONDS_PER_QUEUE` seconds times the
number of queues, but not more than `SPEED_CHECK_INTERVAL_MAX` seconds. After slow claims
for several queues together, a speed check claims once for each queue alone, to find the slow
queues."""


class ClaimingQueue(Protocol):
    """A queue for which the Claimer claims jobs."""

    queue: str

    def choose_claim_limit(self) -> int:
        """Return how many jobs to claim; 0: none. The claimer calls this just before it sends the
        statement."""
        ...

    def receive_claimed_jobs(
        self, rows: list[Record], limit: int, seconds: float, *, is_alone: bool
    ) -> bool:
        """Start the claimed jobs. Return whether the queue takes part in the next statement too.
        The statement requested `limit` jobs and took `seconds` seconds. `is_alone`: whether the
        statement was for this queue only."""
        ...

    def release_claimed_jobs(self, rows: list[Record]) -> None:
        """Release claimed jobs, because the queue no longer waits for them."""
        ...

    def request_claim_speed_check(self) -> None:
        """Request that the next claim is for this queue alone, to find out whether its claims are
        slow."""
        ...


class Claimer:
    """Claims jobs for the queues of one run, with one statement at a time."""

    name = "claimer"

    def __init__(self, run: RunContext) -> None:
        self._connection, self._schema = run.connections.claims, run.schema
        self._kinds, self._client_id = run.kinds_to_claim, run.client.id
        self.polls = PollSchedule()
        self.queue_count = 0
        """The number of queues whose producers run. If there is only one, its producer claims jobs
        without the claimer."""
        self._waiting: dict[ClaimingQueue, asyncio.Future[bool | None]] = {}
        """The queues that wait for the next statement."""
        self._sent: dict[ClaimingQueue, asyncio.Future[bool | None]] = {}
        """The queues of the running statement."""
        self._statement_scope: anyio.CancelScope | None = None
        """The cancel scope of the running statement; None: no statement runs."""
        self._requested = asyncio.Event()
        self._slow_claim_detector = SlowClaimDetector()
        """Finds out whether claims of several queues are slow."""
        self.slow_queue_finder = SlowQueueFinder()
        self._next_speed_check_at = 0.0

    async def claim_jobs(self, queue: ClaimingQueue) -> bool | None:
        """Claim jobs of this queue with the next statements, until the queue wants no more jobs.
        The claimer passes the jobs of each statement to the queue. Return whether the last
        statement returned as many jobs as requested. Return None if the queue requested no jobs.

        Raises:
            Exception: one of DATABASE_ERRORS; the whole statement failed.
        """
        future = self._waiting[queue] = asyncio.get_running_loop().create_future()
        self._requested.set()
        try:
            return await future
        except asyncio.CancelledError:
            self._waiting.pop(queue, None)
            if self._statement_scope is not None and self._does_no_queue_await_running_claim():
                self._statement_scope.cancel(reason="no queue waits for the claimed jobs")
            raise

    def _does_no_queue_await_running_claim(self) -> bool:
        """Return whether no queue of the running statement still waits for its jobs."""
        return bool(self._sent) and all(future.cancelled() for future in self._sent.values())

    async def run(self, scope: StopScope, *, task_status: TaskStatus[None]) -> None:
        """Send claims until stopped."""
        task_status.started()
        while True:
            if not self._waiting:
                self._requested.clear()
                scope.clear_progress_deadline()
                await self._requested.wait()
            scope.set_progress_deadline(within=2 * CLAIM_TIMEOUT)
            await self._send_claim()
            for _ in range(LOOP_TURNS_AFTER_CLAIM):
                await asyncio.sleep(0)  # noqa: TID251 (a turn of the event loop, no delay)

    async def _send_claim(self) -> None:
        """Claim jobs for the waiting queues. If the claim fails, these queues get the error."""
        try:
            with anyio.CancelScope() as self._statement_scope:
                async with self._connection.acquire("claiming jobs", CLAIM_TIMEOUT) as connection:
                    if limits := self._take_waiting_queues():
                        await self._claim_and_distribute_jobs(connection, limits)
        except DATABASE_ERRORS as error:
            # Without a connection no statement was sent, and all waiting queues get the error.
            failed = self._sent or self._waiting
            for future in failed.values():
                if not future.done():
                    future.set_exception(error)
            failed.clear()
        finally:
            self._statement_scope = None
            self._sent = {}

    def _take_waiting_queues(self) -> dict[ClaimingQueue, int]:
        """Choose waiting queues for the next statement, and move them to `_sent`. Return how many
        jobs to claim for each of them."""
        limits: dict[ClaimingQueue, int] = {}
        for queue in list(self._waiting)[:QUEUES_PER_CLAIM_MAX]:
            future = self._waiting.pop(queue)
            if future.done():
                continue
            if limit := queue.choose_claim_limit():
                limits[queue], self._sent[queue] = limit, future
            else:
                future.set_result(None)
        total = sum(limits.values())
        if total > JOBS_PER_CLAIM_MAX and len(limits) > 1:
            for queue, limit in limits.items():
                limits[queue] = max(limit * JOBS_PER_CLAIM_MAX // total, 1)
        return limits

    async def _claim_and_distribute_jobs(
        self, connection: Connection, limits: dict[ClaimingQueue, int]
    ) -> None:
        began, is_alone = time.monotonic(), len(limits) == 1
        rows = await self._claim_rows(connection, limits)
        now = time.monotonic()
        rows_by_queue: dict[str, list[Record]] = {queue.queue: [] for queue in limits}
        for row in rows:
            rows_by_queue[row[JobColumn.QUEUE]].append(row)
        must_check_speed = not is_alone and self._record_claim_and_check_slow(
            len(limits), len(rows), now - began, now
        )
        for queue, limit in limits.items():
            future, found = self._sent.pop(queue), rows_by_queue[queue.queue]
            if future.done():  # the producer of the queue was stopped
                queue.release_claimed_jobs(found)
                continue
            wants_more = queue.receive_claimed_jobs(found, limit, now - began, is_alone=is_alone)
            if must_check_speed:
                queue.request_claim_speed_check()
            elif wants_more:
                self._waiting[queue] = future
                continue
            future.set_result(len(found) == limit)

    def _record_claim_and_check_slow(
        self, queue_count: int, row_count: int, seconds: float, now: float
    ) -> bool:
        """Record the duration of a claim of several queues. Return whether each queue must now be
        claimed alone, to find the slow one."""
        if (
            not self._slow_claim_detector.record_claim_and_check_slow(row_count, seconds)
            or now < self._next_speed_check_at
        ):
            return False
        self.slow_queue_finder.start_comparison(queue_count, seconds)
        self._next_speed_check_at = now + min(
            queue_count * SPEED_CHECK_SECONDS_PER_QUEUE, SPEED_CHECK_INTERVAL_MAX
        )
        return True

    async def _claim_rows(
        self, connection: Connection, limits: dict[ClaimingQueue, int]
    ) -> list[Record]:
        """Claim jobs. If only one queue wants jobs, use the faster statement for one queue."""
        if len(limits) == 1:
            ((queue, limit),) = limits.items()
            return await job_claim(
                connection,
                self._schema,
                queue=queue.queue,
                kinds=self._kinds,
                skipped_ids=[],
                after_position=WHOLE_QUEUE_RANGE.start_after,
                priority_max=WHOLE_QUEUE_RANGE.last_priority,
                limit=limit,
                client_id=self._client_id,
            )
        return await job_claim_queues(
            connection,
            self._schema,
            queues=[queue.queue for queue in limits],
            limits=list(limits.values()),
            kinds=self._kinds,
            client_id=self._client_id,
        )
