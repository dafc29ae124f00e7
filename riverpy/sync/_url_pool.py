"""UrlPoolDatabase: a small pool of psycopg connections, for a blocking client that was created
with a URL.

We do not use psycopg_pool, because its threads do not exist in a forked child process. A web server
that loads the program before it forks would wait for a connection forever. We do not use the pool
of SQLAlchemy, because riverpy does not require SQLAlchemy.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import Conninfo, TransactionStatus

from riverpy._dsn import adapt_url_for_asyncpg, database_address_from_url
from riverpy._postgres.driver import CONNECT_TIMEOUT, PASSWORD_TIMEOUT_FRACTION, SERVER_VERSION_MIN
from riverpy.errors import ClientStateError, ConfigError, ServerVersionError
from riverpy.sync._database import BlockingDatabase, make_connect_error
from riverpy.sync._psycopg import open_transaction

if TYPE_CHECKING:
    from collections.abc import Generator

    from riverpy._postgres.passwords import PasswordSource
    from riverpy._postgres.sessions.psycopg import PsycopgSession
    from riverpy.sync._database import Isolation

STATEMENT_TIMEOUT = 30.0
"""The server's timeout for one statement, in seconds."""
NETWORK_TIMEOUT = 30.0
"""After this many seconds without a network answer from the server, a connection counts as lost."""
FREE_CONNECTION_TIMEOUT = 10.0
"""How long a call waits for a free connection if all connections are in use, in seconds."""
IDLE_CONNECTION_LIFETIME = 300.0
"""How long a connection may be idle, in seconds. A connection that was idle longer is closed
instead of being used again."""
_KEEPALIVE_COUNT = 3


class _IdleConnection(NamedTuple):
    """A connection that no thread uses."""

    connection: psycopg.Connection[Any]
    idle_since: float


class _ProcessConnections:
    """The connections that one process has opened to the URL."""

    def __init__(self, size: int) -> None:
        self.pid = os.getpid()
        self.free_places = threading.Semaphore(size)
        self.idle: deque[_IdleConnection] = deque()


class UrlPoolDatabase(BlockingDatabase):
    """A pool of connections to a URL. A call takes the idle connection that was used last. After a
    fork, the child process opens its own connections."""

    def __init__(
        self, url: str, *, size: int, through_pooler: bool, password: PasswordSource | None
    ) -> None:
        self.url = url
        self._hosts = database_address_from_url(url).hosts
        self._options = _make_connect_options(url, through_pooler=through_pooler)
        self._size, self._password = size, password
        self._through_pooler = through_pooler
        self._connections = _ProcessConnections(size)
        self._inherited: list[_ProcessConnections] = []
        """The connections that parent processes opened before a fork. This list keeps them
        referenced: if Python deleted them in this process, it would close them and so end the
        parent's database sessions."""
        self._opener_pid: int | None = None
        """The id of the process that called `open`. None: `open` was not called. Then the first
        call of the client opens a connection."""

    def open(self) -> None:
        """Open one connection, so that errors appear now and not in the first call.

        Raises:
            ClientStateError: this process has already opened the pool.
            ConfigError: the URL leads to a connection pooler, but `Config.pooler` is False.
            OSError: the database cannot be reached.
        """
        if self._opener_pid == os.getpid():
            raise ClientStateError("the client is open already")
        with self._borrow_connection():
            self._opener_pid, self.is_open = os.getpid(), True

    def close(self) -> None:
        """Close the idle connections. Connections in use are closed when their calls end."""
        self._opener_pid, self.is_open = None, False
        connections = self._get_process_connections()
        while connections.idle:
            connections.idle.pop().connection.close()

    @contextmanager
    def transaction(self, isolation: Isolation) -> Generator[PsycopgSession]:
        with (
            self._borrow_connection() as connection,
            open_transaction(connection, isolation) as session,
        ):
            yield session

    def _get_process_connections(self) -> _ProcessConnections:
        if self._connections.pid != os.getpid():
            self._inherited.append(self._connections)
            self._connections = _ProcessConnections(self._size)
        return self._connections

    @contextmanager
    def _borrow_connection(self) -> Generator[psycopg.Connection[Any]]:
        connections = self._get_process_connections()
        if not connections.free_places.acquire(timeout=FREE_CONNECTION_TIMEOUT):
            raise TimeoutError(
                f"got no connection within {FREE_CONNECTION_TIMEOUT:g} s, because all "
                f"{self._size} are in use: increase Config(pool_size=…)"
            )
        try:
            connection = self._take_idle_connection(connections) or self._connect()
            try:
                yield connection
            finally:
                self._return_connection(connections, connection)
        finally:
            connections.free_places.release()

    def _take_idle_connection(
        self, connections: _ProcessConnections
    ) -> psycopg.Connection[Any] | None:
        """Return an idle connection that is still open, or None if there is none."""
        while True:
            try:
                connection, idle_since = connections.idle.pop()
            except IndexError:  # another thread has taken the last connection
                return None
            if time.monotonic() - idle_since < IDLE_CONNECTION_LIFETIME and _is_usable(connection):
                return connection
            connection.close()

    def _return_connection(
        self, connections: _ProcessConnections, connection: psycopg.Connection[Any]
    ) -> None:
        status = connection.pgconn.transaction_status
        if self.is_open and status == TransactionStatus.IDLE and connections.pid == os.getpid():
            connections.idle.append(_IdleConnection(connection, time.monotonic()))
        else:
            connection.close()

    def _connect(self) -> psycopg.Connection[Any]:
        options = dict(self._options)
        if self._password is not None:
            timeout = options["connect_timeout"] * PASSWORD_TIMEOUT_FRACTION
            options["password"] = self._password.fetch_password_blocking(timeout)
        try:
            connection = psycopg.Connection.connect(**options)
        except psycopg.Error as error:
            if "unsupported startup parameter" in str(error) and not self._through_pooler:
                raise ConfigError(
                    "the database URL leads to a pooler that takes no settings of a session "
                    f"({make_connect_error(error)}): set Config(pooler=True)"
                ) from None
            raise make_connect_error(error, self._hosts) from None
        if connection.info.server_version < SERVER_VERSION_MIN * 10_000:
            connection.close()
            raise ServerVersionError(f"riverpy needs PostgreSQL {SERVER_VERSION_MIN} or newer")
        return connection


def _is_usable(connection: psycopg.Connection[Any]) -> bool:
    """Return whether an idle connection can be used. If its socket has data to read, the server has
    probably closed the connection, so it cannot be used."""
    if connection.closed:
        return False
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return not poll.poll(0)


def _make_connect_options(url: str, *, through_pooler: bool) -> dict[str, Any]:
    """Return psycopg's connection options for a URL. Parameters of the URL that libpq does not know
    become settings of the session, as in the async client."""
    known = {option.keyword.decode() for option in Conninfo.get_defaults()}
    ignored = adapt_url_for_asyncpg(url).ignored_parameters
    base, _, query = url.partition("?")
    kept: list[str] = []
    settings: dict[str, str] = {}
    for part in query.split("&") if query else ():
        ((name, value),) = parse_qsl(part, keep_blank_values=True)
        if name in known:
            kept.append(part)
        elif name not in ignored:
            settings[name] = value
    options: dict[str, Any] = {
        "fallback_application_name": "riverpy",
        "keepalives_idle": round(NETWORK_TIMEOUT / 2),
        "keepalives_interval": round(NETWORK_TIMEOUT / 2 / _KEEPALIVE_COUNT),
        "keepalives_count": _KEEPALIVE_COUNT,
        "tcp_user_timeout": round(NETWORK_TIMEOUT * 1000),
        **conninfo_to_dict(f"{base}?{'&'.join(kept)}" if kept else base),
        "autocommit": True,
    }
    if through_pooler:
        options["prepare_threshold"] = None
    else:  # a pooler in transaction mode refuses settings
        settings = {"statement_timeout": str(round(STATEMENT_TIMEOUT * 1000)), **settings}
    words = [f"-c {name}={_escape_option(value)}" for name, value in settings.items()]
    if words:
        options["options"] = " ".join([*words, options.get("options") or ""]).strip()
    timeout = options.get("connect_timeout") or os.environ.get("PGCONNECT_TIMEOUT")
    options["connect_timeout"] = int(timeout or 0) or round(CONNECT_TIMEOUT)
    return options


def _escape_option(value: str) -> str:
    """Escape white space and backslashes in the value of a setting, because white space separates
    the settings in libpq's `options`."""
    return "".join(rf"\{character}" if character in " \\\t" else character for character in value)
