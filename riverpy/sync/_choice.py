"""Chooses the class that opens transactions for a blocking client, from the type of the given
database. SQLAlchemy and psycopg are imported only if they are used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from riverpy._dsn import validate_url
from riverpy._postgres.driver import is_pool
from riverpy._postgres.passwords import make_password_source
from riverpy.errors import ConfigError

if TYPE_CHECKING:
    from riverpy._postgres.passwords import PasswordFunction
    from riverpy.config import Config
    from riverpy.sync._database import BlockingDatabase

_ASYNC_CLASS_NAMES = (
    "AsyncEngine",
    "AsyncConnectionPool",
    "AsyncNullConnectionPool",
    "AsyncConnection",
)


def make_blocking_database(
    database: object, config: Config, password: PasswordFunction | None
) -> BlockingDatabase | None:
    """Return the object that opens transactions on `database` for a blocking client. Return None if
    `database` is None.

    Raises:
        ConfigError: the type of `database` is not supported, the URL is not valid, or psycopg is
            not installed.
    """
    password_source = make_password_source(password, database)
    if database is None:
        return None
    if isinstance(database, str):
        validate_url(database)
        _require_psycopg()
        from riverpy.sync._url_pool import UrlPoolDatabase

        return UrlPoolDatabase(
            database,
            size=config.pool_size,
            through_pooler=config.pooler,
            password=password_source,
        )
    found = _wrap_engine_pool_or_connection(database)
    if found is None:
        raise ConfigError(
            "the database is a postgres:// URL, an Engine of SQLAlchemy, or a ConnectionPool or "
            f"Connection of psycopg, got {_describe_unsupported_database(database)}"
        )
    return found


def _require_psycopg() -> None:
    try:
        import_module("psycopg")
    except ImportError as error:
        raise ConfigError(
            "riverpy.sync.Client needs psycopg 3 for a URL: pip install 'riverpy-queue[psycopg]', "
            "or give the client an Engine of SQLAlchemy"
        ) from error


def _wrap_engine_pool_or_connection(database: object) -> BlockingDatabase | None:
    packages = {base.__module__.partition(".")[0] for base in type(database).__mro__}
    if "sqlalchemy" in packages:
        from sqlalchemy import Engine

        from riverpy.sync._engine import SqlAlchemyDatabase

        return SqlAlchemyDatabase(database) if isinstance(database, Engine) else None
    if "psycopg" in packages:
        import psycopg

        from riverpy.sync._psycopg import PsycopgConnectionDatabase

        if isinstance(database, psycopg.Connection):
            return PsycopgConnectionDatabase(cast("psycopg.Connection[Any]", database))
    if "psycopg_pool" in packages:
        from psycopg_pool import ConnectionPool

        from riverpy.sync._psycopg import PsycopgPoolDatabase

        if isinstance(database, ConnectionPool):
            return PsycopgPoolDatabase(cast("Any", database))
    return None


def _describe_unsupported_database(database: object) -> str:
    name = type(database).__name__
    if is_pool(database) or name in _ASYNC_CLASS_NAMES:
        return f"{name}, which is async: use riverpy.Client for it"
    if name in {"Session", "scoped_session", "Connection"}:
        return f"{name}: pass it as tx= of each call, and give the client its engine or nothing"
    return name
