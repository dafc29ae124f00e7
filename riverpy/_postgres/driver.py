"""Connections, pools, errors and server warnings of the driver asyncpg. No other module imports
asyncpg at run time."""

from __future__ import annotations

import configparser
import os
import re
import socket
import ssl
from contextlib import contextmanager, suppress
from functools import cache
from operator import itemgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import anyio
import asyncpg
import asyncpg.pool

from riverpy._dsn import (
    UNKNOWN_USER_TEXT,
    DatabaseAddress,
    adapt_url_for_asyncpg,
    database_address_from_url,
    find_ignored_pg_variables,
    find_tls_file_problem,
    make_pg_variables_url,
    mask_passwords,
    validate_url,
)
from riverpy._error_text import describe_missing_grant, format_error_with_type
from riverpy._log import get_logger
from riverpy._log_events import DATABASE_URL_PARAMETERS_IGNORED, DATABASE_VARIABLES_IGNORED
from riverpy._postgres.array_types import ARRAY_TYPES
from riverpy._timestamps import encode_timestamp
from riverpy.errors import ConfigError, RiverError, ServerVersionError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping, Sequence
    from datetime import datetime
    from typing import TypeAlias

    from typing_extensions import TypeIs

    from riverpy._postgres.passwords import PasswordSource

    Connection: TypeAlias = asyncpg.Connection[asyncpg.Record]
    PoolConnection: TypeAlias = asyncpg.pool.PoolConnectionProxy[asyncpg.Record]
    Pool: TypeAlias = asyncpg.Pool[asyncpg.Record]
    Transaction: TypeAlias = Connection | PoolConnection
    """An asyncpg connection, from a pool or not. Callers pass one with an open transaction as
    `tx=`."""
else:  # users may evaluate the annotations of public classes at run time
    Pool = asyncpg.Pool
    Transaction = asyncpg.Connection | asyncpg.pool.PoolConnectionProxy

CONNECT_TIMEOUT = 10.0
"""The timeout for making a connection, in seconds."""
PASSWORD_TIMEOUT_FRACTION = 0.8
"""The timeout of the user's password function, as a fraction (0 to 1) of the connect timeout."""
NEXT_HOST_DELAY = 0.5
"""Seconds to wait for the answer of one host of a URL before the next host is tried too."""
CONNECTION_CLOSE_TIMEOUT = 0.5
"""Seconds for closing a connection or pool. If it takes longer, the connections are terminated."""
SERVER_VERSION_MIN = 13
_DEFAULT_URL_SETTING_NAME = "database URL"
_UNDECLARED_POOLER_REMEDY = (
    "set Config(pooler=True) and a listen_url that leads past the pooler; or, if it pools whole "
    "sessions, set ignore_startup_parameters there"
)
_URL_PARAMETER_REMEDY = (
    "leave this parameter out of the URL: set it for the role (ALTER ROLE … SET)"
)
_REFUSED_SETTING_SQLSTATES = {"22023", "42704", "55P02"}
"""The SQLSTATEs with which the server refuses a connection because of a session setting."""

DATABASE_ERRORS: tuple[type[Exception], ...] = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,
    TimeoutError,
    EOFError,
)
"""All errors of statements and of connection attempts. asyncpg raises InternalClientError if the
connection ends while asyncpg uses the connection."""

_TRY_NEXT_HOST_ERRORS = (
    OSError,
    asyncpg.CannotConnectNowError,
    asyncpg.ConnectionDoesNotExistError,
    asyncpg.TargetServerAttributeNotMatched,
)
"""Errors after which the next host of a URL is tried. After any other error no further host is
tried, because the next host may be an outdated standby."""

UniqueViolationError = asyncpg.UniqueViolationError
UndefinedTableError = asyncpg.UndefinedTableError
UndefinedColumnError = asyncpg.UndefinedColumnError
InsufficientPrivilegeError = asyncpg.InsufficientPrivilegeError
InFailedTransactionError = asyncpg.InFailedSQLTransactionError
LockNotAvailableError = asyncpg.LockNotAvailableError
SerializationError = asyncpg.SerializationError
QueryCanceledError = asyncpg.QueryCanceledError
InterfaceError = asyncpg.InterfaceError
PostgresError = asyncpg.PostgresError
ConnectionDoesNotExistError = asyncpg.ConnectionDoesNotExistError


def _get_sqlstate_class(error: BaseException) -> str:
    """Return the first two characters of the SQLSTATE, or "" if the error is not the server's."""
    sqlstate: str = getattr(error, "sqlstate", None) or ""
    return sqlstate[:2] if isinstance(error, asyncpg.PostgresError) else ""


def is_data_error(error: BaseException) -> bool:
    """Whether the server or asyncpg refused a value. The same value would be refused again."""
    return isinstance(error, asyncpg.DataError) or (
        _get_sqlstate_class(error) in {"22", "23", "54"} and not is_notification_queue_full(error)
    )


def is_notification_queue_full(error: BaseException) -> bool:
    """Whether the server refused a commit because its queue of notifications is full. Other errors
    have the same SQLSTATE, so the error must also come from `async.c` of the server's source
    code."""
    return (
        isinstance(error, asyncpg.ProgramLimitExceededError)
        and getattr(error, "server_source_filename", None) == "async.c"
    )


def is_channel_name_too_long(error: BaseException) -> bool:
    """Whether the server refused a notification channel because its name is too long."""
    return (
        isinstance(error, asyncpg.InvalidParameterValueError)
        and getattr(error, "server_source_filename", None) == "async.c"
    )


_TEMPORARY_SQLSTATE_CLASSES = {"", "08", "25", "40", "53", "55", "57", "58", "XX"}
"""SQLSTATE classes of temporary errors: the same statement may succeed later."""


def is_permanent_statement_error(error: BaseException) -> bool:
    """Whether the server, or a trigger of the user, refused the statement because of its content.
    The same statement would fail again."""
    return is_data_error(error) or (
        _get_sqlstate_class(error) not in _TEMPORARY_SQLSTATE_CLASSES
        and not is_notification_queue_full(error)
    )


def is_damaged_data_error(error: BaseException) -> bool:
    """Whether the server could not read stored data, or had an internal error."""
    return _get_sqlstate_class(error) == "XX"


def is_damaged_or_untranslatable_error(error: BaseException) -> bool:
    """Whether the server cannot send a stored value: the value is damaged, or has characters that
    UTF-8, the encoding of the connection, lacks."""
    return is_damaged_data_error(error) or isinstance(
        error, (asyncpg.CharacterNotInRepertoireError, asyncpg.UntranslatableCharacterError)
    )


def is_untranslatable_text_error(error: BaseException) -> bool:
    """Whether the server refused a text with characters that the database's encoding lacks."""
    return isinstance(error, asyncpg.UntranslatableCharacterError)


def is_read_only_error(error: BaseException) -> bool:
    """Whether the server refused a write, because it or the transaction is read-only."""
    return isinstance(error, asyncpg.ReadOnlySQLTransactionError)


def is_server_statement_timeout(error: BaseException) -> bool:
    """Whether the server cancelled the statement because of its `statement_timeout`."""
    return isinstance(error, asyncpg.QueryCanceledError)


def is_certain_rollback(error: BaseException) -> bool:
    """Whether the error proves that the statement changed nothing: asyncpg could not encode a
    value, or the server reported an error and kept the session open."""
    if not isinstance(error, asyncpg.PostgresError):
        return False
    severity: str | None = getattr(error, "severity_en", None)
    if severity is None:  # an error of asyncpg itself
        return isinstance(error, asyncpg.DataError)
    return severity == "ERROR" and _get_sqlstate_class(error) != "08"


def is_connection_loss(error: BaseException) -> bool:
    """Whether the error means that the connection was lost."""
    return isinstance(
        error,
        (
            OSError,
            EOFError,
            asyncpg.InterfaceError,
            asyncpg.InternalClientError,
            asyncpg.ConnectionDoesNotExistError,
        ),
    )


def describe_error(error: BaseException) -> str:
    """Return the error in one line, without passwords. The line starts with the error's type if
    the error has no text, or comes from neither the database nor riverpy."""
    if isinstance(error, asyncpg.TargetServerAttributeNotMatched):  # for example during a failover
        return "no server of the URL matches target_session_attrs"
    if isinstance(error, asyncpg.InternalClientError):  # asyncpg's own text explains nothing
        return "the connection ended while it was used"
    is_plain = isinstance(error, (RiverError, *DATABASE_ERRORS)) and bool(str(error).strip())
    text = str(error) if is_plain else format_error_with_type(error)
    grant = describe_missing_grant(text) if isinstance(error, InsufficientPrivilegeError) else ""
    return mask_passwords(" ".join(text.split())) + grant


class ConnectionWithKnownArrayTypes(asyncpg.Connection):
    """A connection that already knows the array types in riverpy's statements. asyncpg would query
    these types in each new session. That takes longer than the statement itself."""

    async def _introspect_types(
        self, typeoids: Iterable[int], timeout: float | None
    ) -> tuple[Sequence[Mapping[str, object]], object]:
        oids = set(typeoids)
        if oids <= ARRAY_TYPES.keys():
            # No query was sent. For an empty name, asyncpg would prepare the statement again.
            no_statement = SimpleNamespace(name="none")
            return [ARRAY_TYPES[oid] for oid in oids], no_statement
        parent: Any = super()
        return await parent._introspect_types(oids, timeout)  # noqa: SLF001 (the only way)


class _ConnectionTarget(NamedTuple):
    """Where to connect: a valid URL, its server and `connect_timeout`, and the user's password
    function if there is one."""

    url: str
    server: DatabaseAddress
    connect_timeout: float | None
    password: PasswordSource | None = None

    @classmethod
    def from_url(cls, url: str | None, password: PasswordSource | None) -> _ConnectionTarget:
        url = make_pg_variables_url() if url is None else url
        validate_url(url)
        variables = find_ignored_pg_variables(url)
        url, limit, parameters = adapt_url_for_asyncpg(url)
        _warn_of_ignored_settings(parameters, variables)
        server = database_address_from_url(url)
        if server.user == UNKNOWN_USER_TEXT:
            raise ConfigError(
                "the database URL has no user, and the user of this process has no name: write "
                "postgres://USER@…, or set PGUSER"
            )
        return cls(url, server, limit, password)

    async def fetch_password_option(self, connect_timeout: float) -> dict[str, str]:
        """Call the user's password function, and return the password as an option of
        `asyncpg.connect`. Return no option if there is no function."""
        if self.password is None:
            return {}
        timeout = connect_timeout * PASSWORD_TIMEOUT_FRACTION
        return {"password": await self.password.fetch_password(timeout)}


@cache
def _warn_of_ignored_settings(parameters: tuple[str, ...], variables: tuple[str, ...]) -> None:
    """Log the URL parameters and environment variables that have no effect. The same ones are
    logged only once per process."""
    log = get_logger()
    if parameters:
        log.warning(DATABASE_URL_PARAMETERS_IGNORED, parameters=list(parameters))
    if variables:
        log.warning(DATABASE_VARIABLES_IGNORED, variables=list(variables))


async def connect(
    url: str | None,
    *,
    application_name: str = "riverpy",
    session_settings: Mapping[str, str] | None = None,
    through_pooler: bool = False,
    timeout: float = CONNECT_TIMEOUT,
    url_setting_name: str = _DEFAULT_URL_SETTING_NAME,
    password: PasswordSource | None = None,
) -> Connection:
    """Open one connection.

    Args:
        url: the URL of the database. None: the environment variables `PG*` say where to connect.
        application_name: the name of the connection in `pg_stat_activity`.
        session_settings: settings of the session.
        through_pooler: whether the URL leads to a pooler in transaction mode. Then the connection
            has no settings and caches no statements.
        timeout: the timeout in seconds. A shorter `connect_timeout` of the URL applies instead.
        url_setting_name: the name of the setting that has the URL, for error texts.
        password: calls the user's password function. None: the password is in the URL or the
            environment.

    Raises:
        ConfigError: the URL is not valid, or leads to a pooler although `through_pooler` is False.
        ServerVersionError: the server is older than PostgreSQL 13.
        OSError, TimeoutError, PostgresError: the server does not answer, or refuses the connection.
            The text names the server.
    """
    target = _ConnectionTarget.from_url(url, password)
    timeout = min(timeout, target.connect_timeout or timeout)
    own_settings = {"application_name": application_name, **(session_settings or {})}
    with _translate_connect_errors(
        target, url_setting_name, timeout, through_pooler=through_pooler
    ):
        login = await target.fetch_password_option(timeout)
        with anyio.fail_after(timeout):
            connection = await _connect_to_first_host(
                target,
                timeout=timeout,
                **login,
                connection_class=ConnectionWithKnownArrayTypes,
                statement_cache_size=0 if through_pooler else 512,
                server_settings=None if through_pooler else own_settings,
            )
    with terminate_on_error(connection):
        check_server_version(connection)
    return connection


@contextmanager
def terminate_on_error(connection: Connection) -> Generator[None]:
    """Terminate the connection if the `with` block raises: no other code would close it."""
    try:
        yield
    except BaseException:
        connection.terminate()
        raise


@contextmanager
def _translate_connect_errors(
    target: _ConnectionTarget, url_setting_name: str, timeout: float, *, through_pooler: bool
) -> Generator[None]:
    """Replace errors of connecting with errors whose texts say what the user has to do."""
    try:
        yield
    except (ValueError, configparser.Error, asyncpg.InterfaceError) as error:
        # Only asyncpg's error texts may be shown: other texts may contain parts of the URL.
        is_asyncpg = isinstance(error, asyncpg.InterfaceError)
        reason = "a part of it, or a PG* variable, has a wrong value"
        reason = describe_error(error) if is_asyncpg else reason
        raise ConfigError(f"the {url_setting_name} cannot be used: {reason}") from None
    except asyncpg.ProtocolViolationError as error:
        if "startup parameter" not in str(error):
            raise
        remedy = _URL_PARAMETER_REMEDY if through_pooler else _UNDECLARED_POOLER_REMEDY
        raise ConfigError(
            f"the {url_setting_name} leads to a pooler that takes no settings of a session "
            f"({describe_error(error)}): {remedy}"
        ) from error
    except asyncpg.PostgresError as error:
        if error.sqlstate not in _REFUSED_SETTING_SQLSTATES:
            raise
        raise ConfigError(
            f"the {url_setting_name} has a parameter that the server refuses: "
            f"{describe_error(error)}. riverpy sends unknown parameters as settings of the "
            "session: correct or remove it"
        ) from error
    except OSError as error:
        raise _make_unreachable_error(error, target, url_setting_name, timeout) from error


async def _connect_to_first_host(
    target: _ConnectionTarget, *, timeout: float, **options: Any
) -> Connection:
    """Connect to the first host that answers and matches `target_session_attrs`. If a host does not
    answer within `NEXT_HOST_DELAY`, try the next host at the same time. asyncpg itself would keep
    waiting for the first host, but a machine that is down never answers."""
    addresses = target.server.addresses
    if len(addresses) < 2:
        return await asyncpg.connect(target.url, timeout=timeout, **options)
    connected: list[Connection] = []
    refusals: list[Exception] = []
    reasons: list[str] = []

    async def try_host(host: str, port: int, attempt_ended: anyio.Event) -> None:
        try:
            connection: Connection = await asyncpg.connect(
                target.url, host=host, port=port, timeout=timeout, **options
            )
        except _TRY_NEXT_HOST_ERRORS as error:
            reasons.append(_describe_connect_failure(error, target, timeout))
        except Exception as error:
            refusals.append(error)
            tasks.cancel_scope.cancel()
        else:
            connected.append(connection)
            tasks.cancel_scope.cancel()
        attempt_ended.set()

    try:
        async with anyio.create_task_group() as tasks:
            for host, port in addresses:
                ended = anyio.Event()
                tasks.start_soon(try_host, host, port, ended)
                with anyio.move_on_after(NEXT_HOST_DELAY):
                    await ended.wait()
        if connected:
            return connected.pop(0)
    finally:
        for connection in connected:  # several hosts may answer at once: close the others
            connection.terminate()
    if refusals:
        raise refusals[0]
    raise ConnectionError("; ".join(dict.fromkeys(reasons)))


def _describe_connect_failure(error: Exception, target: _ConnectionTarget, timeout: float) -> str:
    """Return the reason why no connection was made, as a text."""
    if isinstance(error, asyncpg.TargetServerAttributeNotMatched):
        return "it does not match target_session_attrs"
    if not isinstance(error, OSError):
        return describe_error(error)
    found = re.search(r"\[Errno (\d+)\]", str(error))
    missing = find_tls_file_problem(target.url) if isinstance(error, FileNotFoundError) else None
    if missing is not None:
        return missing
    if isinstance(error, TimeoutError):
        return f"no answer within {timeout:g} s"
    if isinstance(error, (ssl.SSLError, socket.gaierror)) or found is None:
        return error.strerror or str(error) or type(error).__name__
    return os.strerror(int(found[1])).lower()


def _make_unreachable_error(
    error: OSError, target: _ConnectionTarget, url_setting_name: str, timeout: float
) -> OSError:
    """Return an error of the same type as `error` whose text has the server and the reason."""
    reason = _describe_connect_failure(error, target, timeout)
    place = target.server.hosts
    if url_setting_name != _DEFAULT_URL_SETTING_NAME:
        place += f" (of {url_setting_name})"
    named = type(error)(f"cannot connect to {place}: {reason}")
    named.errno = error.errno
    return named


def check_server_version(connection: Transaction) -> None:
    """Raise ServerVersionError for a server that is older than PostgreSQL 13."""
    version = connection.get_server_version()
    if version.major < SERVER_VERSION_MIN:
        raise ServerVersionError(
            f"riverpy needs PostgreSQL {SERVER_VERSION_MIN} or newer, this server is "
            f"{version.major}"
        )


async def use_raw_timestamps(connection: Connection) -> None:
    """Read timestamps on this connection as integers: microseconds since 2000. This saves the
    conversion of timestamps that are not used. Statement arguments may be integers or datetimes."""
    await connection.set_type_codec(
        "timestamptz",
        schema="pg_catalog",
        encoder=_encode_timestamp,
        decoder=itemgetter(0),
        format="tuple",
    )


def _encode_timestamp(value: int | datetime) -> tuple[int]:
    return (value if isinstance(value, int) else encode_timestamp(value),)


async def close_connection(connection: Connection) -> None:
    """Close a connection. Terminate it if closing takes longer than `CONNECTION_CLOSE_TIMEOUT`."""
    with anyio.move_on_after(CONNECTION_CLOSE_TIMEOUT, shield=True), suppress(*DATABASE_ERRORS):
        await connection.close(timeout=CONNECTION_CLOSE_TIMEOUT)
        return
    connection.terminate()


class _ConnectionWithoutReset(ConnectionWithKnownArrayTypes):
    """A pool connection that is released without a reset of the session, because riverpy changes no
    settings of the session. If a cancelled call has left a transaction open, the release rolls it
    back. asyncpg's own reset would also report the open transaction to the event loop as an
    error."""

    async def reset(self, *, timeout: float | None = None) -> None:
        if self._top_xact is None and not self.is_in_transaction():
            return
        self._top_xact = None
        await self.execute("ROLLBACK", timeout=timeout)


async def create_pool(
    url: str | None,
    *,
    max_size: int,
    through_pooler: bool,
    command_timeout: float,
    password: PasswordSource | None = None,
) -> Pool:
    """Open a pool of up to `max_size` connections. First open one connection as a test. This raises
    the same errors as `connect`."""
    await close_connection(await connect(url, through_pooler=through_pooler, password=password))
    target = _ConnectionTarget.from_url(url, password)

    async def connect_to_first_host(_url: str, *, timeout: float, **options: Any) -> Connection:
        try:
            login = await target.fetch_password_option(timeout)
            return await _connect_to_first_host(target, timeout=timeout, **options, **login)
        except OSError as error:
            raise _make_unreachable_error(
                error, target, _DEFAULT_URL_SETTING_NAME, timeout
            ) from error

    connecting: Any = (
        connect_to_first_host  # asyncpg passes fewer arguments than its type stubs declare
    )
    pool: Pool = asyncpg.create_pool(
        target.url,
        connect=connecting,
        min_size=0,
        max_size=max_size,
        timeout=min(CONNECT_TIMEOUT, target.connect_timeout or CONNECT_TIMEOUT),
        command_timeout=command_timeout,
        connection_class=_ConnectionWithoutReset,
        statement_cache_size=0 if through_pooler else 512,
        server_settings=None if through_pooler else {"application_name": "riverpy"},
        max_inactive_connection_lifetime=300.0,
    )
    await pool
    return pool


async def close_pool(pool: Pool) -> bool:
    """Close the pool. If a connection is still in use after `CONNECTION_CLOSE_TIMEOUT`, terminate
    all connections and return False."""
    with anyio.move_on_after(CONNECTION_CLOSE_TIMEOUT, shield=True):
        with suppress(*DATABASE_ERRORS):  # after an error, asyncpg terminates all connections
            await pool.close()
        return True
    pool.terminate()
    return False


def is_pool(database: object) -> TypeIs[Pool]:
    """Whether `database` is an asyncpg pool."""
    return isinstance(database, asyncpg.Pool)


def is_asyncpg_connection(value: object) -> TypeGuard[Transaction]:
    """Whether `value` is a connection of asyncpg, from a pool or not."""
    return isinstance(value, (asyncpg.Connection, asyncpg.pool.PoolConnectionProxy))


def is_in_transaction(connection: Transaction) -> bool:
    """Whether the connection has an open transaction. A closed connection, or one that was released
    to its pool, has none."""
    try:
        return not connection.is_closed() and connection.is_in_transaction()
    except asyncpg.InterfaceError:
        return False


def is_closed_for_good(database: Pool | Transaction) -> bool:
    """Whether a pool or connection is closed, or a connection was released to its pool."""
    try:
        if isinstance(database, asyncpg.Pool):
            return database.is_closing()
        return database.is_closed()
    except asyncpg.InterfaceError:
        return True


class ServerWarning(NamedTuple):
    """A warning that the server sent over a connection."""

    source_file: str
    """The file of PostgreSQL's source code that raised the warning, such as `async.c`."""
    detail: str


@contextmanager
def collect_warnings(connection: Connection, warnings: list[ServerWarning]) -> Generator[None]:
    """During the `with` block, append to `warnings` the warnings that the server sends on this
    connection."""

    def append_warning(_connection: Any, message: Any) -> None:
        source = getattr(message, "server_source_filename", None) or ""
        warnings.append(ServerWarning(source, getattr(message, "detail", None) or ""))

    connection.add_log_listener(append_warning)
    try:
        yield
    finally:
        if not connection.is_closed():
            connection.remove_log_listener(append_warning)
