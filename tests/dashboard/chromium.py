"""The dashboard, and a page of a headless Chromium that opens it."""

from __future__ import annotations

import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio
import uvicorn
from playwright.async_api import expect

from riverpy import Client, Config
from riverpy.web import dashboard
from tests.kit.chromium import running_chromium

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from playwright.async_api import Page

    from tests._database import Schema

PATIENCE_MS = 60_000
expect.set_options(timeout=PATIENCE_MS)


@asynccontextmanager
async def serving_dashboard(schema: Schema, url: str | None = None) -> AsyncGenerator[str]:
    """A dashboard of a schema, and its address. `url` is another URL of the database."""
    config = Config(schema=schema.name, pool_size=3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with Client(url or schema.url, config=config) as client:
            server = uvicorn.Server(
                uvicorn.Config(dashboard(client), log_config=None, timeout_graceful_shutdown=5)
            )
            ended = anyio.Event()

            async def serve() -> None:
                await server.serve([listener])
                ended.set()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(serve)
                try:
                    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
                finally:
                    server.should_exit = True
                    # Otherwise a failure of the test leaves an open server, and its loop hangs.
                    with anyio.move_on_after(10, shield=True):
                        await ended.wait()


@asynccontextmanager
async def opening_page(
    *, width: int = 320, has_script: bool = True, expected_error: str = "status of 40"
) -> AsyncGenerator[Page]:
    """A page of a new browser. No script may fail in it, and nothing may be blocked. Errors of the
    console with the text `expected_error` are ignored; its default is that of error pages."""
    faults: list[str] = []
    async with running_chromium() as browser:
        context = await browser.new_context(
            java_script_enabled=has_script, viewport={"width": width, "height": 700}
        )
        page = await context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on(
            "console",
            lambda line: (
                faults.append(line.text)
                if line.type == "error" and expected_error not in line.text
                else None
            ),
        )
        yield page
        await context.close()
    assert faults == []
