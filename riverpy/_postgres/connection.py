"""DedicatedConnection: a connection for one purpose, which reconnects after a loss.
ConnectionOutageTracker logs each outage once, even if several connections are lost."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import anyio

from riverpy._clock import Backoff
from riverpy._log import get_logger
from riverpy._log_events import CONNECTION_LOST, CONNECTION_RESTORED
from riverpy._postgres.driver import (
    CONNECT_TIMEOUT,
    DATABASE_ERRORS,
    InterfaceError,
    PostgresError,
    close_connection,
    connect,
    describe_error,
    is_pool,
    terminate_on_error,
)
from riverpy._postgres.sql_files import get_query, to_milliseconds
from riverpy._postgres.tracing import suppress_tracing
from riverpy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
    from contextlib import AbstractContextManager

    from riverpy._postgres.driver import Connection, Pool, Transaction
    from riverpy._postgres.passwords import PasswordSource

RECONNECT_DELAY_MIN = timedelta(milliseconds=50)
RECONNECT_DELAY_MAX = timedelta(seconds=2)
MAINTENANCE_STATEMENT_TIMEOUT = timedelta(seconds=4)
"""The server's `statement_timeout` for maintenance. A running statement of a dead leader delays the
next leader by at most this time. The limit is shorter than riverpy's own timeout of a maintenance
transaction. So the server ends a slow statement before riverpy does, and the connection stays
usable."""
OUTAGE_EFFECT_TEXT = "jobs keep running, their results are kept, and the client keeps connecting"
CLIENT_CONNECTION_CHECK_INTERVAL = timedelta(seconds=1)
"""While a statement runs, the server checks at this interval whether the connection still
exists."""
FIRST_CONNECTION_TIMEOUT = CONNECT_TIMEOUT + 5.0
"""The timeout of `DedicatedConnection.open`, in seconds. It includes the time for connecting, and
for the statements that change the session's settings."""
NEW_OUTAGE_AFTER_UNUSED_SECONDS = 60.0
"""If a lost connection fails again after it was not used for this number of seconds, the failure is
logged as a new outage."""
_BROKEN_SESSION_SQLSTATE_CLASSES = {"08", "53", "57", "58", "XX"}
"""SQLSTATE classes of errors after which a session may be unusable."""
_READ_ONLY_SQLSTATE = "25006"
_QUERY_CANCELED_SQLSTATE = "57014"
_FATAL_SEVERITIES = {"FATAL", "PANIC"}


class StatementTimeoutError(TimeoutError):
    """Raised if riverpy's own timeout expired inside the block of `DedicatedConnection.acquire`,
    i.e. while a statement ran. The block starts only if at least half of the timeout remains. Any
    other TimeoutError of `acquire` means that no statement was sent."""


async def set_statement_timeout(connection: Connection, timeout: timedelta) -> None:
    """Set `statement_timeout`, and let the server check for lost connections. Without this check, a
    statement keeps waiting for a lock after its connection was lost. A shorter timeout that the
    session already has stays in effect."""
    statement = get_query("session", "session_limit", None)
    for name, value in (
        ("statement_timeout", timeout),
        (
            "client_connection_check_interval",
            CLIENT_CONNECTION_CHECK_INTERVAL,
        ),  # PostgreSQL 14 added this setting
    ):
        with suppress(PostgresError):  # some platforms lack this setting
            await statement.execute(connection, name=name, milliseconds=to_milliseconds(value))


async def connect_with_statement_timeout(
    url: str | None,
    application_name: str,
    *,
    statement_timeout: timedelta,
    through_pooler: bool,
    session_settings: Mapping[str, str] | None = None,
    password: PasswordSource | None = None,
) -> Connection:
    """Make a connection on which the server ends statements after `statement_timeout`.
    `application_name` is shown in `pg_stat_activity`. A connection through a pooler gets neither
    this timeout nor settings."""
    connection = await connect(
        url,
        application_name=application_name,
        session_settings=session_settings,
        through_pooler=through_pooler,
        password=password,
    )
    if not through_pooler:
        with terminate_on_error(connection):
            await set_statement_timeout(connection, statement_timeout)
    return connection


async def connect_for_maintenance(
    url: str | None,
    application_name: str,
    *,
    through_pooler: bool,
    password: PasswordSource | None = None,
) -> Connection:
    """Make a connection for maintenance. The session gets no `lock_timeout`, because each
    transaction sets its own."""
    # The planner overestimates the cost of these statements. JIT compilation would take longer than
    # it saves.
    return await connect_with_statement_timeout(
        url,
        application_name,
        statement_timeout=MAINTENANCE_STATEMENT_TIMEOUT,
        through_pooler=through_pooler,
        session_settings={"jit": "off"},
        password=password,
    )


class ConnectionOutageTracker:
    """Logs the start and the end of an outage of the connections that share this tracker. An outage
    starts when the first of these connections is lost. It ends when all of them work again."""

    def __init__(self, *, outage_effect: str = OUTAGE_EFFECT_TEXT, **log_keys: str) -> None:
        """Create the tracker. The keyword arguments `log_keys` are added to each log event. The
        event of a lost connection also has the key `effect`, whose value is `outage_effect`."""
        self._lost_connections: set[str] = set()
        self._unused_since_by_connection: dict[str, float] = {}
        """For each lost connection that is not used now, by name: the time at which it became
        unused."""
        self._outage_started_at = 0.0
        self._is_outage_open = False
        """Whether the start of an outage was logged, but not the end."""
        self.outage_count = 0
        """The number of logged outages."""
        self._log = get_logger(**log_keys)
        self._outage_effect = outage_effect

    @property
    def is_outage_logged(self) -> bool:
        """Whether the start of an outage was logged, and a connection that is in use is still lost.
        If so, callers need not log other failures as warnings."""
        return bool(self._lost_connections)

    def record_loss(self, connection_name: str, error: BaseException) -> None:
        """Record that a connection is lost, or cannot be made."""
        unused_since_by_connection = dict(self._unused_since_by_connection)
        is_used_again = self._mark_used_again(connection_name)
        if unused_since_by_connection and not (self._lost_connections or is_used_again):
            self._end_outage_of_unused_connections(unused_since_by_connection)
        if not self._is_outage_open:
            self.outage_count += 1
            self._outage_started_at = time.monotonic()
            self._is_outage_open = True
            self._log.warning(
                CONNECTION_LOST,
                connection=connection_name,
                error_type=type(error).__name__,
                error=describe_error(error),
                effect=self._outage_effect,
            )
        self._lost_connections.add(connection_name)

    def record_success(self, connection_name: str) -> None:
        """Record that a connection works."""
        was_lost = (
            self._mark_used_again(connection_name) or connection_name in self._lost_connections
        )
        self._lost_connections.discard(connection_name)
        if not self._is_outage_open or self._lost_connections:
            return
        now = time.monotonic()
        last_unused_since = max(self._unused_since_by_connection.values(), default=now)
        if was_lost or not self._unused_since_by_connection:
            self._log_connection_restored(connection_name, now)
        elif (
            now - last_unused_since >= NEW_OUTAGE_AFTER_UNUSED_SECONDS
        ):  # the lost connections are not needed now
            self._log_connection_restored(connection_name, last_unused_since)

    def _end_outage_of_unused_connections(self, unused_since: Mapping[str, float]) -> None:
        """Log the end of the outage, because the client has stopped using the connections that it
        had lost."""
        if self._is_outage_open:
            name = max(unused_since, key=unused_since.__getitem__)
            self._log_connection_restored(name, unused_since[name])

    def _log_connection_restored(self, connection_name: str, ended_at: float) -> None:
        self._is_outage_open = False
        self._log.info(
            CONNECTION_RESTORED,
            connection=connection_name,
            seconds=round(ended_at - self._outage_started_at, 1),
        )

    def record_unused(self, connection_name: str) -> None:
        """Record that a connection is closed, or is not used for a while."""
        if connection_name in self._lost_connections:
            self._lost_connections.discard(connection_name)
            self._unused_since_by_connection[connection_name] = time.monotonic()

    def _mark_used_again(self, connection_name: str) -> bool:
        """Mark a connection as used again. Return whether the connection was lost when it became
        unused, and that was less than `NEW_OUTAGE_AFTER_UNUSED_SECONDS` ago."""
        unused_since = self._unused_since_by_connection.pop(
            connection_name, -NEW_OUTAGE_AFTER_UNUSED_SECONDS
        )
        return time.monotonic() - unused_since < NEW_OUTAGE_AFTER_UNUSED_SECONDS


class DedicatedConnection:
    """A connection for one purpose. If the connection is lost, the next `acquire` reconnects. Only
    one task at a time can use the connection."""

    def __init__(
        self,
        name: str,
        connect: Callable[[], Awaitable[Connection]],
        outage_tracker: ConnectionOutageTracker,
        *,
        through_pooler: bool = False,
        trace_internal: bool = False,
        lock_wait_timeout: float | None = None,
        on_reconnected: Callable[[], None] | None = None,
    ) -> None:
        """Store the arguments, and make no connection yet.

        Args:
            name: the name of the connection in the log.
            connect: makes and returns a connection.
            outage_tracker: logs the outages of all connections that share it.
            through_pooler: whether the connection leads to a pooler. If so, it has no
                `statement_timeout`. Then riverpy's own timeout may end a slow statement, and this
                is not logged as a lost connection. Without a pooler, the server ends a slow
                statement first, so riverpy's own timeout means that the connection is lost.
            trace_internal: whether OpenTelemetry's instrumentation of the driver makes spans for
                the statements.
            lock_wait_timeout: how many seconds `acquire` may wait while another task uses the
                connection. This wait does not count towards the timeout of `acquire`. None: the
                wait counts towards that timeout, and takes at most half of it.
            on_reconnected: called after each reconnect, but not after the first connect.
        """
        self.name = name
        self._lock_wait_timeout = lock_wait_timeout
        self._trace_internal = trace_internal
        self._through_pooler = through_pooler
        self._on_reconnected = on_reconnected
        self._connect = connect
        self.outage_tracker = outage_tracker
        self._connection: Connection | None = None
        self._was_connected = self._is_closed = self._is_end_recorded = False
        self._last_seen_outage_count = 0
        """The number of logged outages when this connection worked last."""
        # `fast_acquire`: acquiring a free lock does not yield to the event loop. The SQL statement
        # that is sent next yields anyway.
        self._lock = anyio.Lock(fast_acquire=True)
        self._backoff = Backoff(RECONNECT_DELAY_MIN, RECONNECT_DELAY_MAX)
        self._last_connect_error = ""
        """Why the last attempt to reconnect failed, for error texts. Empty: the attempt succeeded,
        or there was no attempt yet."""

    @property
    def is_connected(self) -> bool:
        """Whether the connection exists, as far as riverpy knows."""
        return self._connection is not None and not self._connection.is_closed()

    async def open(self) -> None:
        """Connect now, so that the start of a client fails if the database cannot be used."""
        reason = f"making connection {self.name!r} took longer than {FIRST_CONNECTION_TIMEOUT:g} s"
        with self._suppress_tracing(), anyio.fail_after(FIRST_CONNECTION_TIMEOUT, reason=reason):
            self._set_connection(await self._connect())

    @asynccontextmanager
    async def acquire(self, purpose: str, timeout: float) -> AsyncGenerator[Connection]:
        """Use the connection in the `async with` block. No other task can use the connection during
        the block. If the connection is lost, reconnect first. Reconnecting and the block together
        take at most `timeout` seconds. Error texts name `purpose`.

        After an error that may leave the session unusable, the connection is closed. If there is no
        connection after half of the time, no statement is sent, because the remaining time might be
        too short for it.

        Raises:
            StatementTimeoutError: `timeout` expired while the block used the connection.
            TimeoutError: `timeout`, or half of it, expired before the block started. No statement
                was sent.
        """
        reason = f"{purpose} took longer than {timeout:.3g} s"
        is_cut = is_replaced = False
        try:
            async with self._lock_connection(purpose, timeout) as seconds:
                with self._suppress_tracing(), anyio.fail_after(seconds, reason=reason) as scope:
                    self._require_not_closed()
                    connection = self._connection
                    if connection is None or connection.is_closed():
                        self._log_closed_while_idle(connection)
                        connection = await self._reconnect()
                        if scope.deadline - anyio.current_time() < timeout / 2:
                            raise TimeoutError(f"{purpose} waited for the connection for too long")
                    try:
                        yield connection
                    except BaseException as error:
                        is_cut = not isinstance(error, Exception)
                        if connection.is_closed() or may_break_session(error):
                            is_replaced = not self._is_connection_lost(connection, error)
                            self._terminate_connection()
                        raise
                    self._last_seen_outage_count = self.outage_tracker.outage_count
                    self.outage_tracker.record_success(self.name)
        except DATABASE_ERRORS as error:
            if self._connection is None and not self._is_closed and not is_replaced:
                self.outage_tracker.record_loss(self.name, error)
                if self._last_connect_error and isinstance(error, TimeoutError):
                    raise TimeoutError(f"{error}: {self._last_connect_error}") from error
            if is_cut:
                raise StatementTimeoutError(reason) from error
            raise

    @asynccontextmanager
    async def _lock_connection(self, purpose: str, timeout: float) -> AsyncGenerator[float]:
        """Wait until no other task uses the connection, then lock it during the `async with` block.
        Yield the number of seconds that the block may take."""
        waited = (
            f"{purpose} waited too long for connection {self.name!r}, which is in use or is being "
            "made again"
        )
        began = anyio.current_time()
        with anyio.fail_after(
            timeout / 2 if self._lock_wait_timeout is None else self._lock_wait_timeout,
            reason=waited,
        ):
            await self._lock.acquire()
        try:
            took = anyio.current_time() - began
            yield timeout - took if self._lock_wait_timeout is None else timeout
        finally:
            self._lock.release()

    def _suppress_tracing(self) -> AbstractContextManager[None]:
        return suppress_tracing(trace_internal=self._trace_internal)

    def _is_connection_lost(self, connection: Connection, error: BaseException) -> bool:
        """Return whether the error means that the connection was lost, or that the server does not
        answer. After other errors, the connection is replaced without a log entry about an
        outage."""
        if connection.is_closed():
            return True
        if isinstance(error, PostgresError):
            severity: str | None = getattr(error, "severity_en", None)
            sqlstate: str | None = getattr(error, "sqlstate", None)
            return (
                severity is None or severity in _FATAL_SEVERITIES or sqlstate == _READ_ONLY_SQLSTATE
            )
        return isinstance(error, DATABASE_ERRORS) or not self._through_pooler

    def mark_unused(self) -> None:
        """Record that the connection is not used for a while. So the end of an outage can be logged
        although this connection is still lost."""
        self.outage_tracker.record_unused(self.name)

    async def close(self) -> None:
        """Close the connection for good. An `acquire` block that uses it fails."""
        self._is_closed = True
        self.mark_unused()
        connection, self._connection = self._connection, None
        if connection is not None:
            await close_connection(connection)

    def _require_not_closed(self) -> None:
        if self._is_closed:
            raise InterfaceError(f"the connection {self.name!r} was closed")

    def _set_connection(self, connection: Connection) -> None:
        def record_end(_connection: object) -> None:
            if connection is self._connection:
                self._record_connection_end()

        connection.add_termination_listener(record_end)
        self._connection = connection
        self._was_connected = True
        self._is_end_recorded = False
        self._last_seen_outage_count = self.outage_tracker.outage_count

    def _record_connection_end(self) -> None:
        """Record that the connection ended. The next `acquire` logs this, except if the connection
        ended during a logged outage."""
        if self._is_end_recorded:
            return
        self._is_end_recorded = True
        self._last_seen_outage_count = (
            self.outage_tracker.outage_count - self.outage_tracker.is_outage_logged
        )

    def _log_closed_while_idle(self, connection: Connection | None) -> None:
        """Log that the connection ended while it was idle. Do nothing if an outage was logged after
        the connection worked last."""
        if connection is None:
            return
        self._record_connection_end()  # asyncpg may not have called `record_end` yet
        if self._last_seen_outage_count == self.outage_tracker.outage_count:
            self.outage_tracker.record_loss(self.name, ConnectionError("the server has closed it"))

    def _terminate_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()

    async def _reconnect(self) -> Connection:
        while True:
            try:
                with anyio.fail_after(CONNECT_TIMEOUT):
                    connection = await self._connect()
                    with terminate_on_error(connection):
                        await require_writable(connection)
                        self._require_not_closed()
            except (*DATABASE_ERRORS, ConfigError) as error:  # the URL has worked before: retry
                self._require_not_closed()
                self.outage_tracker.record_loss(self.name, error)
                self._last_connect_error = describe_error(error)
                await anyio.sleep(self._backoff.next_delay())
            else:
                break
        was_connected = self._was_connected
        self._set_connection(connection)
        self._backoff.reset()
        self._last_connect_error = ""
        if was_connected and self._on_reconnected is not None:
            self._on_reconnected()
        return connection


class CallerDatabase:
    """A pool or connection that riverpy's caller has passed. It has the same method `acquire` as a
    `DedicatedConnection`. riverpy never closes or replaces the pool or connection."""

    def __init__(self, database: Pool | Transaction) -> None:
        """Store the pool or connection. It is already open."""
        self._database = database
        self._lock = anyio.Lock()

    @asynccontextmanager
    async def acquire(self, purpose: str, timeout: float) -> AsyncGenerator[Transaction]:
        """Use a connection in the `async with` block for at most `timeout` seconds, including the
        wait for the connection. When the time expires, raise TimeoutError with `purpose`."""
        reason = f"{purpose} took longer than {timeout:.3g} s"
        with suppress_tracing(), anyio.fail_after(timeout, reason=reason):
            if is_pool(self._database):
                async with self._database.acquire() as connection:
                    yield connection
            else:
                async with self._lock:
                    yield self._database


async def require_writable(connection: Connection) -> None:
    """Raise ConnectionError if the server is read-only. After a failover, a server may be read-only
    for a while."""
    if await get_query("session", "session_is_read_only", None).fetchval(connection):
        raise ConnectionError("the server is read-only: it is a standby, or set to read-only")


async def close_connections(connections: Iterable[DedicatedConnection]) -> None:
    """Close the connections at the same time, so that together they take at most one timeout."""
    with anyio.CancelScope(shield=True):
        async with anyio.create_task_group() as tasks:
            for connection in connections:
                tasks.start_soon(connection.close)


def may_break_session(error: BaseException) -> bool:
    """Return whether the session may be unusable after this error. If the server only refused the
    statement, the session is usable."""
    if not isinstance(error, PostgresError):
        return True
    sqlstate: str = getattr(error, "sqlstate", None) or ""
    if sqlstate == _QUERY_CANCELED_SQLSTATE:
        return False
    return sqlstate == _READ_ONLY_SQLSTATE or sqlstate[:2] in _BROKEN_SESSION_SQLSTATE_CLASSES
