"""SharedPoolConnection: one pool connection at a time for all waits and subscriptions of a
client."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio

from riverpy._insert.errors import make_insert_error
from riverpy._postgres.driver import InsufficientPrivilegeError
from riverpy.errors import DatabaseError, SchemaMissingError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from riverpy._postgres.driver import Pool, Transaction


class SharedPoolConnection:
    """Lends one connection of the client's pool at a time, for the statements of all waits and
    subscriptions of the client. Between two uses, the connection is in the pool."""

    def __init__(self, get_pool: Callable[[], Pool]) -> None:
        """`get_pool` returns the pool of the open client, or raises ClientStateError."""
        self._get_pool = get_pool
        self._lock = anyio.Lock()

    @asynccontextmanager
    async def acquire(self, purpose: str, timeout: float) -> AsyncGenerator[Transaction]:
        """Acquire the connection for the `async with` block. Raise TimeoutError if the wait for the
        connection and the block together take longer than `timeout` seconds. The text of the error
        begins with `purpose`."""
        reason = f"{purpose} took longer than {timeout:.3g} s"
        with anyio.fail_after(timeout, reason=reason):
            async with self._lock, self._get_pool().acquire() as connection:
                yield connection


def make_read_error(error: Exception) -> Exception:
    """Return the error to raise after a read of jobs failed with `error`. If a privilege or River's
    tables are missing, the result explains this. Otherwise it is `error` itself."""
    if not isinstance(error, InsufficientPrivilegeError):
        translated = make_insert_error(error)
        return translated if isinstance(translated, SchemaMissingError) else error
    explained = DatabaseError(
        f"the role of the client may not read jobs: {error}. Execute GRANT SELECT ON river_job TO "
        "this role, as the owner of the table (docs/grants.md)"
    )
    explained.__cause__ = error
    return explained
