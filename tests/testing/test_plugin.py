"""The pytest plugin, in runs of pytest of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests._database import connected

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Run = Callable[..., str]

OPTIONS = ["-q", "-W", "error", *(f"-pno:{name}" for name in ("faker", "hypothesispytest"))]
SETTINGS = "[pytest]\nasyncio_default_fixture_loop_scope = function\n"

CONFTEST = """
from typing import ClassVar

import asyncpg
import msgspec
import pytest
import riverpy
from riverpy.testing import require_inserted


class Welcome(msgspec.Struct):
    kind: ClassVar[str] = "welcome"
    user_id: int


@pytest.fixture(scope="session")
def riverpy_prepare(pytestconfig):
    async def create_tables(url):
        connection = await asyncpg.connect(url)
        await connection.execute(
            "create table users (id bigserial primary key, friend bigint references users);"
            "create table plans (name text); insert into plans values ('free')"
        )
        with open(pytestconfig.rootpath / "prepared", "a") as file:
            file.write(url + "\\n")
        # This connection stays open: the template is copied all the same.
        globals()["left_open"] = connection

    return create_tables


@pytest.fixture
def anyio_backend():
    return "asyncio"


class Checks:
    async def test_connection(self, riverpy_connection):
        await riverpy_connection.execute("insert into users default values")
        assert await riverpy_connection.fetchval("select count(*) from users") == 1

    async def test_session(self, riverpy_session, riverpy_client):
        from sqlalchemy import text

        await riverpy_session.execute(text("insert into users default values"))
        await riverpy_client.insert(Welcome(user_id=1), tx=riverpy_session)
        await riverpy_session.commit()
        await require_inserted(Welcome, user_id=1, tx=riverpy_session)
        assert (await riverpy_client.job_list()).jobs == []

    async def test_client(self, riverpy_client, riverpy_url):
        await riverpy_client.insert(Welcome(user_id=2))
        await require_inserted(Welcome, user_id=2, tx=riverpy_client)
        connection = await asyncpg.connect(riverpy_url)
        await connection.execute(
            "insert into users values (1, null), (2, 1); update users set friend = 2 where id = 1"
        )
        await connection.close()

    async def test_tables_are_empty(self, riverpy_connection):
        for table, rows in [("river_job", 0), ("users", 0), ("plans", 1)]:
            assert await riverpy_connection.fetchval(f"select count(*) from {table}") == rows
"""

TESTS = {
    f"test_{number}": f"import conftest, pytest\n{mark}\nclass Test(conftest.Checks): ...\n"
    for number, mark in enumerate(
        ("@pytest.mark.asyncio", "@pytest.mark.asyncio(loop_scope='session')", "@pytest.mark.anyio")
    )
} | {
    "test_sync": """
import pytest
from conftest import Welcome
from riverpy.testing import require_inserted

@pytest.mark.parametrize("again", [False, True])
def test_client(again, riverpy_sync_client):
    with pytest.raises(AssertionError):
        require_inserted(Welcome, tx=riverpy_sync_client)
    riverpy_sync_client.insert(Welcome(user_id=1))

def test_session(riverpy_sync_session, riverpy_sync_client):
    riverpy_sync_client.insert(Welcome(user_id=1), tx=riverpy_sync_session)
    riverpy_sync_session.commit()
    require_inserted(Welcome, tx=riverpy_sync_session)
    assert not riverpy_sync_client.job_list().jobs
""",
}

KEPT = """
import pytest
from sqlalchemy import text

mark = pytest.mark.asyncio(loop_scope="session")
STATE = (
    "select current_setting('work_mem'), "
    "(select count(*) from pg_locks where pid = pg_backend_pid() and locktype = 'advisory')"
)
CHANGE = ("set work_mem = '1MB'", "select pg_advisory_lock(7)")
pids, states = [], []


@mark
@pytest.mark.parametrize("_", range(3))
async def test_connection(_, riverpy_connection):
    pids.append(riverpy_connection.get_server_pid())
    states.append(tuple(await riverpy_connection.fetchrow(STATE)))
    await riverpy_connection.execute("; ".join(CHANGE))


@mark
@pytest.mark.parametrize("changes_table", [False, False, True, False])
async def test_session(changes_table, riverpy_session):
    pids.append(await riverpy_session.scalar(text("select pg_backend_pid()")))
    states.append(tuple((await riverpy_session.execute(text(STATE))).one()))
    assert len((await riverpy_session.execute(text("select * from users"))).keys()) == 2
    for statement in CHANGE:
        await riverpy_session.execute(text(statement))
    if changes_table:
        await riverpy_session.execute(text("alter table users add note text"))


def test_connections_were_kept():
    first, last = pids[:3], pids[3:]
    assert len(set(first)) == 1 and len(set(last[:3])) == 1 and last[3] not in last[:3]
    assert len(set(states)) == 1, states
"""

KILLED = """
import os, signal

def test_killed(riverpy_url):
    os.kill(os.getpid(), signal.SIGKILL)
"""

MISTAKES = """
import asyncpg
import pytest
import riverpy
from conftest import Welcome
from sqlalchemy import text

workers = riverpy.Workers()
INSERT = "insert into users default values"
left_open = []


@workers.job(kind="other")
async def work(job: riverpy.Job[riverpy.RawArgs]) -> None: ...


@pytest.fixture
def riverpy_workers():
    return workers


@pytest.fixture(autouse=True)
def _tables_are_empty(riverpy_sync_engine):
    with riverpy_sync_engine.connect() as connection:
        assert connection.scalar(text("select count(*) from users")) == 0


async def test_unknown_kind(riverpy_client):
    await riverpy_client.insert(Welcome(user_id=1))


async def test_commit_of_connection(riverpy_connection):
    await riverpy_connection.execute(f"{INSERT}; commit")


async def test_commit_text(riverpy_session):
    for statement in (INSERT, "commit", "select 1"):
        await riverpy_session.execute(text(statement))


async def test_commit_under_session(riverpy_session):
    await riverpy_session.execute(text(INSERT))
    await (await riverpy_session.connection()).commit()


def test_commit_under_sync_session(riverpy_sync_session):
    for statement in (INSERT, "commit", "select 1"):
        riverpy_sync_session.execute(text(statement))


async def test_lock(riverpy_client, riverpy_url):
    connection = await asyncpg.connect(riverpy_url, server_settings={"application_name": "left"})
    await connection.execute("begin; lock table river_job in access exclusive mode")
    left_open.append(connection)


async def test_close(riverpy_connection):
    await riverpy_connection.close()


async def test_locks_of_the_own_connection(riverpy_connection, riverpy_client):
    await riverpy_client.insert(riverpy.RawArgs("other", "{}"))
    await riverpy_connection.execute("update river_job set priority = 2")
"""

MAKERS = """
import pytest
import riverpy
from conftest import Welcome
from sqlalchemy import BigInteger, Column, MetaData, Table, create_engine, func, insert, select
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

users = Table("users", MetaData(), Column("id", BigInteger, primary_key=True))
nowhere = create_engine("postgresql+psycopg://nowhere.invalid/none")
new_blocking_session = sessionmaker(nowhere)
new_session = async_sessionmaker(
    create_async_engine("postgresql+asyncpg://nowhere.invalid/none"), binds={users: nowhere}
)
workers = riverpy.Workers()


class Block(Welcome):
    kind = "block"


@workers.job
async def work(job: riverpy.Job[Welcome]) -> None:
    async with new_session.begin() as session:
        await session.execute(insert(users))


@workers.blocking_job
def block(job: riverpy.Job[Block]) -> None:
    with new_blocking_session.begin() as session:
        session.execute(insert(users))


@pytest.fixture
def riverpy_workers():
    return workers


@pytest.fixture
def riverpy_session_makers():
    return [new_session, new_blocking_session]


async def test_jobs_alone(riverpy_jobs):
    (await riverpy_jobs.work(Welcome(user_id=1))).require_completed()


async def test_session_and_client(riverpy_client, riverpy_jobs):
    await riverpy_client.insert(Block(user_id=1))
    await riverpy_client.insert(Welcome(user_id=1))
    for result in await riverpy_jobs.drain():
        result.require_completed()
    async with new_session() as session:
        assert await session.scalar(select(func.count()).select_from(users)) == 2


async def test_refused_blocking(riverpy_session, riverpy_jobs):
    (await riverpy_jobs.work(Welcome(user_id=1))).require_completed()
    error = (await riverpy_jobs.work(Block(user_id=1))).error
    assert isinstance(error, riverpy.ConfigError) and "is blocking, and cannot join" in str(error)


async def test_refused_async(riverpy_connection, riverpy_jobs):
    error = (await riverpy_jobs.work(Welcome(user_id=1))).error
    assert isinstance(error, riverpy.ConfigError) and "add riverpy_session, or" in str(error)


def test_jobs_in_a_test_that_is_not_async(riverpy_jobs): ...


def test_makers_are_as_before():
    assert new_blocking_session.kw["bind"] is new_session.kw["binds"][users] is nowhere
"""

LEFT = """
import unittest

import asyncpg
import pytest
import pytest_asyncio
import riverpy
from conftest import Welcome
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

INSERT = text("insert into plans values ('paid')")
COUNT = text("select count(*) from plans where name = 'paid'")
left_open = []
new_session = async_sessionmaker(create_async_engine("postgresql+asyncpg://nowhere.invalid/none"))
new_blocking_session = sessionmaker(create_engine("postgresql+psycopg://nowhere.invalid/none"))
workers = riverpy.Workers()


@workers.job
async def work(job: riverpy.Job[Welcome]) -> None:
    async with new_session() as session:
        await session.execute(INSERT)
        await session.execute(text("commit"))


@pytest.fixture
def riverpy_workers():
    return workers


@pytest.fixture
def riverpy_session_makers():
    return [new_session, new_blocking_session]


async def test_row_left(riverpy_session, riverpy_url):
    connection = await asyncpg.connect(riverpy_url)
    left_open.append(connection)
    await connection.execute("begin; insert into users values (7)")


async def test_row_left_without_fixtures(riverpy_url):
    await test_row_left(None, riverpy_url)


async def test_same_row(riverpy_session):
    await riverpy_session.execute(text("insert into users values (7)"))


async def test_session_of_the_test_inside(riverpy_session):
    async with new_session.begin() as mine:
        await mine.execute(INSERT)
        assert await riverpy_session.scalar(COUNT) == 1
        await riverpy_session.commit()
    async with new_session() as mine:
        await mine.execute(INSERT)
        assert await riverpy_session.scalar(COUNT) == 2
    assert await riverpy_session.scalar(COUNT) == 1


async def test_read_inside_and_commit_outside(riverpy_session):
    async with new_session() as outer:
        await outer.execute(COUNT)
        async with new_session.begin() as inner:
            await inner.execute(COUNT)
        await outer.rollback()
        async with new_session.begin() as inner:
            await inner.execute(INSERT)
    assert await riverpy_session.scalar(COUNT) == 1


async def test_undone_inside(riverpy_session):
    async with new_session() as outer:
        await outer.execute(COUNT)
        async with new_session.begin() as inner:
            await inner.execute(INSERT)


async def test_overlap(riverpy_session):
    async with new_session() as first, new_session() as second:
        await first.execute(INSERT)
        await second.execute(INSERT)
        await first.commit()


async def test_commit_in_a_session(riverpy_session):
    async with new_session() as session:
        await session.execute(INSERT)
        await session.execute(text("commit"))


async def test_row_committed(riverpy_session, riverpy_url):
    connection = await asyncpg.connect(riverpy_url)
    await connection.execute("insert into users values (7)")
    await connection.close()


async def test_row_was_deleted(riverpy_session):
    assert await riverpy_session.scalar(text("select count(*) from users")) == 0


def test_blocking_overlap(riverpy_sync_session):
    with new_blocking_session() as first, new_blocking_session() as second:
        first.execute(INSERT)
        second.execute(INSERT)
        with pytest.raises(riverpy.TransactionError, match="while another one"):
            first.commit()


@pytest_asyncio.fixture(loop_scope="session")
async def in_another_loop():
    async with new_session.begin() as session:
        await session.execute(INSERT)


async def test_two_loops(riverpy_session, in_another_loop): ...


async def test_commit_in_a_job(riverpy_session, riverpy_jobs):
    with pytest.raises(riverpy.TransactionError, match="code of the job has committed"):
        await riverpy_jobs.work(Welcome(user_id=1))


class TestUnittest(unittest.IsolatedAsyncioTestCase):
    @pytest.fixture(autouse=True)
    def _open(self, riverpy_session): ...

    async def test_session(self): ...
"""

WRONG = """
import pytest

def test_no_coroutine(riverpy_client): ...

async def test_no_plugin(riverpy_connection): ...

@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_trio(anyio_backend, riverpy_connection): ...

@pytest.mark.asyncio
async def test_late(request):
    request.getfixturevalue("riverpy_connection")

def test_no_sqlalchemy(riverpy_sync_session): ...
"""

MODULES = """
import sys

def test_modules():
    assert {"riverpy", "asyncpg", "asyncio"}.isdisjoint(sys.modules)
"""


@pytest.fixture
def run(tmp_path: Path, server_url: str) -> Run:
    """A function that runs pytest in a new directory with these files, and returns its output."""

    def run_pytest(files: dict[str, str], *options: str, **variables: str) -> str:
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text)
        (tmp_path / "pytest.ini").write_text(SETTINGS)
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "RIVERPY_"))}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *OPTIONS, *options],
            cwd=tmp_path,
            env={**clean, "RIVERPY_TEST_DATABASE_URL": server_url, **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout + done.stderr

    return run_pytest


async def list_databases(url: str) -> list[str]:
    """Return the names of the databases that runs of the plugin with this URL have."""
    async with connected(url) as connection:
        rows = await connection.fetch(
            "select datname from pg_database where starts_with(datname, 'riverpy_pytest_' || "
            "(select oid from pg_database where datname = current_database()) || '_')"
        )
    return [name for (name,) in rows]


async def test_each_loop_and_worker(run: Run, fresh_database_url: str, tmp_path: Path) -> None:
    """Tests of pytest-asyncio, with loops of a test or of the session, of anyio and of no loop have
    databases without rows of other tests. Two workers share one template, and no database stays. A
    run that was killed leaves two, which the next run drops."""
    own_url = {"RIVERPY_TEST_DATABASE_URL": fresh_database_url}
    run({"test_killed": KILLED}, **own_url)
    killed = await list_databases(fresh_database_url)
    assert [name.rpartition("_")[2] for name in sorted(killed)] == ["main", "template"]
    (tmp_path / "test_killed.py").unlink()
    output = run({"conftest": CONFTEST, **TESTS}, "-n", "2", "--dist", "loadfile", **own_url)
    assert "15 passed" in output, output
    (prepared,) = (tmp_path / "prepared").read_text().splitlines()
    assert "_unready" in prepared
    assert await list_databases(fresh_database_url) == []


def test_errors_teach(run: Run) -> None:
    """A fixture that a test cannot have says why, and what to do."""
    output = run({"test_wrong": WRONG, "sqlalchemy": "raise ImportError"})
    for text in (
        "riverpy_client is for async tests: write `async def test_no_coroutine`, or",
        "riverpy_connection needs a plugin that runs async tests: install pytest-asyncio",
        "riverpy_connection needs asyncio, and the test runs on trio: write a fixture",
        "a running test cannot open riverpy_connection: name it in the arguments of the test",
        "riverpy_sync_session needs SQLAlchemy: pip install",
    ):
        assert text in output, output
    assert "1 failed, 4 errors" in output, output


def test_connections_are_kept(run: Run) -> None:
    """Tests of one event loop share a connection, whose session is reset before each test. It is
    not used again after a change of a table."""
    output = run({"conftest": CONFTEST, "test_kept": KEPT})
    assert "8 passed" in output, output


def test_transactions_that_tests_end(run: Run) -> None:
    """A test whose code ends the transaction of a fixture, or leaves a lock behind, gets an error,
    and the next test finds empty tables. A missing kind names the fixture. Sessions of the
    application never use the database that it is configured for: they use that of the test, or are
    refused."""
    files = {"conftest": CONFTEST, "test_mistakes": MISTAKES, "test_makers": MAKERS}
    output = run(files, "-o", "asyncio_mode=auto")
    for text in (
        "the workers that the fixture riverpy_workers returns",
        "has ended the transaction of riverpy_connection",
        "has ended the transaction of riverpy_session",
        "has ended the transaction of riverpy_sync_session",
        "ERROR at teardown of test_lock",
        "or use riverpy.testing with `tx=riverpy_sync_session`",
        "application_name 'left', idle in transaction, last statement 'begin; lock table",
    ):
        assert text in output, output
    assert "1 failed, 12 passed, 6 errors" in output, output


def test_what_tests_leave(run: Run) -> None:
    """A transaction that a test leaves open is an error of this test, and is ended. Sessions that
    overlap with another result than in production are an error that says so."""
    output = run({"conftest": CONFTEST, "test_left": LEFT}, "-o", "asyncio_mode=auto", "-rA")
    for text in (
        "ERROR test_left.py::test_row_left - ",
        "ERROR test_left.py::test_row_left_without_fixtures - ",
        "last statement 'begin; insert into users values (7)'",
        "PASSED test_left.py::test_same_row",
        "PASSED test_left.py::test_session_of_the_test_inside",
        "PASSED test_left.py::test_read_inside_and_commit_outside",
        "ERROR test_left.py::test_undone_inside - ",
        "a session was rolled back, or closed without a commit, after another session",
        "MixedSessionsError: a session has ended while another one, which began later, was open",
        "has ended the transaction of riverpy_session",
        "ERROR test_left.py::test_row_committed - ",
        "has committed rows on a connection of its own, in users",
        "PASSED test_left.py::test_row_was_deleted",
        "ERROR test_left.py::test_blocking_overlap - ",
        "ERROR test_left.py::test_commit_in_a_job - Failed: ",
        "ConfigError: a session of riverpy_session_makers is used in another event loop",
        "a test of unittest cannot have riverpy_session, because",
    ):
        assert text in output, output


def test_server_is_missing(run: Run) -> None:
    """A server that cannot be used is an error of one line that names the option."""
    url = "postgres://nobody:secret@127.0.0.1:9/x"
    output = run({"test_url": "def test_url(riverpy_url): ..."}, f"--riverpy-url={url}")
    text = "of --riverpy-url: cannot connect to 127.0.0.1:9: connection refused\n"
    assert text in output, output
    assert "Traceback" not in output
    assert "secret" not in output


def test_run_without_fixtures_does_not_import_riverpy(run: Run) -> None:
    """A run that uses no fixture of riverpy imports neither riverpy nor asyncpg, nor asyncio."""
    others = [f"-pno:{name}" for name in ("asyncio", "anyio", "xdist")]
    output = run({"test_modules": MODULES}, *others, "-W", "default")
    assert "1 passed" in output, output


def test_embedded_server_is_missing(run: Run, tmp_path: Path) -> None:
    """Without a URL and programs of PostgreSQL the error says what to install or to set."""
    test = "def test_url(riverpy_url): ..."
    output = run({"test_url": test}, RIVERPY_TEST_DATABASE_URL="", RIVERPY_PG_BIN=str(tmp_path))
    assert "name the bin directory of one" in output, output
    assert "--riverpy-url=postgres://" in output
