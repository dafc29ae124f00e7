"""Converts errors of other libraries to errors of asyncpg. The rest of riverpy handles only
asyncpg's errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from riverpy._postgres.driver import (
    DATABASE_ERRORS,
    ConnectionDoesNotExistError,
    InterfaceError,
    PostgresError,
)
from riverpy.errors import ArgsError

if TYPE_CHECKING:
    from collections.abc import Iterator

_PSYCOPG_NAME_BY_FIELD = {
    "S": "severity",
    "V": "severity_nonlocalized",
    "C": "sqlstate",
    "M": "message_primary",
    "D": "message_detail",
    "H": "message_hint",
    "P": "statement_position",
    "W": "context",
    "s": "schema_name",
    "t": "table_name",
    "c": "column_name",
    "d": "datatype_name",
    "n": "constraint_name",
    "F": "source_file",
    "L": "source_line",
    "R": "source_function",
}
"""The attribute of psycopg's `Diagnostic` for each field of an error. The key is the field's code
in PostgreSQL's protocol."""
_ASYNCPG_NAME_BY_FIELD = {
    "C": "sqlstate",
    "M": "message",
    "D": "detail",
    "H": "hint",
    "s": "schema_name",
    "t": "table_name",
    "n": "constraint_name",
    "F": "server_source_filename",
    "R": "server_source_function",
}
"""The attribute of asyncpg's errors for each field of an error. The key is the field's code in
PostgreSQL's protocol."""


class LoginRefusedError(ConnectionError):
    """The server has refused the login. Another try would fail too."""


def make_encoding_error(error: UnicodeEncodeError) -> ArgsError:
    """Return the error for a text that the driver cannot send."""
    return ArgsError(
        "a text has a character that the client_encoding of the connection given as tx lacks "
        f"({error.encoding}), so nothing was sent: set client_encoding to UTF8"
    )


def make_asyncpg_error(error: BaseException, *, is_connection_closed: bool) -> Exception:
    """Return asyncpg's error for an error of psycopg, SQLAlchemy or Django. An error of the server
    keeps its SQLSTATE, text, detail and constraint."""
    for cause in _iterate_causes(error):
        if isinstance(cause, PostgresError):
            # Make a new error, because the caller raises the result from `error`. `cause` is one of
            # the causes of `error`, so `raise cause from error` would make a cycle.
            return PostgresError.new(_read_error_fields(cause, _ASYNCPG_NAME_BY_FIELD))
        diagnostic = getattr(cause, "diag", None)
        if diagnostic is not None and getattr(diagnostic, "sqlstate", None):
            return PostgresError.new(_read_error_fields(diagnostic, _PSYCOPG_NAME_BY_FIELD))
    original = next(_iterate_driver_errors(error), error)
    text = " ".join(str(original).split()) or type(original).__name__
    if is_connection_closed:
        return ConnectionDoesNotExistError(text)
    return InterfaceError(text)


def _read_error_fields(source: object, names: dict[str, str]) -> dict[str, Any]:
    fields = ((field, getattr(source, name, None)) for field, name in names.items())
    return {field: value for field, value in fields if value is not None}


def _iterate_driver_errors(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes, but only errors of the driver. Their texts are safe to show.
    The text of an error of SQLAlchemy also contains the statement and its values."""
    for cause in _iterate_causes(error):
        if isinstance(cause, DATABASE_ERRORS) or type(cause).__module__.startswith("psycopg"):
            yield cause


def _iterate_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = getattr(cause, "orig", None) or cause.__cause__
