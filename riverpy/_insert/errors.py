"""Replaces database errors of inserts with riverpy errors. Their texts say how to solve the
problem."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from riverpy._names import SCHEMA_NAME_TOO_LONG_TEXT
from riverpy._postgres.driver import (
    DATABASE_ERRORS,
    describe_error,
    is_channel_name_too_long,
    is_closed_for_good,
    is_notification_queue_full,
    is_untranslatable_text_error,
)
from riverpy._postgres.transactions import TRANSACTION_ABORTED_ERROR_TEXT, get_pooler_remedy
from riverpy.errors import (
    ArgsError,
    ConfigError,
    JobDamagedError,
    SchemaMissingError,
    TransactionError,
    UniqueConflictError,
)

if TYPE_CHECKING:
    from collections.abc import Generator

    from riverpy._postgres.driver import Transaction

_TRANSACTION_ABORTED_SUFFIX = (
    ". The transaction given as tx is aborted: roll it back, or back to a savepoint"
)
_FAILED_TRANSACTION_SQLSTATE = "25P02"
_LIMIT_EXCEEDED_SQLSTATE = "54000"
_DATA_CORRUPTED_SQLSTATE = "XX001"
_ALLOCATION_FAILED_TEXT = "invalid memory alloc request size"
_PREPARED_STATEMENT_SQLSTATES = {"26000", "42P05"}
_SCHEMA_MISSING_SQLSTATES = {"42P01", "42P10", "42703", "42704", "42883", "3F000"}
_UNIQUE_INDEX_NAME = "river_job_unique_idx"


def sqlstate(error: BaseException) -> str | None:
    """Return the SQLSTATE of an error. Return None if the error does not come from the server."""
    return getattr(error, "sqlstate", None)


@contextmanager
def translate_insert_errors(
    tx: Transaction | None, *, in_savepoint: bool = False
) -> Generator[None]:
    """Replace database errors of the `with` block with riverpy errors if their cause is known.

    Args:
        tx: the caller's connection, or None. If it is set, the error text says that the error has
            aborted the caller's transaction.
        in_savepoint: whether the `with` block runs in a savepoint. Then an error does not abort the
            transaction, and the error text does not say so.
    """
    try:
        yield
    except DATABASE_ERRORS as error:
        suffix = "" if tx is None or in_savepoint else _TRANSACTION_ABORTED_SUFFIX
        translation = _translate_statement_error(error, suffix)
        translation = translation or _translate_connection_error(error, tx, suffix)
        if translation is None:
            raise
        raise translation from error


def make_insert_error(error: Exception) -> Exception:
    """Return a riverpy error for a database error whose cause is known. Return any other error
    unchanged."""
    if not isinstance(error, DATABASE_ERRORS):
        return error
    translation = _translate_statement_error(error, "")
    translation = translation or _translate_connection_error(error, None, "")
    if translation is None:
        return error
    translation.__cause__ = error
    return translation


@contextmanager
def translate_notify_channel_error() -> Generator[None]:
    """Raise ConfigError if the server rejects a notification of the `with` block because the schema
    name is too long."""
    try:
        yield
    except DATABASE_ERRORS as error:
        if not is_channel_name_too_long(error):
            raise
        raise _make_channel_name_error(error) from error


def _make_channel_name_error(error: Exception, suffix: str = "") -> ConfigError:
    return ConfigError(
        f"{SCHEMA_NAME_TOO_LONG_TEXT}: nothing was stored ({describe_error(error)}){suffix}"
    )


def _translate_statement_error(error: Exception, suffix: str) -> Exception | None:
    """Return a riverpy error if the statement or its data caused the database error. Otherwise
    return None. The error text ends with `suffix`."""
    code = sqlstate(error)
    if code in _SCHEMA_MISSING_SQLSTATES:
        return SchemaMissingError(
            f"River's tables are missing or too old ({describe_error(error)}): run `riverpy "
            f"migrate up`, or set Config(schema=...) to the schema that has them{suffix}"
        )
    if is_channel_name_too_long(error):
        return _make_channel_name_error(error, suffix)
    # The error for a full notification queue has the same SQLSTATE as the error for too large args.
    if is_notification_queue_full(error):
        return None
    if code == _LIMIT_EXCEEDED_SQLSTATE or _ALLOCATION_FAILED_TEXT in str(error):
        return ArgsError(
            f"the args or metadata are too large for PostgreSQL: {describe_error(error)}{suffix}"
        )
    if code == _DATA_CORRUPTED_SQLSTATE:
        return JobDamagedError(
            "nothing was inserted: the server cannot read the existing job with the same unique "
            f"key ({describe_error(error)}). `riverpy job list` shows its id{suffix}"
        )
    if is_untranslatable_text_error(error):
        return ArgsError(
            "a text of these jobs has a character that the encoding of the database, or the "
            f"client_encoding of the connection, lacks ({describe_error(error)}): leave it out, or "
            f"use UTF8 for both{suffix}"
        )
    if getattr(error, "constraint_name", None) == _UNIQUE_INDEX_NAME:
        return UniqueConflictError(
            "a job with the same unique key exists, or two jobs of the batch have the same key; "
            f"no job was inserted ({getattr(error, 'detail', None)}). insert_many skips duplicates"
        )
    return None


def _translate_connection_error(
    error: Exception, tx: Transaction | None, suffix: str
) -> Exception | None:
    """Return a riverpy error if the connection or the transaction caused the database error.
    Otherwise return None."""
    code = sqlstate(error)
    if code in _PREPARED_STATEMENT_SQLSTATES:
        remedy = "set Config(pooler=True)" if tx is None else get_pooler_remedy(tx)
        return ConfigError(
            "a prepared statement is missing on the server, so the database URL seems to lead to a "
            f"pooler in transaction mode: {remedy}{suffix}"
        )
    if tx is not None and code == _FAILED_TRANSACTION_SQLSTATE:
        return TransactionError(TRANSACTION_ABORTED_ERROR_TEXT)
    if tx is not None and is_closed_for_good(tx):
        return TransactionError(
            "the connection given as tx was lost, and its transaction was rolled back: "
            f"{describe_error(error)}"
        )
    return None
