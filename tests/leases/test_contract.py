"""What holds for leases wherever they are: in the table, over each kind of connection, and in
memory."""

from __future__ import annotations

import threading
from contextlib import AsyncExitStack, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from structlog.testing import capture_logs

from riverpy import ClientStateError, ConfigError, LeaseLostError, StopCause, TransactionError
from riverpy._log_events import LEASE_ALREADY_LOST
from riverpy._postgres.driver import DATABASE_ERRORS
from tests.kit import pgbouncer
from tests.leases.backends import MemoryBackend, TableBackend

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from riverpy import Lease, LeaseManager
    from tests._database import Schema
    from tests.leases.backends import Backend

QUICK = {"ttl": timedelta(seconds=15), "renew_interval": timedelta(seconds=0.1)}
SHORT = {"ttl": timedelta(seconds=1), "renew_interval": timedelta(seconds=0.3)}
NO_POOLER = "pgbouncer is not installed"
RACERS = 8


@pytest.fixture(params=["url", "pool", "injected", "pooler", "memory"])
async def backend(request: pytest.FixtureRequest, schema: Schema) -> AsyncGenerator[Backend]:
    """Each backend in turn."""
    kind = request.param
    if kind == "memory":
        yield MemoryBackend()
        return
    if kind == "pooler" and not pgbouncer.is_installed():
        pytest.skip(NO_POOLER)
    through = pgbouncer.pooled(schema.url, size=4) if kind == "pooler" else nullcontext(schema.url)
    with through as url:
        async with AsyncExitStack() as stack:
            made = TableBackend(schema, kind, url, stack)
            await made.prepare(RACERS if "race" in request.node.name else 2)
            yield made


async def _granted(manager: LeaseManager, name: str = "x") -> Lease:
    lease = await manager.try_acquire(name)
    assert lease is not None
    return lease


async def _taken_over(manager: LeaseManager, name: str = "x") -> Lease:
    """Bid until granted: a transaction of the last term may go on."""
    with anyio.fail_after(30):
        while (lease := await manager.try_acquire(name)) is None:
            await anyio.sleep(0.01)
    return lease


async def _write(
    backend: Backend,
    lease: Lease,
    effect: str,
    *,
    before_the_end: Callable[[], Awaitable[object]] | None = None,
) -> None:
    """Write under a lease."""
    async with backend.transaction() as writer:
        await lease.fence(writer.connection)
        await writer.write(effect)
        if before_the_end is not None:
            await before_the_end()


async def test_race_of_eight(backend: Backend) -> None:
    """Of eight that bid at once one wins, each time."""
    async with AsyncExitStack() as stack:
        managers = [await stack.enter_async_context(backend.manager()) for _ in range(RACERS)]
        for round_number in range(5):
            won: list[Lease] = []

            async def bid(manager: LeaseManager, name: str, won: list[Lease]) -> None:
                if (lease := await manager.try_acquire(name)) is not None:
                    won.append(lease)

            async with anyio.create_task_group() as tasks:
                for manager in managers:
                    tasks.start_soon(bid, manager, f"name-{round_number}", won)
            assert len(won) == 1


async def test_same_holder_again(backend: Backend) -> None:
    """Who holds a lease does not get it again, and a bid renews nothing."""
    async with backend.manager() as a:
        lease = await _granted(a)
        assert lease.is_held
        assert await a.try_acquire("x") is None
        assert await a.renew(lease)


async def test_renewal_after_takeover(backend: Backend) -> None:
    """A renewal after a takeover is False, and the lease is not held from then on."""
    async with backend.manager() as a, backend.manager() as b:
        lease = await _granted(a)
        await backend.expire("x")
        other = await _granted(b)
        assert other.epoch > lease.epoch
        assert lease.is_held  # as far as it knows
        assert not await a.renew(lease)
        assert not lease.is_held
        assert lease.cause is StopCause.LEASE_LOST
        assert await b.renew(other)


async def test_expired_lease(backend: Backend) -> None:
    """A lease that has expired, and that nobody has taken, cannot be renewed, written under or
    released: it is over for good."""
    async with backend.manager() as a:
        first, second, third = [await _granted(a, name) for name in "xyz"]
        for lease in (first, second, third):
            await backend.expire(lease.name)
            assert lease.is_held  # as far as it knows
        assert not await a.renew(first)
        with pytest.raises(LeaseLostError):
            await _write(backend, second, "late")
        assert not await a.release(third)
        assert await backend.effects() == []


async def test_older_term_of_the_same_holder(backend: Backend) -> None:
    """Who lost a lease and has it again can neither extend nor end the new term by the old one."""
    async with backend.manager() as a:
        old = await _granted(a)
        await backend.expire("x")
        new = await _granted(a)
        assert not await a.renew(old)
        old.may_be_held = True  # as if it had not heard
        assert not await a.release(old)
        assert await a.renew(new)
        with pytest.raises(LeaseLostError):
            await _write(backend, old, "old")


async def test_release_after_takeover(backend: Backend) -> None:
    """A release after a takeover frees nothing and says so at debug; one in time frees the lease,
    once."""
    async with backend.manager() as a, backend.manager() as b:
        lease = await _granted(a)
        await backend.expire("x")
        other = await _granted(b)
        with capture_logs() as log:
            assert not await a.release(lease)
        levels = [(line["event"], line["log_level"]) for line in log if line["lease"] == "x"]
        assert levels == [(LEASE_ALREADY_LOST, "debug")]
        assert await b.renew(other)
        assert await b.release(other)
        assert not await b.release(other)
        assert not other.is_held
        assert (await _granted(a)).epoch > other.epoch


async def test_lost_rows(backend: Backend) -> None:
    """A table that was emptied heals by itself: the old term is over, and epochs go on rising."""
    async with backend.manager() as a, backend.manager() as b:
        lease = await _granted(a)
        await backend.forget()
        assert not await a.renew(lease)
        other = await _granted(b)
        assert other.epoch > lease.epoch


async def test_frozen_holder(backend: Backend) -> None:
    """A holder that was frozen, thaws and believes in its lease cannot write under it."""
    async with backend.manager() as a, backend.manager() as b:
        lease = await _granted(a)
        await backend.expire("x")
        other = await _granted(b)
        assert lease.is_held  # as far as it knows
        with pytest.raises(LeaseLostError, match=r"'x' is not held any more .*epoch \d+.*stop"):
            await _write(backend, lease, "stale")
        assert not lease.is_held
        await _write(backend, other, "fresh")
        assert await backend.effects() == ["fresh"]


async def test_takeover_waits_for_fenced_transaction(backend: Backend) -> None:
    """What was written behind a fence is committed before the next term begins, also when the time
    of the lease is over meanwhile."""
    async with backend.manager() as a, backend.manager() as b:
        lease = await _granted(a)
        async with backend.transaction() as writer:
            await lease.fence(writer.connection)
            await backend.expire("x")
            assert await b.try_acquire("x") is None
            await writer.write("old")
        await _granted(b)
        assert await backend.effects() == ["old"]


async def test_fenced_transaction_is_bounded(backend: Backend) -> None:
    """A fenced transaction whose process hangs holds a takeover up for no longer than the ttl: it
    is ended, and its writes are lost."""
    taken: list[Lease] = []
    async with backend.manager(**SHORT) as a, backend.manager(**SHORT) as b:

        async def take_over() -> None:
            taken.append(await _taken_over(b))

        while not taken:  # a machine that stalls loses the lease before the fence
            lease = await _taken_over(a)
            with pytest.raises((*DATABASE_ERRORS, LeaseLostError)):  # of the server, or the memory
                await _write(backend, lease, "late", before_the_end=take_over)
        assert [other.epoch > lease.epoch for other in taken] == [True]
        assert await backend.effects() == []


async def test_renewal_passes_fenced_transaction(backend: Backend) -> None:
    """A renewal does not wait for a fenced transaction, nor a fence for a renewal."""
    async with backend.manager() as a:
        lease = await _granted(a)
        async with backend.transaction() as writer:
            await lease.fence(writer.connection)
            assert await a.renew(lease)  # one that waited would fail
            await lease.fence(writer.connection)
            await writer.write("once")
        assert await backend.effects() == ["once"]


async def test_denied_bid_waits_for_nobody(backend: Backend) -> None:
    """A bid for a lease that is held is answered at once, with the time that is left, while a
    transaction is fenced by it."""
    async with backend.manager() as a, backend.manager() as b:
        lease = await _granted(a)
        async with backend.transaction() as writer:
            await lease.fence(writer.connection)
            bid = await b._engine._store.acquire("x", "b", timedelta(seconds=15), timeout=5)
            assert bid is not None
            assert (bid.is_granted, bid.holder, bid.epoch) == (False, a.holder, lease.epoch)
            assert bid.remaining is not None
            assert 0 < bid.remaining <= 15


async def test_fence_outside_of_a_transaction(backend: Backend) -> None:
    """A fence outside of a transaction, or on something else, is refused, and the lease stays."""
    async with backend.manager() as a:
        lease = await _granted(a)
        async with backend.transaction() as writer:
            pass
        with pytest.raises(TransactionError):
            await lease.fence(writer.connection)
        with pytest.raises(TransactionError, match="got object"):
            await lease.fence(object())  # type: ignore[arg-type]
        assert await a.renew(lease)


async def test_lease_after_loss(backend: Backend) -> None:
    """A lease that is over refuses every use with the same error."""
    async with backend.manager() as a:
        lease = await _granted(a)
        assert await a.release(lease)
        await lease.wait_lost()
        with pytest.raises(LeaseLostError, match="the lease was released"):
            lease.expect_held()
        with pytest.raises(LeaseLostError):
            _ = lease.fence_statement
        async with backend.transaction() as writer:
            with pytest.raises(LeaseLostError):
                await lease.fence(writer.connection)
        assert lease.valid_for == 0
        assert not await a.renew(lease)


async def test_hold(backend: Backend) -> None:
    """A block's lease is renewed in the background, and the next one runs when it has ended."""
    async with backend.manager(**QUICK) as a, backend.manager(**QUICK) as b:
        async with a.hold("x") as lease:
            a._engine.held.renewed.init()
            for _ in range(3):
                await a._engine.held.renewed.wait()
                assert lease.is_held
            with pytest.raises(TimeoutError, match="'x' was not free"):
                async with b.hold("x", wait=timedelta(0)):
                    pass
        assert not lease.is_held
        async with b.hold("x") as other:
            assert other.epoch > lease.epoch
            assert other.waited >= 0


async def test_block_is_cancelled_on_loss(backend: Backend) -> None:
    """A block whose lease passes to another is cancelled and raises LeaseLostError."""
    was_cancelled = False

    async def lose(a: LeaseManager, b: LeaseManager) -> None:
        nonlocal was_cancelled
        async with a.hold("x"):
            try:
                await backend.expire("x")
                await _granted(b)
                with anyio.fail_after(30):
                    await anyio.sleep_forever()
            except anyio.get_cancelled_exc_class():
                was_cancelled = True
                raise

    async with backend.manager(**QUICK) as a, backend.manager(**QUICK) as b:
        with pytest.raises(LeaseLostError, match="another process may hold the lease"):
            await lose(a, b)
        assert was_cancelled
        assert a._engine.held.leases == []


async def test_manager_that_is_closed(backend: Backend) -> None:
    """What was had of a manager is over when that is closed, and it gives nothing any more."""
    async with backend.manager() as a:
        lease = await _granted(a)
    assert not lease.is_held
    with pytest.raises(LeaseLostError, match="its lease manager was closed"):
        lease.expect_held()
    for use in (a.try_acquire("x"), a.renew(lease), a.release(lease), a.__aenter__()):
        with pytest.raises(ClientStateError, match="make another"):
            await use
    with pytest.raises(ClientStateError, match="make another"):
        a.hold("x")


async def test_times_to_stand_by(backend: Backend) -> None:
    """How long to stand by is a timedelta."""
    bad: Any
    async with backend.manager() as a:
        for bad in (5, "5", 1.5):
            with pytest.raises(ConfigError, match="wait takes a timedelta, or None"):
                a.hold("x", wait=bad)


async def test_names(backend: Backend) -> None:
    """A name of a wrong length or with other characters is refused before anything is asked."""
    async with backend.manager() as a:
        for name in ("", "a" * 101, "with space", "tab\t", "é", "nul\0", 7):
            with pytest.raises(ConfigError, match="the name of a lease"):
                await a.try_acquire(name)  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match="the name of a lease"):
                a.hold(name)  # type: ignore[arg-type]
        assert await a.try_acquire("~" * 100) is not None
        assert await a.try_acquire("it's:\\%1$") is not None


async def test_other_threads(backend: Backend) -> None:
    """A thread asks its lease whether it is held, and hears at once that it is not."""
    async with backend.manager() as a:
        lease = await _granted(a)
        answers: list[bool] = []

        def ask() -> None:
            answers.append(lease.is_held)

        for _ in range(2):
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
            await a.release(lease)
        assert answers == [True, False]
