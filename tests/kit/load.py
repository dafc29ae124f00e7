"""A load of jobs on a fleet, and what must hold of it whatever was broken meanwhile: no job that
was inserted is lost, none is finished twice or run more often than its attempts say, and the
workers' logs are plain."""

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
from riverpy._postgres.driver import DATABASE_ERRORS
from tests.kit.fleet import WorkerSettings
from tests.kit.stalls import is_stall
from tests.kit.statements import read_statements

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Generator, Sequence

    from tests.kit.fleet import Fleet, Worker

STATEMENTS = read_statements(Path(__file__).with_name("load.sql"))
RATE = 500
"""Jobs a second."""
BATCH_INTERVAL = 0.05
JOB_SECONDS = 0.02
LOOK_INTERVAL = 0.02
LIMIT = 90.0
"""Seconds that a machine, however busy, may take for anything that is waited for."""
CALM_BACKLOG = RATE // 4
"""Jobs that wait or run while nothing is broken, at most."""
CLAIMS_LOST = 1.0
"""Seconds before a crash of the server whose claims it may forget, unless they are durable."""
LOST, RESTORED = "database connection lost", "database connection restored"
REFUSED = "job result refused: the attempt is no longer this client's"
HELD = "job results are refused and will be tried again"
PUT_BACK = "put back jobs whose claims were lost"
DELETED = "deleted"
"""The state in a line about a job of an earlier load, whose row is gone: its result was stored, but
the worker did not get the answer and sends it again."""


class LoadSettings(WorkerSettings, frozen=True, kw_only=True):
    """What a worker process under load is told (`tests/kit/load_worker.py`)."""

    target: str = "tests.kit.load_worker:client"
    effects: str = ""
    """The file of its effects. The stage fills it in."""
    durable_claims: bool = False
    look_interval: float = 0.3
    """Seconds between two uses of the connections that are used now and then."""


class Start(NamedTuple):
    """An attempt that began, as its handler noted."""

    job_id: int
    attempt: int
    at: float


class Tail:
    """What is appended to a file, in whole lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def lines(self) -> list[str]:
        """What came since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]
        self._offset += len(text)
        return text.decode().splitlines()


class Place:
    """A worker of the stage, with what it wrote."""

    def __init__(self, worker: Worker, settings: LoadSettings) -> None:
        self.worker = worker
        self._log = Tail(worker.log)
        self._effects = Tail(Path(settings.effects))
        self.said: list[dict[str, Any]] = []
        """Its log since the load began."""
        self.starts: list[Start] = []
        self.led_since = ""
        """When it began to lead last."""

    def read(self) -> None:
        """Take in what it wrote meanwhile."""
        said = [json.loads(line) for line in self._log.lines()]
        self.said += said
        for line in said:
            if line["event"] == "leading begins":
                self.led_since = line["timestamp"]
        for line in self._effects.lines():
            job_id, attempt, at = line.split()
            self.starts.append(Start(int(job_id), int(attempt), float(at)))

    def forget(self) -> None:
        """Begin anew."""
        self.read()
        self.said, self.starts = [], []

    def count(self, event: str) -> int:
        """How often it has said this."""
        self.read()
        return [line["event"] for line in self.said].count(event)

    @property
    def begun(self) -> set[int]:
        """The jobs that began here."""
        self.read()
        return {start.job_id for start in self.starts}

    @property
    def warnings(self) -> list[dict[str, Any]]:
        """What it said at warning, and above, but of a machine that let it stand still, and of jobs
        of an earlier load."""
        self.read()
        loud = [line for line in self.said if line["level"] not in {"debug", "info"}]
        return [line for line in loud if not is_stall(line) and line.get("state") != DELETED]

    def unexpected(self, outages: int, expected: Collection[str]) -> list[dict[str, Any]]:
        """What it said, or did not say, but for a line at the begin and the end of so many
        outages, that it put back jobs whose claims were lost, and what is expected besides."""
        usual = {LOST, PUT_BACK, *expected}
        lines = [line for line in self.warnings if line["event"] not in usual]
        lines += [line for line in self.said if line["level"] in {"error", "critical"}]
        lines += [line for line in self.said if "exception" in line]
        if not self.count(LOST) == self.count(RESTORED) == outages:
            lines += [line for line in self.said if line["event"] in {LOST, RESTORED}]
        return lines


class Stage:
    """A fleet of two workers, for one load after the other."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.places: list[Place] = []

    @property
    def url(self) -> str:
        """Past the proxies."""
        return self.fleet.server.url

    @property
    def leader(self) -> Place:
        """The worker that began to lead last."""
        begun = [(place.led_since, place) for place in self.places if place.led_since]
        return max(begun, key=itemgetter(0))[1]

    async def start(self, settings: LoadSettings, workers: int = 2) -> None:
        """Have the workers work."""
        await self.execute("create")
        for number in range(workers):
            name = f"w{number}"
            async with self.fleet.server.connected() as connection:
                await connection.execute(f"CREATE ROLE {name} LOGIN IN ROLE postgres")
            effects = str(self.fleet.directory / f"{name}.effects")
            its_settings = msgspec.structs.replace(settings, effects=effects)
            worker = await self.fleet.add(name, its_settings, user=name)
            await worker.start()
            self.places.append(Place(worker, its_settings))
        for place in self.places:
            await until(lambda place=place: place.count("worker started") == 1)
        await until(lambda: any(place.count("leading begins") for place in self.places))

    @asynccontextmanager
    async def load(
        self, *, outages: int | None = None, expected: Collection[str] = (), rate: int = RATE
    ) -> AsyncGenerator[Load]:
        """A load for the time of the block; on leaving it recovers, ends, and is checked.

        Args:
            outages: how many each worker must have told of, and of nothing else; None: any number.
            expected: what else they may say at warning.
        """
        with self._keeping_logs():
            await self._clear()
            async with self._checked(Load(self)) as load:
                yield load
            for place in self.places:
                await until(lambda place=place: place.count(LOST) == place.count(RESTORED))
                number = place.count(LOST) if outages is None else outages
                _expect_none(place.unexpected(number, expected))

    @asynccontextmanager
    async def _checked(self, load: Load) -> AsyncGenerator[Load]:
        async with load.client, asyncio.TaskGroup() as tasks:
            inserting = tasks.create_task(load.insert())
            await load.flows()
            try:
                yield load
            finally:
                load.release()
            await load.recovers()
            inserting.cancel()
        await self.ends()
        _expect_none(await load.faults())
        _expect_none([place.worker.name for place in self.places if not place.worker.is_running])

    async def _clear(self) -> None:
        """Wait for what a failed load has left to end, and forget it."""
        await self.ends()
        await self.execute("clear")
        for place in self.places:
            place.forget()

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
        """A value past the proxies; None where the server does not answer."""
        with suppress(*DATABASE_ERRORS):
            async with self.fleet.server.connected() as connection:
                return await connection.fetchval(STATEMENTS[name], *arguments)
        return None

    async def execute(self, name: str) -> None:
        """Run a script past the proxies."""
        async with self.fleet.server.connected() as connection:
            await connection.execute(STATEMENTS[name])


class Load:
    """Jobs that are inserted, and what became of them."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.client = riverpy.Client(stage.url)
        """A web side's."""
        self._released = stage.fleet.directory / f"released-{time.monotonic_ns()}"
        """Held jobs go on until it exists."""
        self._cancelled: set[int] = set()
        self.inserted: list[int] = []
        """The jobs whose insert was answered."""
        self.failures: list[Exception] = []
        """Of inserts."""
        self.crashes: list[tuple[float, float]] = []
        """From when to when the server crashed and recovered; it forgets claims then."""

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

    async def begin_held(self, count: int = 1, **args: object) -> list[int]:
        """Insert jobs that run until `release`; returns their ids when all run."""
        text = json.dumps({"until": str(self._released), **args})
        job = riverpy.InsertManyParams(riverpy.RawArgs("effect", text))
        ids = [result.job.id for result in await self.client.insert_many([job] * count)]
        self.inserted += ids
        await until(lambda: {*ids} <= {start.job_id for start in self._starts()})
        return ids

    def release(self) -> None:
        """Let the held jobs end."""
        self._released.touch()

    async def cancel(self, job_id: int) -> None:
        """Cancel a running job, and return when it has ended so."""

        async def is_cancelled() -> bool:
            return await self._stage.fetchval("state", job_id) == "cancelled"

        await self.client.job_cancel(job_id)
        await until(is_cancelled)
        self._cancelled.add(job_id)

    async def piles_up(self) -> None:
        """Return when jobs wait."""
        await until(lambda: self.is_positive("many_available", CALM_BACKLOG))

    @property
    def begun_again(self) -> set[int]:
        """The jobs of which a second attempt began."""
        return {start.job_id for start in self._starts() if start.attempt > 1}

    async def flows(self) -> None:
        """Return when jobs that are inserted now are completed."""
        newest = None
        while newest is None:
            newest = await self._stage.fetchval("newest")
        await until(lambda: self.is_positive("completed_since", newest))

    async def recovers(self) -> float:
        """Return when new jobs are completed and none waits for longer than usual; gives the
        seconds that this took."""
        began = time.monotonic()
        await self.flows()
        await until(self._is_calm)
        return time.monotonic() - began

    async def faults(self) -> list[str]:
        """What became of the jobs that must not be."""
        async with self._stage.fleet.server.connected() as connection:
            ends = await connection.fetch(STATEMENTS["ends"])
        starts = self._starts()
        return [
            *(f"job {job_id} is lost" for job_id in {*self.inserted} - {row["id"] for row in ends}),
            *self._faults_of_ends(ends, {start.job_id for start in starts}),
            *self._faults_of_starts(starts),
        ]

    def _starts(self) -> list[Start]:
        for place in self._stage.places:
            place.read()
        return [start for place in self._stage.places for start in place.starts]

    def _faults_of_ends(self, ends: Sequence[Any], begun: set[int]) -> list[str]:
        found: list[str] = []
        for row in ends:
            is_cancelled = row["id"] in self._cancelled
            expected = {
                "state": "cancelled" if is_cancelled else "completed",
                "finishes": 0 if is_cancelled else 1,
                "attempt": 1 + row["rescues"],
                "errors": is_cancelled + row["rescues"],
            }
            if row["id"] not in begun or any(row[name] != expected[name] for name in expected):
                found.append(f"{dict(row)}, {'begun' if row['id'] in begun else 'never begun'}")
        return found

    def _faults_of_starts(self, starts: list[Start]) -> list[str]:
        """An attempt begins once; once more for a claim that a crash made the server forget."""
        counts = Counter((start.job_id, start.attempt) for start in starts)
        forgotten = Counter(
            (start.job_id, start.attempt)
            for start in starts
            if any(began - CLAIMS_LOST <= start.at <= ended for began, ended in self.crashes)
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
        """Whether a statement says so."""
        return bool(await self._stage.fetchval(name, *arguments))


def _expect_none(found: Sequence[object]) -> None:
    if found:
        raise AssertionError("\n".join(map(str, found[:30])))


async def until(holds: Callable[[], bool | Awaitable[bool]]) -> None:
    """Return when this holds.

    Raises:
        TimeoutError: it does not within `LIMIT`.
    """
    async with asyncio.timeout(LIMIT):
        while True:
            found = holds()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(LOOK_INTERVAL)
