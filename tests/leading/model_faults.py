"""Faults of processes that hypothesis can choose in a simulated world."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tests.leading.model import LATENCY, Fault

BAD = Fault(request=None), Fault(answer=None), Fault(answer=4.0), Fault(request=2.0, answer=2.0)
"""The faults of a network that a process can have for all exchanges."""

some_process = st.integers(0, 2)
some_seconds = st.sampled_from([0.2, 1.0, 2.5, 4.0, 6.0, 11.0, 20.0])
some_delay = st.sampled_from([None, LATENCY, 4.0, 25.0])


class Slowness(RuleBasedStateMachine):
    """Faults by which processes are slow."""

    world: Any

    def one(self, number: int, *states: str) -> Any:
        """Return a random process, or one in this state."""
        processes = [p for p in self.world.processes if not states or p.state in states]
        return processes[number % len(processes)]

    def any(self, *states: str) -> bool:
        """Whether a process is in this state."""
        return any(process.state in states for process in self.world.processes)

    @precondition(lambda self: self.any("running"))
    @rule(number=some_process, is_suspended=st.booleans(), seconds=some_seconds)
    def is_frozen(self, number: int, is_suspended: bool, seconds: float) -> None:
        """A process stops running, or its machine is suspended."""
        self.one(number, "running").freeze(is_suspended=is_suspended)
        self.world.run(seconds)

    @precondition(lambda self: self.any("frozen"))
    @rule(number=some_process, seconds=some_seconds)
    def is_thawed(self, number: int, seconds: float) -> None:
        """A frozen process runs again."""
        self.one(number, "frozen").thaw()
        self.world.run(seconds)

    @rule(number=some_process, request=some_delay, answer=some_delay)
    def will_meet_a_fault(self, number: int, request: float | None, answer: float | None) -> None:
        """The next exchange with the database is slow or lost."""
        self.one(number).connection.faults.append(Fault(request, answer))

    def teardown(self) -> None:
        """End all processes."""
        if hasattr(self, "world"):
            self.world.close()


class Damage(Slowness):
    """Faults by which processes, connections and clocks fail."""

    @precondition(lambda self: self.any("running", "frozen"))
    @rule(number=some_process, seconds=some_seconds)
    def is_killed(self, number: int, seconds: float) -> None:
        """A process ends without a stop."""
        self.one(number, "running", "frozen").kill()
        self.world.run(seconds)

    @precondition(lambda self: self.any("running", "frozen"))
    @rule(number=some_process, seconds=some_seconds)
    def is_stopped(self, number: int, seconds: float) -> None:
        """A process is asked to stop."""
        self.one(number, "running", "frozen").stop()
        self.world.run(seconds)

    @precondition(lambda self: self.any("dead"))
    @rule(number=some_process, seconds=some_seconds)
    def is_started(self, number: int, seconds: float) -> None:
        """A process starts again."""
        self.one(number, "dead").start()
        self.world.run(seconds)

    @rule(number=some_process, fault=st.sampled_from(BAD), seconds=some_seconds)
    def is_cut_off(self, number: int, fault: Fault, seconds: float) -> None:
        """The network loses requests or answers, or is slow."""
        self.one(number).cut_off(fault)
        self.world.run(seconds)

    @rule(number=some_process, is_noticed=st.booleans(), seconds=some_seconds)
    def is_healed(self, number: int, is_noticed: bool, seconds: float) -> None:
        """The network works again. A process with a listener notices it."""
        process = self.one(number)
        process.heal()
        if is_noticed:
            process.resync()
        self.world.run(seconds)

    @rule(number=some_process)
    def loses_its_connection(self, number: int) -> None:
        """Waiting callers get an error."""
        self.one(number).connection.reset()
        self.world.settle()
