"""The contract of leases, tested with the table over each kind of connection, and in memory."""

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
    """Try until granted: a transaction of the last term may be open."""
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
    """Of eight managers that try at once, one acquires the lease, each time."""
    async with AsyncExitStack() as stack:
        managers = [await stack.enter_async_context(backend.manager()) for _ in range(RACERS)]
        for round_number in range(5):
            won: list[Lease] = []

            async def attempt(manager: LeaseManager, name: str, won: list[Lease]) -> None:
                if (lease := await manager.try_acquire(name)) is not None:
                    won.append(lease)

            async with anyio.create_task_group() as tasks:
                for manager in managers:
                    tasks.start_soon(attempt, manager, f"name-{round_number}", won)
            assert len(won) == 1


async def test_same_holder_again(backend: Backend) -> None:
    """A holder cannot acquire its lease again, and an attempt renews nothing."""
    async with backend.manager() as a:
        lease = await _granted(a)
        assert lease.is_held
        assert await a.try_acquire("x") is None
        assert await a.renew(lease)


async def test_renewal_after_takeover(backend: Backend) -> None:
    """A renewal after a takeover returns False, and the lease is not held from then on."""
    async with backend.manager() as a, backend.manager() as b:
        lease = await _granted(a)
        await backend.expire("x")
        other = await _granted(b)
        assert other.epoch > lease.epoch
        assert lease.is_held  # locally
        assert not await a.renew(lease)
        assert not lease.is_held
        assert lease.cause is StopCause.LEASE_LOST
        assert await b.renew(other)


async def test_expired_lease(backend: Backend) -> None:
    """A lease that has expired cannot be renewed, written under or released, even if no other
    process acquired it."""
    async with backend.manager() as a:
        first, second, third = [await _granted(a, name) for name in "xyz"]
        for lease in (first, second, third):
            await backend.expire(lease.name)
            assert lease.is_held  # locally
        assert not await a.renew(first)
        with pytest.raises(LeaseLostError):
            await _write(backend, second, "late")
        assert not await a.release(third)
        assert await backend.effects() == []


async def test_older_term_of_the_same_holder(backend: Backend) -> None:
    """A holder that lost a lease and acquired it again cannot renew or release the new term by the
    old one."""
    async with backend.manager() as a:
        old = await _granted(a)
        await backend.expire("x")
        new = await _granted(a)
        assert not await a.renew(old)
        old.may_be_held = True  # as if its end had not been noticed
        assert not await a.release(old)
        assert await a.renew(new)
        with pytest.raises(LeaseLostError):
            await _write(backend, old, "old")


async def test_release_after_takeover(backend: Backend) -> None:
    """A release after a takeover frees nothing and logs at debug. A release in time frees the
    lease, once."""
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
    """If the table is emptied, the old term ends, and later epochs are higher."""
    async with backend.manager() as a, backend.manager() as b:
        lease = await _granted(a)
        await backend.forget()
        assert not await a.renew(lease)
        other = await _granted(b)
        assert other.epoch > lease.epoch


async def test_frozen_holder(backend: Backend) -> None:
    """A holder that was frozen for longer than its lease cannot write under it."""
    async with backend.manager() as a, backend.manager() as b:
        lease = await _granted(a)
        await backend.expire("x")
        other = await _granted(b)
        assert lease.is_held  # locally
        with pytest.raises(LeaseLostError, match=r"'x' is not held any more .*epoch \d+.*stop"):
            await _write(backend, lease, "stale")
        assert not lease.is_held
        await _write(backend, other, "fresh")
        assert await backend.effects() == ["fresh"]


async def test_takeover_waits_for_fenced_transaction(backend: Backend) -> None:
    """The writes of a fenced transaction are committed before the next term begins, even if the
    lease expires before the commit."""
    async with backend.manager() as a, backend.manager() as b:
        lease = await _granted(a)
        async with backend.transaction() as writer:
            await lease.fence(writer.connection)
            await backend.expire("x")
            assert await b.try_acquire("x") is None
            await writer.write("old")
        await _granted(b)
        assert await backend.effects() == ["old"]


async def test_fenced_transaction_is_limited(backend: Backend) -> None:
    """A fenced transaction whose process hangs delays a takeover for at most the ttl. The server
    ends it, and its writes are lost."""
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
    """A renewal does not wait for a fenced transaction, and a fence does not wait for a renewal."""
    async with backend.manager() as a:
        lease = await _granted(a)
        async with backend.transaction() as writer:
            await lease.fence(writer.connection)
            assert await a.renew(lease)  # one that waited would fail
            await lease.fence(writer.connection)
            await writer.write("once")
        assert await backend.effects() == ["once"]


async def test_denied_attempt_does_not_wait(backend: Backend) -> None:
    """An attempt for a held lease returns the remaining time at once, even during a fenced
    transaction."""
    async with backend.manager() as a, backend.manager() as b:
        lease = await _granted(a)
        async with backend.transaction() as writer:
            await lease.fence(writer.connection)
            answer = await b._engine._store.acquire("x", "b", timedelta(seconds=15), timeout=5)
            assert answer is not None
            assert (answer.is_granted, answer.holder, answer.epoch) == (
                False,
                a.holder,
                lease.epoch,
            )
            assert answer.seconds_until_expiry is not None
            assert 0 < answer.seconds_until_expiry <= 15


async def test_fence_outside_of_a_transaction(backend: Backend) -> None:
    """A fence outside of a transaction, or on another object, raises an error, and the lease stays
    held."""
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
    """Every use of a lost lease raises the same error."""
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
    """The lease of a block is renewed in the background. The next block runs when it has ended."""
    async with backend.manager(**QUICK) as a, backend.manager(**QUICK) as b:
        async with a.hold("x") as lease:
            a._engine.renewer.leases_renewed.init()
            for _ in range(3):
                await a._engine.renewer.leases_renewed.wait()
                assert lease.is_held
            with pytest.raises(TimeoutError, match="'x' was not free"):
                async with b.hold("x", wait=timedelta(0)):
                    pass
        assert not lease.is_held
        async with b.hold("x") as other:
            assert other.epoch > lease.epoch
            assert other.waited >= 0


async def test_block_is_cancelled_on_loss(backend: Backend) -> None:
    """A block whose lease another process acquired is cancelled and raises LeaseLostError."""
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
        assert a._engine.renewer.leases == []


async def test_manager_that_is_closed(backend: Backend) -> None:
    """Leases of a closed manager are lost, and it grants no more."""
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


async def test_bad_waits(backend: Backend) -> None:
    """`wait` must be a timedelta."""
    bad: Any
    async with backend.manager() as a:
        for bad in (5, "5", 1.5):
            with pytest.raises(ConfigError, match="wait takes a timedelta, or None"):
                a.hold("x", wait=bad)


async def test_names(backend: Backend) -> None:
    """A name with a wrong length or other characters is refused before a statement is sent."""
    async with backend.manager() as a:
        for name in ("", "a" * 101, "with space", "tab\t", "é", "nul\0", 7):
            with pytest.raises(ConfigError, match="the name of a lease"):
                await a.try_acquire(name)  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match="the name of a lease"):
                a.hold(name)  # type: ignore[arg-type]
        assert await a.try_acquire("~" * 100) is not None
        assert await a.try_acquire("it's:\\%1$") is not None


async def test_other_threads(backend: Backend) -> None:
    """A thread can read whether its lease is held, and sees its end at once."""
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
