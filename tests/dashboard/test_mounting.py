"""The dashboard in applications of frameworks, below a path of its own."""

from __future__ import annotations

import re
from html import unescape
from typing import TYPE_CHECKING

import pytest
from fastapi import FastAPI
from litestar import Litestar, asgi
from starlette.applications import Starlette
from starlette.routing import Mount

from riverpy import Client, Config
from riverpy.web import Access, dashboard
from tests.dashboard.site_kit import SAME_SITE, Browser, insert_job

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

    from tests._database import Schema


def authorize(request: Request) -> Access | None:
    """Let everybody in whom the application let in."""
    return Access("write", request.headers.get("user"))


def mount_in_fastapi(app: ASGIApp) -> ASGIApp:
    outer = FastAPI()
    outer.mount("/admin/jobs", app)
    return outer


def mount_in_litestar(app: ASGIApp) -> ASGIApp:
    return Litestar([asgi("/admin/jobs", is_mount=True, copy_scope=True)(app)])  # type: ignore[arg-type]


def mount_before_django(app: ASGIApp) -> ASGIApp:
    async def django(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError(f"{scope['path']} is not for Django")

    return Starlette(routes=[Mount("/admin/jobs", app), Mount("/", django)])


@pytest.mark.parametrize("mount", [mount_in_fastapi, mount_in_litestar, mount_before_django])
async def test_mounted(schema: Schema, mount: object) -> None:
    """All links lead below the path. A page changes a job, as the API does, and live updates
    follow."""
    job_id = await insert_job(schema, "discarded")
    client = Client(schema.url, config=Config(schema=schema.name, pool_size=2))
    app = mount(dashboard(client, authorize=authorize))  # type: ignore[operator]
    root = "/admin/jobs"
    async with client, Browser(app) as browser:
        page = await browser.see(f"{root}/jobs/{job_id}")
        paths = {unescape(one) for one in re.findall(r'(?:href|src|action)="(/[^"]*)"', page)}
        assert paths
        for path in paths:
            assert path.startswith(f"{root}/")
            if not path.endswith("/change"):
                await browser.see(path)
        answer = await browser.submit(
            page, f"{root}/jobs/change", id=job_id, action="retry", back=f"/jobs/{job_id}"
        )
        assert answer.url.path == f"{root}/jobs/{job_id}"
        assert f"Job {job_id} was retried." in answer.text
        answer = await browser.post(
            f"{root}/api/jobs/cancel", json={"ids": [job_id]}, headers=SAME_SITE
        )
        assert answer.status_code == 200, answer.text
        document = (await browser.get(f"{root}/api/openapi.json")).json()
        assert document["servers"] == [{"url": f"{root}/api"}]
        assert (await client.job_get(job_id)).state == "cancelled"
        await browser.see(f"{root}/live?path=/none", status=404)
