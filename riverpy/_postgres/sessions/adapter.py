"""Chooses the adapter for a connection or session that a caller passes as `tx=`. This module
imports no library that the caller has not imported."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from riverpy._postgres.sessions.session import CallerSession
from riverpy._without_loop import is_without_loop

if TYPE_CHECKING:
    from collections.abc import Callable

ASYNC_TX_TYPES_TEXT = (
    "an asyncpg connection, a psycopg AsyncConnection or AsyncCursor, or a SQLAlchemy "
    "AsyncSession, AsyncConnection or async_scoped_session"
)
BLOCKING_TX_TYPES_TEXT = (
    "a psycopg Connection or Cursor, a SQLAlchemy Session, Connection or scoped_session, or a "
    "connection of Django or its alias"
)
_ADAPTER_MODULES = {"sqlalchemy": "sqlalchemy", "psycopg": "psycopg", "django": "django"}
"""The names of the adapter modules in this package, by name of the library's package.

A module has the function `adapt(tx)`, which returns the adapter of `tx`, or None for an object that
the module does not know. A module is imported when a caller passes an object of its library.
"""
_DJANGO_ALIAS_MODULE = "django"
"""The name of the adapter module for a str that a caller passes as `tx` to a blocking client. The
str is an alias of Django's DATABASES. The module is used only if the program has imported
`django.db`."""
_HINT_BY_CLASS_NAME = {
    "AsyncEngine": "open a session or connection of the engine: `async with engine.begin() as tx:`",
    "Engine": "open a session or connection of the engine: `with engine.begin() as tx:`",
    "async_sessionmaker": "make a session: `async with sessionmaker.begin() as tx:`",
    "sessionmaker": "make a session: `with sessionmaker.begin() as tx:`",
    "coroutine": "await it first",
    "AsyncTransaction": "pass its connection",
    "AsyncSessionTransaction": "pass its session",
    "AsyncConnectionPool": "take a connection: `async with pool.connection() as tx:`",
    "AsyncNullConnectionPool": "take a connection: `async with pool.connection() as tx:`",
    "ConnectionPool": "take a connection: `with pool.connection() as tx:`",
    "NullConnectionPool": "take a connection: `with pool.connection() as tx:`",
    "Pool": "take a connection: `async with pool.acquire() as tx, tx.transaction():`",
    "connection": "a connection of psycopg2 is accepted through SQLAlchemy only",
    "cursor": "a connection of psycopg2 is accepted through SQLAlchemy only",
}
"""Advice for callers that pass an object of a wrong class as `tx`, by name of the class. Callers
confuse objects of these classes with connections and sessions."""


def adapt_session(tx: object) -> CallerSession | None:
    """Return the adapter of a connection or session, or `tx` itself if it is an adapter. Return
    None if riverpy does not know the type of `tx`."""
    if isinstance(tx, CallerSession):
        return tx
    if isinstance(tx, str):
        is_alias = "django.db" in sys.modules and is_without_loop()
        return _adapt_with_module(_DJANGO_ALIAS_MODULE, tx) if is_alias else None
    for base in type(tx).__mro__:
        module_name = _ADAPTER_MODULES.get(base.__module__.partition(".")[0])
        if module_name is not None:
            return _adapt_with_module(module_name, tx)
    return None


def _adapt_with_module(module_name: str, tx: object) -> CallerSession | None:
    module = import_module(f"riverpy._postgres.sessions.{module_name}")
    adapt: Callable[[object], CallerSession | None] = module.adapt
    return adapt(tx)


def describe_wrong_type(tx: object) -> str:
    """Return the name of the type of `tx`, for an error text. If it is a type that callers confuse
    with a connection, add what to do instead."""
    name = type(tx).__name__
    hints = [
        _HINT_BY_CLASS_NAME[base.__name__]
        for base in type(tx).__mro__
        if base.__name__ in _HINT_BY_CLASS_NAME
    ]
    return f"{name}: {hints[0]}" if hints else name
