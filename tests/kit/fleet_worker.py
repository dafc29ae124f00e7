"""The client of a fleet's worker processes: `riverpy worker tests.kit.fleet_worker:client`.

It records its leading, its attempts at jobs and the times in which it did not run into the history,
by a connection past its proxy. Each term has one service more than usual, which says so whenever it
begins a pass and writes a row through the term's fence.
"""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import anyio
import asyncpg
import msgspec

import riverpy
from riverpy import _log
from riverpy._clock import SystemClock
from riverpy._maintenance import base
from riverpy._postgres.driver import DATABASE_ERRORS
from riverpy._work import leader_setup as candidacy
from riverpy.periodic import PeriodicJob, every
from tests.kit.fleet import SETTINGS_VARIABLE, WorkerSettings, end_with_the_fleet
from tests.kit.history import PERIOD, POLICIES, STATEMENTS, Act, Term

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from riverpy._lifecycle import StopScope
    from riverpy._maintenance.base import TermContext

LINES_MAX = 1_000_000
"""About single jobs: tests want each."""
TICK = 0.05
STALL = 0.25
"""Seconds without a turn of the event loop that count as not having run."""
PASS_INTERVAL = 0.05
HOLD_MOST = 0.1
"""Seconds that a fenced transaction stays open at most, so that faults hit some."""
FLUSH_LIMIT = 3.0
RECONNECT = 0.05
CLOCK_STEP = timedelta(minutes=10)


class Recorder:
    """Brings what this process did into the history, in order, however often the server goes."""

    def __init__(self, url: str, name: str) -> None:
        self._url = url
        self._process = f"{name}:{os.getpid()}"
        self._number = 0
        self._send, self._receive = anyio.create_memory_object_stream[tuple[int, Act]](100_000)
        self._stored = 0

    def record(
        self,
        what: str,
        *,
        at: datetime | None = None,
        term: Term | None = None,
        stalled_since: datetime | None = None,
        job: riverpy.JobRow | None = None,
    ) -> None:
        """Note an act, by default of now. The server reads the same clock."""
        self._number += 1
        act = Act(
            process=self._process,
            what=what,
            at=at or datetime.now(UTC),
            term=term,
            stalled_since=stalled_since,
            job_id=job and job.id,
            attempt=job and job.attempt,
        )
        self._send.send_nowait((self._number, act))

    async def run(self) -> None:
        """Store what is noted."""
        connection: asyncpg.Connection | None = None
        async for number, act in self._receive:
            while self._stored < number:
                try:
                    if connection is None:
                        connection = await asyncpg.connect(self._url, timeout=5)
                    await self._store(connection, number, act)
                    self._stored = number
                except DATABASE_ERRORS:
                    if connection is not None:
                        connection.terminate()
                    connection = None
                    await anyio.sleep(RECONNECT)

    async def flush(self) -> None:
        """Wait a moment until all that is noted so far is stored."""
        number = self._number
        with anyio.move_on_after(FLUSH_LIMIT):
            while self._stored < number:
                await anyio.sleep(0.01)

    async def _store(self, connection: asyncpg.Connection, number: int, act: Act) -> None:
        elected_at, leader_id = act.term or (None, None)
        await connection.execute(
            STATEMENTS["act"],
            *(act.process, number, act.what, leader_id, elected_at),
            *(act.stalled_since, act.job_id, act.attempt, act.at),
            timeout=5,
        )


class TermWriter(base.MaintenanceService):
    """Writes rows under the fence of its term."""

    name = "term writer"
    number = 0
    _began_at: datetime

    async def _pass(self, scope: StopScope) -> float:
        """The time is taken before the trust in the term is asked for: the process may be frozen
        between the two."""
        self._began_at = datetime.now(UTC)
        return await super()._pass(scope)

    async def run_once(self, scope: StopScope) -> float:
        """Say that a pass begins, and write one row."""
        fence = self.context.fence
        term = Term(fence.term.elected_at, fence.term.leader_id)
        recorder.record("pass", term=term, at=self._began_at)
        self.number += 1
        async with fence.transaction(self.context.connection, "a fleet's write") as connection:
            await connection.execute(
                STATEMENTS["term_write"],
                *(term.leader_id, term.elected_at, self.number, datetime.now(UTC)),
            )
            await anyio.sleep(random.uniform(0, HOLD_MOST))
        return PASS_INTERVAL


class Touch(msgspec.Struct, frozen=True):
    """A job that takes a while."""

    kind: ClassVar[str] = "touch"
    seconds: float


class Tick(msgspec.Struct, frozen=True):
    """A periodic job."""

    kind: ClassVar[str] = "tick"


def _with_term_writer(context: TermContext, *arguments: Any) -> list[base.MaintenanceService]:
    return [*usual_services(context, *arguments), TermWriter(context)]


async def _watch_leadership(client: riverpy.Client) -> None:
    async with client.leadership() as changes:
        async for change in changes:
            if change.elected_at is not None:
                term = Term(change.elected_at, change.leader_id)
                recorder.record("begin" if change.is_leader else "end", term=term)


async def _watch_stalls() -> None:
    while True:
        began, measured = datetime.now(UTC), time.monotonic()
        await anyio.sleep(TICK)
        if time.monotonic() - measured > STALL:
            recorder.record("stall", stalled_since=began)


class SteppingClock:
    """riverpy's wall clock, which a signal moves forward and back. The history goes by the true
    one."""

    def __init__(self) -> None:
        self._offset = timedelta(0)
        signal.signal(signal.SIGUSR1, self._step)
        SystemClock.now = lambda _: datetime.now(UTC) + self._offset
        true_time = time.time
        time.time = lambda: true_time() + self._offset.total_seconds()

    def _step(self, *_: object) -> None:
        self._offset = timedelta(0) if self._offset else CLOCK_STEP


async def _exhaust_pool(client: riverpy.Client) -> None:
    """Take what the pool has, again and again, and give nothing back."""
    async with AsyncExitStack() as held:
        while True:
            with suppress(riverpy.ClientStateError, TimeoutError):
                await held.enter_async_context(client._acquire())
            await anyio.sleep(TICK)


settings = msgspec.json.decode(os.environ[SETTINGS_VARIABLE], type=WorkerSettings)
recorder = Recorder(settings.history_url, settings.name)
usual_services = candidacy.domain_services
candidacy.domain_services = _with_term_writer
base.STAGGER = min(base.STAGGER, settings.leader_ttl / 15)  # a short term shall do something
stepping_clock = SteppingClock()
_log.LINES_MAX = LINES_MAX
workers = riverpy.Workers()


@workers.job(timeout=None)
async def touch(job: riverpy.Job[Touch]) -> None:
    """Note the attempt, and take a while. It does not end before the note is stored, which is lost
    where the process is killed before."""
    recorder.record("attempt", job=job)
    await anyio.sleep(job.args.seconds)
    await recorder.flush()


@workers.job
async def tick(_job: riverpy.Job[Tick]) -> None:
    """It is never worked."""


def make_tick() -> tuple[Tick, riverpy.InsertOpts]:
    """Into a queue that nobody works: a job that is rescued, or put back, is due anew, and does not
    tell its slot any more."""
    return Tick(), riverpy.InsertOpts(queue="slots")


def make_client() -> riverpy.Client:
    """The client, as the settings say."""
    names = POLICIES if settings.periodic_jobs else ()
    return riverpy.Client(
        workers=workers,
        queues={"default": riverpy.QueueConfig(max_workers=settings.slots)},
        periodic_jobs=[
            PeriodicJob(every(PERIOD), make_tick, id=name, missed=name) for name in names
        ],
        config=riverpy.Config(
            poll_only=settings.poll_only,
            elect_interval=timedelta(seconds=settings.elect_interval),
            leader_ttl=timedelta(seconds=settings.leader_ttl),
            dead_after=timedelta(seconds=settings.dead_after),
        ),
    )


@asynccontextmanager
async def client() -> AsyncGenerator[riverpy.Client]:
    """The client, watched."""
    end_with_the_fleet()
    watched = make_client()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(recorder.run)
        tasks.start_soon(_watch_leadership, watched)
        tasks.start_soon(_watch_stalls)
        if settings.pool_is_exhausted:
            tasks.start_soon(_exhaust_pool, watched)
        yield watched
        await recorder.flush()
        tasks.cancel_scope.cancel()
