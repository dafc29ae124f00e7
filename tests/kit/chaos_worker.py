"""The client of workers under random faults: `riverpy worker tests.kit.chaos_worker:client`.

It records in a file what its handlers do and which results it stored. The file survives the process
and needs no database.
"""

from __future__ import annotations

import time
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

import riverpy
from riverpy._postgres.driver import DATABASE_ERRORS
from riverpy.retry import DefaultRetryPolicy
from tests.kit.chaos_acts import Attempt, record, settings, work_in_process
from tests.kit.chaos_jobs import (
    PLANNED,
    Blocking,
    Child,
    Endless,
    Flaky,
    Once,
    Parent,
    PoolExhausting,
    Quick,
    Slow,
    Snoozing,
    Threaded,
)
from tests.kit.fleet import end_with_the_fleet

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

STALL = 0.5
"""If the event loop makes no turn for this many seconds, the process counts as not running."""
TICK = 0.1
STOP_PATIENCE = timedelta(seconds=3)
RETRY_DELAY = timedelta(milliseconds=200)
LONG_DELAY = timedelta(seconds=6)
"""Longer than the 5 s within which a job due again is available at once, so the leader schedules
it."""
LONG_SHARE = 8
"""One job in this many waits that long."""
CHILD_LIMIT = 8.0
BLOCKED_MAX = 30.0
"""Maximum seconds that a job blocks the event loop. It is longer than the stop timeout."""
SHORT_DELAY = timedelta(milliseconds=100)


class ChaosRetryPolicy(DefaultRetryPolicy):
    """Retry policy that runs rescued jobs again soon."""

    def next_retry(self, job: riverpy.JobRow, /) -> timedelta:
        """Return when the job is due again."""
        return RETRY_DELAY


workers = riverpy.Workers()


def is_long(number: int) -> bool:
    """Return whether the job with this number waits for the leader when it is retried."""
    return number % LONG_SHARE == 0


@workers.job
async def quick(job: riverpy.Job[Quick]) -> None:
    """Return at once."""
    with Attempt(job):
        await anyio.sleep(0)


@workers.job
async def once(job: riverpy.Job[Once]) -> None:
    """Return at once; the job is unique by its number."""
    with Attempt(job):
        await anyio.sleep(0)


@workers.job
async def child(job: riverpy.Job[Child]) -> None:
    """Return at once; another job inserted this one."""
    with Attempt(job):
        await anyio.sleep(0)


@workers.job
async def slow(job: riverpy.Job[Slow]) -> None:
    """Take a while."""
    with Attempt(job):
        await anyio.sleep(job.args.seconds)


class FlakyWorker(riverpy.Worker[Flaky]):
    """Worker that fails as often as the args of its jobs say."""

    async def work(self, job: riverpy.Job[Flaky]) -> None:
        """Fail or succeed."""
        with Attempt(job):
            failed = sum(PLANNED in error.error for error in job.errors)
            if failed < job.args.failures:
                raise RuntimeError(f"{PLANNED} failure {failed + 1}")

    def next_retry(self, job: riverpy.Job[Flaky]) -> timedelta | None:
        """Return a time soon, or one that the leader has to schedule."""
        return LONG_DELAY if is_long(job.args.number) else RETRY_DELAY


@workers.job
async def snoozing(job: riverpy.Job[Snoozing]) -> None:
    """Snooze once."""
    with Attempt(job):
        if not job.metadata.get("snoozes"):
            raise riverpy.JobSnooze(LONG_DELAY if is_long(job.args.number) else SHORT_DELAY)


@workers.blocking_job(executor="thread")
def threaded(job: riverpy.Job[Threaded]) -> None:
    """Take a while in a thread."""
    with Attempt(job):
        time.sleep(job.args.seconds)


workers.blocking_job(executor="process")(work_in_process)


@workers.job(timeout=None)
async def blocking(job: riverpy.Job[Blocking]) -> None:
    """Block the event loop as long as the job's file exists."""
    with Attempt(job):
        end = time.monotonic() + BLOCKED_MAX
        while Path(job.args.path).exists() and time.monotonic() < end:
            time.sleep(TICK)


@workers.job(timeout=None)
async def endless(job: riverpy.Job[Endless]) -> None:
    """Run until cancelled."""
    with Attempt(job):
        await anyio.sleep_forever()


@workers.job
async def parent(job: riverpy.Job[Parent]) -> None:
    """Insert another job by the pool of this client. An insert that raises may still have been
    committed."""
    with Attempt(job):
        try:
            with anyio.fail_after(CHILD_LIMIT):
                result = await pooled.insert(Child(number=job.args.number))
        except Exception as error:
            raise RuntimeError(f"{PLANNED}: no child, {type(error).__name__}: {error}") from error
        record("child", child_id=result.job.id)


@workers.job
async def pool_exhausting(job: riverpy.Job[PoolExhausting]) -> None:
    """Take every connection of the client's pool."""
    with Attempt(job):
        try:
            async with AsyncExitStack() as held:
                with anyio.move_on_after(job.args.seconds):
                    while True:
                        await held.enter_async_context(pooled._get_open_pool().acquire())
        except DATABASE_ERRORS as error:  # a lost connection also fails when it is released
            raise RuntimeError(f"{PLANNED}: no connection, {error}") from error


async def _record_stored(events: riverpy.Subscription) -> None:
    async for event in events:
        if event.job is not None:
            record("stored", event.job, how=event.kind.value)


async def _watch_stalls() -> None:
    while True:
        began = time.time()
        await anyio.sleep(TICK)
        if time.time() - began > STALL:
            record("stall", since=began)


workers.add(FlakyWorker())
pooled = riverpy.Client(
    workers=workers,
    queues={
        "default": riverpy.QueueConfig(max_workers=settings.slots),
        "ahead": riverpy.QueueConfig(max_workers=settings.slots, prefetch=True),
        settings.name: riverpy.QueueConfig(max_workers=2),
    },
    config=riverpy.Config(
        elect_interval=timedelta(seconds=settings.elect_interval),
        leader_ttl=timedelta(seconds=settings.leader_ttl),
        dead_after=timedelta(seconds=settings.dead_after),
        soft_stop_timeout=STOP_PATIENCE,
        retry_policy=ChaosRetryPolicy(),
    ),
)


@asynccontextmanager
async def client() -> AsyncGenerator[riverpy.Client]:
    """Yield the client and record its events."""
    end_with_the_fleet()
    async with anyio.create_task_group() as tasks, pooled.subscribe(*riverpy.EventKind) as events:
        tasks.start_soon(_record_stored, events)
        tasks.start_soon(_watch_stalls)
        yield pooled
        tasks.cancel_scope.cancel()
