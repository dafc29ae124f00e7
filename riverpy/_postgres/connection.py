"""Connections that serve one purpose for the life of a client: made again when lost, with one log
line an outage."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager, contextmanager, suppress
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
    close,
    connect,
    describe,
)
from riverpy._postgres.sql_files import query
from riverpy._postgres.tracing import untraced
from riverpy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Mapping
    from contextlib import AbstractContextManager

    from riverpy._postgres.driver import Connection, Pool, Transaction

RECONNECT_FIRST = timedelta(milliseconds=50)
RECONNECT_MOST = timedelta(seconds=2)
MAINTENANCE_STATEMENT_LIMIT = timedelta(seconds=4)
"""After which the server ends a statement of maintenance: a leader that is gone delays the next one
by no more. It is less than a fenced transaction may take, so that the server ends a slow statement
before we cut its connection."""
OUTAGE_EFFECT = "jobs keep running, their results are kept, and the client keeps connecting"
CHECK_INTERVAL = timedelta(seconds=1)
"""How often the server looks, during a statement, whether we are still there."""
OPEN_TIMEOUT = CONNECT_TIMEOUT + 5.0
"""Seconds within which the first connection must be up, with the settings of its session."""
SOON = 60.0
"""Seconds within which a connection that was given up lost, and is wanted again, is still lost for
the reason that was told."""
_UNUSABLE_CLASSES = {"08", "53", "57", "58", "XX"}
_READ_ONLY = "25006"
_STATEMENT_CANCELLED = "57014"
_FATAL = {"FATAL", "PANIC"}


class StatementTimeoutError(TimeoutError):
    """Our own time limit ended a statement that was running. It had at least half of the limit. Any
    other TimeoutError of a use means that no statement was sent: waiting for the connection, or
    making it again, took the time."""


@contextmanager
def cut_on_error(connection: Connection) -> Generator[None]:
    """A step of making a connection, which nobody owns yet."""
    try:
        yield
    except BaseException:
        connection.terminate()
        raise


async def limit_statements(connection: Connection, limit: timedelta) -> None:
    """Let the server itself end what we do not wait for any more: a statement that waits for a lock
    does not notice that its connection was cut, and would go on waiting.

    A shorter limit that the session has already stays.
    """
    statement = query("session", "session_limit", None)
    for name, value in (
        ("statement_timeout", limit),
        ("client_connection_check_interval", CHECK_INTERVAL),  # from PostgreSQL 14 on
    ):
        milliseconds = round(value.total_seconds() * 1000)
        with suppress(PostgresError):  # a platform may lack it; our own limits stand
            await connection.execute(
                statement.text,
                *statement.arguments({"name": name, "milliseconds": milliseconds}),
            )


async def connect_limited(
    url: str | None,
    name: str,
    *,
    limit: timedelta,
    pooled: bool,
    settings: Mapping[str, str] | None = None,
) -> Connection:
    """Make a connection that is called `name`, on which the server ends statements after `limit`;
    through a pooler without any settings.

    Raises:
        ConfigError, DatabaseError, or one of DATABASE_ERRORS.
    """
    connection = await connect(url, application_name=name, settings=settings, pooled=pooled)
    if not pooled:
        with cut_on_error(connection):
            await limit_statements(connection, limit)
    return connection


async def connect_maintenance(url: str | None, name: str, *, pooled: bool) -> Connection:
    """Make a connection for maintenance. How long it waits for locks is for each transaction."""
    # Its statements read little of what the planner thinks they may: no time for compiling.
    return await connect_limited(
        url, name, limit=MAINTENANCE_STATEMENT_LIMIT, pooled=pooled, settings={"jit": "off"}
    )


class ConnectionOutage:
    """Says once that connections to the database are lost, and once that all are back."""

    def __init__(
        self,
        client_id: str | None = None,
        *,
        holder: str | None = None,
        effect: str = OUTAGE_EFFECT,
    ) -> None:
        """Make it. The events have the id of the client or the holder of leases, if it is
        given, and `effect`: what the outage means."""
        self._lost: set[str] = set()
        self._given_up: dict[str, float] = {}
        """When connections that were lost were not needed any more."""
        self._began_at = 0.0
        self._is_open = False
        """Whether its begin was told, and not its end."""
        self.count = 0
        """How many outages were told of."""
        self._log = get_logger()
        self._effect = effect
        if client_id is not None:
            self._log = self._log.bind(client_id=client_id)
        if holder is not None:
            self._log = self._log.bind(holder=holder)

    @property
    def is_told(self) -> bool:
        """Whether there is one now: what fails meanwhile fails for a reason that is known."""
        return bool(self._lost)

    def lost(self, connection: str, error: BaseException) -> None:
        """A connection is lost, or cannot be made."""
        is_known = self._was_given_up(connection) and self._is_open
        if not self._lost and not is_known:
            self.count += 1
            self._began_at = time.monotonic()
            self._is_open = True
            self._log.warning(
                CONNECTION_LOST,
                connection=connection,
                error_type=type(error).__name__,
                error=describe(error),
                effect=self._effect,
            )
        self._lost.add(connection)

    def restored(self, connection: str) -> None:
        """A connection does its work."""
        was_lost = self._was_given_up(connection) or connection in self._lost
        self._lost.discard(connection)
        if not self._is_open or self._lost:
            return
        now = time.monotonic()
        if was_lost or not self._given_up:
            self._tell_end(connection, now)
        elif now - (given_up_at := max(self._given_up.values())) >= SOON:
            self._tell_end(connection, given_up_at)  # what was given up last is not wanted again

    def _tell_end(self, connection: str, ended_at: float) -> None:
        self._is_open = False
        self._log.info(
            CONNECTION_RESTORED,
            connection=connection,
            seconds=round(ended_at - self._began_at, 1),
        )

    def forget(self, connection: str) -> None:
        """A connection is not needed any more, or not for now."""
        if connection in self._lost:
            self._lost.discard(connection)
            self._given_up[connection] = time.monotonic()

    def _was_given_up(self, connection: str) -> bool:
        return time.monotonic() - self._given_up.pop(connection, -SOON) < SOON


class DedicatedConnection:
    """One connection for one purpose, used by one task at a time."""

    def __init__(
        self,
        name: str,
        connect: Callable[[], Awaitable[Connection]],
        outage: ConnectionOutage,
        *,
        pooled: bool = False,
        trace_internal: bool = False,
        wait: float | None = None,
        reconnected: Callable[[], None] | None = None,
    ) -> None:
        """Make it; nothing is connected.

        Args:
            name: what the log calls it.
            connect: makes a connection.
            outage: of all connections of its owner.
            pooled: the server ends no slow statement before we do, for a pooler carries no setting
                of a session. So a statement that we cut is no sign of a lost connection.
            trace_internal: whether instrumentation of the driver makes spans of its statements.
            wait: the seconds that a use may wait for its turn, beside its bound. Default: half of
                its bound, and it counts.
            reconnected: called after the connection was lost and made again.
        """
        self.name = name
        self._wait = wait
        self._trace_internal = trace_internal
        self._pooled = pooled
        self._reconnected = reconnected
        self._connect = connect
        self._outage = outage
        self._connection: Connection | None = None
        self._was_connected = self._is_closed = False
        self._outages = 0
        """How many there were when it was known to be alive last."""
        self._lock = anyio.Lock(fast_acquire=True)  # a statement follows, and yields
        self._backoff = Backoff(RECONNECT_FIRST, RECONNECT_MOST)
        self._obstacle = ""
        """Why it cannot be made."""

    @property
    def is_up(self) -> bool:
        """Whether there is a connection, as far as is known."""
        return self._connection is not None and not self._connection.is_closed()

    @property
    def is_outage_told(self) -> bool:
        """Whether it was said that connections are lost, and not yet that all are back."""
        return self._outage.is_told

    async def open(self) -> None:
        """Connect now, so that a database that cannot be used shows at the start.

        Raises:
            ConfigError, DatabaseError, or one of DATABASE_ERRORS.
        """
        reason = f"making connection {self.name!r} took longer than {OPEN_TIMEOUT:g} s"
        with self._untraced(), anyio.fail_after(OPEN_TIMEOUT, reason=reason):
            self._keep(await self._connect())

    @asynccontextmanager
    async def use(self, purpose: str, bound: float) -> AsyncGenerator[Connection]:
        """The connection, alone, for at most `bound` seconds with the time to connect again if it
        was lost.

        An error that leaves it in doubt cuts it; the next use makes a new one. A use that has
        waited for half of the bound, for its turn or for the server, gives up: the time that is
        left would say nothing about its statement.

        Raises:
            StatementTimeoutError: the bound is over while the connection is used; the text has the
                purpose.
            TimeoutError: the bound is over, or half of it, before that; nothing was sent.
            Exception: one of DATABASE_ERRORS.
        """
        reason = f"{purpose} took longer than {bound:.3g} s"
        is_cut = is_replaced = False
        try:
            async with self._turn(purpose, bound) as left:
                with self._untraced(), anyio.fail_after(left, reason=reason) as scope:
                    self._expect_open()
                    connection = self._connection
                    if connection is None or connection.is_closed():
                        self._tell_closed(connection)
                        connection = await self._reconnect()
                        if scope.deadline - anyio.current_time() < bound / 2:
                            raise TimeoutError(f"{purpose} waited for the connection for too long")
                    try:
                        yield connection
                    except BaseException as error:
                        is_cut = not isinstance(error, Exception)
                        if connection.is_closed() or _leaves_doubt(error):
                            is_replaced = not self._is_lost(connection, error)
                            self._discard()
                        raise
                    self._outages = self._outage.count
                    self._outage.restored(self.name)
        except DATABASE_ERRORS as error:
            if self._connection is None and not self._is_closed and not is_replaced:
                self._outage.lost(self.name, error)
                if self._obstacle and isinstance(error, TimeoutError):
                    raise TimeoutError(f"{error}: {self._obstacle}") from error
            if is_cut:
                raise StatementTimeoutError(reason) from error
            raise

    @asynccontextmanager
    async def _turn(self, purpose: str, bound: float) -> AsyncGenerator[float]:
        """The connection alone, in the order of asking. Yields the seconds that are left."""
        waited = f"{purpose} waited for another statement for too long"
        began = anyio.current_time()
        with anyio.fail_after(bound / 2 if self._wait is None else self._wait, reason=waited):
            await self._lock.acquire()
        try:
            took = anyio.current_time() - began
            yield bound - took if self._wait is None else bound
        finally:
            self._lock.release()

    def _untraced(self) -> AbstractContextManager[None]:
        return untraced(trace_internal=self._trace_internal)

    def _is_lost(self, connection: Connection, error: BaseException) -> bool:
        """Whether the server or the network ended the connection, or does not answer. Otherwise we
        replace it, for its session may be unusable."""
        if connection.is_closed():
            return True
        if isinstance(error, PostgresError):
            severity: str | None = getattr(error, "severity_en", None)
            sqlstate: str | None = getattr(error, "sqlstate", None)
            return severity is None or severity in _FATAL or sqlstate == _READ_ONLY
        return isinstance(error, DATABASE_ERRORS) or not self._pooled

    def rest(self) -> None:
        """Nobody uses it for now: if it is lost, nobody would say that it is back."""
        self._outage.forget(self.name)

    async def close(self) -> None:
        """Say goodbye within the driver's limit, or cut. It is not made again: a use that goes on
        fails."""
        self._is_closed = True
        self.rest()
        connection, self._connection = self._connection, None
        if connection is not None:
            await close(connection)

    def _expect_open(self) -> None:
        if self._is_closed:
            raise InterfaceError(f"the connection {self.name!r} was closed")

    def _keep(self, connection: Connection) -> None:
        connection.add_termination_listener(lambda _connection: self._ended())
        self._connection = connection
        self._was_connected = True
        self._outages = self._outage.count

    def _ended(self) -> None:
        """The end of the connection is seen: a part of the outage that goes on, or, when nothing
        else is lost, later than all of them; whether it was used in them or not."""
        self._outages = self._outage.count - self._outage.is_told

    def _tell_closed(self, connection: Connection | None) -> None:
        """It ended while nobody used it, which may be part of an outage that was told of since."""
        if connection is not None and self._outages == self._outage.count:
            self._outage.lost(self.name, ConnectionError("the server has closed it"))

    def _discard(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()

    async def _reconnect(self) -> Connection:
        while True:
            try:
                with anyio.fail_after(CONNECT_TIMEOUT):
                    connection = await self._connect()
                    with cut_on_error(connection):
                        await expect_writable(connection)
                        self._expect_open()
            except (*DATABASE_ERRORS, ConfigError) as error:  # it worked before: not for ever
                self._expect_open()
                self._outage.lost(self.name, error)
                self._obstacle = describe(error)
                await anyio.sleep(self._backoff.next())
            else:
                break
        was_connected = self._was_connected
        self._keep(connection)
        self._backoff.reset()
        self._obstacle = ""
        if was_connected and self._reconnected is not None:
            self._reconnected()
        return connection


class InjectedConnection:
    """A connection of somebody else's, used as a `DedicatedConnection` is: never closed, replaced
    or made again, whatever happens on it."""

    def __init__(self, connection: Transaction) -> None:
        """Make it."""
        self._connection = connection
        self._lock = anyio.Lock()

    @asynccontextmanager
    async def use(self, purpose: str, bound: float) -> AsyncGenerator[Transaction]:
        """The connection, alone, for at most `bound` seconds.

        Raises:
            TimeoutError: the bound is over; the text has the purpose.
            Exception: one of DATABASE_ERRORS.
        """
        with untraced(), anyio.fail_after(bound, reason=f"{purpose} took longer than {bound:g} s"):
            async with self._lock:
                yield self._connection


class SharedPool:
    """A pool of somebody else's, of which each use takes a connection for itself."""

    def __init__(self, pool: Pool) -> None:
        """Make it."""
        self._pool = pool

    @asynccontextmanager
    async def use(self, purpose: str, bound: float) -> AsyncGenerator[Transaction]:
        """A connection, for at most `bound` seconds with the wait for it.

        Raises:
            TimeoutError: the bound is over; the text has the purpose.
            Exception: one of DATABASE_ERRORS.
        """
        reason = f"{purpose} took longer than {bound:.3g} s"
        with untraced(), anyio.fail_after(bound, reason=reason):
            connection = await self._pool.acquire()
            try:
                yield connection
            finally:
                await self._pool.release(connection)


async def expect_writable(connection: Connection) -> None:
    """A server that was failed over may only be read yet: that is no end of the outage.

    Raises:
        ConnectionError: nobody can write.
        Exception: one of DATABASE_ERRORS.
    """
    statement = query("session", "session_is_read_only", None)
    if await connection.fetchval(statement.text):
        raise ConnectionError("the server lets nobody write: it is a standby, or set to read-only")


async def close_all(connections: Iterable[DedicatedConnection]) -> None:
    """Close them side by side, so that a database that does not answer costs the limit once."""
    with anyio.CancelScope(shield=True):
        async with anyio.create_task_group() as tasks:
            for connection in connections:
                tasks.start_soon(connection.close)


def _leaves_doubt(error: BaseException) -> bool:
    """Whether the session may be unusable: all but a plain refusal of the statement by the
    server."""
    if not isinstance(error, PostgresError):
        return True
    sqlstate: str = getattr(error, "sqlstate", None) or ""
    if sqlstate == _STATEMENT_CANCELLED:
        return False
    return sqlstate == _READ_ONLY or sqlstate[:2] in _UNUSABLE_CLASSES
