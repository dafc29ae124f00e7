"""A simulated world in which the real election and lease engine run.

Each process has an event loop with its own time, and a network that loses and delays. The world has
the true time. It advances the time from event to event, and checks after each one whether two
processes are the leader. The loop of a frozen process does not run. In a suspended process the
loop's time stops too.
"""

from __future__ import annotations

import asyncio
import heapq
import json
from collections import deque
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio

from riverpy._clock import Timer
from riverpy._leading.election import Election, receive_leadership_notification
from riverpy._leases.engine import LeaseEngine
from riverpy._leases.store import LeaseStore
from riverpy._lifecycle import ServiceGroup
from riverpy._names import DEFAULT_DOMAIN
from tests.leading.model_database import RIVAL, TIMING, TRANSACTION_LIMIT, Rival, Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from datetime import timedelta

    from riverpy._leases.lease import Lease
    from riverpy._leases.timing import LeaseTiming
    from riverpy._lifecycle import StopScope
    from riverpy._postgres.leases import LeaseAcquireResult
    from tests.leading.model_database import Term

LATENCY = 0.01
"""Seconds from a process to the database, or back, without faults."""
WATCH = 1.0
"""Seconds within which a process that did not run handles what became due."""
PACE = 2.5
"""Usual seconds between two writes of a term's services."""
CALM = 150.0
"""Seconds within which a process must be leader when there are no faults: the duration of a lease,
and the longest pause of a process."""
_RESOLUTION = 1e-9
"""Seconds that a timer is late, so that rounding does not make it early."""


class Violation(AssertionError):
    """A rule is broken. The text is the history of the world."""


class Fault(NamedTuple):
    """The faults of one exchange with the database."""

    request: float | None = LATENCY
    """Seconds until the request reaches the database; None: never."""
    answer: float | None = LATENCY
    """Seconds until the answer reaches the process; None: never."""


class Connection(LeaseStore):
    """A process's connection to the database: the store of its leases, and fenced transactions."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._world = process.world
        self.faults: deque[Fault] = deque()
        """The faults of the next exchanges."""
        self.usual = Fault()
        """The fault of all other exchanges."""
        self._pending: set[asyncio.Future[Any]] = set()

    async def acquire(
        self, name: str, holder: str, ttl: timedelta, *, timeout: float
    ) -> LeaseAcquireResult | None:
        """Try to acquire the lease."""
        self._expect_idle("tries to acquire the lease")
        act = partial(self._world.server.acquire, name, holder, ttl)
        return await self._ask("attempt", act, timeout)

    async def renew(
        self, holder: str, terms: Iterable[tuple[str, int]], *, timeout: float
    ) -> dict[str, bool]:
        """Extend terms."""
        terms = list(terms)
        lease = self._process.lease
        self._expect(
            lease is not None
            and terms == [(lease.name, lease.epoch)]
            and timeout <= lease.valid_for,
            "renews a term that it does not hold, or for longer than it does",
        )
        act = partial(self._world.server.renew, holder, terms)
        return await self._ask("renewal", act, timeout, locks=False)

    async def release(self, name: str, epoch: int, holder: str, *, timeout: float) -> bool:
        """End a term."""
        self._expect_idle("releases its lease")
        act = partial(self._world.server.release, name, epoch, holder)
        return await self._ask("release", act, timeout, locks=self._world.server.release_locks)

    async def fence(self, *_args: Any, **_options: Any) -> bool:
        """Not used: `begin` is."""
        raise NotImplementedError

    async def begin(self, lease: Lease) -> int | None:
        """Begin a fenced transaction. Returns None if the term has ended."""
        act = partial(self._world.server.fence, lease.name, lease.epoch)
        return await self._ask("fence", act, self._world.transaction_limit, locks=False)

    async def commit(self, transaction: int) -> None:
        """Commit a fenced transaction."""
        act = partial(self._world.server.commit, transaction)
        await self._ask("commit", act, self._world.transaction_limit, locks=False)

    def reset(self) -> None:
        """Lose the connection. Waiting callers get an error."""
        for future in self._pending:
            if not future.done():
                future.set_exception(ConnectionError("the connection was lost"))

    def _expect_idle(self, does: str) -> None:
        is_idle = self._process.lease is None and not self._process.services.is_serving
        self._expect(is_idle, f"{does} while it leads or its services run")

    def _expect(self, is_right: bool, wrong: str) -> None:
        is_alive = self._process.state != "dead"
        self._world.expect(is_right or not is_alive, f"{self._process.name} {wrong}")

    async def _ask(
        self, what: str, act: Callable[..., object], timeout: float, *, locks: bool = True
    ) -> Any:
        process, server = self._process, self._world.server
        if process.state == "dead":
            raise ConnectionError("the process is no more")
        fault = self.faults.popleft() if self.faults else self.usual
        future: asyncio.Future[Any] = process.loop.create_future()
        self._pending.add(future)

        def answer(result: object) -> None:
            if fault.answer is not None:
                self._world.later(fault.answer, lambda: future.done() or future.set_result(result))

        if fault != Fault():
            process.say(f"its {what} meets {_words(fault)}")
        if fault.request is not None:
            self._world.later(fault.request, lambda: server.serve(act, answer, locks=locks))
        try:
            with anyio.fail_after(timeout):
                return await future
        finally:
            self._pending.discard(future)


def _words(fault: Fault) -> str:
    request = "is lost" if fault.request is None else f"takes {fault.request:g} s"
    answer = "is lost" if fault.answer is None else f"takes {fault.answer:g} s"
    return f"a fault: request {request}, answer {answer}"


class Services:
    """The services of a term: one task that writes through the fence, and may stop late."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.pace = PACE
        """Seconds between two writes."""
        self.lateness = 0.0
        """Seconds that services keep running after they were stopped."""
        self.told_to_end = False
        self._told_at = 0.0
        self._running = 0

    async def run_term(self, lease: Lease, scope: StopScope) -> None:
        """Run the services of a term, until stopped."""
        process, world = self._process, self._process.world
        world.expect(not self._running, f"{process.name} began a term beside another")
        world.expect(
            lease.is_held or scope.cause is not None,
            f"{process.name} began a term that it does not hold",
        )
        self.told_to_end = False
        self._running += 1
        writer = process.loop.create_task(self._write(lease))
        try:
            await anyio.sleep_forever()
        finally:
            process.say("services are told to end")
            self.told_to_end, self._told_at = True, process.timer.seconds_since_boot()
            with anyio.CancelScope(shield=True):
                await process.timer.sleep(self.lateness)
                writer.cancel()
                await asyncio.wait([writer])
            self._running -= 1

    @property
    def is_serving(self) -> bool:
        """Whether services run."""
        return self._running > 0

    @property
    def is_given_up(self) -> bool:
        """Whether services run for longer than the grace period after they were stopped."""
        late = self._process.timer.seconds_since_boot() - self._told_at
        return self.is_serving and self.told_to_end and late > TIMING.grace_seconds

    async def _write(self, lease: Lease) -> None:
        connection = self._process.connection
        while True:
            await self._process.timer.sleep(self.pace)
            if not self.lateness and not lease.is_held:
                continue
            try:
                transaction = await connection.begin(lease)
                if transaction is None:
                    lease.end("the database refused a write", may_be_held=False)
                else:
                    await connection.commit(transaction)
            except (TimeoutError, ConnectionError):
                continue


class ProcessTimer(Timer):
    """The timer of a process."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def seconds_since_boot(self) -> float:
        """Seconds by the process's clock, suspended ones included."""
        return self._process.seconds_since_boot()


class _Loop(asyncio.SelectorEventLoop):
    """An event loop in the time of a process."""

    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__()
        self._now = now
        self._clock_resolution = _RESOLUTION / 10  # asyncio's own: it runs what is due, not more

    def time(self) -> float:
        return self._now()

    @property
    def next_timer(self) -> float | None:
        """Return the time of the next timer. This removes cancelled timers before it, as asyncio
        does."""
        scheduled: list[asyncio.TimerHandle] = self._scheduled
        while scheduled and scheduled[0].cancelled():
            removed: Any = heapq.heappop(scheduled)
            removed._scheduled = False
            self._timer_cancelled_count -= 1
        return scheduled[0].when() if scheduled else None

    def settle(self) -> None:
        """Run all callbacks that can run now."""
        ready: deque[asyncio.Handle] = self._ready
        while ready or self._is_due():
            self.call_soon(self.stop)
            self.run_forever()

    def _is_due(self) -> bool:
        due = self.next_timer
        return due is not None and due <= self.time()


class Process:
    """One process with the real election and lease engine."""

    def __init__(self, world: World, name: str, rate: float) -> None:
        """Create the process. Its ids begin with `name`. `rate` is the speed of its clocks; 1 is
        the speed of the world's clock."""
        self.world, self.name, self.rate = world, name, rate
        self._suspended_at: float | None = None
        self._missed = 0.0
        self._lives = count(1)
        self.state = "dead"
        self.start()

    def start(self) -> None:
        """Start the process with a new id."""
        self.leader_id = f"{self.name}{next(self._lives)}"
        self.state = "running"
        self._resume()
        self.awake_since: float | None = None
        self.loop = _Loop(self.monotonic)
        self.loop.set_exception_handler(self._failed)
        self.timer = ProcessTimer(self)
        self._assemble()
        self._stopping = asyncio.Event()
        self.main = self.loop.create_task(self._run(self._stopping))

    def _assemble(self) -> None:
        self.connection = Connection(self)
        self.services = Services(self)
        self.engine = LeaseEngine(
            self.connection, holder=self.leader_id, timing=self.world.timing, timer=self.timer
        )
        self.election = Election(self.engine, self.world.lease_name, self.services.run_term)

    @property
    def lease(self) -> Lease | None:
        """The lease that the process treats as held."""
        return self.election.lease

    async def _run(self, stopping: asyncio.Event) -> None:
        async with ServiceGroup() as group:
            await group.start(self.election)
            await stopping.wait()

    def _failed(self, _loop: object, context: dict[str, Any]) -> None:
        if self.world.violation is None:  # it shows at the next step: this may be any moment
            self.world.violation = f"{self.name}: {context.get('exception') or context['message']}"

    def seconds_since_boot(self) -> float:
        """Seconds by the clock that counts suspension."""
        return self.rate * self.world.now

    def monotonic(self) -> float:
        """Seconds by the clock that does not count suspension."""
        now = self.world.now if self._suspended_at is None else self._suspended_at
        return self.rate * (now - self._missed)

    @property
    def wakes_at(self) -> float | None:
        """The time of its next timer, by the world's clock."""
        if self.state != "running" or (due := self.loop.next_timer) is None:
            return None
        return due / self.rate + self._missed + _RESOLUTION

    @property
    def awake_for(self) -> float:
        """Seconds since it was last frozen."""
        if self.awake_since is None:
            return float("inf")
        return self.world.now - self.awake_since

    def say(self, line: str) -> None:
        """Add a line to the history, if the process is alive."""
        if self.state != "dead":
            self.world.say(f"{self.name}: {line}")

    def freeze(self, *, is_suspended: bool = False) -> None:
        """Stop running, as after SIGSTOP or during a long garbage collection. A suspended process
        counts no time either."""
        self.say(f"{'its machine is suspended' if is_suspended else 'freezes'}")
        self.state = "frozen"
        if is_suspended:
            self._suspended_at = self.world.now

    def thaw(self) -> None:
        """Run again."""
        self.say("thaws")
        self._resume()
        self.state = "running"
        self.awake_since = self.world.now

    def _resume(self) -> None:
        if self._suspended_at is not None:
            self._missed += self.world.now - self._suspended_at
            self._suspended_at = None

    def cut_off(self, fault: Fault) -> None:
        """Set the fault of every exchange."""
        self.say(f"from now on, {_words(fault)}")
        self.connection.usual = fault

    def heal(self) -> None:
        """Remove all network faults."""
        self.connection.faults.clear()
        if self.connection.usual != Fault():
            self.say("is reached again")
            self.connection.usual = Fault()

    def resync(self) -> None:
        """Handle a reconnect."""
        if self.state != "dead":
            self.loop.call_soon(self.engine.wake_all_waiting_callers)

    def give_up(self) -> None:
        """Let maintenance fail."""
        if self.state != "dead" and (lease := self.lease) is not None:
            self.say("its services cannot start")
            self.loop.call_soon(self.election.resign_after_failure, lease, LookupError())

    def recover(self) -> None:
        """Run again without faults."""
        self.heal()
        self.services.lateness = 0.0
        if self.state == "frozen":
            self.thaw()
        if self.is_stopping and self.state != "dead":
            self.kill()
        if self.state == "dead":
            self.start()

    def stop(self) -> None:
        """Stop cleanly, as on SIGTERM."""
        self.say("is told to stop")
        self._stopping.set()

    @property
    def is_stopping(self) -> bool:
        """Whether the process was asked to stop."""
        return self._stopping.is_set()

    def receive(self, payload: str) -> None:
        """Receive a notification, if the network delivers it."""
        if self.state != "dead" and self.connection.usual == Fault():
            self.loop.call_soon(receive_leadership_notification, self.engine, payload)

    def step(self) -> None:
        """Run all callbacks and timers that are due."""
        if self.state != "running":
            return
        self.loop.settle()
        if self.world.violation is not None:  # it was raised inside a task
            raise Violation(self.world.violation)
        if self.main.done():
            self.main.result()
            self.world.expect(self.is_stopping, f"{self.name}: the election ended by itself")
            self.unwind()

    def kill(self) -> None:
        """End at once, as by SIGKILL. Statements that were sent still arrive."""
        self.say("is killed")
        self.unwind()

    def unwind(self) -> None:
        """Cancel the tasks of an ended process, in a time of their own."""
        self.state = "dead"
        loop, time = self.loop, self.loop.time()

        def now() -> float:
            return time

        loop._now = now
        while tasks := asyncio.all_tasks(loop):
            for task in tasks:
                task.cancel()
            loop.settle()
            time = max(time, loop.next_timer or time)
        if not self.main.cancelled():
            self.main.exception()  # it was raised, or is of no interest any more
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


class World:
    """All processes, the database, and the true time."""

    lease_name = DEFAULT_DOMAIN
    transaction_limit = TRANSACTION_LIMIT
    """Seconds after which the server ends a fenced transaction."""

    def __init__(
        self,
        rates: list[float],
        *,
        server: type[Server] = Server,
        process: type[Process] = Process,
        timing: LeaseTiming = TIMING,
        overlap: float = 0.0,
    ) -> None:
        """Create the world.

        Args:
            rates: of the clocks of each process.
            server: what the database is.
            process: what a process is.
            timing: of the lease.
            overlap: seconds for which a leader may believe on when the database, which has lost
                its row or its time, has elected another.
        """
        self.now = 0.0
        self.story: list[str] = []
        self.violation: str | None = None
        """The history until the first violation."""
        self.timing, self._overlap = timing, overlap
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._ids = count()
        self.server = server(self)
        self.rival = Rival(self)
        self.processes = [
            process(self, name, rate) for name, rate in zip("abcdef", rates, strict=False)
        ]

    def say(self, line: str) -> None:
        """Add a line to the history."""
        self.story.append(f"{self.now:8.3f}  {line}")

    def expect(self, is_right: bool, wrong: str) -> None:
        """Check an expectation.

        Raises:

        Violation: it is not met. The text is the history.
        """
        if not is_right and self.violation is None:
            self.say(wrong)
            self.violation = "\n".join([wrong, *self.story[-60:]])
            raise Violation(self.violation)

    def later(self, seconds: float, act: Callable[[], object]) -> None:
        """Call a function after this many seconds."""
        heapq.heappush(self._events, (self.now + seconds, next(self._ids), act))

    def announce(self, action: str, leader_id: str) -> None:
        """Notify all processes that the network reaches."""
        payload = json.dumps({"leader_id": leader_id, "action": action})
        for process in self.processes:
            self.later(LATENCY, partial(process.receive, payload))

    def run(self, seconds: float) -> None:
        """Advance the time."""
        end = self.now + seconds
        self.settle()
        while (due := self._next()) <= end:
            self.now = max(self.now, due)
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            self.settle()
        self.now = end
        self.settle()

    def _next(self) -> float:
        due = [process.wakes_at for process in self.processes]
        if self._events:
            due.append(self._events[0][0])
        return min((time for time in due if time is not None), default=float("inf"))

    def settle(self) -> None:
        """Let the processes run, and check the world before and after each."""
        self.check()
        for process in self.processes:
            process.step()
            self.check()

    def leaders(self) -> list[tuple[str, Term]]:
        """Return the processes that treat their lease as held, also while they do not run."""
        held = [
            (process.name, self.server.term_of(process.lease))
            for process in self.processes
            if process.state != "dead" and process.lease is not None
        ]
        rival = self.rival.term
        return held if rival is None else [*held, (RIVAL, rival)]

    def check(self) -> None:
        """Check what must hold at every moment.

        Raises:

        Violation: it does not hold.
        """
        leaders = self.leaders()
        if len(leaders) > 1:
            names = " and ".join(name for name, _ in leaders)
            self.expect(
                all(self._is_tolerated(term) for _, term in leaders), f"{names} lead at once"
            )
        for name, _ in leaders:
            for process in self.processes:
                services = process.services
                is_serving = services.is_serving and not services.is_given_up
                if process.name != name and process.state == "running" and is_serving:
                    self._check_ending(process)

    def _is_tolerated(self, term: Term) -> bool:
        began = self.server.began
        after = self.server.terms.index(term) + 1
        return after == len(began) or self.now - began[after] < self._overlap

    def _check_ending(self, process: Process) -> None:
        """Check that the services of an old term have stopped, or are given up, when another
        process is leader. Services of a process that did not run must be stopped soon after it runs
        again."""
        if self._overlap:
            return
        awake = process.awake_for * process.rate
        self.expect(
            process.services.told_to_end or awake <= WATCH,
            f"{process.name} serves while another leads",
        )
        self.expect(
            awake <= WATCH + TIMING.grace_seconds,
            f"{process.name} still serves while another leads",
        )

    def expect_leader(self) -> None:
        """Remove all faults, and check that one process becomes leader and stays leader."""
        for process in self.processes:
            process.recover()
        until = self.now + CALM + self.server.set_back
        self.run(TIMING.attempt_interval)
        while (self.rival.term or not self.leaders()) and self.now < until:
            self.run(TIMING.attempt_interval)
        leaders = self.leaders()
        self.expect(bool(leaders), "nobody leads though nothing is wrong")
        self.run(2 * TIMING.ttl)
        self.expect(self.leaders() == leaders, "a leader went though nothing was wrong")

    def close(self) -> None:
        """End all processes."""
        for process in self.processes:
            if process.state != "dead":
                process.kill()
