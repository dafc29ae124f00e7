"""What errors of the database mean at an insert, and what can be done about them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from riverpy.drivers.asyncpg import (
    DATABASE_ERRORS,
    InterfaceError,
    describe,
    is_notification_queue_full,
)
from riverpy.errors import (
    ArgsError,
    ConfigError,
    DatabaseError,
    SchemaMissingError,
    TransactionError,
)

if TYPE_CHECKING:
    from collections.abc import Generator

    from riverpy.drivers.asyncpg import Transaction

_IN_FAILED_TRANSACTION = "25P02"
_TOO_LARGE = "54000"
_NO_MEMORY = "invalid memory alloc request size"
_STATEMENT_LOST = {"26000", "42P05"}
_SCHEMA_MISSING = {"42P01", "42P10", "42703", "42704", "42883", "3F000"}


def sqlstate(error: BaseException) -> str | None:
    """The server's code of an error; None: it is none of the server's."""
    return getattr(error, "sqlstate", None)


def check_open(tx: Transaction) -> None:
    """Raise TransactionError if it is closed."""
    if _is_closed(tx):
        raise TransactionError(
            "the connection given as tx is closed or back in its pool: nothing was inserted"
        )


def _is_closed(tx: Transaction) -> bool:
    try:
        return tx.is_closed()
    except InterfaceError:  # a pool has it back
        return True


@contextmanager
def translated(tx: Transaction | None) -> Generator[None]:
    """Raise errors of the database as ours where it is known what to do about them."""
    try:
        yield
    except DATABASE_ERRORS as error:
        if (meaning := _meaning(error, tx)) is None:
            raise
        raise meaning from error


def _meaning(error: Exception, tx: Transaction | None) -> Exception | None:
    code = sqlstate(error)
    if code in _SCHEMA_MISSING:
        return SchemaMissingError(
            f"River's tables are missing or too old ({describe(error)}): run `riverpy migrate up`, "
            "or set Config(schema=...) to the schema that has them"
        )
    if is_notification_queue_full(error):
        if tx is None:
            return None
        return DatabaseError(
            "the commit was refused, since the server's queue of notifications is full: "
            "`riverpy doctor` names the session that holds it back; a client with "
            "Config(insert_notify=False) inserts without notifications"
        )
    if code == _TOO_LARGE or _NO_MEMORY in str(error):
        return ArgsError(
            f"PostgreSQL cannot store args or metadata of this size: {describe(error)}"
        )
    if code in _STATEMENT_LOST:
        remedy = (
            "set Config(pooler=True)"
            if tx is None
            else "connect with statement_cache_size=0 what is given as tx"
        )
        return ConfigError(
            "the session is not the one that its statements were prepared in, so a pooler in "
            f"transaction mode stands before it: {remedy}"
        )
    if tx is None:
        return None
    if code == _IN_FAILED_TRANSACTION:
        return TransactionError(
            "the transaction given as tx is aborted by an earlier error, so nothing was inserted: "
            "roll it back, or back to a savepoint from before that error"
        )
    if _is_closed(tx):
        return TransactionError(
            f"the connection given as tx was lost, and its transaction with it: {describe(error)}"
        )
    return None
