"""Injects random faults into connections, the server and the workers of a fleet that works jobs."""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections import Counter, defaultdict
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import count
from typing import TYPE_CHECKING, Any

import anyio
import asyncpg
import msgspec

import riverpy
from riverpy._postgres.driver import DATABASE_ERRORS
from riverpy._postgres.job_maintenance import RESCUE_ERROR_TEXT
from tests.kit import server_faults
from tests.kit.bad_rows import JOBS, refused_rows, slow_rows
from tests.kit.chaos_jobs import Blocking, ChaosSettings, PoolExhausting, Processed
from tests.kit.chaos_load import FAILURES, Load
from tests.kit.chaos_plan import (
    BACKENDS,
    ENDS_WORKER,
    HARMLESS,
    NO_REASON,
    OF_SERVER,
    OF_USERS,
    PARTITIONS,
    Fault,
    FaultKind,
    make_plan,
)
from tests.kit.fleet import Shutdown, running_fleet, with_user
from tests.kit.history import Violation
from tests.kit.load import FileReader
from tests.kit.stepped_server import CLOCK_STEP, SteppedServer, make_server
from tests.kit.work_history import (
    ALL,
    STATEMENTS,
    Act,
    ClockStep,
    History,
    JobEnd,
    LogLine,
    Span,
    check,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence
    from pathlib import Path

    from riverpy.job import JobArgs
    from tests.kit.fleet import Fleet, Server, Worker

PROGRESS_INTERVAL = 5.0
STARTED = b'"event": "worker started"'
STARTUP_ERROR = "riverpy: "
START_LIMIT = 60.0
"""Seconds after the server's last fault until a started worker must work."""
CALM_LIMIT = 120.0
"""Seconds after the last fault until every job must be finished."""
CALM = 5.0
"""Seconds for which the load continues after the last fault."""
LOOK_INTERVAL = 0.05
STOPPED, NOT_READY, ABANDONED, KILLED = 0, 3, 4, -9
"""Exit codes of workers."""
LOAD_USER = "load"
TIMEOUTS = {"statement_timeout": "1s", "idle_in_transaction_session_timeout": "300ms"}
READ_ONLY = {"default_transaction_read_only": "on"}
BOUND = 5.0
"""Seconds after the end of a fault until jobs must run again."""
OUTAGES_MAX = 3
"""How often a worker may log for one fault that its connections are lost. An idle connection may be
found lost after the others are back, and a frozen backend may hold locks that others need."""
CONNECTIONS_MOST = 90
OWN_FIRST = 1_000_000_000
"""The first number of the jobs that faults insert. The numbers of the load are lower."""
IN_PROCESS = 10.0
"""How long a job in a process runs whose worker is killed, in seconds."""
JOB_START_TIMEOUT = 10.0
"""Seconds to wait for the job of a fault to start."""


# --- doing it


class ChaosOfWork:
    """One run against a fleet that works jobs."""

    def __init__(self, fleet: Fleet, settings: ChaosSettings, plan: Sequence[Fault]) -> None:
        self._fleet, self._settings, self._plan = fleet, settings, plan
        self._url = fleet.server.url
        self._busy: set[Worker] = set()
        """The workers that a fault hits at the moment."""
        self._server_lock = anyio.Lock()
        self._numbers = count(OWN_FIRST)
        self.done: Counter[str] = Counter()
        self.spans: list[Span] = []
        self.crashes: list[tuple[float, float]] = []
        self.clock_steps: list[ClockStep] = []
        self.ends: dict[str, float] = {}
        self.violations: list[Violation] = []
        """Violations found during the run. The history shows others."""

    async def run(self, workers: int, seconds: float, load: Load) -> History:
        """Inject faults under a load, let the fleet recover, stop it, and return its history."""
        await self._prepare(workers)
        history = History(
            committed=load.committed,
            rolled_back=load.rolled_back,
            unique=load.unique,
            cancels=load.cancels,
            spans=self.spans,
            crashes=self.crashes,
            clock_steps=self.clock_steps,
            ends=self.ends,
            dead_after=self._settings.dead_after,
        )
        history.began = time.time()
        began = anyio.current_time()
        async with anyio.create_task_group() as around:
            around.start_soon(self._watch_processes)
            around.start_soon(self._show_progress, load)
            async with anyio.create_task_group() as loading:
                loading.start_soon(load.run)
                async with anyio.create_task_group() as faults:
                    for fault in self._plan:
                        await anyio.sleep_until(began + fault.at)
                        faults.start_soon(self._do, fault)
                    await anyio.sleep_until(began + seconds)
                await anyio.sleep(CALM)
                history.ended = time.time()
                load.is_stopping = True
                await self._cancel_endless(load)
            await self._until_all_ended()
            around.cancel_scope.cancel()
        await self._stop()
        await self._read(history)
        return history

    @contextmanager
    def watching_loop(self) -> Generator[None]:
        """Check that the event loop of the inserting tasks reports no unhandled error."""
        loop = asyncio.get_running_loop()
        before = loop.get_exception_handler()
        loop.set_exception_handler(self._on_loop_error)
        try:
            yield
        finally:
            loop.set_exception_handler(before)

    def _on_loop_error(self, _: object, context: dict[str, Any]) -> None:
        """Ignore one error of asyncpg: it leaves a future behind when a call is cancelled before
        its connection is lost."""
        if not isinstance(context.get("exception"), asyncpg.ConnectionDoesNotExistError):
            self._violate("no error of the event loop", f"{context}")

    async def _prepare(self, workers: int) -> None:
        for number in range(workers):
            name = f"w{number}"
            acts = self._fleet.directory / f"{name}.acts"
            settings = msgspec.structs.replace(self._settings, acts=str(acts))
            await self._fleet.add(name, settings, user=name)
        async with self._fleet.server.connected() as connection:
            for name in (*(worker.name for worker in self._fleet.workers), LOAD_USER):
                await connection.execute(
                    f'CREATE ROLE "{name}" LOGIN; '
                    f'GRANT ALL ON ALL TABLES IN SCHEMA public TO "{name}"; '
                    f'GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO "{name}"'
                )
        async with anyio.create_task_group() as tasks:
            for worker in self._fleet.workers:
                tasks.start_soon(self._start, worker)

    # -- faults

    async def _do(self, fault: Fault) -> None:
        """Inject a fault. Another fault can end it early."""
        try:
            if fault.kind is FaultKind.CLOCK_STEP and not isinstance(
                self._fleet.server, SteppedServer
            ):
                return
            if fault.kind in OF_SERVER:
                async with self._server_lock:
                    with self._spanning(fault.kind, ALL):
                        await self._do_to_server(fault)
            elif fault.kind in OF_USERS:
                with self._spanning(fault.kind, ALL):
                    await self._do_as_user(fault)
            elif worker := self._choose(fault.number):
                with self._spanning(fault.kind, worker.name), self._busying(worker):
                    await self._do_to_worker(worker, fault)
        except* FAILURES:
            pass

    async def _do_to_server(self, fault: Fault) -> None:
        match fault.kind:
            case FaultKind.RESTART | FaultKind.CRASH | FaultKind.DOWN:
                await self._shut_down(fault)
            case FaultKind.REFUSE:
                async with server_faults.connections_refused(self._url, *self._users):
                    await anyio.sleep(fault.seconds)
            case FaultKind.EXHAUST:
                async with server_faults.connections_exhausted(with_user(self._url, LOAD_USER)):
                    await self._end_connections()
                    await anyio.sleep(fault.seconds)
            case FaultKind.CLOCK_STEP:
                await self._step_clock(fault)
            case FaultKind.TIMEOUTS:
                async with server_faults.server_settings(self._url, **TIMEOUTS):
                    await anyio.sleep(fault.seconds)
            case _:
                async with server_faults.server_settings(self._url, **READ_ONLY):
                    await self._end_connections()
                    await anyio.sleep(fault.seconds)

    async def _shut_down(self, fault: Fault) -> None:
        is_crash = fault.kind is FaultKind.CRASH
        server, began = self._fleet.server, time.time()
        await server.shut_down(Shutdown.IMMEDIATE if is_crash else Shutdown.FAST)
        await anyio.sleep(fault.seconds)
        await server.come_back()
        if is_crash:
            self.crashes.append((began, time.time()))

    async def _step_clock(self, fault: Fault) -> None:
        """Set the clock forward or back, and later to the true time."""
        assert isinstance(self._fleet.server, SteppedServer)
        began, seconds = time.time(), CLOCK_STEP if fault.number % 2 else -CLOCK_STEP
        clock = self._fleet.server.clock
        await server_faults.step_clock_often(clock, seconds, lasting=fault.seconds)
        self.clock_steps.append(ClockStep(began, time.time(), seconds))
        await self._fetch("end_sleeps")
        await self._fetch("make_due")

    async def _do_as_user(self, fault: Fault) -> None:
        match fault.kind:
            case FaultKind.LOCK_ROWS:
                async with server_faults.rows_locked(self._url, STATEMENTS["lock"]):
                    await anyio.sleep(fault.seconds)
            case FaultKind.SLOW_ROWS:
                rows = await self._fetch("future_id")
                slowest = f"OLD.id = {rows[0]['id']}" if rows else "false"
                async with slow_rows(self._url, JOBS, slowest):
                    await anyio.sleep(fault.seconds)
            case FaultKind.REFUSED_ROWS:
                async with refused_rows(self._url, JOBS):
                    await anyio.sleep(fault.seconds)
            case _:
                await self._insert(PoolExhausting(next(self._numbers), fault.seconds))
                await anyio.sleep(fault.seconds)

    async def _insert(self, *jobs: JobArgs, queue: str = "default") -> None:
        async with riverpy.Client(with_user(self._url, LOAD_USER)) as client:
            await client.insert_many(
                [riverpy.InsertManyParams(job, riverpy.InsertOpts(queue=queue)) for job in jobs]
            )

    async def _do_to_worker(self, worker: Worker, fault: Fault) -> None:
        doing, _, whose = fault.kind.name.partition("_")
        if whose in BACKENDS:
            await self._break_backends(worker, doing, BACKENDS[whose], fault.seconds)
            return
        match fault.kind:
            case FaultKind.KILL | FaultKind.STOP:
                await self._end_worker(worker, fault)
            case FaultKind.KILL_PARENT:
                await self._begin_job(worker, Processed(next(self._numbers), IN_PROCESS))
                await self._end_worker(worker, fault)
            case FaultKind.STOP_BLOCKED:
                await self._stop_blocked(worker, fault)
            case FaultKind.FREEZE:
                worker.freeze()
                await anyio.sleep(fault.seconds)
                worker.thaw()
            case FaultKind.CUT:
                worker.proxy.cut()
            case FaultKind.PROXY_REFUSES:
                worker.proxy.refusing = True
                worker.proxy.cut()
                await anyio.sleep(fault.seconds)
                worker.proxy.refusing = False
            case FaultKind.ROLE_TIMEOUTS:
                async with server_faults.role_settings(self._url, worker.name, **TIMEOUTS):
                    await server_faults.kill_backends(self._url, None, user=worker.name)
                    await anyio.sleep(fault.seconds)
            case _:
                worker.proxy.partition = PARTITIONS[fault.kind]
                await anyio.sleep(fault.seconds)
                await worker.proxy.heal()

    async def _end_worker(self, worker: Worker, fault: Fault) -> None:
        if fault.kind in {FaultKind.KILL, FaultKind.KILL_PARENT}:
            worker.kill()
            expected = {KILLED}
        else:
            worker.terminate()
            expected = {STOPPED, ABANDONED}
        self._note_end(worker, await worker.ended(), expected)
        await anyio.sleep(fault.seconds)
        await self._start(worker)

    async def _stop_blocked(self, worker: Worker, fault: Fault) -> None:
        """Stop the worker while one job blocks its event loop and another runs in a process."""
        path = self._fleet.directory / f"{worker.name}.blocked"
        path.touch()
        try:
            await self._begin_job(worker, Processed(next(self._numbers), IN_PROCESS))
            await self._begin_job(worker, Blocking(next(self._numbers), str(path)))
            await self._end_worker(worker, fault)
        finally:
            path.unlink(missing_ok=True)

    async def _begin_job(self, worker: Worker, job: Processed | Blocking) -> None:
        """Insert the job for this worker, and wait for its start."""
        acts = FileReader(self._fleet.directory / f"{worker.name}.acts")
        acts.lines()
        with anyio.move_on_after(JOB_START_TIMEOUT):
            await self._insert(job, queue=worker.name)
            while True:
                if any(f'"number":{job.number},' in line for line in acts.lines()):
                    return
                await anyio.sleep(LOOK_INTERVAL)

    async def _break_backends(self, worker: Worker, doing: str, name: str, seconds: float) -> None:
        if doing == "KILL":
            await server_faults.kill_backends(self._url, name, user=worker.name)
            return
        pids = await server_faults.find_backends(self._url, name, user=worker.name)
        async with server_faults.frozen_backends(self._url, pids):
            await anyio.sleep(seconds)

    async def _end_connections(self) -> None:
        for user in self._users:
            await server_faults.kill_backends(self._url, None, user=user)

    @property
    def _users(self) -> list[str]:
        return [worker.name for worker in self._fleet.workers]

    @contextmanager
    def _spanning(self, kind: FaultKind, worker: str) -> Generator[None]:
        self.done[kind] += 1
        began = time.time()
        try:
            yield
        finally:
            self.spans.append(
                Span(
                    kind,
                    worker,
                    began,
                    time.time(),
                    halts=kind not in HARMLESS,
                    is_reason=kind not in NO_REASON,
                    ends_worker=kind in ENDS_WORKER,
                )
            )

    @contextmanager
    def _busying(self, worker: Worker) -> Generator[None]:
        self._busy.add(worker)
        try:
            yield
        finally:
            self._busy.discard(worker)

    def _choose(self, number: int) -> Worker | None:
        """Return the worker with this number, or the next one without a fault."""
        workers = self._fleet.workers
        turned = workers[number:] + workers[:number]
        return next((worker for worker in turned if worker not in self._busy), None)

    # -- processes

    async def _start(self, worker: Worker) -> None:
        """Start a worker, again if it found no database, and return when it works."""
        limit = time.monotonic() + START_LIMIT
        starts = worker.log.read_bytes().count(STARTED) if worker.log.exists() else 0
        await worker.start()
        while worker.log.read_bytes().count(STARTED) == starts:
            if not worker.is_running:
                self._note_end(worker, await worker.ended(), {NOT_READY})
                await worker.start()
            if self._server_lock.locked():
                limit = time.monotonic() + START_LIMIT
            if time.monotonic() > limit:
                self._violate("a worker starts", f"{worker.name} does not start")
                return
            await anyio.sleep(LOOK_INTERVAL)

    async def _watch_processes(self) -> None:
        """Report a violation when a worker exits by itself."""
        while True:
            await anyio.sleep(LOOK_INTERVAL)
            for worker in self._fleet.workers:
                if worker not in self._busy and not worker.is_running:
                    with self._busying(worker):
                        self._note_end(worker, await worker.ended(), set())
                        await self._start(worker)

    def _note_end(self, worker: Worker, code: int, expected: set[int]) -> None:
        self.ends[f"{worker.name}:{worker.pid}"] = time.monotonic()
        if code not in expected:
            self._violate(
                "no worker fails", f"{worker.name} exited with code {code}: see {worker.log}"
            )

    def _violate(self, rule: str, text: str) -> None:
        self.violations.append(Violation(rule, text))

    async def _show_progress(self, load: Load) -> None:
        began = anyio.current_time()
        while True:
            await anyio.sleep(PROGRESS_INTERVAL)
            unfinished = await self._fetch("unfinished")
            print(
                f"{anyio.current_time() - began:5.0f} s  faults {self.done.total()}  "
                f"jobs {len(load.committed)}  waiting {unfinished[0][0] if unfinished else '?'}",
                file=sys.stderr,
            )

    # -- afterwards

    async def _cancel_endless(self, load: Load) -> None:
        """Cancel all endless jobs, including those whose insert returned no result."""
        rows: list[Any] | None = None
        while rows is None:
            rows = await self._fetch("endless")
        for row in rows:
            await load.cancel(row["id"])

    async def _until_all_ended(self) -> None:
        limit = time.monotonic() + CALM_LIMIT
        if self.clock_steps:
            await self._fetch("make_due")
        while (rows := await self._fetch("unfinished")) is None or rows[0][0]:
            if time.monotonic() > limit:
                return  # each of them is a violation
            await anyio.sleep(LOOK_INTERVAL)

    async def _stop(self) -> None:
        for worker in self._fleet.workers:
            worker.terminate()
        for worker in self._fleet.workers:
            self._note_end(worker, await worker.ended(), {STOPPED})

    async def _fetch(self, name: str) -> list[Any] | None:
        """Return the rows of a statement; None where the server does not answer."""
        with suppress(*DATABASE_ERRORS):
            async with self._fleet.server.connected() as connection:
                return await connection.fetch(STATEMENTS[name])
        return None

    async def _read(self, history: History) -> None:
        async with self._fleet.server.connected() as connection, connection.transaction():
            async for row in connection.cursor(STATEMENTS["jobs"], prefetch=1000):
                history.jobs.append(JobEnd(**row))
        for worker in self._fleet.workers:
            acts = self._fleet.directory / f"{worker.name}.acts"
            history.acts += _read_acts(acts)
            history.logs[worker.name] = _read_log(worker.log)


def _read_acts(path: Path) -> Iterator[Act]:
    decoder = msgspec.json.Decoder(Act)
    with path.open("rb") as file:
        for line in file:
            yield decoder.decode(line)


def _read_log(path: Path) -> list[LogLine]:
    """Parse a log. A line that is not JSON is an error, except for the last lines of a worker that
    could not start."""
    lines: list[LogLine] = []
    for text in path.read_text().splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            if text.startswith(STARTUP_ERROR) or not text:
                continue
            lines.append(LogLine(text, "error", lines[-1].at if lines else 0.0))
            continue
        at = datetime.fromisoformat(line["timestamp"]).timestamp()
        lines.append(
            LogLine(
                line["event"],
                line["level"],
                at,
                line.get("client_id", ""),
                str(line.get("exception", "")),
                line.get("job_id"),
            )
        )
    return lines


# --- the command


async def run_chaos(
    seed: int,
    *,
    seconds: float,
    workers: int,
    rate: float,
    bound: float = BOUND,
    outages_max: int = OUTAGES_MAX,
) -> dict[str, Any]:
    """Run once, and return figures and violations.

    Args: seed, seconds, workers: the plan. rate: jobs inserted per second. bound: seconds after the
    end of a fault within which jobs must run again. outages_max: how often a worker may lose its
    connections in one fault. A busy machine needs more than 1, when an answer takes as long as a
    connection timeout.
    """
    settings = ChaosSettings()
    plan = make_plan(seed, seconds=seconds, workers=workers, dead_after=settings.dead_after)
    async with running_fleet(_make_server) as fleet:
        load = Load(with_user(fleet.server.url, LOAD_USER), rate, seed)
        chaos = ChaosOfWork(fleet, settings, plan)
        with chaos.watching_loop():
            history = await chaos.run(workers, seconds, load)
        history.bound, history.outages_max = bound, outages_max
        violations = [*chaos.violations, *check(history)]
        if violations:
            fleet.keep("history.json", msgspec.json.encode(history))
        rules = Counter(violation.rule for violation in violations)
        return {
            "seed": seed,
            "seconds": seconds,
            "workers": workers,
            "faults": dict(sorted(chaos.done.items())),
            "failed_calls": load.failed_calls,
            **figures(history),
            "lost": rules["no committed job lost"],
            "finished_twice": rules["no job finished twice"],
            "violations": [msgspec.structs.asdict(violation) for violation in violations],
            "logs": str(fleet.directory) if violations else None,
        }


def _make_server(directory: Path) -> Server:
    """Start a server with a small disk."""
    return make_server(directory, max_connections=str(CONNECTIONS_MOST))


def figures(history: History) -> dict[str, Any]:
    """Return the figures of a history that are neither right nor wrong."""
    by_kind = defaultdict[str, list[float]](list)
    for recovery in history.recoveries():
        by_kind[recovery.kind].append(recovery.seconds)
    states = Counter(job.state for job in history.jobs)
    stalls = [until - since for since, until in history.stalls()]
    return {
        "jobs": len(history.jobs),
        "completed": states["completed"],
        "cancelled": states["cancelled"],
        "attempts": sum(act.what == "begin" for act in history.acts),
        "rescues": sum(text == RESCUE_ERROR_TEXT for job in history.jobs for text in job.errors),
        "rolled_back": len(history.rolled_back),
        "halted_s": round(sum(until - since for since, until in history.halts()), 1),
        "longest_stall_s": round(max(stalls, default=0.0), 3),
        "recovery_s": {
            kind: {
                "count": len(seconds),
                "median": round(statistics.median(seconds), 3),
                "max": round(max(seconds), 3),
            }
            for kind, seconds in sorted(by_kind.items())
        },
    }


def show(found: dict[str, Any]) -> None:
    """Print the result as text."""
    print(
        f"{found['jobs']} jobs: {found['completed']} completed, {found['cancelled']} cancelled, "
        f"in {found['attempts']} attempts, {found['rescues']} of them rescued; "
        f"{found['rolled_back']} rolled back; {found['failed_calls']} calls failed"
    )
    print(f"{found['lost']} lost, {found['finished_twice']} finished twice")
    print(f"longest stall {found['longest_stall_s']} s, besides {found['halted_s']} s of outages")
    print("faults, and seconds from the end of each until a worker stored results again:")
    recoveries = found["recovery_s"]
    for kind in sorted({*found["faults"], *recoveries}):
        count = found["faults"].get(kind, "")
        times = recoveries.get(kind)
        summary = f"median {times['median']:.3f}, max {times['max']:.3f}" if times else ""
        print(f"  {count:>4} {kind:<36} {summary}")
