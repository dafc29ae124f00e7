"""The dashboard in applications of frameworks, below a path of its own."""

from __future__ import annotations

import asyncio
import re
import sys
from contextlib import asynccontextmanager
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from fastapi import FastAPI
from litestar import Litestar, asgi

from riverpy import Client, Config
from riverpy.web import Access, dashboard
from tests._database import connected
from tests.cli.worker_process import environment
from tests.dashboard.site_kit import SAME_SITE, Browser, insert_job

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

    from tests._database import Schema

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0
SETTINGS = """
import os
from tests.django.project import make_settings

globals().update(make_settings(os.environ["DATABASE_URL"]))
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
"""
"""The settings of a Django project, whose only pages are the admin site."""
SERVE = """
import socket

import asgi
import uvicorn
from django.contrib.auth.models import Permission, User
from django.core.management import call_command

call_command("migrate", verbosity=0, skip_checks=True)
for name, codename in (("ann", "change_job"), ("bob", "view_job"), ("eve", None)):
    user = User.objects.create_user(name, password="secret", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename=codename))
with socket.create_server(("127.0.0.1", 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(asgi.application, log_level="error")).run([listener])
"""


def authorize(request: Request) -> Access | None:
    """Let everybody in whom the application let in."""
    return Access("write", request.headers.get("user"))


def mount_in_fastapi(app: ASGIApp) -> ASGIApp:
    outer = FastAPI()
    outer.mount("/admin/jobs", app)
    return outer


def mount_in_litestar(app: ASGIApp) -> ASGIApp:
    return Litestar([asgi("/admin/jobs", is_mount=True, copy_scope=True)(app)])  # type: ignore[arg-type]


@pytest.mark.parametrize("mount", [mount_in_fastapi, mount_in_litestar])
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
        for path in ("/none", "http://["):
            await browser.see(f"{root}/live?path={path}", status=404)


async def test_prefix_of_proxy(schema: Schema) -> None:
    """A proxy removes a prefix, and the server adds it to `root_path`. Some servers also add it to
    the path (uvicorn), and others do not (hypercorn). Links lead below the prefix in both."""
    job_id = await insert_job(schema)
    client = Client(schema.url, config=Config(schema=schema.name, pool_size=2))
    outer = mount_in_fastapi(dashboard(client, authorize=authorize))
    for added in ("", "/ops"):

        async def server(scope: Scope, receive: Receive, send: Send, *, added: str = added) -> None:
            path = f"{added}{scope['path']}"
            await outer({**scope, "root_path": "/ops", "path": path}, receive, send)

        async with client, Browser(server) as browser:
            page = await browser.see(f"/admin/jobs/jobs/{job_id}")
            paths = re.findall(r'(?:href|src|action)="(/[^"]*)"', page)
            assert paths
            assert all(path.startswith("/ops/admin/jobs/") for path in paths)
            assert f'name="back" value="/jobs/{job_id}"' in page
            for path in ("", "jobs", "api/jobs", f"jobs/{job_id}/args"):
                await browser.see(f"/admin/jobs/{path}")


@asynccontextmanager
async def serving_django(directory: Path, database_url: str) -> AsyncGenerator[str]:
    """A server with the program in the guide, in a process of its own, because the settings of
    Django are those of a process. Yield its address."""
    guide = (ROOT / "docs" / "dashboard.md").read_text()
    _, _, rest = guide.partition("```python file=asgi.py\n")
    (directory / "mysite").mkdir()
    (directory / "mysite" / "settings.py").write_text(SETTINGS)
    (directory / "asgi.py").write_text(rest.partition("```\n")[0])
    (directory / "serve.py").write_text(SERVE)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "serve.py"),
        cwd=directory,
        env=environment(DATABASE_URL=database_url, PYTHONPATH=str(ROOT)),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE):
            port = (await process.stdout.readline()).decode().strip()
        yield f"http://127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def log_in(browser: httpx.AsyncClient, name: str, path: str) -> httpx.Response:
    """Log in at Django's own login page, and return the page to which it leads."""
    form = await browser.get("/admin/login/")
    token = re.search(r'name="csrfmiddlewaretoken" value="([^"]*)"', form.text)
    assert token, form.text
    data = {"username": name, "password": "secret", "next": path}
    data["csrfmiddlewaretoken"] = token[1]
    return await browser.post("/admin/login/", data=data)


async def test_beside_django(fresh_database_url: str, tmp_path: Path) -> None:
    """The program in the guide serves Django and the dashboard. Without a session of Django, the
    browser goes to the login page. Then the permissions of the user decide, and changes work."""
    async with serving_django(tmp_path, fresh_database_url) as url:
        async with connected(fresh_database_url) as connection:
            job_id = await connection.fetchval(
                "INSERT INTO river_job (kind, args, max_attempts, state, finalized_at)"
                " VALUES ('k', '{}', 1, 'discarded', now()) RETURNING id"
            )
        for name, status in (("ann", 200), ("bob", 200), ("eve", 403)):
            async with httpx.AsyncClient(
                base_url=url, follow_redirects=True, timeout=PATIENCE
            ) as browser:
                assert (await browser.get("/jobs/")).url.path == "/admin/login/"
                page = await log_in(browser, name, f"/jobs/jobs/{job_id}")
                assert page.status_code == status, page.text
                assert name in (await browser.get("/admin/")).text
                can_change = name == "ann"
                assert (">Retry<" in page.text) == can_change
                if can_change:
                    token = re.search(r'name="token" value="([^"]*)"', page.text)
                    assert token
                    data = {"token": unescape(token[1]), "id": job_id, "action": "retry"}
                    page = await browser.post("/jobs/jobs/change", data=data, headers=SAME_SITE)
                    assert f"Job {job_id} was retried." in page.text
                    assert "ann" in page.text
