"""Limits for retries of inserts without `tx`, and functions that decide whether an error allows a
retry."""

from __future__ import annotations

from datetime import timedelta

from riverpy._insert.errors import sqlstate
from riverpy._postgres.driver import DATABASE_ERRORS
from riverpy._postgres.sessions.errors import LoginRefusedError

ACQUIRE_CONNECTION_TIMEOUT = 10.0
"""The longest time that an insert waits for a connection, in seconds. If the database is
unavailable, for example because the server is starting, the insert retries within this time."""
POOL_STATEMENT_TIMEOUT = 30.0
"""The timeout of one statement of an insert without `tx`, in seconds."""
CONNECT_RETRY_DELAY_MIN, CONNECT_RETRY_DELAY_MAX = timedelta(milliseconds=50), timedelta(seconds=1)
ROLLBACK_RETRIES_MAX = 10
"""The maximum number of retries of an insert without `tx`, if the server rolls the insert back."""
ROLLBACK_RETRY_DELAY_MIN = timedelta(milliseconds=5)
ROLLBACK_RETRY_DELAY_MAX = timedelta(milliseconds=200)
_ROLLBACK_SQLSTATES = {"40001", "40P01"}
"""The error codes of a serialization failure and of a deadlock."""
_UNAVAILABLE_SQLSTATES = {"53300", "57P03"}
"""The error codes of too many connections, and of a server that starts or stops."""


def is_database_unavailable(error: BaseException) -> bool:
    """Return whether a connection attempt failed for a reason that may end soon, for example
    because the server is starting."""
    if not isinstance(error, DATABASE_ERRORS):
        return False
    if isinstance(error, OSError):
        return not isinstance(error, LoginRefusedError)
    return sqlstate(error) in _UNAVAILABLE_SQLSTATES


def is_rolled_back_for_conflict(error: BaseException) -> bool:
    """Return whether the server rolled a statement back because it conflicted with another
    session."""
    return sqlstate(error) in _ROLLBACK_SQLSTATES
