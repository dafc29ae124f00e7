"""SqlAlchemyDatabase: opens transactions of a blocking client on a SQLAlchemy engine."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from riverpy._postgres.sessions.errors import make_asyncpg_error
from riverpy._postgres.sessions.sqlalchemy import SqlAlchemySession
from riverpy.sync._database import (
    BlockingDatabase,
    make_connect_error,
    translate_context_manager_errors,
)

if TYPE_CHECKING:
    from collections.abc import Generator

    from sqlalchemy import Connection, Engine

    from riverpy.sync._database import Isolation


class SqlAlchemyDatabase(BlockingDatabase):
    """Opens the transactions of a blocking client on the caller's SQLAlchemy engine. Never closes
    the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @contextmanager
    def transaction(self, isolation: Isolation) -> Generator[SqlAlchemySession]:
        opened = translate_context_manager_errors(
            _connect(self._engine), SQLAlchemyError, _translate_error, _translate_connect_error
        )
        with opened as connection:
            if isolation is None and getattr(
                connection.connection.dbapi_connection, "autocommit", False
            ):
                isolation = "read_committed"  # with AUTOCOMMIT, the engine has no transactions
            if isolation is not None:
                level = isolation.replace("_", " ").upper()
                connection = connection.execution_options(isolation_level=level)
            with translate_context_manager_errors(
                connection.begin(), SQLAlchemyError, _translate_error
            ):
                yield SqlAlchemySession(connection)


@contextmanager
def _connect(engine: Engine) -> Generator[Connection]:
    """Return a context manager that connects when it is entered. `engine.connect()` connects
    earlier, when it is called, so that its errors would not be translated."""
    with engine.connect() as connection:
        yield connection


def _translate_error(error: SQLAlchemyError) -> Exception:
    is_lost = isinstance(error, DBAPIError) and error.connection_invalidated
    return make_asyncpg_error(error, is_connection_closed=is_lost)


def _translate_connect_error(error: SQLAlchemyError) -> Exception:
    if isinstance(error, DBAPIError):
        return make_connect_error(error.orig or error)
    return make_connect_error(error) if isinstance(error, PoolTimeoutError) else error
