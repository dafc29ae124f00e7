"""The pytest plugin of riverpy: a database and a client for each test. See docs/testing.md.

pytest imports this module at the start of every run in an environment with riverpy, so the module
is outside of the package: `import riverpy` takes longer than the start of pytest. A fixture imports
riverpy when a test first uses it.
"""

from __future__ import annotations

import inspect
import os
import sys
from contextlib import ExitStack, contextmanager, nullcontext
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar, cast

import pytest

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    import asyncpg
    import sqlalchemy
    import sqlalchemy.ext.asyncio
    import sqlalchemy.orm

    import riverpy
    import riverpy.sync
    from riverpy import Transaction as CallerTransaction
    from riverpy.testing import FixedClock
    from riverpy.testing.async_fixtures import SessionMaker
    from riverpy.testing.run_databases import RunDatabases
    from riverpy.testing.session_jobs import SessionJobs
    from riverpy.testing.session_time import SessionTime

    Prepare = Callable[[str], Awaitable[object] | object]

URL_ENV_VARIABLE: Final = "RIVERPY_TEST_DATABASE_URL"
EMBEDDED_SERVER_NAME: Final = "pytest"
EMBEDDED_SERVER_SETTINGS: Final = {
    "max_connections": "300",
    # The data of tests need not survive a crash of the machine.
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "off",
    # The tables of tests are small and are soon emptied, so a vacuum would only take time.
    "autovacuum": "off",
    # Queries of tests are short. JIT would compile asyncpg's queries for types on each connection.
    "jit": "off",
}
_TRANSACTION_FIXTURES: Final = ("riverpy_session", "riverpy_connection", "riverpy_client")
_LOOP_SCOPES: Final = ("function", "class", "module", "package", "session")
_RUN_NUMBER: Final = pytest.StashKey[int]()
_ValueT = TypeVar("_ValueT")


# --- hooks


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option and the setting for the URL of a server."""
    text = (
        "the postgres:// URL of a database on the server for tests with riverpy's fixtures, whose "
        "role may create databases; the tests use databases of their own there. The default is "
        f"{URL_ENV_VARIABLE} or else an embedded PostgreSQL"
    )
    parser.getgroup("riverpy").addoption("--riverpy-url", metavar="URL", help=text)
    parser.addini("riverpy_url", f"without --riverpy-url and {URL_ENV_VARIABLE}: {text}")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the number of this run, and register the loops of pytest-asyncio."""
    given: dict[str, Any] = getattr(config, "workerinput", {})  # in a worker of pytest-xdist
    config.stash[_RUN_NUMBER] = given.get("riverpy_run") or _make_run_number()
    if config.pluginmanager.hasplugin("asyncio"):
        config.pluginmanager.register(_make_asyncio_loops())


def _make_run_number() -> int:
    return int.from_bytes(os.urandom(4), "big") >> 1  # positive as an `integer` of PostgreSQL


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Send the number of the run to the workers of pytest-xdist."""
    node.workerinput["riverpy_run"] = node.config.stash[_RUN_NUMBER]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """If a test fails because a client lacks a job kind, add a hint: the fixture
    `riverpy_workers`."""
    try:
        return (yield)
    except Exception as error:
        errors = sys.modules.get("riverpy.errors")
        if (
            errors is not None
            and isinstance(error, errors.UnknownJobKindError)
            and "riverpy_workers" in getattr(item, "fixturenames", ())
        ):
            error.add_note(
                "The clients of this test have the workers that the fixture riverpy_workers "
                "returns: register the function of this kind there"
            )
        raise


# --- the server and its databases


@pytest.fixture(scope="session")
def riverpy_prepare() -> Prepare:
    """Override this to prepare the database of the tests: return a function, async or not, that
    gets the URL of a database with riverpy's tables, and creates the tables of your application.
    This function is called once in each run of pytest."""
    return lambda _url: None


@pytest.fixture(scope="session")
def _riverpy_databases(request: pytest.FixtureRequest) -> Generator[RunDatabases]:
    config = request.config
    given: dict[str, Any] = getattr(config, "workerinput", {})
    run, worker = config.stash[_RUN_NUMBER], given.get("workerid", "main")
    sources = {
        "--riverpy-url": config.getoption("riverpy_url"),
        URL_ENV_VARIABLE: os.environ.get(URL_ENV_VARIABLE),
        "the setting riverpy_url of pytest": config.getini("riverpy_url"),
        "the embedded PostgreSQL": None,
    }
    name, url = next(((name, url) for name, url in sources.items() if url), [*sources.items()][-1])

    from riverpy.testing.run_databases import run_databases

    with (
        nullcontext(url) if url else _start_server() as server_url,
        _failing_without_server(),
        run_databases(server_url, run, worker, name) as databases,
    ):
        yield databases


@contextmanager
def _failing_without_server() -> Generator[None]:
    """Let a test fail with one line if the server for the tests cannot be used."""
    from riverpy.testing.run_databases import UnusableServerError

    try:
        yield
    except UnusableServerError as error:
        _fail(str(error))


@contextmanager
def _start_server() -> Generator[str]:
    """Start the embedded server, which the processes of all runs share. It stops when no process
    uses it."""
    from riverpy.errors import DatabaseError

    try:
        from riverpy.embedded import EmbeddedPostgres

        server = EmbeddedPostgres(EMBEDDED_SERVER_NAME, settings=EMBEDDED_SERVER_SETTINGS)
        url = server.start()
    except (DatabaseError, ImportError) as error:
        _fail(f"{error}: --riverpy-url=postgres://… or {URL_ENV_VARIABLE}")
    try:
        yield url
    finally:
        server.release()


@pytest.fixture(scope="session")
def riverpy_url(_riverpy_databases: RunDatabases, riverpy_prepare: Prepare) -> str:
    """The URL of the database of this process, with riverpy's tables and what `riverpy_prepare`
    adds. Each worker of pytest-xdist has its own."""
    with _failing_without_server():
        return _riverpy_databases.create(riverpy_prepare)


@pytest.fixture
def riverpy_empty_tables(
    request: pytest.FixtureRequest,
    _riverpy_databases: RunDatabases,
    riverpy_url: str,
    riverpy_session_makers: Sequence[SessionMaker],
    _riverpy_refused_sessions: None,
) -> Generator[None]:
    """For tests that commit: empty the tables after the test, except those in which
    `riverpy_prepare` stored rows. The clients of the plugin use this fixture."""
    del riverpy_url
    with ExitStack() as stack:
        if riverpy_session_makers:
            _bind_to_database(request, stack, riverpy_session_makers)
        yield
    _empty_tables(_riverpy_databases)


def _empty_tables(databases: RunDatabases) -> None:
    """Empty the tables after a test. Fail with a short text if an open session has locked a
    table."""
    from riverpy.errors import RiverError

    try:
        databases.empty_tables()
    except RiverError as error:
        _fail(str(error))


@pytest.fixture(autouse=True)
def _riverpy_no_transaction_is_left(request: pytest.FixtureRequest) -> Generator[None]:
    """If a test with a database leaves a transaction open that holds locks, end it and fail the
    test. This fixture opens before the other fixtures of a test, and closes after them."""
    if "_riverpy_databases" not in request.fixturenames:
        yield
        return
    request.getfixturevalue("riverpy_url")
    databases: RunDatabases = request.getfixturevalue("_riverpy_databases")
    before = databases.list_transactions()
    yield

    from riverpy.errors import TransactionError

    try:
        databases.end_transactions(before)
    except TransactionError as error:
        _fail(str(error))


@contextmanager
def _keeping_transaction(request: pytest.FixtureRequest) -> Generator[None]:
    """If the tested code has ended the transaction of a fixture, fail the test and empty the
    tables. They are emptied after the fixture is closed, because it may hold locks."""
    if "riverpy_empty_tables" in request.fixturenames:  # it must open before this fixture
        request.getfixturevalue("riverpy_empty_tables")
    is_own_database = "_riverpy_databases" in request.fixturenames
    databases = request.getfixturevalue("_riverpy_databases") if is_own_database else None

    from riverpy.testing._session_turns import MixedSessionsError
    from riverpy.testing.async_fixtures import TransactionEndedError

    try:
        yield
    except (TransactionEndedError, MixedSessionsError) as error:
        if databases is not None:
            _empty_tables(databases)
        _fail(str(error))


def _bind_to_database(
    request: pytest.FixtureRequest, stack: ExitStack, session_makers: Sequence[SessionMaker]
) -> None:
    """Let the sessions of the application use the database of the test, except sessions that join
    the transaction of a fixture."""
    from riverpy.testing.async_fixtures import bind_session_makers, select_session_makers

    for kind, is_async in [("riverpy", True), ("riverpy_sync", False)]:
        makers = select_session_makers(session_makers, is_async=is_async)
        if makers and f"{kind}_session" not in request.fixturenames:
            engine = request.getfixturevalue(f"{kind}_engine")
            stack.enter_context(bind_session_makers(makers, engine))


# --- settings of the clients of tests


@pytest.fixture
def riverpy_workers() -> riverpy.Workers | None:
    """Override this to return the workers of your application."""
    return None


@pytest.fixture
def riverpy_config() -> riverpy.Config:
    """Override this to return the settings of the clients of your tests."""
    from riverpy import Config

    return Config()


@pytest.fixture
def riverpy_queues(riverpy_workers: riverpy.Workers | None) -> Mapping[str, riverpy.QueueConfig]:
    """Override this to return the queues that `riverpy_client` works. The default is `default` if
    there are workers."""
    from riverpy import QueueConfig

    return {} if riverpy_workers is None else {"default": QueueConfig(max_workers=10)}


@pytest.fixture
def riverpy_periodic_jobs() -> Sequence[riverpy.PeriodicJob]:
    """Override this to return the periodic jobs of the client of your tests."""
    return ()


@pytest.fixture
def riverpy_session_makers() -> Sequence[SessionMaker]:
    """Override this to return the `async_sessionmaker`s and `sessionmaker`s of your application.
    During a test their sessions join the transaction of `riverpy_session` or
    `riverpy_sync_session`, or use the database of `riverpy_client`. In a test whose transaction
    they cannot join, their statements raise ConfigError."""
    return ()


@pytest.fixture
def _riverpy_refused_sessions(riverpy_session_makers: Sequence[SessionMaker]) -> Generator[None]:
    """Let the sessions of the application refuse their first statement, unless another fixture
    lets them use the database of the test."""
    with ExitStack() as stack:
        if riverpy_session_makers:
            from riverpy.testing.async_fixtures import refusing_sessions

            stack.enter_context(refusing_sessions(riverpy_session_makers))
        yield


@pytest.fixture
def riverpy_clock() -> FixedClock:
    """The clock of the clients of a test that uses `riverpy_clock` or `riverpy_time`. It shows the
    time of the start of the test until the test moves it."""
    from riverpy.testing import FixedClock

    return FixedClock()


@pytest.fixture
def _riverpy_settings(
    request: pytest.FixtureRequest, riverpy_config: riverpy.Config
) -> riverpy.Config:
    if "riverpy_clock" not in request.fixturenames:
        return riverpy_config
    import msgspec

    return msgspec.structs.replace(riverpy_config, clock=request.getfixturevalue("riverpy_clock"))


# --- for async tests


@pytest.fixture
def riverpy_connection(
    request: pytest.FixtureRequest, riverpy_url: str, _riverpy_refused_sessions: None
) -> Generator[asyncpg.Connection[asyncpg.Record]]:
    """An asyncpg connection in a transaction, which is rolled back after the test."""
    from riverpy.testing.async_fixtures import open_connection

    with _keeping_transaction(request):
        yield from _open_in_loop(request, open_connection(riverpy_url))


@pytest.fixture(scope="session")
def riverpy_engine(riverpy_url: str) -> sqlalchemy.ext.asyncio.AsyncEngine:
    """The engine of `riverpy_session`. Override this to use another driver than asyncpg, with
    `poolclass=NullPool`."""
    arguments = _make_engine_arguments("riverpy_session", riverpy_url, "asyncpg")
    from sqlalchemy.ext.asyncio import create_async_engine

    from riverpy._postgres.driver import ArrayTypeConnection

    # Without it, asyncpg would query types in each test, which takes 6 ms.
    arguments["connect_args"] = {"connection_class": ArrayTypeConnection}
    return create_async_engine(**arguments)


@pytest.fixture
def riverpy_session(
    request: pytest.FixtureRequest,
    riverpy_engine: sqlalchemy.ext.asyncio.AsyncEngine,
    riverpy_session_makers: Sequence[SessionMaker],
    _riverpy_refused_sessions: None,
) -> Generator[sqlalchemy.ext.asyncio.AsyncSession]:
    """A session of SQLAlchemy in a transaction, which is rolled back after the test. Its commits
    only release savepoints."""
    from riverpy.testing.async_fixtures import open_session

    manager = open_session(riverpy_engine, riverpy_session_makers)
    with _keeping_transaction(request):
        yield from _open_in_loop(request, manager)


@pytest.fixture
def riverpy_client(
    request: pytest.FixtureRequest,
    riverpy_url: str,
    riverpy_workers: riverpy.Workers | None,
    riverpy_queues: Mapping[str, riverpy.QueueConfig],
    riverpy_periodic_jobs: Sequence[riverpy.PeriodicJob],
    _riverpy_settings: riverpy.Config,
    riverpy_empty_tables: None,
) -> Generator[riverpy.Client]:
    """An open client. What it inserts is committed, and deleted after the test."""
    from riverpy import Client

    client = Client(
        riverpy_url,
        workers=riverpy_workers,
        queues=riverpy_queues,
        periodic_jobs=riverpy_periodic_jobs,
        config=_riverpy_settings,
    )
    yield from _open_in_loop(request, client)


@pytest.fixture
def riverpy_tx(
    request: pytest.FixtureRequest, riverpy_session_makers: Sequence[SessionMaker]
) -> CallerTransaction | riverpy.Client:
    """The session or client that `riverpy_jobs` and `riverpy_time` use: the first of
    `riverpy_session`, `riverpy_connection` and `riverpy_client` that the test uses. Otherwise
    `riverpy_session` if sessions of the application can join it, or else `riverpy_connection`."""
    if not _is_async(request.function):
        _fail(
            "riverpy_jobs and riverpy_time are for async tests: write `async def "
            f"{request.node.name}`, or use riverpy.testing with `tx=riverpy_sync_session`: "
            "TestWorker(workers).work(args, tx=…), drain, advance and require_inserted"
        )
    used = [name for name in _TRANSACTION_FIXTURES if name in request.fixturenames]
    if not used and riverpy_session_makers and "riverpy_empty_tables" not in request.fixturenames:
        from riverpy.testing.async_fixtures import select_session_makers

        if select_session_makers(riverpy_session_makers, is_async=True):
            return request.getfixturevalue("riverpy_session")
    return request.getfixturevalue((used or ["riverpy_connection"])[0])


@pytest.fixture
def _riverpy_client_of_jobs(
    riverpy_tx: CallerTransaction | riverpy.Client,
    riverpy_workers: riverpy.Workers | None,
    riverpy_queues: Mapping[str, riverpy.QueueConfig],
    riverpy_periodic_jobs: Sequence[riverpy.PeriodicJob],
    _riverpy_settings: riverpy.Config,
) -> riverpy.Client:
    from riverpy import Client

    if isinstance(riverpy_tx, Client):
        return riverpy_tx
    return Client(
        workers=riverpy_workers,
        queues=riverpy_queues,
        periodic_jobs=riverpy_periodic_jobs,
        config=_riverpy_settings,
    )


@pytest.fixture
def riverpy_jobs(
    riverpy_tx: CallerTransaction | riverpy.Client, _riverpy_client_of_jobs: riverpy.Client
) -> SessionJobs:
    """The jobs that the test has inserted, with assertions on them and methods that work them in
    the transaction of the test."""
    from riverpy.testing.session_jobs import SessionJobs

    return SessionJobs(riverpy_tx, _riverpy_client_of_jobs)


@pytest.fixture
def riverpy_time(
    riverpy_tx: CallerTransaction | riverpy.Client,
    _riverpy_client_of_jobs: riverpy.Client,
    riverpy_clock: FixedClock,
) -> SessionTime:
    """Moves the time of the test's jobs: `await riverpy_time.advance(timedelta(days=1))`."""
    from riverpy.testing.session_time import SessionTime

    return SessionTime(riverpy_tx, _riverpy_client_of_jobs, riverpy_clock)


# --- for tests that are not async


@pytest.fixture(scope="session")
def riverpy_sync_engine(riverpy_url: str) -> sqlalchemy.Engine:
    """The engine of `riverpy_sync_session`. Override this to use another driver than psycopg, with
    `poolclass=NullPool`."""
    arguments = _make_engine_arguments("riverpy_sync_session", riverpy_url, "psycopg")
    from sqlalchemy import create_engine

    return create_engine(**arguments)


@pytest.fixture
def riverpy_sync_session(
    request: pytest.FixtureRequest,
    riverpy_sync_engine: sqlalchemy.Engine,
    riverpy_session_makers: Sequence[SessionMaker],
    _riverpy_refused_sessions: None,
) -> Generator[sqlalchemy.orm.Session]:
    """A session of SQLAlchemy for code that is not async, in a transaction, which is rolled back
    after the test. Its commits only release savepoints."""
    from riverpy.testing.async_fixtures import open_sync_session

    with (
        _keeping_transaction(request),
        open_sync_session(riverpy_sync_engine, riverpy_session_makers) as session,
    ):
        yield session


@pytest.fixture
def riverpy_sync_client(
    riverpy_url: str,
    riverpy_workers: riverpy.Workers | None,
    _riverpy_settings: riverpy.Config,
    riverpy_empty_tables: None,
) -> Generator[riverpy.sync.Client]:
    """A client for code that is not async. What it inserts is committed, and deleted after the
    test."""
    import riverpy.sync

    with riverpy.sync.Client(
        riverpy_url, workers=riverpy_workers, config=_riverpy_settings
    ) as client:
        yield client


def _make_engine_arguments(fixture: str, url: str, driver: str) -> dict[str, Any]:
    """Return arguments for an engine without a pool, since each test may have its own event
    loop."""
    try:
        from sqlalchemy import NullPool, make_url
    except ImportError:
        _fail(f"{fixture} needs SQLAlchemy: pip install 'sqlalchemy[asyncio]'")
    url_with_driver = make_url(url).set(drivername=f"postgresql+{driver}")
    return {"url": url_with_driver, "poolclass": NullPool}


# --- the event loop of a test


def _make_asyncio_loops() -> ModuleType:
    """Return a plugin with one fixture for each scope that an event loop of pytest-asyncio can
    have. The fixture returns the loop."""
    import asyncio

    import pytest_asyncio

    plugin = ModuleType("riverpy_asyncio_loops")
    for scope in _LOOP_SCOPES:

        async def get_loop() -> AsyncGenerator[asyncio.AbstractEventLoop]:
            yield asyncio.get_running_loop()

        name = f"_riverpy_{scope}_loop"
        setattr(plugin, name, pytest_asyncio.fixture(get_loop, loop_scope=scope, name=name))
    return plugin


@pytest.fixture
async def _riverpy_anyio_loop(anyio_backend: object) -> AsyncGenerator[asyncio.AbstractEventLoop]:
    import asyncio

    del anyio_backend
    yield asyncio.get_running_loop()  # noqa: PT022 (anyio ends the loop after the last fixture)


def _open_in_loop(
    request: pytest.FixtureRequest, manager: AbstractAsyncContextManager[_ValueT]
) -> Generator[_ValueT]:
    """Enter and exit a context manager in the event loop of the test."""
    if _is_in_running_loop():
        name = request.fixturename
        _fail(f"a running test cannot open {name}: name it in the arguments of the test")
    loop = _find_loop(request)
    value = loop.run_until_complete(manager.__aenter__())
    try:
        yield value
    finally:
        loop.run_until_complete(manager.__aexit__(None, None, None))


def _find_loop(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoop:
    """Return the loop in which pytest-asyncio or anyio runs the test."""
    import unittest

    item, name = request.node, request.fixturename
    marker = item.get_closest_marker("asyncio")
    if isinstance(request.instance, unittest.TestCase):
        _fail(
            f"a test of unittest cannot have {name}, because unittest runs it in an event loop of "
            "its own: connect to riverpy_url in asyncSetUp, and pass the connection as tx to "
            "riverpy.testing; or write a test of pytest"
        )
    if not _is_async(request.function):
        _fail(
            f"{name} is for async tests: write `async def {item.name}`, or use a fixture for code "
            "that is not async, such as riverpy_sync_client"
        )
    if marker is not None and request.config.pluginmanager.hasplugin("asyncio"):
        scope = marker.kwargs.get("loop_scope") or marker.kwargs.get("scope")
        scope = scope or request.config.getini("asyncio_default_test_loop_scope")
        return request.getfixturevalue(f"_riverpy_{scope}_loop")
    if "anyio_backend" not in request.fixturenames:
        _fail(
            f"{name} needs a plugin that runs async tests: install pytest-asyncio and set "
            "`asyncio_mode = auto` in the settings of pytest or mark the test with "
            "@pytest.mark.asyncio; or mark it with @pytest.mark.anyio"
        )
    backend: object = request.getfixturevalue("anyio_backend")
    backend = cast("tuple[object, ...]", backend)[0] if isinstance(backend, tuple) else backend
    if backend != "asyncio":
        _fail(
            f"{name} needs asyncio, and the test runs on {backend}: write a fixture "
            "`anyio_backend` that returns 'asyncio'"
        )
    return request.getfixturevalue("_riverpy_anyio_loop")


def _is_async(function: Any) -> bool:
    inner = getattr(getattr(function, "hypothesis", None), "inner_test", function)
    return inspect.iscoroutinefunction(inner)


def _is_in_running_loop() -> bool:
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _fail(text: str) -> NoReturn:
    """Fail the test with this text, without a traceback into this module."""
    raise pytest.fail.Exception(text, pytrace=False) from None
