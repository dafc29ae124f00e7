"""What the tests of the dashboard share: a browser without JavaScript, and jobs to look at."""

from __future__ import annotations

import re
from contextlib import asynccontextmanager
from html import unescape
from typing import TYPE_CHECKING, Any

import httpx

from riverpy import Client, Config
from riverpy.web import Access, dashboard

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.requests import Request
    from starlette.types import ASGIApp

    from tests._database import Schema

LOCAL = "http://localhost:8080"
SAME_SITE = {"Sec-Fetch-Site": "same-origin"}


class Browser(httpx.AsyncClient):
    """Sends requests to an application, and keeps cookies, as a browser without JavaScript."""

    def __init__(self, app: ASGIApp, *, base_url: str = LOCAL, peer: str = "127.0.0.1") -> None:
        transport = httpx.ASGITransport(app=app, client=(peer, 1234), raise_app_exceptions=True)
        super().__init__(transport=transport, base_url=base_url)

    async def see(self, path: str, *, status: int = 200) -> str:
        """Return the text of a page."""
        answer = await self.get(path)
        assert answer.status_code == status, answer.text
        return answer.text

    async def submit(self, page: str, path: str, **fields: Any) -> httpx.Response:
        """Send the form of a page, with its token, and follow a redirection."""
        found = re.search(r'name="token" value="([^"]*)"', page)
        token = unescape(found[1]) if found else ""
        data = {"token": token, **fields}
        return await self.post(path, data=data, headers=SAME_SITE, follow_redirects=True)


async def insert_job(schema: Schema, state: str = "available", **columns: str) -> int:
    """Insert a job. The values of the columns are SQL. Return its id."""
    values = {"kind": "'k'", "args": "'{}'", "max_attempts": "25", **columns}
    if state in {"completed", "cancelled", "discarded"}:
        values.setdefault("finalized_at", "now()")
    return await schema.fetchval(
        f"INSERT INTO river_job (state, {', '.join(values)})"
        f" VALUES ('{state}', {', '.join(values.values())}) RETURNING id"
    )


async def insert_client(schema: Schema, client_id: str, **columns: str) -> None:
    """Register a client with a heartbeat of now. The values of the columns are SQL."""
    values = {
        "queues": "array['default']",
        "kinds": "array['k']",
        "candidate": "true",
        "poll_only": "false",
        "version": "'1'",
        "dead_after": "interval '1 hour'",
        **columns,
    }
    await schema.execute(
        f"INSERT INTO riverpy_client (client_id, {', '.join(values)})"
        f" VALUES ($1, {', '.join(values.values())})",
        client_id,
    )


async def insert_queue(schema: Schema, name: str, *, is_paused: bool = False) -> None:
    """Insert the row of a queue, which no client has updated for a day."""
    await schema.execute(
        "INSERT INTO river_queue (name, updated_at, paused_at)"
        " VALUES ($1, now() - interval '1 day', CASE WHEN $2 THEN now() - interval '2 h' END)",
        name,
        is_paused,
    )


@asynccontextmanager
async def open_site(schema: Schema) -> AsyncGenerator[Browser]:
    """A browser at a dashboard. The query parameter `as` of a page chooses the user's rights."""

    def authorize(request: Request) -> Any:
        return "read" if request.query_params.get("as") == "read" else Access("write", user="ann")

    config = Config(schema=schema.name, pool_size=2)
    async with (
        Client(schema.url, config=config) as client,
        Browser(dashboard(client, authorize=authorize)) as browser,
    ):
        yield browser
