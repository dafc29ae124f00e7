"""Chooses the adapter of a caller's connection or session. It imports no library that the caller
has not imported."""

from __future__ import annotations

from riverpy._postgres.sessions.session import CallerSession

ACCEPTED_TEXT = (
    "an asyncpg connection, a psycopg AsyncConnection or AsyncCursor, or a SQLAlchemy "
    "AsyncSession, AsyncConnection or async_scoped_session"
)
_HINTS = {
    "AsyncEngine": "open a session or connection of the engine: `async with engine.begin() as tx:`",
    "async_sessionmaker": "make a session: `async with sessionmaker.begin() as tx:`",
    "coroutine": "await it first",
    "AsyncTransaction": "pass its connection",
    "AsyncSessionTransaction": "pass its session",
    "AsyncConnectionPool": "take a connection: `async with pool.connection() as tx:`",
    "AsyncNullConnectionPool": "take a connection: `async with pool.connection() as tx:`",
    "Pool": "take a connection: `async with pool.acquire() as tx, tx.transaction():`",
    **dict.fromkeys(
        ("Engine", "Session", "scoped_session", "sessionmaker", "Connection", "Cursor"),
        "an async client takes the async kind of it only",
    ),
}
"""What to do instead, for objects that callers confuse with their connection. The keys are names of
classes."""


def adapt_session(tx: object) -> CallerSession | None:
    """Return the adapter of a connection or session, which may be an adapter already. None: riverpy
    does not know its type."""
    if isinstance(tx, CallerSession):
        return tx
    for base in type(tx).__mro__:
        package = base.__module__.partition(".")[0]
        if package == "sqlalchemy":
            from riverpy._postgres.sessions import sqlalchemy

            return sqlalchemy.adapt(tx)
        if package == "psycopg":
            from riverpy._postgres.sessions import psycopg

            return psycopg.adapt(tx)
    return None


def describe_wrong_type(tx: object) -> str:
    """Return the name of the object's type and, if it is known, what to pass instead."""
    name = type(tx).__name__
    hints = [_HINTS[base.__name__] for base in type(tx).__mro__ if base.__name__ in _HINTS]
    return f"{name}: {hints[0]}" if hints else name
