"""Terms that begin and end at random moments, with starts, ends and faults of every kind: whatever
the order, the last term's maintenance runs, once."""

from __future__ import annotations

import asyncio
import os
import random
from typing import TYPE_CHECKING

import pytest

from riverpy._leading.term_runner import CONSECUTIVE_FAILURES_MAX
from riverpy._lifecycle import StopCause
from tests._time import settle
from tests.maintenance.fakes import GRACE, FakeMaintenance, HookError, Plan, term

if TYPE_CHECKING:
    from riverpy._postgres.leases import LeaseAcquireResult

pytestmark = pytest.mark.usefixtures("log")
SEED_VARIABLE = "RIVERPY_TEST_SEED"
"""Repeats the one history of this seed."""
RUNS = 250


@pytest.mark.parametrize("is_orderly", [True, False], ids=["orderly", "wild"])
async def test_random_histories(*, is_orderly: bool) -> None:
    """After any history of terms, faults and delays only the maintenance of the last term runs. The
    rules for each step hold during it (P4, P7, P8, P14). An orderly election starts nothing before
    `end` returns; a wild one also does so while `end` waits, or without it (P9)."""
    before = asyncio.all_tasks()
    if given := os.environ.get(SEED_VARIABLE):
        seeds = [int(given)]
    else:
        first = random.SystemRandom().randrange(2**32)
        seeds = list(range(first, first + RUNS))
    for seed in seeds:
        race = Race(random.Random(seed), is_orderly=is_orderly)
        await race.run()
        assert race.faults == [], f"{SEED_VARIABLE}={seed}: {race.maintenance.events}"
        assert asyncio.all_tasks() == before, f"{SEED_VARIABLE}={seed} left a task"


class Race:
    """One random history of a TermServicesRunner, looked at whenever something happens."""

    def __init__(self, rng: random.Random, *, is_orderly: bool) -> None:
        self.rng = rng
        self.is_orderly = is_orderly
        self.maintenance = FakeMaintenance(watch=self._look)
        self.faults: list[str] = []
        self.number = 0
        self.is_held = False
        self.over: set[LeaseAcquireResult] = set()
        """Terms that are over."""
        self.let_go: set[LeaseAcquireResult] = set()
        """Terms of which `end` said that they go on."""
        self._gates: list[asyncio.Event] = []
        self._ends: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """The history, and its good end."""
        for _ in range(self.rng.randint(5, 25)):
            await self._step()
            for _ in range(self.rng.choice([0, 0, 1, 2, 3, 10, 40])):
                await asyncio.sleep(0)
        await self._gain([])
        for gate in self._gates:
            gate.set()
        await self.maintenance.timer.advance(GRACE)
        running = self.maintenance.running
        self._expect([maintainer.term for maintainer in running] == [term(self.number)], "one runs")
        self._expect(all(maintainer.is_up for maintainer in running), "it is up")
        await self._lose()
        await settle()
        self._expect(not running and self.maintenance.is_clear, "all have ended")
        self._expect(self.maintenance.timer.sleepers == 0, "nobody waits")

    async def _step(self) -> None:
        match self.rng.choice(["gain", "gain", "lose", "gate", "gate", "fault", "time"]):
            case "gain":
                await self._gain(
                    [self._plan() for _ in range(self.rng.randint(0, CONSECUTIVE_FAILURES_MAX))]
                )
            case "lose" if self.is_held:
                await self._lose()
            case "gate" if self._gates:
                self._gates.pop(self.rng.randrange(len(self._gates))).set()
            case "fault" if self.maintenance.running:
                self.rng.choice(self.maintenance.running).fail()
            case _:
                await self.maintenance.timer.advance(self.rng.choice([0.1, 1.0, GRACE, 5.0, 70.0]))

    async def _gain(self, plans: list[Plan]) -> None:
        if self.is_held:
            await self._lose()
        while self.is_orderly and self._ends:
            await self.maintenance.timer.advance(1.0)
        self.over.add(term(self.number))
        self.number += 1
        self.is_held = True
        self.maintenance.plans = plans
        self.maintenance.begin(self.number)

    async def _lose(self) -> None:
        """The term is over; its end is waited for elsewhere."""
        self.is_held = False
        task = asyncio.create_task(self._end(self.number))
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)
        while term(self.number) not in self.over:
            await asyncio.sleep(0)

    async def _end(self, number: int) -> None:
        ending = term(number)
        self.over.add(ending)
        if await self.maintenance.tasks[number - 1].stop_and_wait(StopCause.LEADERSHIP_LOST):
            going_on = [maintainer.term for maintainer in self.maintenance.running]
            self._expect(ending not in going_on, "what has ended does not run")
        else:
            self.let_go.add(ending)

    def _plan(self) -> Plan:
        return Plan(
            error=HookError("start") if self.rng.random() < 0.5 else None,
            gate=self._gate() if self.rng.random() < 0.4 else None,
            ignores_cancellation=self.rng.random() < 0.5,
            end_gate=self._gate() if self.rng.random() < 0.2 else None,
            end_error=HookError("end") if self.rng.random() < 0.2 else None,
        )

    def _gate(self) -> asyncio.Event:
        gate = asyncio.Event()
        self._gates.append(gate)
        return gate

    def _look(self, event: str, which: LeaseAcquireResult) -> None:
        """Something happens. It is recorded, not raised: it happens inside what is tested."""
        if event == "stop":
            return
        is_now = which == term(self.number)
        if event == "start":
            self._expect(is_now and which not in self.over, f"{which} starts in its time")
            others = {maintainer.term for maintainer in self.maintenance.running}
            may_run = self.let_go if self.is_orderly else self.over
            self._expect(others <= may_run, f"{others} run when {which} starts")
        elif event in {"told up", "resign"}:
            self._expect(is_now and which not in self.over, f"{event} {which} in its time")
        if event == "resign":
            starts = self.maintenance.events.count(("start", which))
            self._expect(
                starts >= CONSECUTIVE_FAILURES_MAX, f"{which} resigned after {starts} starts"
            )
            self._expect(self.maintenance.resigned.count(which) == 1, f"{which} resigned again")

    def _expect(self, holds: bool, what: str) -> None:
        if not holds:
            self.faults.append(what)
