"""Passwords that change: a function returns the password for each new connection."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

import riverpy._postgres.passwords
from riverpy import Client, Config, ConfigError, Job, LeaseManager, QueueConfig, Workers
from riverpy._log_events import CONNECTION_LOST, CONNECTION_RESTORED, WORKER_STARTED
from riverpy._postgres.driver import connect
from riverpy._postgres.passwords import PasswordError, PasswordSource
from riverpy.embedded import EmbeddedPostgres
from riverpy.migrate import migrate_all
from tests._database import run_apart
from tests.cli.worker_process import running_worker
from tests.kit.fleet import SERVER_SETTINGS, with_user
from tests.work.rig import PATIENCE, Task

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator

SECRET = "s3cret"
"""A part of all passwords of these tests."""
APP = """
from pathlib import Path
import riverpy

workers = riverpy.Workers()

@workers.job(kind="task")
async def task(job: riverpy.Job[dict]) -> None:
    print("job", job.id, flush=True)

client = riverpy.Client(
    {url!r},
    workers=workers,
    queues={{"default": riverpy.QueueConfig()}},
    config=riverpy.Config(listen_url={url!r}),
    password=lambda: Path("password").read_text(),
)
"""


class PasswordServer:
    """A server on which the role `app` must log in with a password."""

    def __init__(self, url: str) -> None:
        self.admin_url = url
        self.url = with_user(url, "app")

    async def set_password(self, password: str) -> None:
        """Change the password of the role."""
        await self.execute(f"ALTER ROLE app PASSWORD '{password}'")

    async def execute(self, statement: str, *values: object) -> Any:
        """Send a statement as the superuser, and return its first value."""
        connection = await asyncpg.connect(self.admin_url)
        try:
            return await connection.fetchval(statement, *values)
        finally:
            await connection.close()

    async def end_sessions(self) -> None:
        """End all connections of the role."""
        await self.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'app'"
        )

    async def set_up(self, directory: Path) -> None:
        """Create the role and the tables, and ask the role for its password."""
        hba = directory / "data" / "pg_hba.conf"
        hba.write_text(f"local all app scram-sha-256\n{hba.read_text()}")
        connection = await asyncpg.connect(self.admin_url)
        await migrate_all(connection)
        await connection.execute("CREATE ROLE app LOGIN IN ROLE postgres; SELECT pg_reload_conf()")
        await connection.close()


@pytest.fixture(scope="module")
def server() -> Generator[PasswordServer]:
    """Start the server."""
    with tempfile.TemporaryDirectory(prefix="rp-", dir="/tmp") as base:
        Path(base).chmod(0o711)
        postgres = EmbeddedPostgres("password", base_dir=Path(base), settings=SERVER_SETTINGS)
        server = PasswordServer(postgres.start())
        try:
            run_apart(server.set_up, postgres.directory)
            yield server
        finally:
            postgres.remove()


@pytest.fixture
async def changed_password(server: PasswordServer) -> AsyncGenerator[Callable[[], Any]]:
    """Yield a function that returns a new password at each call. The one before is not valid any
    more, as with a token that is valid once."""
    calls: list[str] = []

    async def change_password() -> str:
        calls.append(f"{SECRET} {len(calls)}")
        await server.set_password(calls[-1])
        return calls[-1]

    yield change_password
    assert len(calls) > 1


def expect_no_secret(log: object) -> None:
    """Fail if a password is in the log, or the function's representation."""
    text = repr(log)
    assert SECRET not in text
    assert "<function" not in text
    assert "functools.partial" not in text


async def test_each_connection_has_its_password(
    server: PasswordServer, changed_password: Callable[[], Any], log: list[Any]
) -> None:
    """Each connection of a pool and of leases calls the function, so a password may be valid for
    one connection only."""
    async with Client(server.url, password=changed_password) as client:
        await client.insert(Task())
        await client._get_open_pool().expire_connections()
        await client.insert(Task())
        async with client.lease("own"):
            pass
    async with LeaseManager(server.url, password=changed_password) as leases:
        lease = await leases.try_acquire("other")
        assert lease is not None
        assert await leases.release(lease)
    expect_no_secret(log)


async def test_outage_of_the_function(
    server: PasswordServer, log: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function that fails while a client works is an outage: the client connects again as soon as
    there is a password. All connections of a run use it: those for claims, results, leases and
    notifications, and the leader's."""
    monkeypatch.setattr(riverpy._postgres.connection, "RECONNECT_DELAY_MAX", timedelta(seconds=0.2))
    password: Any = f"{SECRET} 1"
    failed = asyncio.Event()
    done: asyncio.Queue[int] = asyncio.Queue()
    workers = Workers()

    @workers.job(kind="task")
    async def task(job: Job) -> None:  # type: ignore[type-arg]
        done.put_nowait(job.id)

    async def give_password(secret: str) -> str:
        if isinstance(password, Exception):
            failed.set()
            raise password
        assert secret
        return str(password)

    async def insert_and_wait() -> None:
        job_id = await server.execute(
            "INSERT INTO river_job (kind, max_attempts, args) VALUES ('task', 25, '{}')"
            " RETURNING id"
        )
        async with asyncio.timeout(PATIENCE):
            while await done.get() != job_id:
                pass

    await server.set_password(password)
    client = Client(
        server.url,
        workers=workers,
        queues={"default": QueueConfig()},
        config=Config(listen_url=server.url),
        password=partial(give_password, SECRET),
    )
    async with client.working():
        await insert_and_wait()
        names = await server.execute(
            "SELECT array_agg(DISTINCT application_name) FROM pg_stat_activity"
            " WHERE usename = 'app'"
        )
        assert {"riverpy claims", "riverpy results", "riverpy listener"} <= set(names)
        password = RuntimeError(f"no token for {SECRET}")
        await server.set_password(f"{SECRET} 2")
        await server.end_sessions()
        async with asyncio.timeout(PATIENCE):
            await failed.wait()
        password = f"{SECRET} 2"
        await insert_and_wait()
        assert await client.release_claims([]) == 0
    lost = [entry for entry in log if entry["event"] == CONNECTION_LOST]
    assert len(lost) == 1
    assert CONNECTION_RESTORED in {entry["event"] for entry in log}
    expect_no_secret(log)


async def test_worker_process(server: PasswordServer, tmp_path: Path) -> None:
    """`riverpy worker` uses the function of the client's module. The password of the role changes
    while it runs."""
    insert = (
        "INSERT INTO river_job (kind, max_attempts, args) VALUES ('task', 25, '{}') RETURNING id"
    )
    (tmp_path / "password").write_text(f"{SECRET} 1")
    await server.set_password(f"{SECRET} 1")
    async with running_worker(tmp_path, "jobs", code=APP.format(url=server.url)) as worker:
        await worker.until_logged(WORKER_STARTED)
        await worker.until_printed(f"job {await server.execute(insert)}")
        (tmp_path / "password").write_text(f"{SECRET} 2")
        await server.set_password(f"{SECRET} 2")
        await server.end_sessions()
        await worker.until_printed(f"job {await server.execute(insert)}")
    expect_no_secret(worker.logged)


class _Token:
    """A function that is an object."""

    async def __call__(self) -> str:
        return SECRET


async def _later() -> str:
    return SECRET


@pytest.mark.parametrize(
    "function",
    [_Token(), _later, partial(_later), lambda: _later(), lambda: SECRET],
    ids=["object", "async", "partial", "returns awaitable", "plain"],
)
async def test_functions(function: Any) -> None:
    """A function may be async or not, a partial, an object, or return an awaitable."""
    assert await PasswordSource(function).fetch_password(PATIENCE) == SECRET


def _raise(error: BaseException) -> Any:
    raise error


async def _raise_async(error: BaseException) -> Any:
    raise error


async def _hang() -> Any:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (partial(_raise, KeyError(SECRET)), "raised KeyError"),
        (partial(_raise, SystemExit(SECRET)), "raised RuntimeError"),
        (partial(_raise, StopIteration(SECRET)), "raised RuntimeError"),
        (partial(_raise_async, KeyError(SECRET)), "raised KeyError"),
        (partial(_raise_async, TimeoutError(SECRET)), "raised TimeoutError"),
        (partial(_raise_async, asyncio.CancelledError(SECRET)), "raised CancelledError"),
        (lambda: None, "must return a str, got NoneType"),
        (lambda: SECRET.encode(), "must return a str, got bytes"),
        (lambda: "", "returned an empty text"),
        (lambda: f"{SECRET}\0", "a text with a NUL character"),
        (lambda: f"{SECRET}\udc80", "a text that is not valid Unicode"),
        (_hang, "did not return within 0.04 s"),
        (lambda: threading.Event().wait(3), "did not return within 0.04 s"),
    ],
    ids=range(13),
)
async def test_functions_that_fail(server: PasswordServer, function: Any, expected: str) -> None:
    """A function that raises, hangs or returns no password is an error of connecting. Its text has
    the server and the reason, and no part of the password or of the function's error."""
    with pytest.raises(PasswordError, match=expected) as raised:
        await connect(
            server.url,
            password=PasswordSource(function),
            timeout=0.05 if "did not return" in expected else PATIENCE,
        )
    assert "cannot connect to" in str(raised.value)
    assert isinstance(raised.value, OSError)
    error: BaseException | None = raised.value
    while error is not None:
        expect_no_secret((str(error), error.args))
        error = None if error.__suppress_context__ else error.__cause__ or error.__context__


async def test_hanging_calls_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that hang do not start threads without a limit. When they return, the function is
    called again. A cancelled caller is cancelled at once."""
    monkeypatch.setattr(riverpy._postgres.passwords, "HANGING_CALLS_MAX", 1)
    release, started = threading.Event(), threading.Event()

    def give_password() -> str:
        started.set()
        release.wait(PATIENCE)
        return SECRET

    source = PasswordSource(give_password)
    caller = asyncio.ensure_future(source.fetch_password(PATIENCE))
    await asyncio.to_thread(started.wait, PATIENCE)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    with pytest.raises(PasswordError, match="1 calls of the password function have not returned"):
        await source.fetch_password(PATIENCE)
    release.set()
    async with asyncio.timeout(PATIENCE):
        while source._running_calls:
            await asyncio.sleep(0.01)
    assert await source.fetch_password(PATIENCE) == SECRET


async def test_refused() -> None:
    """A password that is not a function, a URL that has a password too, and a pool are refused
    before anything connects. The errors show no password."""
    url, other = "postgres://app@h/db", f"postgres://app:{SECRET}@h/db"
    pool = asyncpg.create_pool(url)
    password: Any = f"{SECRET}"

    def give_password() -> str:
        return SECRET

    for arguments, expected in (
        ({"password": password}, "must be a function"),
        ({"database": other}, "remove one of them"),
        ({"database": f"postgres://h/db?user=app&password={SECRET}"}, "remove one of them"),
        ({"config": Config(listen_url=other)}, "remove one of them"),
        ({"database": pool}, "create_pool"),
    ):
        values: Any = {"database": url, "password": give_password} | arguments
        with pytest.raises(ConfigError, match=expected) as raised:
            Client(**values)
        expect_no_secret(raised.value)
    with pytest.raises(ConfigError, match="remove one of them"):
        LeaseManager(other, password=give_password)
    client = Client(password=give_password)
    with pytest.raises(ConfigError, match="remove one of them"):
        client.configure(database=other)
    expect_no_secret(vars(client)["_password"])
