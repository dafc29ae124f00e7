"""A load of jobs of every kind, inserted in every way, with the results that its callers
received."""

from __future__ import annotations

import random
from contextlib import suppress
from time import time
from typing import TYPE_CHECKING, Self

import anyio
import asyncpg

import riverpy
from riverpy import InsertManyParams
from riverpy._postgres.driver import DATABASE_ERRORS
from tests.kit.chaos_jobs import (
    Endless,
    Flaky,
    Once,
    Parent,
    Processed,
    Quick,
    Slow,
    Snoozing,
    Threaded,
)
from tests.kit.work_history import Cancel

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from typing import TypeAlias

    from riverpy.job import JobArgs

    Way: TypeAlias = Callable[[list[JobArgs]], Awaitable[None]]

TURN = 0.1
"""Seconds between two inserts by the same way."""
CALL_TIMEOUT = 20.0
"""Timeout of a call, in seconds."""
RETRY = 0.1
ROLLBACK_SHARE = 0.3
"""The share of transactions that roll back."""
ONCE_SHARE = 20
"""One job in this many has a unique number. Each unique number is inserted several times."""
CANCEL_DELAY_MAX = 3.0
"""Maximum seconds until a job is cancelled."""
FAILURES = (riverpy.TransactionError, riverpy.JobDamagedError, *DATABASE_ERRORS)
"""Errors that a call raises during an outage, or while a fault makes the server refuse to write the
row of a duplicate or of a job to cancel."""


class Load:
    """Inserts and cancels jobs until `is_stopping` is set."""

    def __init__(self, url: str, rate: float, seed: int) -> None:
        """Create a load of `rate` jobs per second, with choices that depend on the seed."""
        self._url, self._rate = url, rate
        self._rng = random.Random(seed)
        self._number = 0
        self._once = 0
        self.committed: set[int] = set()
        self.rolled_back: set[int] = set()
        self.unique: list[int] = []
        self.cancels: list[Cancel] = []
        self.is_stopping = False
        self.failed_calls = 0

    async def run(self) -> None:
        """Insert until `is_stopping`, then return when all planned cancels are done."""
        async with (
            riverpy.Client(self._url) as client,
            Transactions(self, self._url, client) as transactions,
            anyio.create_task_group() as tasks,
        ):
            self._client, self._tasks = client, tasks
            ways: list[tuple[float, Way]] = [
                (0.4, self._singly),
                (0.25, self._many),
                (0.2, self._by_copy),
                (0.15, transactions.insert),
            ]
            for share, way in ways:
                tasks.start_soon(self._insert, way, share * self._rate * TURN)

    async def cancel(self, job_id: int, delay: float = 0.0) -> None:
        """Cancel a job, and try again as often as that fails."""
        await anyio.sleep(delay)
        while True:
            with suppress(*FAILURES):
                with anyio.fail_after(CALL_TIMEOUT):
                    await self._client.job_cancel(job_id)
                self.cancels.append(Cancel(job_id, time()))
                return
            await anyio.sleep(RETRY)

    def commit(self, jobs: Sequence[JobArgs]) -> None:
        """Record that these jobs are committed."""
        self.committed.update(job.number for job in jobs)

    def tell(self, jobs: Sequence[JobArgs], results: Sequence[riverpy.InsertResult]) -> None:
        """Record that these jobs are committed, with the results of their inserts."""
        self.commit(jobs)
        for job, result in zip(jobs, results, strict=True):
            if isinstance(job, Once) and not result.unique_skipped_as_duplicate:
                self.unique.append(job.number)

    async def _insert(self, way: Way, count: float) -> None:
        """Insert by one way in turns. Inserts that an outage prevents are not repeated."""
        due, left = anyio.current_time(), 0.0
        while not self.is_stopping:
            left += count
            jobs = [self._job(way) for _ in range(int(left))]
            left -= len(jobs)
            if jobs:
                try:
                    with anyio.fail_after(CALL_TIMEOUT):
                        await way(jobs)
                except FAILURES:
                    self.failed_calls += 1
            due = max(due + TURN, anyio.current_time() - TURN)
            await anyio.sleep_until(due)

    def _job(self, way: Way) -> JobArgs:
        self._number += 1
        number, rng = self._number, self._rng
        chosen = rng.random()
        if way == self._singly and chosen < 0.01:
            return Endless(number)
        if way != self._by_copy and chosen < 0.1:
            # Lower than the numbers of all other jobs, so that a repeated insert is never new among
            # them.
            self._once += 1
            return Once(-1 - self._once // ONCE_SHARE * 4 - rng.randrange(4))
        if chosen < 0.2:
            return Flaky(number, rng.randrange(1, 3))
        if chosen < 0.27:
            return Snoozing(number)
        if chosen < 0.3:
            return Threaded(number, rng.random() * 0.2)
        if chosen < 0.35:
            return Slow(number, rng.random() ** 3 * 2)
        if chosen < 0.4:
            return Parent(number)
        if chosen < 0.402:
            return Processed(number, rng.random() * 3)
        return Quick(number)

    def _options(self) -> riverpy.InsertOpts:
        return riverpy.InsertOpts(
            queue=self._rng.choice(("default", "default", "ahead")),
            priority=self._rng.randrange(1, 5),
        )

    async def _singly(self, jobs: list[JobArgs]) -> None:
        async with anyio.create_task_group() as tasks:
            for job in jobs:
                tasks.start_soon(self._one, job)

    async def _one(self, job: JobArgs) -> None:
        try:
            result = await self._client.insert(job, self._options())
        except FAILURES:
            self.failed_calls += 1
            return
        self.tell([job], [result])
        if isinstance(job, Endless) or self._rng.random() < 0.02:
            delay = self._rng.random() * CANCEL_DELAY_MAX
            if not isinstance(job, Once):
                self._tasks.start_soon(self.cancel, result.job.id, delay)

    async def _many(self, jobs: list[JobArgs]) -> None:
        self.tell(jobs, await self._client.insert_many(self.params(jobs)))

    async def _by_copy(self, jobs: list[JobArgs]) -> None:
        await self._client.insert_many_fast(self.params(jobs))
        self.commit(jobs)

    def params(self, jobs: list[JobArgs]) -> list[InsertManyParams]:
        """Return the parameters of the jobs with random options."""
        return [InsertManyParams(job, self._options()) for job in jobs]

    def rolls_back(self) -> bool:
        """Return whether the next transaction rolls back."""
        return self._rng.random() < ROLLBACK_SHARE


class Transactions:
    """The transactions of a user on a connection of their own."""

    def __init__(self, load: Load, url: str, client: riverpy.Client) -> None:
        self._load, self._url, self._client = load, url, client
        self._connection: asyncpg.Connection | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._connection is not None:
            self._connection.terminate()

    async def insert(self, jobs: list[JobArgs]) -> None:
        """Insert these jobs in one transaction, which is committed or rolled back."""
        if self._connection is None or self._connection.is_closed():
            self._connection = await asyncpg.connect(self._url, timeout=CALL_TIMEOUT)
        unique_none = [job for job in jobs if not isinstance(job, Once)]
        is_asked_to_commit = False
        try:
            transaction = self._connection.transaction()
            await transaction.start()
            results = await self._client.insert_many(self._load.params(jobs), tx=self._connection)
            if self._load.rolls_back():
                await transaction.rollback()
                self._load.rolled_back.update(job.number for job in unique_none)
                return
            is_asked_to_commit = True
            await transaction.commit()
        except BaseException:
            if not is_asked_to_commit:
                self._load.rolled_back.update(job.number for job in unique_none)
            self._connection.terminate()
            raise
        self._load.tell(jobs, results)
