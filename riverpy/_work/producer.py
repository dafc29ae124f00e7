"""Producer: claims the jobs of one queue, as fast as its slots come free."""

from __future__ import annotations

import asyncio
import heapq
import random
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import structlog

from riverpy._clock import Backoff
from riverpy._db.jobs import job_claim
from riverpy._lifecycle import TestSignal
from riverpy.drivers.asyncpg import DATABASE_ERRORS, describe
from riverpy.events import EventKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from anyio.abc import TaskStatus

    from riverpy._db.connection import DedicatedConnection
    from riverpy._lifecycle import StopScope
    from riverpy._work.completer import Completer
    from riverpy._work.subscriptions import Subscriptions
    from riverpy._work.work_group import WorkGroup
    from riverpy.config import QueueConfig

CLAIM_TIMEOUT = 10.0
"""Seconds for one claim, with the time to connect again."""
CLAIM_TIMEOUT_STOPPING = 1.0
"""Seconds that a claim in flight may still take when a stop was asked for."""
CLAIM_MIN = 100
"""A claim takes at most half of the slots, so that the server works on the next while this process
runs the last, but
may always take this many: a statement costs the same however few rows it brings."""
ECHOES = (0.005, 0.1)
"""Seconds after a notification at which the queue is looked at again. A sender notifies once for
all it inserts within a few milliseconds (River in Go: within 100), and commits of the others may
end after the notification came."""
DUE_MARGIN = 0.002
"""Seconds that the server may be behind in seeing a job become due."""
POLL_JITTER = 0.1
POLL_JITTER_MIN = 0.01


class Producer:
    """The claiming loop of one queue. Its slots are taken by what it launches, and given back by
    the work group."""

    name = "producer"

    def __init__(
        self,
        queue: str,
        config: QueueConfig,
        *,
        client_id: str,
        schema: str | None,
        poll_interval: timedelta,
        claims: DedicatedConnection,
        completer: Completer,
        work: WorkGroup,
        subscriptions: Subscriptions,
        claim_failed: Callable[[], None],
    ) -> None:
        self.queue = queue
        self._client_id, self._schema = client_id, schema
        self._claims, self._completer, self._work = claims, completer, work
        self._subscriptions = subscriptions
        self._claim_failed = claim_failed
        self._free = config.max_workers
        self._chunk = max(CLAIM_MIN, config.max_workers // 2)
        self._cooldown = (config.fetch_cooldown or timedelta(0)).total_seconds()
        self._poll = (config.fetch_poll_interval or poll_interval).total_seconds()
        self._backoff = Backoff(timedelta(milliseconds=50), timedelta(seconds=2))
        # "A slot is free" must not wake a loop that waits because the queue is empty, hence two
        # events.
        self._slot_free, self._stirred, self._resumed = (asyncio.Event() for _ in range(3))
        self._resumed.set()
        self._notified = False
        """Whether there is a reason to claim again at once."""
        self._echoes: list[float] = []
        self._due: list[float] = []
        self._log: Any = structlog.get_logger("riverpy").bind(queue=queue)
        self.claimed = TestSignal(f"Producer({queue}).claimed")

    @property
    def paused(self) -> bool:
        """Whether the queue is paused."""
        return not self._resumed.is_set()

    def notify(self) -> None:
        """Somebody inserted into the queue."""
        now = time.monotonic()
        self._echoes = [now + echo for echo in ECHOES]
        self.wake()

    def expect(self, delay: float) -> None:
        """A job of ours is due again after `delay` seconds: nobody will notify, and the poll may be
        far off."""
        if delay <= 0:
            self.wake()
        else:
            heapq.heappush(self._due, time.monotonic() + delay + DUE_MARGIN)
            self._stirred.set()

    def wake(self) -> None:
        """Look at the queue now."""
        self._notified = True
        self._stirred.set()

    def release(self) -> None:
        """One slot came free."""
        self._free += 1
        self._slot_free.set()

    def set_paused(self, paused: bool) -> None:
        """Stop or go on claiming. Running jobs are not touched; a repetition does nothing."""
        if paused == self.paused:
            return
        if paused:
            self._resumed.clear()
        else:
            self._resumed.set()
            self.wake()
        self._log.info("queue paused" if paused else "queue resumed")
        kind = EventKind.QUEUE_PAUSED if paused else EventKind.QUEUE_RESUMED
        self._subscriptions.publish_queue(kind, self.queue)

    async def run(self, scope: StopScope, *, task_status: TaskStatus[None]) -> None:
        """Claim until stopped. A claim in flight is finished, so that no claimed row is left
        behind."""
        task_status.started()
        while True:
            await self._resumed.wait()
            await self._slot()
            await self._completer.accepting()
            await (
                anyio.lowlevel.checkpoint_if_cancelled()
            )  # a claim is shielded, so not after a stop
            self._notified = False  # before the claim, so that a notification during it counts
            started = time.monotonic()
            try:
                drained = await self._claim(scope)
            except DATABASE_ERRORS as error:
                self._claim_failed()
                self._log.debug("claim failed", error=describe(error))
                await anyio.sleep(self._backoff.next())
                continue
            self._backoff.reset()
            if drained:
                await self._wait_for_more()
            if self._cooldown:
                await anyio.sleep(max(0.0, started + self._cooldown - time.monotonic()))
            elif not drained:
                await asyncio.sleep(0)  # noqa: TID251 (a turn for the launched jobs, no delay)

    async def _slot(self) -> None:
        while not self._free:
            self._slot_free.clear()
            await self._slot_free.wait()

    async def _claim(self, scope: StopScope) -> bool:
        """Claim and launch. Returns whether the queue had fewer jobs than asked for."""
        limit = min(self._free, self._chunk)
        with scope.shielded(CLAIM_TIMEOUT, after_stop=CLAIM_TIMEOUT_STOPPING):
            async with self._claims.use("claiming jobs", CLAIM_TIMEOUT) as connection:
                if self.paused:  # while it waited for the connection
                    return True
                rows = await job_claim(
                    connection,
                    self._schema,
                    queue=self.queue,
                    limit=limit,
                    client_id=self._client_id,
                )
                self._free -= len(rows)
                self._work.launch(rows, self)
        self.claimed.emit()
        return len(rows) < limit

    async def _wait_for_more(self) -> None:
        """Wait for a notification, its echoes, or the poll; finished jobs do not wake an empty
        queue."""
        most = max(self._poll * POLL_JITTER, POLL_JITTER_MIN)
        poll_at = time.monotonic() + self._poll + random.uniform(0, most)  # noqa: S311 (no secret)
        while not self._notified:
            now = time.monotonic()
            self._echoes = [echo for echo in self._echoes if echo > now]
            while self._due and self._due[0] <= now:
                heapq.heappop(self._due)
            self._stirred.clear()
            with anyio.move_on_after(min([poll_at, *self._echoes, *self._due[:1]]) - now):
                await self._stirred.wait()
                continue
            return
