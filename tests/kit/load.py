"""A load of jobs on a fleet, and the rules that hold during any fault: no committed job is lost,
none finishes twice or runs more often than its attempts say, and the workers log nothing
unexpected."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from contextlib import asynccontextmanager, contextmanager, suppress
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

import riverpy
from riverpy._log_events import (
    CONNECTION_LOST,
    CONNECTION_RESTORED,
    JOB_COUNTS_NOT_STORED,
    JOB_RESULT_REFUSED,
    JOB_RESULTS_REJECTED,
    JOBS_OF_LOST_CLAIMS_RELEASED,
    LEADER_ELECTED,
    WORKER_STARTED,
)
from riverpy._postgres.driver import DATABASE_ERRORS
from tests.kit.fleet import WorkerSettings
from tests.kit.stalls import is_stall
from tests.kit.statements import read_statements

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Generator, Sequence

    from tests.kit.fleet import Fleet, Worker

STATEMENTS = read_statements(Path(__file__).with_name("load.sql"))
RATE = 120
"""Jobs inserted per second."""
BATCH_INTERVAL = 0.05
JOB_SECONDS = 0.02
LOOK_INTERVAL = 0.02
LIMIT = 90.0
"""Timeout in seconds for anything that is waited for, on a machine however busy."""
CALM_BACKLOG = 100
"""Maximum number of jobs that wait or run while nothing is broken."""
LOST_CLAIMS_WINDOW = 1.0
"""Seconds before a crash of the server within which claims may be lost, since they are not
durable."""
LOST, RESTORED = CONNECTION_LOST, CONNECTION_RESTORED
REFUSED = JOB_RESULT_REFUSED
HELD = JOB_RESULTS_REJECTED
PUT_BACK = JOBS_OF_LOST_CLAIMS_RELEASED
DELETED = "deleted"
"""The state in a log line about a job of an earlier load whose row is deleted. Its result was
stored, but the worker received no answer and sends it again."""


class LoadSettings(WorkerSettings, frozen=True, kw_only=True):
    """Settings of a worker process under load (`tests/kit/load_worker.py`)."""

    target: str = "tests.kit.load_worker:client"
    effects: str = ""
    """Path of the file with its effects. The stage sets it."""
    durable_claims: bool = False
    look_interval: float = 0.3
    """Seconds between two uses of the connections that are rarely used."""


class Start(NamedTuple):
    """The start of an attempt, as its handler recorded it."""

    job_id: int
    attempt: int
    at: float


class FileReader:
    """Reads the whole lines that are appended to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def lines(self) -> list[str]:
        """Return the lines since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]
        self._offset += len(text)
        return text.decode().splitlines()


class StageMember:
    """A worker of the stage, with its log and its effects."""

    def __init__(self, worker: Worker, settings: LoadSettings) -> None:
        self.worker = worker
        self._log = FileReader(worker.log)
        self._effects = FileReader(Path(settings.effects))
        self.log_lines: list[dict[str, Any]] = []
        """Its log since the load started."""
        self.starts: list[Start] = []
        self.led_since = ""
        """When it last became leader."""

    def read(self) -> None:
        """Read what it wrote since the last call."""
        log_lines = [json.loads(line) for line in self._log.lines()]
        self.log_lines += log_lines
        for line in log_lines:
            if line["event"] == LEADER_ELECTED:
                self.led_since = line["timestamp"]
        for line in self._effects.lines():
            job_id, attempt, at = line.split()
            self.starts.append(Start(int(job_id), int(attempt), float(at)))

    def forget(self) -> None:
        """Start again without earlier lines."""
        self.read()
        self.log_lines, self.starts = [], []

    def count(self, event: str) -> int:
        """Return how often it logged this event."""
        self.read()
        return [line["event"] for line in self.log_lines].count(event)

    @property
    def started_jobs(self) -> set[int]:
        """Return the jobs that started in this worker."""
        self.read()
        return {start.job_id for start in self.starts}

    @property
    def warnings(self) -> list[dict[str, Any]]:
        """Return its log lines at warning and above, without those about a stalled machine and
        about jobs of an earlier load."""
        self.read()
        loud = [line for line in self.log_lines if line["level"] not in {"debug", "info"}]
        return [line for line in loud if not is_stall(line) and line.get("state") != DELETED]

    def unexpected(self, outages: int, expected: Collection[str]) -> list[dict[str, Any]]:
        """Return the unexpected and the missing log lines. Expected are a line at the start and the
        end of this many outages, releases of lost claims, and the given events. An outage of the
        reserved connection may begin while counts of jobs are written over it."""
        usual = {LOST, PUT_BACK, *expected}
        if outages:
            usual.add(JOB_COUNTS_NOT_STORED)
        lines = [line for line in self.warnings if line["event"] not in usual]
        lines += [line for line in self.log_lines if line["level"] in {"error", "critical"}]
        lines += [line for line in self.log_lines if "exception" in line]
        if not self.count(LOST) == self.count(RESTORED) == outages:
            lines += [line for line in self.log_lines if line["event"] in {LOST, RESTORED}]
        return lines


class Stage:
    """A fleet of two workers that gets one load after the other."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.members: list[StageMember] = []

    @property
    def url(self) -> str:
        """The URL without the proxies."""
        return self.fleet.server.url

    @property
    def leader(self) -> StageMember:
        """The worker that became leader last."""
        led = [(member.led_since, member) for member in self.members if member.led_since]
        return max(led, key=itemgetter(0))[1]

    async def start(self, settings: LoadSettings, workers: int = 2) -> None:
        """Start the workers and wait until they work."""
        await self.execute("create")
        for number in range(workers):
            name = f"w{number}"
            async with self.fleet.server.connected() as connection:
                await connection.execute(f"CREATE ROLE {name} LOGIN IN ROLE postgres")
            effects = str(self.fleet.directory / f"{name}.effects")
            its_settings = msgspec.structs.replace(settings, effects=effects)
            worker = await self.fleet.add(name, its_settings, user=name)
            await worker.start()
            self.members.append(StageMember(worker, its_settings))
        for member in self.members:
            await until(lambda member=member: member.count(WORKER_STARTED) == 1)
        await until(lambda: any(member.count(LEADER_ELECTED) for member in self.members))

    @asynccontextmanager
    async def load(
        self, *, outages: int | None = None, expected: Collection[str] = ()
    ) -> AsyncGenerator[Load]:
        """Run a load during the block. At its end the load recovers, stops, and is checked.

        Args: outages: how many each worker must have logged, and nothing else; None: any number.
        expected: other events that they may log at warning.
        """
        with self._keeping_logs():
            await self._clear()
            async with self._checked(Load(self)) as load:
                yield load
            for member in self.members:
                await until(lambda member=member: member.count(LOST) == member.count(RESTORED))
                number = member.count(LOST) if outages is None else outages
                _expect_none(member.unexpected(number, expected))

    @asynccontextmanager
    async def _checked(self, load: Load) -> AsyncGenerator[Load]:
        async with load.client, asyncio.TaskGroup() as tasks:
            inserting = tasks.create_task(load.insert())
            await load.until_completed()
            try:
                yield load
            finally:
                load.release()
            await load.until_recovered()
            inserting.cancel()
        await self.ends()
        _expect_none(await load.faults())
        _expect_none(
            [member.worker.name for member in self.members if not member.worker.is_running]
        )

    async def _clear(self) -> None:
        """Wait for the end of what a failed load left, and forget it."""
        await self.ends()
        await self.execute("clear")
        for member in self.members:
            member.forget()

    async def ends(self) -> None:
        """Return when every job is completed."""

        async def is_done() -> bool:
            return await self.fetchval("unfinished") == 0

        await until(is_done)

    @contextmanager
    def _keeping_logs(self) -> Generator[None]:
        try:
            yield
        except BaseException as error:
            self.fleet.is_kept = True
            error.add_note(f"logs: {self.fleet.directory}")
            raise

    async def fetchval(self, name: str, *arguments: object) -> Any:
        """Return the value of a statement without a proxy; None where the server does not
        answer."""
        with suppress(*DATABASE_ERRORS):
            async with self.fleet.server.connected() as connection:
                return await connection.fetchval(STATEMENTS[name], *arguments)
        return None

    async def execute(self, name: str) -> None:
        """Run a script without a proxy."""
        async with self.fleet.server.connected() as connection:
            await connection.execute(STATEMENTS[name])


class Load:
    """The jobs of a load and their results."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.client = riverpy.Client(stage.url)
        """The client that inserts, like that of a web application."""
        self.release_file = stage.fleet.directory / f"released-{time.monotonic_ns()}"
        """Held jobs run until this file exists."""
        self._cancelled: set[int] = set()
        self.inserted: list[int] = []
        """The ids of jobs whose insert returned a result."""
        self.failures: list[Exception] = []
        """Errors of inserts."""
        self.crashes: list[tuple[float, float]] = []
        """Start and end of each crash of the server, which can lose claims."""

    async def insert(self) -> None:
        """Insert until cancelled."""
        job = riverpy.InsertManyParams(
            riverpy.RawArgs("effect", json.dumps({"seconds": JOB_SECONDS}))
        )
        batch = [job] * round(RATE * BATCH_INTERVAL)
        due = time.monotonic()
        while True:
            try:
                results = await self.client.insert_many(batch)
                self.inserted += [result.job.id for result in results]
            except DATABASE_ERRORS as error:
                self.failures.append(error)
            due = max(due + BATCH_INTERVAL, time.monotonic() - BATCH_INTERVAL)
            await asyncio.sleep(due - time.monotonic())

    async def start_held(self, count: int = 1, **args: object) -> list[int]:
        """Insert jobs that run until `release`, and return their ids when all run."""
        text = json.dumps({"until": str(self.release_file), **args})
        job = riverpy.InsertManyParams(riverpy.RawArgs("effect", text))
        ids = [result.job.id for result in await self.client.insert_many([job] * count)]
        self.inserted += ids
        await until(lambda: {*ids} <= {start.job_id for start in self._starts()})
        return ids

    def release(self) -> None:
        """Let the held jobs end."""
        self.release_file.touch()

    async def cancel(self, job_id: int) -> None:
        """Cancel a running job, and return when it is cancelled."""

        async def is_cancelled() -> bool:
            return await self._stage.fetchval("state", job_id) == "cancelled"

        await self.client.job_cancel(job_id)
        await until(is_cancelled)
        self._cancelled.add(job_id)

    async def until_jobs_wait(self) -> None:
        """Return when jobs wait."""
        await until(lambda: self.is_positive("many_available", CALM_BACKLOG))

    @property
    def restarted_jobs(self) -> set[int]:
        """Return the jobs with a second attempt."""
        return {start.job_id for start in self._starts() if start.attempt > 1}

    async def until_completed(self) -> None:
        """Return when jobs that are inserted from now on are completed."""
        newest = None
        while newest is None:
            newest = await self._stage.fetchval("newest")
        await until(lambda: self.is_positive("completed_since", newest))

    async def until_recovered(self) -> float:
        """Return the seconds until new jobs are completed and none waits for longer than usual."""
        began = time.monotonic()
        await self.until_completed()
        await until(self._is_calm)
        return time.monotonic() - began

    async def faults(self) -> list[str]:
        """Return the broken rules of the load."""
        async with self._stage.fleet.server.connected() as connection:
            ends = await connection.fetch(STATEMENTS["ends"])
        starts = self._starts()
        return [
            *(f"job {job_id} is lost" for job_id in {*self.inserted} - {row["id"] for row in ends}),
            *self._faults_of_ends(ends, {start.job_id for start in starts}),
            *self._faults_of_starts(starts),
        ]

    def _starts(self) -> list[Start]:
        for member in self._stage.members:
            member.read()
        return [start for member in self._stage.members for start in member.starts]

    def _faults_of_ends(self, ends: Sequence[Any], started_jobs: set[int]) -> list[str]:
        found: list[str] = []
        for row in ends:
            is_cancelled = row["id"] in self._cancelled
            expected = {
                "state": "cancelled" if is_cancelled else "completed",
                "finishes": 0 if is_cancelled else 1,
                "attempt": 1 + row["rescues"],
                "errors": is_cancelled + row["rescues"],
            }
            if row["id"] not in started_jobs or any(
                row[name] != expected[name] for name in expected
            ):
                found.append(
                    f"{dict(row)}, {'started' if row['id'] in started_jobs else 'never started'}"
                )
        return found

    def _faults_of_starts(self, starts: list[Start]) -> list[str]:
        """Check that each attempt starts once, and once more for a claim that a crash of the server
        lost."""
        counts = Counter((start.job_id, start.attempt) for start in starts)
        forgotten = Counter(
            (start.job_id, start.attempt)
            for start in starts
            if any(began - LOST_CLAIMS_WINDOW <= start.at <= ended for began, ended in self.crashes)
        )
        return [
            f"attempt {attempt} of job {job_id} began {count} times"
            for (job_id, attempt), count in counts.items()
            if count > 1 + forgotten[job_id, attempt]
        ]

    async def _is_calm(self) -> bool:
        unfinished = await self._stage.fetchval("unfinished")
        return unfinished is not None and unfinished <= CALM_BACKLOG

    async def is_positive(self, name: str, *arguments: object) -> bool:
        """Return whether the value of a statement is positive."""
        return bool(await self._stage.fetchval(name, *arguments))


def _expect_none(found: Sequence[object]) -> None:
    if found:
        raise AssertionError("\n".join(map(str, found[:30])))


async def until(holds: Callable[[], bool | Awaitable[bool]]) -> None:
    """Return when the condition holds.

    Raises: TimeoutError: it does not hold within `LIMIT`.
    """
    async with asyncio.timeout(LIMIT):
        while True:
            found = holds()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(LOOK_INTERVAL)
