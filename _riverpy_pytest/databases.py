"""The server of the tests, the database of this process, and what tests leave in it."""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final

import pytest

from _riverpy_pytest.failures import fail

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Sequence

    from riverpy.testing.async_fixtures import SessionMaker
    from riverpy.testing.run_databases import PytestRunDatabases

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
_CONNECTING_FIXTURES: Final = {"riverpy_url", "riverpy_engine", "riverpy_sync_engine"}
RUN_NUMBER: Final = pytest.StashKey[int]()


@pytest.fixture(scope="session")
def riverpy_prepare() -> Prepare:
    """Override this to prepare the database of the tests: return a function, async or not, that
    gets the URL of a database with riverpy's tables, and creates the tables of your application.
    This function is called once in each run of pytest."""
    return lambda _url: None


@pytest.fixture(scope="session")
def _riverpy_databases(request: pytest.FixtureRequest) -> Generator[PytestRunDatabases]:
    config = request.config
    given: dict[str, Any] = getattr(config, "workerinput", {})
    run, worker = config.stash[RUN_NUMBER], given.get("workerid", "main")
    sources = {
        "--riverpy-url": config.getoption("riverpy_url"),
        URL_ENV_VARIABLE: os.environ.get(URL_ENV_VARIABLE),
        "the setting riverpy_url of pytest": config.getini("riverpy_url"),
        "the embedded PostgreSQL": None,
    }
    name, url = next(((name, url) for name, url in sources.items() if url), [*sources.items()][-1])

    from riverpy.testing.run_databases import open_pytest_run_databases

    with (
        nullcontext(url) if url else _start_server() as server_url,
        _failing_without_server(),
        open_pytest_run_databases(server_url, run, worker, name) as databases,
    ):
        yield databases


@contextmanager
def _failing_without_server() -> Generator[None]:
    """Let a test fail with one line if the server for the tests cannot be used."""
    from riverpy.testing.run_databases import UnusableServerError

    try:
        yield
    except UnusableServerError as error:
        fail(str(error))


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
        fail(f"{error}: --riverpy-url=postgres://… or {URL_ENV_VARIABLE}")
    try:
        yield url
    finally:
        server.release()


@pytest.fixture(scope="session")
def riverpy_url(_riverpy_databases: PytestRunDatabases, riverpy_prepare: Prepare) -> str:
    """The URL of the database of this process, with riverpy's tables and what `riverpy_prepare`
    adds. Each worker of pytest-xdist has its own."""
    with _failing_without_server():
        return _riverpy_databases.create(riverpy_prepare)


@pytest.fixture
def riverpy_empty_tables(
    request: pytest.FixtureRequest,
    _riverpy_databases: PytestRunDatabases,
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


def _empty_tables(databases: PytestRunDatabases) -> None:
    """Empty the tables after a test. Fail with a short text if an open session has locked a
    table."""
    from riverpy.errors import RiverError

    try:
        databases.empty_tables()
    except RiverError as error:
        fail(str(error))


@pytest.fixture(autouse=True)
def _riverpy_no_transaction_is_left(request: pytest.FixtureRequest) -> Generator[None]:
    """After a test with a database, end the transactions with locks that the test has left open. If
    there are any, fail the test. This fixture opens before the other fixtures of a test, and closes
    after them."""
    if "_riverpy_databases" not in request.fixturenames:
        yield
        return
    request.getfixturevalue("riverpy_url")
    databases: PytestRunDatabases = request.getfixturevalue("_riverpy_databases")

    from riverpy.errors import TransactionError

    before = databases.list_open_transactions()
    yield

    try:
        databases.end_test_transactions(before)
        if _may_commit_unseen(request):
            databases.empty_tables_and_require_empty()
    except TransactionError as error:
        fail(str(error))


def _may_commit_unseen(request: pytest.FixtureRequest) -> bool:
    """Return whether the test may commit rows that no fixture deletes. This is so if the test or a
    fixture of the user connects with `riverpy_url` or an engine fixture, and the test does not use
    `riverpy_empty_tables`."""
    if "riverpy_empty_tables" in request.fixturenames:
        return False
    info: Any = request.node._fixtureinfo  # noqa: SLF001 (pytest has no public name for it)
    names: set[str] = set(info.initialnames)
    for definitions in info.name2fixturedefs.values():
        for fixture in definitions:
            if not fixture.func.__module__.startswith("_riverpy_pytest"):
                names.update(fixture.argnames)
    return not names.isdisjoint(_CONNECTING_FIXTURES)


@contextmanager
def keeping_transaction(request: pytest.FixtureRequest) -> Generator[None]:
    """Fail the test and empty the tables if the fixture in the `with` block raises
    TransactionEndedError, because the tested code has ended its transaction, or MixedSessionsError.
    The tables are emptied after the fixture is closed, because the fixture may hold locks."""
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
        fail(str(error))


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
