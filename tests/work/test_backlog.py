"""The backlog of results is bounded while the database stores them more slowly than jobs end."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from riverpy._work import completer
from tests.kit.stalls import is_stall
from tests.work.rig import PATIENCE, Task

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from riverpy import Job
    from tests.work.rig import Rig

SLOTS = 20
BOUND = 200
JOBS = 1_500


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the number of waiting results."""
    monkeypatch.setattr(completer, "RESULT_BACKLOG_MAX", BOUND)
    monkeypatch.setattr(completer, "RESULTS_PER_STATEMENT_MAX", 50)


class SlowDatabase:
    """Accepts a statement with results only when the test allows it."""

    def __init__(self, client: Any) -> None:
        self._results = client._run._connections.results
        self._acquire = self._results.acquire
        self._turns = anyio.Semaphore(0)
        self.is_slow = True
        self.waits = False
        """Whether all allowed statements were used."""
        self._results.acquire = self.acquire

    @asynccontextmanager
    async def acquire(self, purpose: str, timeout: float) -> AsyncGenerator[Any]:
        if self.is_slow and purpose == "storing job results":
            self.waits = not self._turns.value
            await self._turns.acquire()
            self.waits = False
        async with self._acquire(purpose, timeout) as connection:
            yield connection

    def take(self, turns: int) -> None:
        self.waits = False
        for _ in range(turns):
            self._turns.release()

    def take_all(self) -> None:
        self.is_slow = False
        self._turns.release()


@pytest.mark.usefixtures("bound")
async def test_slow_completion(rig: Rig, log: list[dict[str, Any]]) -> None:
    """While results are stored more slowly than jobs end, the number of waiting results is bounded.
    Claims stop, and resume as results are stored. Nothing is logged, and nothing is lost
    (PF-11)."""
    runs: Counter[int] = Counter()

    @rig.job
    async def work(job: Job[Task]) -> None:
        runs[job.id] += 1

    async with rig.working(slots=SLOTS, candidate=False) as client:
        run: Any = client._run
        slow = SlowDatabase(client)
        await rig.insert_rows(JOBS)
        run.producers["default"].wake()

        async def until_full() -> tuple[int, int]:
            """Wait until claims have stopped. Returns the numbers of claimed and of stored jobs."""
            try:
                with anyio.fail_after(PATIENCE):
                    while (
                        not slow.waits
                        or run._completer.waiting_result_count <= BOUND
                        or run.running_attempts
                    ):
                        await asyncio.sleep(0.005)
            except TimeoutError:
                slow.take_all()
                raise AssertionError(
                    f"claims did not stop: {slow.waits=}, {run._completer.waiting_result_count=}, "
                    f"{len(run.running_attempts)=}, {run._heartbeat.can_claim_jobs=}, "
                    f"{await rig.states()}, {log}"
                ) from None
            states = await rig.states()
            return JOBS - states["available"], states.get("completed", 0)

        most = BOUND + 50 + 2 * SLOTS
        claimed, stored = await until_full()
        assert stored == 0
        assert BOUND < claimed <= most
        assert len(run._completer.unstored_attempts) == claimed
        slow.take(5)
        claimed, stored = await until_full()
        assert stored > 4 * SLOTS
        assert stored + BOUND < claimed <= stored + most
        assert len([one for one in log if one["log_level"] != "debug" and not is_stall(one)]) <= 1
        slow.take_all()
        await rig.take(JOBS)
    assert await rig.states() == {"completed": JOBS}
    assert set(runs.values()) == {1}
    assert len(runs) == JOBS
