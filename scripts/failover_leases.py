"""Measures for `scripts/failover leases` how a lease changes its holder after each fault.

Two processes with a PostgreSQL of their own hold one lease or wait for it. The holder acts every 10
ms without a statement, writes through the lease's fence all the time, and tries one more write
after its term. `after`: from the fault to the start of the next term. `gap`: from the last act of
the old term at which its lease was valid to the start of the next; a negative gap is an overlap.
`kept`: how often the term continued instead. `late`: acts after the start of the next term at which
the old lease was not valid. `refused`: fenced writes of ended terms. `stale`: fenced writes after
one of a later term, which must never happen. Exit code 1: a stale write, an epoch that did not
rise, no new holder, or an overlap that is not allowed.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from tests.kit.fleet import Server, Shutdown
from tests.kit.lease_fleet import Holding, LeaseSettings, lease_stage
from tests.kit.pgbouncer import is_installed, pooler
from tests.kit.proxy import Partition, Proxy
from tests.kit.standby import Pair
from tests.kit.stepped_server import SteppedServer
from tests.kit.wall_clock import WallClock

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from tests.kit.lease_fleet import LeaseStage, LeaseWorker
    from tests.kit.pgbouncer import Pooler

DEFAULT = LeaseSettings()
SHORT = LeaseSettings(elect_interval=0.5, leader_ttl=1.5)
AT_A_TIME = 4
LATE_LIMIT = 30.0
STEP = 3600


def boottime() -> float:
    """Return the time of the clock that the records use."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaseRow:
    """A fault that is injected into the holder of the lease again and again."""

    name: ClassVar[str]
    what: ClassVar[str]
    through = "manager"
    is_survived = False
    """Whether the holder's term may survive the fault. `fault` waits for as long as the term needs
    to end."""
    ends_its_process = False
    needs_own_servers = False
    """Whether each repetition of the measurement needs new servers."""
    can_overlap = False
    """Whether two terms may be valid at once for a while. Their writes are fenced."""
    make_server: Callable[[Path], Server] = Server

    def __init__(self, stage: LeaseStage, settings: LeaseSettings) -> None:
        self.stage = stage
        self.settings = msgspec.structs.replace(settings, through=self.through)
        self.afters: list[float] = []
        self.gaps: list[float] = []
        self.kept = 0
        self.late = 0

    @classmethod
    def obstacle(cls) -> str | None:
        """Return the reason why it cannot be measured here."""
        return None

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Run the two processes for the block."""
        for name in ("one", "two"):
            await self.stage.add(name, self.settings)
        yield

    async def prepare(self, old: Holding) -> Holding:
        """Set up the state that the fault needs, and return the term that it hits."""
        return old

    async def fault(self, worker: LeaseWorker) -> None:
        """Inject the fault into the holder. Return when it has happened."""
        raise NotImplementedError

    async def undo(self, worker: LeaseWorker) -> None:
        """Undo the fault after the next term started."""

    async def measure(self, repeat: int) -> None:
        """Measure the fault this many times."""
        async with self.running():
            for _ in range(repeat):
                await self.stage.until_all_ready()
                await asyncio.sleep(self.settings.elect_interval * (1 + random.random()))
                await self._once(await self.prepare(await self.stage.present_holding(LATE_LIMIT)))

    async def _once(self, old: Holding) -> None:
        worker = self.stage.worker(old.worker)
        fault_at = boottime()
        await self.fault(worker)
        new = await self._next(old)
        await self.undo(worker)
        if new is None:
            self.kept += 1
            return
        if not self.ends_its_process:  # it has noticed its end, and tried to write
            await self.stage.until(lambda: self.stage.of_term(old, "late_refused"), LATE_LIMIT)
        acts = self.stage.of_term(old, "act")
        self.afters.append(new.began - fault_at)
        self.gaps.append(new.began - max(act.at for act in acts if act.is_held))
        self.late += sum(act.at > new.began and not act.is_held for act in acts)

    async def _next(self, old: Holding) -> Holding | None:
        ttl = self.settings.leader_ttl
        try:
            return await self.stage.next_holding(old, (1.5 if self.is_survived else 20) * ttl)
        except TimeoutError:
            if self.is_survived:
                return None
            raise


class Graceful(LeaseRow):
    """The fault: SIGTERM to the holder. The processes only poll."""

    name, what = "graceful_poll_only", "SIGTERM of the holder, the other polls"

    async def fault(self, worker: LeaseWorker) -> None:
        worker.terminate()

    async def undo(self, worker: LeaseWorker) -> None:
        await worker.ended()
        await worker.start()


class GracefulListen(Graceful):
    """The fault: SIGTERM to the holder. The processes listen, so that its release is notified."""

    name, what = "graceful", "SIGTERM of the holder, the other listens"
    through = "client"


class Killed(LeaseRow):
    """The fault: SIGKILL to the holder."""

    name, what = "killed", "SIGKILL of the holder"
    ends_its_process = True

    async def fault(self, worker: LeaseWorker) -> None:
        worker.kill()
        await worker.ended()

    async def undo(self, worker: LeaseWorker) -> None:
        await worker.start()


class FrozenShortly(LeaseRow):
    """The fault: SIGSTOP to the holder, for less time than its lease is valid."""

    name, what = "frozen_shortly", "SIGSTOP of the holder for 0.3 ttl"
    is_survived = True

    async def fault(self, worker: LeaseWorker) -> None:
        worker.freeze()
        await asyncio.sleep(0.3 * self.settings.leader_ttl)
        worker.thaw()


class Frozen(LeaseRow):
    """The fault: SIGSTOP to the holder, for longer than its lease is valid."""

    name, what = "frozen", "SIGSTOP of the holder until the next holds it, then SIGCONT"

    async def fault(self, worker: LeaseWorker) -> None:
        worker.freeze()

    async def undo(self, worker: LeaseWorker) -> None:
        await asyncio.sleep(0.1)  # let the next write happen
        worker.thaw()


class Blocked(LeaseRow):
    """The fault: a call blocks the event loop of the holder."""

    name, what = "blocked", "the holder's event loop is blocked for 1.3 ttl"

    async def fault(self, worker: LeaseWorker) -> None:
        worker.block()


class RequestsLost(LeaseRow):
    """The fault: the network drops what the holder sends."""

    name, what = "requests_lost", "data that the holder sends is dropped"
    partition = Partition.REQUESTS_LOST

    async def fault(self, worker: LeaseWorker) -> None:
        worker.proxy.partition = self.partition

    async def undo(self, worker: LeaseWorker) -> None:
        await worker.proxy.heal()


class AnswersLost(RequestsLost):
    """The fault: the network drops what the server answers."""

    name, what = "answers_lost", "answers of the server to the holder are dropped"
    partition = Partition.ANSWERS_LOST


class BothHeld(RequestsLost):
    """The fault: the network holds data back and delivers it late."""

    name, what = "cut_off", "data between holder and server is held back, then delivered"
    partition = Partition.HELD


class ExhaustedPool(LeaseRow):
    """User code takes the connections that the lease needs."""

    name, what = "exhausted_pool", "a manager on a pool whose connections user code takes"
    through = "pool"

    async def fault(self, worker: LeaseWorker) -> None:
        worker.take_connections()


class ExhaustedClientPool(ExhaustedPool):
    """User code takes connections that the lease does not need."""

    name, what = "exhausted_client_pool", "a client's singleton takes its pool's connections"
    through = "client"
    is_survived = True


class Restart(LeaseRow):
    """The server restarts cleanly."""

    name, what = "restart", "the server restarts cleanly"
    is_survived = True
    how = Shutdown.FAST

    async def fault(self, worker: LeaseWorker) -> None:
        await self.stage.fleet.server.shut_down(self.how)
        await self.stage.fleet.server.come_back()


class Crash(Restart):
    """The server crashes and comes back."""

    name, what = "crash", "the server crashes and comes back"
    how = Shutdown.IMMEDIATE


class ConnectionOutage(LeaseRow):
    """The server is away for longer than the lease."""

    name, what = "outage", "the server is away for two ttl"

    async def fault(self, worker: LeaseWorker) -> None:
        await self.stage.fleet.server.shut_down(Shutdown.FAST)
        await asyncio.sleep(2 * self.settings.leader_ttl)
        await self.stage.fleet.server.come_back()


class Failover(LeaseRow):
    """The primary is lost. Its standby has neither the term nor its renewals."""

    name = "failover"
    what = "the primary is lost; its standby without the term is promoted"
    needs_own_servers = True
    can_overlap = True
    make_server = Pair

    @property
    def pair(self) -> Pair:
        """Start the primary and the standby."""
        server = self.stage.fleet.server
        assert isinstance(server, Pair)
        return server

    async def prepare(self, old: Holding) -> Holding:
        async with self.pair.primary.connected() as connection:
            self._sender: int = await connection.fetchval("SELECT pid FROM pg_stat_replication")
        os.kill(self._sender, signal.SIGSTOP)  # from now on the standby receives nothing
        worker = self.stage.worker(old.worker)
        worker.terminate()
        new = await self.stage.next_holding(old, LATE_LIMIT)
        await worker.ended()
        await worker.start()
        await self.stage.until_all_ready()
        return new

    async def fault(self, worker: LeaseWorker) -> None:
        stopping = asyncio.create_task(self.pair.primary.shut_down(Shutdown.IMMEDIATE))
        await asyncio.sleep(0)  # it is already stopping
        os.kill(self._sender, signal.SIGKILL)
        await stopping
        await self.pair.standby.promote()
        self.pair.primary, self.pair.standby = self.pair.standby, self.pair.primary


class ClockStep(LeaseRow):
    """The wall clocks of both processes are wrong."""

    name, what = "clock_step", "the wall clock of both processes steps by an hour, there and back"
    is_survived = True

    @classmethod
    def obstacle(cls) -> str | None:
        return None if WallClock.is_possible() else "no C compiler"

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        with tempfile.TemporaryDirectory() as place:
            self._clock = WallClock(Path(place))
            self._seconds = 0
            for name in ("one", "two"):
                await self.stage.add(name, self.settings, environment=self._clock.environment)
            yield

    async def fault(self, worker: LeaseWorker) -> None:
        self._seconds = STEP - self._seconds
        self._clock.set(self._seconds)


class ServerClockForward(LeaseRow):
    """The server's clock steps forward, so that every lease expires at once."""

    name, what = "server_clock_forward", "the server's clock steps forward by an hour"
    make_server = SteppedServer
    can_overlap = True
    step = STEP

    @classmethod
    def obstacle(cls) -> str | None:
        return ClockStep.obstacle()

    async def fault(self, worker: LeaseWorker) -> None:
        server = self.stage.fleet.server
        assert isinstance(server, SteppedServer)
        server.clock.step(self.step)


class ServerClockBack(ServerClockForward):
    """The server's clock steps back, so that every lease lasts for hours."""

    name, what = "server_clock_back", "the server's clock steps back by an hour"
    is_survived = True
    step = -STEP


class PoolerRow(LeaseRow):
    """A row whose connections go through PgBouncer in transaction mode."""

    @classmethod
    def obstacle(cls) -> str | None:
        return None if is_installed() else "PgBouncer is not installed"

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        settings = msgspec.structs.replace(self.settings, is_pooler=True)
        with pooler(self.stage.fleet.server.url) as self.pooler:
            self.pooler: Pooler
            for name in ("one", "two"):
                await self.stage.add(name, settings, proxy=Proxy(self.pooler.url))
            yield


class PoolerKilled(PoolerRow, Killed):
    """The holder is killed behind a pooler."""

    name, what = "pgbouncer_killed", "SIGKILL of the holder, behind PgBouncer"


class PoolerRestart(PoolerRow):
    """The pooler is killed."""

    name, what = "pgbouncer_restart", "PgBouncer is killed and started again"
    is_survived = True

    async def fault(self, worker: LeaseWorker) -> None:
        self.pooler.kill()
        await asyncio.to_thread(self.pooler.start)


ROWS: dict[str, type[LeaseRow]] = {
    row.name: row
    for row in (
        GracefulListen,
        Graceful,
        Killed,
        FrozenShortly,
        Frozen,
        Blocked,
        RequestsLost,
        AnswersLost,
        BothHeld,
        ExhaustedPool,
        ExhaustedClientPool,
        Restart,
        Crash,
        ConnectionOutage,
        Failover,
        ClockStep,
        ServerClockForward,
        ServerClockBack,
        PoolerKilled,
        PoolerRestart,
    )
}


class Result(msgspec.Struct):
    """The result of a row."""

    row: str
    what: str
    ttl: float
    afters: list[float] = []
    gaps: list[float] = []
    kept: int = 0
    late: int = 0
    refused: int = 0
    stale: int = 0
    is_rising: bool = True
    """Whether each term had a higher epoch than the one before."""
    error: str | None = None

    @property
    def is_bad(self) -> bool:
        """Return whether something happened that is never allowed."""
        is_overlap = min(self.gaps, default=0) < 0 and not ROWS[self.row].can_overlap
        return bool(self.error or self.stale or is_overlap or not self.is_rising)

    def add(self, row: LeaseRow) -> None:
        """Add the records of one stage."""
        self.afters += row.afters
        self.gaps += row.gaps
        self.kept += row.kept
        self.late += row.late
        notes = row.stage.read()
        self.refused += sum(note.what in {"refused", "late_refused"} for note in notes)
        self.stale += sum(note.what == "stale" for note in notes)
        epochs = [holding.epoch for holding in row.stage.holdings()]
        self.is_rising &= all(a < b for a, b in itertools.pairwise(epochs))


async def run_row(row_type: type[LeaseRow], settings: LeaseSettings, repeat: int) -> Result:
    """Measure one row on servers of its own."""
    result = Result(row_type.name, row_type.what, settings.leader_ttl)
    result.error = row_type.obstacle()
    stages, times = (repeat, 1) if row_type.needs_own_servers else (1, repeat)
    for _ in range(stages):
        if result.error is None:
            async with lease_stage(row_type.make_server) as stage:
                row = row_type(stage, settings)
                try:
                    await row.measure(times)
                except TimeoutError:
                    result.error = f"no process acquired the lease (logs: {stage.fleet.directory})"
                    stage.fleet.is_kept = True
                result.add(row)
    return result


async def run_rows(names: list[str], settings: LeaseSettings, repeat: int) -> list[Result]:
    """Measure all rows, some of them at the same time."""
    free = asyncio.Semaphore(AT_A_TIME)

    async def run(name: str) -> Result:
        async with free:
            result = await run_row(ROWS[name], settings, repeat)
        print(f"{name}: done", file=sys.stderr, flush=True)
        return result

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(run(name)) for name in names]
    return [task.result() for task in running]


def as_json(result: Result) -> dict[str, Any]:
    """Return the result with its figures in seconds."""
    found = msgspec.to_builtins(result)
    for name in ("afters", "gaps"):
        values = found.pop(name)
        numbers = (
            {"median": statistics.median(values), "min": min(values), "max": max(values)}
            if values
            else {}
        )
        found[name.removesuffix("s")] = {key: round(value, 3) for key, value in numbers.items()}
    return found | {"times": len(result.gaps) + result.kept}


def show(results: list[Result]) -> None:
    """Print a table of seconds, with fractions of the ttl."""
    print(
        f"{'row':21} {'times':>5} {'kept':>4} {'after: median':>13} {'max':>7} {'of ttl':>6} "
        f"{'gap: median':>11} {'min':>7} {'max':>7} {'of ttl':>6} "
        f"{'late':>4} {'refused':>7} {'stale':>5}"
    )
    for result in results:
        found = as_json(result)
        after, gap = found["after"], found["gap"]
        cells = [_seconds(after.get(key)) for key in ("median", "max")]
        cells += [_share(after.get("max"), result.ttl)]
        cells += [_seconds(gap.get(key)) for key in ("median", "min", "max")]
        cells += [_share(gap.get("max"), result.ttl)]
        print(
            f"{result.row:21} {found['times']:>5} {result.kept:>4} {cells[0]:>13} {cells[1]:>7} "
            f"{cells[2]:>6} {cells[3]:>11} {cells[4]:>7} {cells[5]:>7} {cells[6]:>6} "
            f"{result.late:>4} {result.refused:>7} {result.stale:>5}"
        )
        if result.error or not result.is_rising:
            print(f"  {result.error or 'an epoch did not rise'}")


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _share(value: float | None, ttl: float) -> str:
    return "-" if value is None else f"{value / ttl:.2f}"
