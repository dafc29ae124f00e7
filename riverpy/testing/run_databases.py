"""PytestRunDatabases: creates and drops the databases of one run of pytest on one server.

A run has one or more processes (the workers of pytest-xdist). The first process creates a template
database with River's and riverpy's tables, and a function of the user may prepare it. Each process
uses its own copy of the template.

Each process holds a shared advisory lock of its run until it ends. If no process holds this lock,
all processes of the run have ended or were killed. Then any later run drops the databases of that
run. Normally the last process of a run drops the template itself.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import anyio.to_thread
from anyio.from_thread import start_blocking_portal

from riverpy._postgres import test_databases as statements
from riverpy._postgres.driver import (
    DATABASE_ERRORS,
    InsufficientPrivilegeError,
    close_connection,
    connect,
    describe_error,
)
from riverpy.errors import ConfigError, DatabaseError, RiverError, TransactionError
from riverpy.migrate import migrate_all

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Sequence

    from anyio.from_thread import BlockingPortal

    from riverpy._postgres.driver import Connection

DATABASE_NAME_PREFIX: Final = "riverpy_pytest_"
RUN_NUMBER_MAX: Final = 0x7FFFFFFF
"""The largest allowed run number. Advisory locks have the run number as their second key, which is
a PostgreSQL `integer`."""
LOCK_TIMEOUT: Final = 2.0
"""How long to wait for a table that an open session of a test has locked, in seconds. After that,
this session is ended."""

CLOSE_CHECKS_MAX: Final = 100
"""How many times to check, every 10 ms, whether a test's transactions have ended. After that, the
sessions whose transactions are still open are ended."""


class UnusableServerError(DatabaseError):
    """The server for the tests does not answer, or refuses a statement that the tests need, for
    example because the role does not have the necessary rights."""


@contextmanager
def _translating_server_errors(url_setting_name: str) -> Generator[None]:
    """Replace errors of the database in the `with` block by an UnusableServerError."""
    try:
        yield
    except (RiverError, *DATABASE_ERRORS) as error:
        hint = ""
        if isinstance(error, InsufficientPrivilegeError):
            hint = ". The role must be allowed to create databases: alter role … createdb"
        raise UnusableServerError(
            f"riverpy's fixtures cannot use the server of {url_setting_name}: "
            f"{describe_error(error)}{hint}"
        ) from error


@contextmanager
def open_pytest_run_databases(
    server_url: str, run: int, worker: str, url_setting_name: str = "the URL"
) -> Generator[PytestRunDatabases]:
    """Connect to the server for one process of a run of pytest. At the end, drop the databases that
    no other process of the run needs.

    Args:
        server_url: the URL of a database on the server. Its role must be allowed to create
            databases. This database itself is not changed.
        run: the number of the run, the same for all its processes, at most `RUN_NUMBER_MAX`.
        worker: the name of this process. Each process of the run needs its own name.
        url_setting_name: the name of the setting that has the URL, for error texts.

    Raises:
        UnusableServerError: the server does not answer, or refuses a statement.
    """
    with start_blocking_portal() as portal:
        with _translating_server_errors(url_setting_name):
            connection = portal.call(_connect, server_url)
        try:
            databases = PytestRunDatabases(
                portal, connection, server_url, run, worker, url_setting_name
            )
            with _translating_server_errors(url_setting_name):
                portal.call(databases.begin_run)
            try:
                yield databases
            finally:
                with _translating_server_errors(url_setting_name):
                    portal.call(databases.end_run)
        finally:
            portal.call(close_connection, connection)


class PytestRunDatabases:
    """The databases of a run of pytest, for one process of the run.

    The methods that are not async block the calling thread. Any thread may call them, except the
    thread in which the event loop of `portal` (an anyio `BlockingPortal`) runs."""

    def __init__(
        self,
        portal: BlockingPortal,
        connection: Connection,
        server_url: str,
        run: int,
        worker: str,
        url_setting_name: str,
    ) -> None:
        self._portal = portal
        self._connection = connection
        self._server_url = server_url
        self._run = run
        self._worker = worker
        self._url_setting_name = url_setting_name
        self._prefix = DATABASE_NAME_PREFIX
        self._database: Connection | None = None
        """A connection to the database of this process. It empties the tables between tests."""

    async def begin_run(self) -> None:
        """Acquire the lock of this run of pytest, and drop the databases of runs that have
        ended."""
        await statements.disable_idle_session_timeout(self._connection)
        await statements.lock_test_run(self._connection, self._run)
        oid = await statements.fetch_database_oid(self._connection)
        self._prefix = f"{DATABASE_NAME_PREFIX}{oid}_"
        names = await statements.fetch_database_names(self._connection, self._prefix)
        for run in {_parse_run_number(name, self._prefix) for name in names} - {None, self._run}:
            if run is not None:
                await self._drop_run_if_ended(run)

    async def end_run(self) -> None:
        """Drop the database of this process. If this is the last process of the run of pytest, drop
        the template database of the run too."""
        if self._database is not None:
            await close_connection(self._database)
        await statements.drop_database(self._connection, self._make_database_name(self._worker))
        await statements.unlock_test_run(self._connection, self._run)
        await self._drop_run_if_ended(self._run)

    async def _drop_run_if_ended(self, run: int) -> None:
        if not await statements.try_lock_ended_test_run(self._connection, run):
            return
        prefix = f"{self._prefix}{run:08x}_"
        for name in await statements.fetch_database_names(self._connection, prefix):
            with suppress(InsufficientPrivilegeError):  # the database may belong to another role
                await statements.drop_database(self._connection, name)
        await statements.unlock_ended_test_run(self._connection, run)

    def _make_database_name(self, use: str) -> str:
        return f"{self._prefix}{self._run:08x}_{use}"

    def create(self, prepare: Callable[[str], Awaitable[object] | object]) -> str:
        """Create the database of this process as a copy of the run's template database, and return
        its URL.

        Args:
            prepare: the user's function that prepares the template database, async or not. One
                process of the run calls it with the URL of this database, after the migrations.

        Raises:
            UnusableServerError: the server does not answer, or refuses a statement.
        """
        return self._portal.call(self._create, prepare)

    async def _create(self, prepare: Callable[[str], Awaitable[object] | object]) -> str:
        await statements.lock_template(self._connection, self._run)
        try:
            await self._make_template_once(prepare)
        finally:
            await statements.unlock_template(self._connection, self._run)
        name = self._make_database_name(self._worker)
        url = _replace_database_in_url(self._server_url, name)
        with _translating_server_errors(self._url_setting_name):
            await statements.copy_database(
                self._connection, self._make_database_name("template"), name
            )
            self._database = await _connect(url)
            await statements.disable_idle_session_timeout(self._database)
            await statements.record_tables_to_keep(self._database)
        return url

    async def _make_template_once(
        self, prepare: Callable[[str], Awaitable[object] | object]
    ) -> None:
        template = self._make_database_name("template")
        if template in await statements.fetch_database_names(self._connection, template):
            return
        unready = self._make_database_name("unready")
        url = _replace_database_in_url(self._server_url, unready)
        with _translating_server_errors(self._url_setting_name):
            await statements.drop_database(self._connection, unready)
            await statements.make_database(self._connection, unready)
            await migrate_all(url)
        await anyio.to_thread.run_sync(_call_in_new_loop, prepare, url)
        await statements.refuse_connections(self._connection, unready)
        await statements.rename_database(self._connection, unready, template)

    def empty_tables(self) -> None:
        """Empty the tables of this process's database, except tables that have rows in the template
        database. If a lock of another session blocks this for 2 seconds, end that session.

        Raises:
            TransactionError: a session had to be ended, or cannot be ended. The error text
                describes the session.
        """
        self._portal.call(self._empty_tables)

    async def _empty_tables(self) -> None:
        if self._database is None:
            raise ConfigError(
                "the fixture riverpy_url is overridden, and riverpy's fixtures empty no database "
                "but their own: set the URL of the server with --riverpy-url"
            )
        blocking: list[str] = []
        error: Exception | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._end_blocking_sessions, self._database, blocking)
            try:
                await statements.empty_tables(self._database)
            except DATABASE_ERRORS as raised:  # the task group would raise an exception group
                error = raised
            tasks.cancel_scope.cancel()
        if blocking:
            was_ended = "could not be ended" if error is not None else "was ended"
            raise TransactionError(
                f"a session has locked a table that riverpy's fixtures empty, and {was_ended}: "
                f"{'; '.join(blocking)}. End its transaction in the test, or close its connection"
            ) from error
        if error is not None:
            raise error

    def empty_tables_and_require_empty(self) -> None:
        """Check that a test which must not commit has left no rows. If it has, empty the tables.

        Raises:
            TransactionError: the test has left rows. The error text names the tables.
        """
        tables = self._portal.call(self._fetch_filled_tables)
        if not tables:
            return
        self._portal.call(self._empty_tables)
        raise TransactionError(
            f"the test has committed rows on a connection of its own, in {', '.join(tables)}. They "
            "were deleted now. Add the fixture riverpy_empty_tables to the test, which empties the "
            "tables after it, or riverpy_client"
        )

    async def _fetch_filled_tables(self) -> list[str]:
        return (
            [] if self._database is None else await statements.fetch_filled_tables(self._database)
        )

    async def _end_blocking_sessions(self, database: Connection, blocking: list[str]) -> None:
        """Every 2 seconds, until this task is cancelled, end the sessions whose locks block the
        connection `database`. Append the descriptions of these sessions to `blocking`."""
        while True:
            await anyio.sleep(LOCK_TIMEOUT)
            rows = await statements.fetch_blocking_sessions(
                self._connection, database.get_server_pid()
            )
            blocking += [_describe_session(row) for row in rows]
            await self._end_sessions(rows)

    async def _end_sessions(self, rows: Sequence[Any]) -> None:
        with suppress(*DATABASE_ERRORS):  # the session may belong to a superuser
            for row in rows:
                await statements.end_session(self._connection, row["pid"])

    def list_open_transactions(self) -> set[tuple[int, str]]:
        """Return the open transactions in this process's database that have written or hold locks.
        Each is a pair of the server process id and the start time of the transaction."""
        return {_get_transaction_key(row) for row in self._portal.call(self._fetch_transactions)}

    async def _fetch_transactions(self) -> list[Any]:
        if self._database is None:  # the user overrides riverpy_url, so `create` was not called
            return []
        return await statements.fetch_locking_transactions(self._database)

    def end_test_transactions(self, kept: set[tuple[int, str]]) -> None:
        """Wait up to a second until the open transactions of a test have ended. Then end the
        sessions whose transactions are still open.

        `kept` has the transactions that may stay open. These are the transactions that
        `list_open_transactions` returned before the test.

        Raises:
            TransactionError: a session had to be ended. The error text describes the session.
        """
        self._portal.call(self._end_test_transactions, kept)

    async def _end_test_transactions(self, kept: set[tuple[int, str]]) -> None:
        rows: list[Any] = []
        for _ in range(CLOSE_CHECKS_MAX):
            rows = [
                row
                for row in await self._fetch_transactions()
                if _get_transaction_key(row) not in kept
            ]
            if not rows:
                return
            # If a connection was just closed, the server ends its transaction a little later.
            await anyio.sleep(0.01)
        await self._end_sessions(rows)
        raise TransactionError(
            "the test has left a transaction open on a connection of its own, so later tests would "
            f"wait for its locks. It was ended: {'; '.join(map(_describe_session, rows))}. Commit "
            "or roll it back in the test, or close its connection"
        )


def _get_transaction_key(row: Any) -> tuple[int, str]:
    return row["pid"], row["began_at"]


def _describe_session(row: Any) -> str:
    return (
        f"pid {row['pid']}, application_name {row['application_name']!r}, {row['state']}, "
        f"last statement {row['query']!r}"
    )


def _call_in_new_loop(function: Callable[[str], Awaitable[object] | object], url: str) -> None:
    """Call the user's function with a URL. If the function is async, run it in a new event
    loop."""
    result = function(url)
    if isawaitable(result):

        async def wait_for_result() -> None:
            await result

        anyio.run(wait_for_result)


async def _connect(url: str) -> Connection:
    return await connect(url, application_name="riverpy pytest")


def _parse_run_number(database_name: str, prefix: str) -> int | None:
    """Return the number of the run to which a database belongs, or None if it belongs to no run."""
    try:
        return int(database_name.removeprefix(prefix).partition("_")[0], 16)
    except ValueError:
        return None


def _replace_database_in_url(url: str, database: str) -> str:
    """Return the URL of another database on the same server."""
    parts = urlsplit(url)
    query: Any = [
        (key, value) for key, value in parse_qsl(parts.query) if key not in _DATABASE_URL_PARAMETERS
    ]
    return urlunsplit(parts._replace(path=f"/{database}", query=urlencode(query, safe="/:,")))


_DATABASE_URL_PARAMETERS = {"dbname", "database"}
"""The parameters of a URL that can name the database instead of the URL's path."""
