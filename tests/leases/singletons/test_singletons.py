"""Singletons: exactly one of the clients that register a function runs it."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import anyio
import asyncpg
import pytest

from riverpy import (
    Client,
    ClientStateError,
    Config,
    ConfigError,
    LeaseLostError,
    SchemaMissingError,
)
from riverpy._leases import engine as engine_module
from riverpy._leases import held_leases
from riverpy._leases import singletons as singleton_runner
from riverpy._leases.store import UserLeaseTable
from riverpy._log_events import (
    SINGLETON_ENDED,
    SINGLETON_FAILED,
    SINGLETON_FAILED_FOR_GOOD,
    SINGLETON_FAILED_WHILE_STOPPING,
    SINGLETONS_ABANDONED,
    WORK_RAN_PAST_ITS_LEASE,
)
from riverpy.migrate import Migrator
from tests._statements import record_statements
from tests._time import settle
from tests.leases.singletons.rig import INTERVAL, LONG, TTL, Task, make_client, running, soon, until

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from riverpy import Lease
    from tests._database import Schema

pytestmark = pytest.mark.usefixtures("log")


def lines_of(log: list[Any], event: str) -> list[Any]:
    """Return the log lines of an event."""
    return [entry for entry in log if entry["event"] == event]


async def take_over(schema: Schema, name: str) -> None:
    """Let another process hold the lease, as after a partition."""
    await schema.execute(
        "update riverpy_lease set epoch = epoch + 1, holder = 'rival',"
        " expires_at = now() + interval '300 ms', ttl = '300 ms' where name = $1",
        f"s:{name}",
    )


async def test_one_of_three_runs_it(schema: Schema) -> None:
    """One of three processes runs the function. When it stops, another one runs it, with a higher
    epoch. The stop of the first leaves nothing behind."""
    tasks = [Task() for _ in range(3)]
    clients = [make_client(schema, f"c{number}") for number in range(3)]
    for client, task in zip(clients, tasks, strict=True):
        client.singleton("projection", task)
    async with running(*clients):
        await until(lambda: any(task.leases for task in tasks))
        first = next(number for number, task in enumerate(tasks) if task.leases)
        stats = clients[first].stats().singletons["projection"]
        assert (stats.held, stats.running, stats.terms) == (True, True, 1)
        clients[first].stop()
        await soon(tasks[first].ended)
        await until(lambda: sum(len(task.leases) for task in tasks) == 2)
        second = next(n for n, task in enumerate(tasks) if task.leases and n != first)
        old, new = tasks[first].leases[0], tasks[second].leases[0]
        assert new.epoch > old.epoch
        assert (old.is_held, new.is_held) == (False, True)
    assert sum(len(task.leases) for task in tasks) <= 3  # the third, as the second stopped


async def test_cancelled_at_the_deadline(schema: Schema) -> None:
    """Renewals move the deadline. If they fail, the function is cancelled before another process
    can acquire the lease. It runs again when the database answers (S1)."""
    task, client = Task(), make_client(schema, "one", ttl=TTL)
    client.singleton("s", task)
    async with running(client):
        lease = await soon(task.began)
        await until(lambda: client.stats().leases.renewals > 5)
        assert lease.is_held
        async with schema.connected() as rival, rival.transaction():
            await rival.execute("lock table riverpy_lease in access exclusive mode")
            await soon(task.ended)
            assert not lease.is_held
            since = time.monotonic() - task.ended_at
            left = await rival.fetchval(
                "select extract(epoch from expires_at - clock_timestamp())::float8"
                " from riverpy_lease"
            )
            assert left + since > 0
        again = await soon(task.began)
        assert again.epoch > lease.epoch
    assert client.stats().singletons["s"].losses == 1


async def test_one_statement_renews_all(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """25 leases of a process are renewed by one statement in each interval, over a connection that
    is used for nothing else (S2)."""
    client, tasks = make_client(schema, "one"), [Task() for _ in range(25)]
    sent = record_statements(monkeypatch)
    for number, task in enumerate(tasks):
        client.singleton(f"s{number}", task)
    async with running(client):
        for task in tasks:
            await soon(task.began)
        before, start = client.stats().leases.renewals, len(sent)
        await until(lambda: client.stats().leases.renewals >= before + 4)
        renewals = client.stats().leases.renewals - before
        ours = [one for one in sent[start:] if "riverpy_lease" in one.text and "update" in one.text]
        assert abs(len(ours) - renewals) <= 1  # one may be under way, at the start or the end
        assert client.stats().leases.held == 25
        names = {one.connection for one in ours}
        assert len(names) == 1
        assert not names & {"riverpy claims", "riverpy results", "riverpy reserved"}


async def test_release_wakes_other_clients(schema: Schema) -> None:
    """The notification of a release makes a waiting client acquire the lease at once, before its
    next attempt (S3)."""
    hour = timedelta(hours=1)
    tasks, clients = [Task(), Task()], []
    for number, task in enumerate(tasks):
        client = make_client(schema, f"c{number}", ttl=3 * hour, interval=hour)
        client.singleton("s", task)
        clients.append(client)
    async with running(clients[0]), clients[1]:
        await soon(tasks[0].began)
        engine = await clients[1]._lease_engine.open()
        engine.lease_denied.init()
        async with running(clients[1]):
            await engine.lease_denied.wait()
            clients[0].stop()
            await soon(tasks[1].began)


async def test_names_spread(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that holds more leases tries later, so that the leases of a stopped process spread
    over the others (S4)."""
    hour = timedelta(hours=1)
    clients = [
        make_client(schema, f"c{number}", ttl=3 * hour, interval=hour) for number in range(4)
    ]
    tasks = [[Task() for _ in range(12)] for _ in clients]
    for client, own in zip(clients, tasks, strict=True):
        for number, task in enumerate(own):
            client.singleton(f"s{number}", task)
    async with running(clients[0]):
        for task in tasks[0]:
            await soon(task.began)
        async with clients[1], clients[2], clients[3]:
            engines = [await client._lease_engine.open() for client in clients[1:]]
            for engine in engines:
                engine.lease_denied.init()
            async with running(*clients[1:]):
                for engine in engines:
                    for _ in range(12):
                        await engine.lease_denied.wait()
                # A process may be notified later than others that a lease is free.
                monkeypatch.setattr(engine_module, "ACQUIRE_DELAY_PER_HELD_LEASE", 0.25)
                monkeypatch.setattr(engine_module, "ACQUIRE_DELAY_MAX", 2.0)
                clients[0].stop()
                counts: list[int] = []

                def all_run() -> bool:
                    counts[:] = (sum(len(task.leases) for task in own) for own in tasks[1:])
                    return sum(counts) == 12

                await until(all_run)
                assert min(counts) >= 1, counts


async def test_max_leases(schema: Schema) -> None:
    """Two clients with `max_leases` 4 share eight singletons. A third client waits until one of
    them stops, and then acquires its leases (S4)."""
    clients = [make_client(schema, f"c{number}", max_leases=4) for number in range(3)]
    tasks = [[Task() for _ in range(8)] for _ in clients]
    for client, own in zip(clients, tasks, strict=True):
        for number, task in enumerate(own):
            client.singleton(f"s{number}", task)

    def held() -> list[int]:
        return [client.stats().leases.held for client in clients]

    async with running(*clients[:2]):
        await until(lambda: held() == [4, 4, 0])
        async with clients[2]:
            engine = await clients[2]._lease_engine.open()
            engine.lease_denied.init()
            async with running(clients[2]):
                for _ in range(8):
                    await engine.lease_denied.wait()
                assert held() == [4, 4, 0]
                clients[0].stop()
                await until(lambda: held() == [0, 4, 4])


async def test_returning(schema: Schema, log: list[Any]) -> None:
    """A function that returns has ended in this process, and its lease is released. Another process
    runs it, this one does not (S5)."""
    tasks, clients = [Task(), Task()], [make_client(schema, "a"), make_client(schema, "b")]
    for client, task in zip(clients, tasks, strict=True):
        client.singleton("s", task)
    tasks[0].may_end.set()
    async with running(clients[0]):
        await soon(tasks[0].ended)
        async with running(clients[1]):
            await soon(tasks[1].began)
            tasks[1].may_end.set()
            await until(lambda: len(lines_of(log, SINGLETON_ENDED)) == 2)
        assert await schema.fetchval("select expires_at = '-infinity' from riverpy_lease")
        assert len(tasks[0].leases) == 1


async def test_raising(schema: Schema, log: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """If a function raises, its lease is released and another process runs it. This process tries
    again after a delay (S5)."""
    monkeypatch.setattr(singleton_runner, "FUNCTION_RETRY_DELAY_MIN", timedelta(milliseconds=50))
    tasks, clients = [Task(), Task()], [make_client(schema, "a"), make_client(schema, "b")]
    for client, task in zip(clients, tasks, strict=True):
        client.singleton("s", task)
    tasks[0].error = LookupError("no such stream")
    tasks[0].may_end.set()
    async with running(clients[0]):
        first, second = await soon(tasks[0].began), await soon(tasks[0].began)
        assert second.epoch > first.epoch
        async with running(clients[1]):
            await soon(tasks[1].began)
    assert clients[0].stats().singletons["s"].failures >= 2
    assert "no such stream" in lines_of(log, SINGLETON_FAILED)[0]["error"]


async def test_error_of_another_lease(schema: Schema, log: list[Any]) -> None:
    """If a function raises an error about another lease or another leadership, this counts as any
    error. Otherwise it would start again at once (S5)."""
    task, client = Task(), make_client(schema, "a")
    task.error = LeaseLostError("another")
    task.may_end.set()
    client.singleton("s", task)
    async with running(client):
        await soon(task.ended)
        await until(lambda: bool(lines_of(log, SINGLETON_FAILED)))
        stats = client.stats().singletons["s"]
        assert (stats.failures, stats.losses) == (1, 0)


async def test_never_again(schema: Schema, log: list[Any]) -> None:
    """With restart="never" a function does not run again in this process after an error (S5)."""
    task, client = Task(), make_client(schema, "a")
    task.error = LookupError("no such stream")
    task.may_end.set()
    client.singleton("s", task, restart="never")
    async with running(client):
        await soon(task.ended)
        await until(lambda: bool(lines_of(log, SINGLETON_FAILED_FOR_GOOD)))
        assert not client.stats().singletons["s"].running


async def test_clean_up_of_a_lost_lease(schema: Schema) -> None:
    """A function that loses its lease during a transaction is cancelled once, as jobs are. The
    transaction is rolled back, clean-up can be awaited, and the connection returns to its pool
    unchanged (S6)."""
    began: asyncio.Queue[int] = asyncio.Queue()
    left: asyncio.Queue[int] = asyncio.Queue()
    await schema.execute("create table effects (n int)")

    async def work(lease: Lease) -> None:
        async with pool.acquire() as connection:
            try:
                async with connection.transaction():
                    await connection.execute("insert into effects values (1)")
                    began.put_nowait(connection.get_server_pid())
                    await anyio.sleep_forever()
            finally:
                left.put_nowait(await connection.fetchval("select count(*) from effects"))

    client = make_client(schema, "a", ttl=TTL)
    client.singleton("s", work)
    try:
        async with (
            asyncpg.create_pool(
                schema.url,
                min_size=1,
                max_size=1,
                server_settings={"search_path": schema.name},
            ) as pool,
            running(client),
        ):
            pid = await soon(began)
            await take_over(schema, "s")
            assert await soon(left) == 0
            assert await soon(began) == pid
    finally:
        await schema.execute("drop table effects")


async def test_function_that_keeps_running(
    schema: Schema, log: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a function runs after its lease was lost, this is logged repeatedly. Its process does not
    try to acquire the lease until the function has ended, and then runs it again (S6)."""
    monkeypatch.setattr(held_leases, "UNFINISHED_WORK_LOG_INTERVAL", 0.05)
    task, client = Task(), make_client(schema, "a", ttl=TTL)
    task.is_deaf = True
    client.singleton("s", task)
    async with running(client):
        first = await soon(task.began)
        await take_over(schema, "s")
        await until(lambda: len(lines_of(log, WORK_RAN_PAST_ITS_LEASE)) >= 3)
        stats = client.stats().singletons["s"]
        assert (stats.held, stats.running) == (False, True)
        row = await schema.fetchrow("select holder, expires_at < now() from riverpy_lease")
        assert row is not None
        assert tuple(row) == ("rival", True)
        task.is_deaf = False
        task.may_end.set()
        await soon(task.ended)
        second = await soon(task.began)
        assert second.epoch > first.epoch


async def test_failing_at_the_stop(schema: Schema, log: list[Any]) -> None:
    """An error that a function raises when the client stops is logged (S6)."""
    task, client = Task(), make_client(schema, "a")

    async def work(lease: Lease) -> None:
        try:
            await task(lease)
        finally:
            raise LookupError("no such file")

    client.singleton("s", work)
    async with running(client):
        await soon(task.began)
    (line,) = lines_of(log, SINGLETON_FAILED_WHILE_STOPPING)
    assert (line["log_level"], line["error"]) == ("error", "LookupError: no such file")


async def test_failing_before_the_stop(
    schema: Schema, log: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error just before the stop is logged, even if the client stops while the lease is released
    (S6)."""
    task, client = Task(), make_client(schema, "a")
    task.error = LookupError("no such file")
    is_asked, may_go_on, release = asyncio.Event(), asyncio.Event(), UserLeaseTable.release

    async def release_late(table: UserLeaseTable, *args: Any, **values: Any) -> bool:
        is_asked.set()
        await may_go_on.wait()
        return await release(table, *args, **values)

    monkeypatch.setattr(UserLeaseTable, "release", release_late)
    client.singleton("s", task)
    async with running(client):
        await soon(task.began)
        task.may_end.set()
        await until(is_asked.is_set)
        client.stop()
        try:
            await until(lambda: bool(lines_of(log, SINGLETON_FAILED_WHILE_STOPPING)))
        finally:
            may_go_on.set()
    (line,) = lines_of(log, SINGLETON_FAILED_WHILE_STOPPING)
    assert (line["log_level"], line["error"]) == ("error", "LookupError: no such file")


async def test_left_behind(schema: Schema, log: list[Any]) -> None:
    """A function that ignores the stop is in the run's report. The run ends without it (S6)."""
    task, client = Task(), make_client(schema, "a", ttl=TTL)
    task.is_deaf = True
    client.singleton("s", task)
    async with running(client) as reports:
        await soon(task.began)
        client.stop()
        try:
            await until(lambda: bool(reports))
        finally:
            task.may_end.set()
            await soon(task.ended)
    assert (reports[0].singletons_left, reports[0].is_clean) == (("s",), False)
    assert lines_of(log, SINGLETONS_ABANDONED)


async def test_left_behind_and_started_again(
    schema: Schema, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If functions of earlier runs are still running, a client that runs again does not try to
    acquire their leases before they have ended (S6)."""
    task, other, client = Task(), Task(), make_client(schema, "a", ttl=TTL)
    task.is_deaf = True
    client.singleton("s", task)
    client.singleton("t", other)
    acquire, asked = UserLeaseTable.acquire, list[str]()

    async def asking(table: UserLeaseTable, name: str, *args: Any, **values: Any) -> Any:
        asked.append(name)
        return await acquire(table, name, *args, **values)

    async with running(client):
        first = await soon(task.began)
    monkeypatch.setattr(UserLeaseTable, "acquire", asking)
    try:
        for _ in range(2):
            other.began = asyncio.Queue()
            await schema.execute("update riverpy_lease set expires_at = now() - interval '1 s'")
            async with running(client):
                await soon(other.began)
        assert set(asked) == {"t"}
    finally:
        task.may_end.set()
        await soon(task.ended)
    async with running(client):
        assert (await soon(task.began)).epoch > first.epoch


async def test_threads(schema: Schema) -> None:
    """A plain function runs in a thread, with the lease as its argument. It sees there that the
    lease is lost. The fence statement finds the row as long as the lease is held (S7)."""
    began: asyncio.Queue[Lease] = asyncio.Queue()
    statements: list[str] = []
    errors: list[Exception] = []
    loop = asyncio.get_running_loop()
    lost = threading.Event()

    def work(lease: Lease) -> None:
        lease.expect_held()
        statements.append(lease.fence_statement)
        loop.call_soon_threadsafe(began.put_nowait, lease)
        while lease.is_held:
            lost.wait(0.01)
        try:
            lease.expect_held()
        except LeaseLostError as error:
            errors.append(error)
            raise

    client = make_client(schema, "a")
    client.singleton("s", work)
    async with running(client) as reports:
        await soon(began)
        async with schema.connected() as connection, connection.transaction():
            assert len(await connection.fetch(statements[0])) == 1
        await take_over(schema, "s")
        await soon(began)
        assert len(errors) == 1
        async with schema.connected() as connection, connection.transaction():
            assert await connection.fetch(statements[0]) == []
    assert reports[0].is_clean, "the stop was not clean"
    assert len(errors) == 2
    assert client.stats().singletons["s"].losses == 1


async def _projection(lease: Lease) -> None:
    raise AssertionError(f"nobody awaits it: {lease}")


async def _async_generator(lease: Lease) -> AsyncGenerator[Lease]:
    yield lease


def _generator(lease: Lease) -> Generator[Lease]:
    yield lease


async def _forgotten(lease: Lease) -> object:
    return _projection(lease)


@pytest.mark.parametrize(
    ("fn", "kind"),
    [
        (lambda lease: _projection(lease), "coroutine"),
        (_forgotten, "coroutine"),
        (lambda lease: _async_generator(lease), "async_generator"),
        (lambda lease: _generator(lease), "generator"),
    ],
)
async def test_function_that_returns_an_awaitable(
    schema: Schema, log: list[Any], fn: Any, kind: str
) -> None:
    """A function that returns an awaitable, for example a lambda around a coroutine function, fails
    with an error that says what to register."""
    client = make_client(schema, "a")
    client.singleton("s", fn, restart="never")
    async with running(client):
        await until(lambda: bool(lines_of(log, SINGLETON_FAILED_FOR_GOOD)))
        assert client.stats().singletons["s"].failures == 1
    error = lines_of(log, SINGLETON_FAILED_FOR_GOOD)[0]["error"]
    assert f"returned {kind}, which never runs: register an `async def`" in error


async def _raise(_lease: Lease) -> None:
    raise GeneratorExit


def _raise_in_thread(_lease: Lease) -> None:
    raise GeneratorExit


@pytest.mark.parametrize("fn", [_raise, _raise_in_thread])
async def test_generator_exit(schema: Schema, log: list[Any], fn: Any) -> None:
    """A function that raises GeneratorExit has failed, as by any other exception."""
    client = make_client(schema, "a")
    client.singleton("s", fn, restart="never")
    async with running(client):
        await until(lambda: bool(lines_of(log, SINGLETON_FAILED_FOR_GOOD)))
    error = lines_of(log, SINGLETON_FAILED_FOR_GOOD)[0]["error"]
    assert "singleton 's' raised GeneratorExit" in error


async def test_stats(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stats have the held leases with their epochs and waiting times, and the renewals, also
    failed ones (S8)."""
    task, client = Task(), make_client(schema, "a")
    client.singleton("s", task)
    async with running(client):
        lease = await soon(task.began)
        stats = client.stats()
        assert stats.singletons["s"].epoch == lease.epoch
        assert (stats.singletons["s"].waited or 0) > 0
        await until(lambda: client.stats().leases.renewals >= 2)
        assert client.stats().leases.renewal_seconds > 0
        monkeypatch.setattr(held_leases, "LEASE_STORE_TIMEOUT", 0.1)
        async with schema.connected() as rival, rival.transaction():
            await rival.execute("lock table riverpy_lease in access exclusive mode")
            await until(lambda: client.stats().leases.renewal_failures > 0)
    stats = client.stats()
    assert not stats.singletons["s"].held
    assert stats.singletons["s"].epoch is None


async def test_no_candidate(schema: Schema) -> None:
    """A client with `candidate=False` for a singleton never runs it."""
    tasks, clients = [Task(), Task()], [make_client(schema, "a"), make_client(schema, "b")]
    clients[0].singleton("s", tasks[0], candidate=False)
    clients[0].singleton("t", Task())
    clients[1].singleton("s", tasks[1])
    async with running(*clients):
        await soon(tasks[1].began)
        assert set(clients[0].stats().singletons) == {"t"}
    assert tasks[0].leases == []


async def test_lease_in_a_script(schema: Schema) -> None:
    """A client that is open but does not run can hold a lease for a block, also one of a singleton.
    A second client waits for at most `wait`."""
    async with make_client(schema, "a") as one, make_client(schema, "b") as two:
        async with one.lease("stream 7".replace(" ", "-")) as lease:
            assert lease.is_held
            with pytest.raises(TimeoutError):
                async with two.lease("stream-7", wait=timedelta(0)):
                    pass
        async with two.lease("stream-7", wait=LONG) as next_lease:
            assert next_lease.epoch > lease.epoch
        assert not lease.is_held


async def test_lease_in_a_handler_is_lost(schema: Schema) -> None:
    """The block of a lost lease is cancelled, with an error that says so."""
    async with make_client(schema, "a") as client:

        async def work() -> None:
            async with client.lease("s"):
                await take_over(schema, "s")
                await anyio.sleep_forever()

        with pytest.raises(LeaseLostError, match="'s'"):
            await work()


async def test_close_during_the_first_lease(schema: Schema) -> None:
    """If a client is closed while its first lease is requested, the request is refused, and no
    connection stays open."""
    client, refused = make_client(schema, "a"), anyio.Event()

    async def ask() -> None:
        with pytest.raises(ClientStateError):
            async with client.lease("s"):
                pass
        refused.set()

    waiting = (
        "select count(*) from pg_stat_activity where datname = current_database()"
        " and application_name = 'riverpy leases' and wait_event_type = 'Lock'"
    )
    async with anyio.create_task_group() as tasks:
        await client.__aenter__()
        async with schema.connected() as rival, rival.transaction():
            await rival.execute("lock table river_migration in access exclusive mode")
            tasks.start_soon(ask)
            with anyio.fail_after(30):
                while not await schema.fetchval(waiting):
                    await anyio.sleep(0.01)
            tasks.start_soon(client.__aexit__, None, None, None)
            await settle()
        with anyio.fail_after(30):
            await refused.wait()
    sessions = waiting.replace(" and wait_event_type = 'Lock'", "")
    with anyio.fail_after(30):
        while await schema.fetchval(sessions):
            await anyio.sleep(0.01)


@pytest.mark.parametrize("name", ["", "a b", "é", "x" * 101, "a\n", 7])
async def test_bad_names(schema: Schema, name: Any) -> None:
    """Wrong names are refused at once, and nothing is registered."""
    client = make_client(schema, "a")
    with pytest.raises(ConfigError):
        client.singleton(name, Task())
    assert len(client._singleton_registry.singletons_by_name) == 0
    async with client:
        with pytest.raises(ConfigError):
            async with client.lease(name):
                pass


async def test_bad_waits(schema: Schema) -> None:
    """A `wait` that is not a timedelta is refused before the client opens a connection for
    leases."""
    bad: Any = 5
    async with make_client(schema, "a") as client:
        with pytest.raises(ConfigError, match="wait takes a timedelta"):
            async with client.lease("s", wait=bad):
                pytest.fail("it is held")


async def test_bad_registrations(schema: Schema) -> None:
    """The same name twice, an object that is no function, and other wrong values are refused."""
    client, bad = make_client(schema, "a"), Any
    client.singleton("s", Task())
    with pytest.raises(ConfigError, match="registered already"):
        client.singleton("s", Task())
    bad = 7
    with pytest.raises(ConfigError, match="takes a function, got int"):
        client.singleton("t", bad)  # type: ignore[arg-type]
    generators: list[Any] = [_generator, _async_generator]
    for bad in generators:
        with pytest.raises(ConfigError, match="is a generator"):
            client.singleton("t", bad)
    bad = "always"
    with pytest.raises(ConfigError, match="'on_error' or 'never'"):
        client.singleton("t", Task(), restart=bad)  # type: ignore[arg-type]
    bad = "no"
    with pytest.raises(ConfigError, match="True or False"):
        client.singleton("t", Task(), candidate=bad)  # type: ignore[arg-type]
    async with running(client):
        with pytest.raises(ClientStateError):
            client.singleton("t", Task())
    assert len(client._singleton_registry.singletons_by_name) == 1


async def test_ttl_of_days(schema: Schema) -> None:
    """A ttl that the table does not accept is refused with an error."""
    client = make_client(schema, "a", ttl=timedelta(days=2))
    client.singleton("s", Task())
    with pytest.raises(ConfigError, match="leader_ttl must be 1 day, 0:00:00 or less"):
        await client.run()
    async with client:
        with pytest.raises(ConfigError, match="leader_ttl must be 1 day, 0:00:00 or less"):
            async with client.lease("s"):
                pass


async def test_line_not_migrated(fresh_database_url: str) -> None:
    """Without our tables the start fails with the command that creates them, and no client is
    registered. After the migration the client can be started."""
    await Migrator(fresh_database_url, line="main").up()
    task = Task()
    config = Config(elect_interval=INTERVAL, leader_ttl=LONG, candidate=False)
    client = Client(fresh_database_url, config=config)
    client.singleton("s", task)
    with pytest.raises(SchemaMissingError, match="riverpy migrate up --line riverpy"):
        await client.run()
    assert not client.is_running
    await Migrator(fresh_database_url, line="riverpy").up()
    async with running(client):
        await soon(task.began)
