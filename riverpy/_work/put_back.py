"""Giving claimed attempts back over a connection of its own: the last thing a process does before
it dies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from riverpy._db.jobs import job_put_back
from riverpy.drivers.asyncpg import connect, use_raw_timestamps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from riverpy._db.jobs import Stamp

PUT_BACK_TIMEOUT = 2.0
"""Seconds for all of it."""


async def put_back(
    url: str | None, schema: str | None, stamps: Sequence[Stamp], *, pooled: bool
) -> int:
    """Make the attempts available again without counting them; returns how many were.

    Raises:
        Exception: one of DATABASE_ERRORS.
    """
    if not stamps:
        return 0
    with anyio.fail_after(PUT_BACK_TIMEOUT, reason="putting jobs back"):
        connection = await connect(
            url,
            application_name="riverpy put back",
            settings={"lock_timeout": "500ms"},
            pooled=pooled,
            timeout=PUT_BACK_TIMEOUT,
        )
        try:
            await use_raw_timestamps(connection)
            return len(await job_put_back(connection, schema, stamps))
        finally:
            connection.terminate()
