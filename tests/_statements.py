"""What riverpy's connections send, statement by statement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import asyncpg

if TYPE_CHECKING:
    import pytest


class Sent(NamedTuple):
    """A statement, and the name of the connection that it was sent over."""

    connection: str
    text: str


def record_statements(monkeypatch: pytest.MonkeyPatch, prefix: str = "riverpy") -> list[Sent]:
    """All that is sent from now on over new connections whose name begins so, as it is sent."""
    sent: list[Sent] = []
    connect = asyncpg.connect

    async def recorded(*args: Any, **options: Any) -> Any:
        connection = await connect(*args, **options)
        name = (options.get("server_settings") or {}).get("application_name", "")
        if name.startswith(prefix):
            connection.add_query_logger(lambda query: sent.append(Sent(name, query.query)))
        return connection

    monkeypatch.setattr(asyncpg, "connect", recorded)
    return sent
