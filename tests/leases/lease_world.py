"""A simulated world of processes that use the real lease engine.

It uses the processes, clocks and networks of `tests/leading/model.py`, and the table of
`tests/leases/model_leases.py`. Users write under a lease, and may keep writing after it has ended.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections import defaultdict
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from riverpy._leases.engine import LeaseEngine
from riverpy.errors import LeaseLostError
from tests.leading.model import LATENCY, Connection, Fault, Process, World
from tests.leading.model_database import TIMING, Server
from tests.leases.model_leases import LeaseTable, Locked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from datetime import datetime, timedelta

    from riverpy import Lease
    from riverpy._leases.timing import LeaseTiming
    from riverpy._postgres.leases import LeaseAcquireResult

NAMES = ("one", "two")
PACE = 2.5
"""Usual seconds between two writes of a user."""
TRANSACTION_LIMIT = TIMING.ttl
"""Seconds after which the server ends a fenced transaction."""
CALM = 150.0
"""Seconds within which every lease must be held when there are no faults."""


class LeaseServer(Server):
    """The database: its clock, its table of leases, the statements that wait for a lock, and the
    writes.

    Attributes:

    table: decides about statements; a test can replace it. lock_limit: seconds that an attempt
    waits for a fenced transaction.
    """

    table: type[LeaseTable] = LeaseTable
    lock_limit = 0.5
    release_locks = False

    def __init__(self, world: LeaseWorld) -> None:
        super().__init__(world)
        self._world: LeaseWorld = world
        self._table = self.table()
        self._transactions: dict[int, tuple[str, int]] = {}
        self._bids: dict[int, Callable[[], bool]] = {}
        """The statements that wait for a lock. Each returns whether it is done."""
        self._ids = count()
        self._highest: dict[str, int] = defaultdict(int)
        """The epoch of the last grant of each lease."""
        self._written: dict[str, int] = defaultdict(int)
        """The epoch of the last write under each lease."""
        self._released: set[tuple[str, int]] = set()
        self.has_lost_commits = False
        """Whether a standby took over that lacked the last commits."""
        self.granted_at: dict[tuple[str, int], float] = {}
        """The start of each term in the world's time."""

    def serve(
        self, act: Callable[[datetime], object], answer: Callable[[object], None], *, locks: bool
    ) -> None:
        """Run a statement. One that must wait for a lock runs when the lock is free, or never."""
        began = self.now()
        if not locks:
            answer(act(began))
        elif not self._try(act, began, answer, has_waited=False):
            number = next(self._ids)
            self._bids[number] = partial(self._try, act, began, answer, has_waited=True)
            self._world.later(self.lock_limit, partial(self._give_up, number, answer))

    def _try(
        self,
        act: Callable[..., object],
        began: datetime,
        answer: Callable[[object], None],
        *,
        has_waited: bool,
    ) -> bool:
        try:
            answer(act(began, has_waited=has_waited))
        except Locked:
            return False
        return True

    def _give_up(self, number: int, answer: Callable[[object], None]) -> None:
        if self._bids.pop(number, None) is not None:
            answer(None)

    def acquire(
        self, name: str, holder: str, ttl: timedelta, now: datetime, *, has_waited: bool
    ) -> LeaseAcquireResult | None:
        """Try to acquire a lease."""
        answer = self._table.acquire(
            name, holder, ttl, now, clock=self.now(), has_waited=has_waited
        )
        if answer is not None and answer.is_granted:
            self._world.say(f"db: {holder} is granted {name} under {self.short(answer.epoch)}")
            self._world.expect(
                answer.epoch > self._highest[name], f"an epoch of {name} is not above the last"
            )
            self._highest[name] = answer.epoch
            self.granted_at[name, answer.epoch] = self._world.now
        return answer

    def renew(self, holder: str, terms: list[tuple[str, int]], now: datetime) -> dict[str, bool]:
        """Extend terms."""
        names = self._table.renew(holder, terms, now)
        for term in terms:
            self._world.expect(
                term[0] not in names or term not in self._released,
                f"{holder} was told that {term[0]} goes on, which it had released",
            )
        return names

    def release(self, name: str, epoch: int, holder: str, now: datetime) -> bool:
        """End a term."""
        is_freed = self._table.release(name, epoch, holder, now)
        if is_freed:
            self._world.say(f"db: {holder} releases {name}")
            self._released.add((name, epoch))
            self._world.announce_release(name, epoch, holder)
        return is_freed

    def fence(self, name: str, epoch: int, _now: datetime) -> int | None:
        """Begin a transaction that commits only under a term."""
        if not self._table.fence(name, epoch, clock=self.now()):
            return None
        transaction = next(self._ids)
        self._transactions[transaction] = name, epoch
        self._world.later(TRANSACTION_LIMIT, partial(self.commit, transaction, write=False))
        return transaction

    def commit(self, transaction: int, _now: datetime | None = None, *, write: bool = True) -> bool:
        """End a fenced transaction, if the server has not ended it."""
        term = self._transactions.pop(transaction, None)
        if term is None:
            return False
        name, epoch = term
        if write:
            self._world.say(f"db: a write under {name} {self.short(epoch)}")
            self._world.expect(
                epoch >= self._written[name], f"a write under {name} came after a newer term's"
            )
            self._written[name] = epoch
            self._world.writes += 1
        self._table.unfence(name)
        for number, attempt in list(self._bids.items()):
            if number in self._bids and attempt():
                self._bids.pop(number, None)
        return True

    def crash(self) -> None:
        """Restart without a clean shutdown: open transactions are lost, rows are kept."""
        self._world.say("db: restarts")
        self._transactions.clear()
        self._bids.clear()
        self._table.fences.clear()

    def copy_to_standby(self) -> None:
        """Bring the standby up to date."""
        self._standby = copy.deepcopy(self._table.rows), dict(self._written)

    def fail_over(self) -> None:
        """Continue with the standby, without the last commits."""
        self.crash()
        self.has_lost_commits = True
        self._world.say("db: a standby takes over, and what was done last is lost")
        rows, written = self._standby
        self._table.rows = copy.deepcopy(rows)
        self._written = defaultdict(int, written)

    def short(self, epoch: int) -> str:
        """Return an epoch in short form for messages."""
        return f"epoch {epoch % 1_000_000_000}"


class LeaseConnection(Connection):
    """A process's connection to the database: the store of its leases, and fenced transactions."""

    lease_name_prefix = "s:"

    async def acquire(
        self, name: str, holder: str, ttl: timedelta, *, timeout: float
    ) -> LeaseAcquireResult | None:
        """Try to acquire a lease."""
        self._expect(
            name not in self._process.using,
            f"tries to acquire {name} while it is used under an old term",
        )
        act = partial(self._world.server.acquire, name, holder, ttl)
        return await self._ask(f"attempt for {name}", act, timeout)

    async def renew(
        self, holder: str, terms: Iterable[tuple[str, int]], *, timeout: float
    ) -> dict[str, bool]:
        """Extend terms."""
        act = partial(self._world.server.renew, holder, list(terms))
        return await self._ask("renewal", act, timeout, locks=False)

    async def release(self, name: str, epoch: int, holder: str, *, timeout: float) -> bool:
        """End a term."""
        self._expect(name not in self._process.using, f"releases {name} while it is used")
        act = partial(self._world.server.release, name, epoch, holder)
        return await self._ask(f"release of {name}", act, timeout, locks=False)


class LeaseProcess(Process):
    """A process that tries to acquire every lease."""

    def _assemble(self) -> None:
        self.connection = LeaseConnection(self)
        self.engine = LeaseEngine(
            self.connection, holder=self.leader_id, timing=self.world.timing, timer=self.timer
        )
        self.held: dict[str, Lease] = {}
        """The last term of each lease."""
        self.using: set[str] = set()
        """The leases whose blocks run."""
        self.pace = PACE
        """Seconds between two writes."""
        self.hold = 0.0
        """Seconds that a transaction stays open after its fence."""
        self.lateness = 0.0
        """Seconds that a user keeps writing after the end of the term."""
        self._let_go = asyncio.Event()

    async def _run(self, stopping: asyncio.Event) -> None:
        async with self.engine:
            users = [self.loop.create_task(self._use_again(name)) for name in NAMES]
            users.append(self.loop.create_task(stopping.wait()))
            await asyncio.wait(users, return_when=asyncio.FIRST_COMPLETED)
            for user in users:
                user.cancel()
            await asyncio.wait(users)
            if not stopping.is_set():
                await asyncio.gather(*users)

    async def _use_again(self, name: str) -> None:
        while True:
            try:
                async with self.engine.hold(name) as lease:
                    self.held[name] = lease
                    self.using.add(name)
                    try:
                        await self._use(lease)
                    finally:
                        self.using.discard(name)
            except LeaseLostError:
                self.say(f"has lost {name}")

    async def _use(self, lease: Lease) -> None:
        """Write until the term ends, and for a while longer."""
        writer = self.loop.create_task(self._write_again(lease))
        try:
            await self._let_go.wait()
            self._let_go.clear()
        finally:
            self.loop.call_later(self.lateness, writer.cancel)

    async def _write_again(self, lease: Lease) -> None:
        while True:
            await self.timer.sleep(self.pace)
            try:
                transaction = await self.connection.begin(lease)
                if transaction is not None:
                    await self.timer.sleep(self.hold)
                    await self.connection.commit(transaction)
            except (TimeoutError, ConnectionError):
                continue

    def let_go(self) -> None:
        """Release a held lease."""
        if self.state != "dead":
            self.loop.call_soon(self._let_go.set)

    def receive(self, payload: str) -> None:
        """Receive a notification, unless the process or its network is down."""
        if self.state != "dead" and self.connection.usual == Fault():
            self.loop.call_soon(self.engine.receive_notification, payload)

    def resync(self) -> None:
        """Handle a reconnect."""
        if self.state != "dead":
            self.loop.call_soon(self.engine.wake_all_waiting_callers)

    def recover(self) -> None:
        """Run again without faults."""
        self.lateness = self.hold = 0.0
        self.heal()
        if self.state == "frozen":
            self.thaw()
        if self.is_stopping and self.state != "dead":
            self.kill()
        if self.state == "dead":
            self.start()


class LeaseWorld(World):
    """All processes, the database, and the true time."""

    transaction_limit = TRANSACTION_LIMIT

    def __init__(
        self,
        rates: list[float],
        *,
        server: type[LeaseServer] = LeaseServer,
        timing: LeaseTiming = TIMING,
        overlap: float = 0.0,
    ) -> None:
        """Make it; `overlap` is for how many seconds a holder may believe on when a database that
        has lost its last commits has granted the lease to another."""
        self.writes = 0
        super().__init__(rates, server=server, process=LeaseProcess, timing=timing, overlap=overlap)

    def announce_release(self, name: str, epoch: int, holder: str) -> None:
        """Notify all processes that can receive notifications."""
        message = {"v": 1, "lease": f"s:{name}", "epoch": epoch, "holder": holder}
        payload = json.dumps(message | {"action": "released"})
        for process in self.processes:
            self.later(LATENCY, partial(process.receive, payload))

    def announce_wish(self, name: str) -> None:
        """Request a lease."""
        for process in self.processes:
            if process.state != "dead" and (lease := process.held.get(name)) is not None:
                message = {"v": 1, "lease": f"s:{name}", "epoch": lease.epoch}
                payload = json.dumps(message | {"action": "resign_requested"})
                self.later(LATENCY, partial(process.receive, payload))

    def holders(self, name: str) -> list[tuple[str, int]]:
        """Return the processes that treat a lease as held, with its epoch, also while they do not
        run."""
        return [
            (process.name, lease.epoch)
            for process in self.processes
            if process.state != "dead"
            and (lease := process.held.get(name)) is not None
            and lease.is_held
        ]

    def check(self) -> None:
        """Check what must hold at every moment.

        Raises:

        Violation: it does not hold.
        """
        for name in NAMES:
            holders = self.holders(name)
            if len(holders) > 1:
                epochs = sorted(epoch for _, epoch in holders)
                since = self.server.granted_at[name, epochs[-1]]
                names = " and ".join(process for process, _ in holders)
                self.expect(epochs[0] != epochs[-1], f"{names} hold one epoch of {name}")
                self.expect(self.now - since < self._overlap, f"{names} hold {name} at once")

    def expect_holders(self) -> None:
        """Remove all faults, and check that every lease is acquired and stays held."""
        for process in self.processes:
            process.recover()
        until = self.now + CALM + self.server.set_back
        self.run(TIMING.attempt_interval)
        while not all(map(self.holders, NAMES)) and self.now < until:
            self.run(TIMING.attempt_interval)
        held = {name: self.holders(name) for name in NAMES}
        self.expect(all(held.values()), "a lease is not held though nothing is wrong")
        self.run(2 * TIMING.ttl)
        self.expect(
            held == {name: self.holders(name) for name in NAMES},
            "a lease went though nothing was wrong",
        )
