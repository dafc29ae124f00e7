"""Records the statements that riverpy's connections send."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import asyncpg

if TYPE_CHECKING:
    import pytest


class Sent(NamedTuple):
    """A statement, and the name of its connection."""

    connection: str
    text: str


def record_statements(monkeypatch: pytest.MonkeyPatch, prefix: str = "riverpy") -> list[Sent]:
    """Return a list that receives all statements of new connections whose names have this
    prefix."""
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
