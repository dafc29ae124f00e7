"""What errors of the database mean at an insert, and what can be done about them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from riverpy._names import SCHEMA_TOO_LONG
from riverpy._postgres.driver import (
    DATABASE_ERRORS,
    describe,
    is_channel_too_long,
    is_closed_for_good,
    is_notification_queue_full,
    is_untranslatable,
)
from riverpy._postgres.transactions import ABORTED
from riverpy.errors import (
    ArgsError,
    ConfigError,
    JobDamagedError,
    SchemaMissingError,
    TransactionError,
)

if TYPE_CHECKING:
    from collections.abc import Generator

    from riverpy._postgres.driver import Transaction

_NOW = ". The transaction given as tx is aborted: roll it back, or back to a savepoint"
_IN_FAILED_TRANSACTION = "25P02"
_TOO_LARGE = "54000"
_DAMAGED = "XX001"
_NO_MEMORY = "invalid memory alloc request size"
_STATEMENT_LOST = {"26000", "42P05"}
_SCHEMA_MISSING = {"42P01", "42P10", "42703", "42704", "42883", "3F000"}


def sqlstate(error: BaseException) -> str | None:
    """The server's code of an error; None: it is none of the server's."""
    return getattr(error, "sqlstate", None)


@contextmanager
def translated(tx: Transaction | None, *, in_savepoint: bool = False) -> Generator[None]:
    """Raise errors of the database as ours where it is known what to do about them.

    Args:
        tx: what the caller gave, whose transaction an error of the server aborts.
        in_savepoint: the transaction is usable again: a savepoint was rolled back.
    """
    try:
        yield
    except DATABASE_ERRORS as error:
        if (meaning := _meaning(error, tx, "" if tx is None or in_savepoint else _NOW)) is None:
            raise
        raise meaning from error


@contextmanager
def channel_named() -> Generator[None]:
    """Raise ConfigError where a notification is refused because the schema has too long a name."""
    try:
        yield
    except DATABASE_ERRORS as error:
        if not is_channel_too_long(error):
            raise
        raise _channel_error(error) from error


def _channel_error(error: Exception, aborted: str = "") -> ConfigError:
    return ConfigError(f"{SCHEMA_TOO_LONG}: nothing was stored ({describe(error)}){aborted}")


def _meaning(error: Exception, tx: Transaction | None, aborted: str) -> Exception | None:
    """Our error. `aborted` says what became of the caller's transaction."""
    code = sqlstate(error)
    if code in _SCHEMA_MISSING:
        return SchemaMissingError(
            f"River's tables are missing or too old ({describe(error)}): run `riverpy migrate up`, "
            f"or set Config(schema=...) to the schema that has them{aborted}"
        )
    if is_channel_too_long(error):
        return _channel_error(error, aborted)
    if is_notification_queue_full(error):  # of the same class as what is too large
        return None
    if code == _TOO_LARGE or _NO_MEMORY in str(error):
        return ArgsError(
            f"PostgreSQL cannot store args or metadata of this size: {describe(error)}{aborted}"
        )
    if code == _DAMAGED:
        return JobDamagedError(
            "nothing was inserted: the server cannot read the job that has the unique key "
            f"({describe(error)}). `riverpy job list` names it{aborted}"
        )
    if is_untranslatable(error):
        return ArgsError(
            "a text of these jobs has a character that the encoding of the database lacks "
            f"({describe(error)}): leave it out, or use a database with encoding UTF8{aborted}"
        )
    if code in _STATEMENT_LOST:
        remedy = (
            "set Config(pooler=True)"
            if tx is None
            else "connect with statement_cache_size=0 what is given as tx"
        )
        return ConfigError(
            "the session is not the one that its statements were prepared in, so a pooler in "
            f"transaction mode stands before it: {remedy}{aborted}"
        )
    if tx is None:
        return None
    if code == _IN_FAILED_TRANSACTION:
        return TransactionError(ABORTED)
    if is_closed_for_good(tx):
        return TransactionError(
            f"the connection given as tx was lost, and its transaction with it: {describe(error)}"
        )
    return None
