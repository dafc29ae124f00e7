"""The client of a fleet's worker processes: `riverpy worker tests.kit.fleet_worker:client`.

It records its terms, its attempts and the times when it did not run, by a connection without the
proxy. Each term has one more service than usual, which records each of its passes and writes a row
through the fence of the term.
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
from riverpy._clock import Clock
from riverpy._maintenance import base
from riverpy._postgres.driver import DATABASE_ERRORS
from riverpy._work import elections as candidacy
from riverpy.periodic import PeriodicJob
from riverpy.schedules import every
from tests.kit.fleet import SETTINGS_VARIABLE, WorkerSettings, end_with_the_fleet
from tests.kit.history import PERIOD, POLICIES, STATEMENTS, Act, Term

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from riverpy._leading.term_context import TermContext
    from riverpy._lifecycle import StopScope

EVENTS_MAX = 1_000_000
"""Lines about single jobs per minute. Tests need all of them."""
TICK = 0.05
STALL = 0.25
"""If the event loop makes no turn for this many seconds, the process counts as not running."""
PASS_INTERVAL = 0.05
HOLD_MAX = 0.1
"""Maximum seconds that a fenced transaction stays open, so that faults hit some of them."""
FLUSH_LIMIT = 3.0
RECONNECT = 0.05
CLOCK_STEP = timedelta(minutes=10)


class Recorder:
    """Stores the acts of this process in the history, in order, and across outages of the
    server."""

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
        """Record an act, by default with the current time. The server reads the same clock."""
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
        """Store the recorded acts."""
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
        """Wait a short time until all acts recorded so far are stored."""
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

    async def _run_once_and_log_errors(self, scope: StopScope) -> float:
        """Read the time before the validity of the term, since the process may be frozen between
        the two."""
        self._began_at = datetime.now(UTC)
        return await super()._run_once_and_log_errors(scope)

    async def run_once(self, scope: StopScope) -> float:
        """Record the start of a pass, and write one row."""
        fence = self.context.fence
        term = Term(fence.lease.acquired_at, fence.lease.holder)
        recorder.record("pass", term=term, at=self._began_at)
        self.number += 1
        async with fence.transaction(self.context.connection, "a fleet's write") as connection:
            await connection.execute(
                STATEMENTS["term_write"],
                *(term.leader_id, term.elected_at, self.number, datetime.now(UTC)),
            )
            await anyio.sleep(random.uniform(0, HOLD_MAX))
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
    """riverpy's wall clock, which a signal sets forward and back. The history uses the true
    time."""

    def __init__(self) -> None:
        self._offset = timedelta(0)
        signal.signal(signal.SIGUSR1, self._step)
        Clock.now = lambda _: datetime.now(UTC) + self._offset
        true_time = time.time
        time.time = lambda: true_time() + self._offset.total_seconds()

    def _step(self, *_: object) -> None:
        self._offset = timedelta(0) if self._offset else CLOCK_STEP


async def _exhaust_pool(client: riverpy.Client) -> None:
    """Take all connections of the pool, again and again, and release none."""
    async with AsyncExitStack() as held:
        while True:
            with suppress(riverpy.ClientStateError, TimeoutError):
                await held.enter_async_context(client._get_open_pool().acquire())
            await anyio.sleep(TICK)


settings = msgspec.json.decode(os.environ[SETTINGS_VARIABLE], type=WorkerSettings)
recorder = Recorder(settings.history_url, settings.name)
usual_services = candidacy.make_domain_services
candidacy.make_domain_services = _with_term_writer
# Even a short term makes a pass.
base.FIRST_RUN_DELAY_MAX = min(base.FIRST_RUN_DELAY_MAX, settings.leader_ttl / 15)
stepping_clock = SteppingClock()
_log.EVENTS_PER_WINDOW_MAX = EVENTS_MAX
workers = riverpy.Workers()


@workers.job(timeout=None)
async def touch(job: riverpy.Job[Touch]) -> None:
    """Record the attempt, and take a while. It ends only after the record is stored. A process that
    is killed before loses the record."""
    recorder.record("attempt", job=job)
    await anyio.sleep(job.args.seconds)
    await recorder.flush()


@workers.job
async def tick(_job: riverpy.Job[Tick]) -> None:
    """Do nothing; this job is never worked."""


def make_tick() -> tuple[Tick, riverpy.InsertOpts]:
    """Return a job of a queue that no client works. A rescued or released job would be due at
    another time than its slot."""
    return Tick(), riverpy.InsertOpts(queue="slots")


def make_client() -> riverpy.Client:
    """Create the client from the settings."""
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
    """Yield the client and record its events."""
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
