"""River UI's own pages on the JSON API of the dashboard, in a real browser."""

from __future__ import annotations

import json
import subprocess
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cli.test_web import serving
from tests.dashboard.site_kit import insert_job
from tests.kit.chromium import needs_chromium, running_chromium

if TYPE_CHECKING:
    from playwright.async_api import Response, Route

    from tests._database import Schema

MODULE = "riverqueue.com/riverui@v0.22.0"
PATIENCE_MS = 60_000
DOWNLOAD_TIMEOUT = 60
PAGE = """<!doctype html><title>River</title>
<script type="application/json" id="config__json">{"apiUrl": "/api", "base": "/ui"}</script>
<script type="module" src="/ui/assets/SCRIPT"></script><div id="root"></div>"""
TYPES = {".js": "text/javascript", ".css": "text/css"}


@cache
def find_files() -> Path | None:
    """Return the directory with the files that River UI sends to browsers."""
    try:
        done = subprocess.run(
            ["go", "mod", "download", "-json", MODULE],
            capture_output=True,
            check=True,
            timeout=DOWNLOAD_TIMEOUT,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return Path(json.loads(done.stdout)["Dir"]) / "dist"


@needs_chromium
async def test_pages(schema: Schema) -> None:
    """River UI lists jobs, shows one, retries it, and pauses a queue. The numbers in args are
    exact. It asks for nothing that the API lacks."""
    files = find_files()
    if files is None:
        pytest.skip("needs Go, and River UI from the module proxy")
    (script,) = files.glob("assets/main-*.js")
    job_id = await insert_job(
        schema, "discarded", kind="'mail'", args="'{\"n\": 12345678901234567890123}'"
    )
    await schema.execute("INSERT INTO river_queue (name, updated_at) VALUES ('default', now())")

    async def send_file(route: Route) -> None:
        name = route.request.url.partition("/ui/")[2]
        if name.startswith("assets/"):
            file = files / name
            await route.fulfill(body=file.read_bytes(), content_type=TYPES[file.suffix])
        else:
            text = PAGE.replace("SCRIPT", script.name)
            await route.fulfill(body=text, content_type="text/html")

    answers: list[tuple[str, str, int]] = []

    def note(response: Response) -> None:
        if "/api/" in response.url:
            path = response.url.partition("/api")[2].partition("?")[0]
            answers.append((response.request.method, path, response.status))

    database = ("--database-url", schema.url, "--schema", schema.name)
    async with serving(*database) as (_, url), running_chromium() as browser:
        page = await browser.new_page()
        page.set_default_timeout(PATIENCE_MS)
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("response", note)
        await page.route("**/ui/**", send_file)
        await page.goto(f"{url}/ui/jobs?state=discarded")
        await page.get_by_text("12345678901234567890123").wait_for()
        await page.goto(f"{url}/ui/jobs/{job_id}")
        async with page.expect_response("**/api/jobs/retry"):
            await page.get_by_role("button", name="Retry").click()
        await page.goto(f"{url}/ui/queues")
        await page.get_by_text("default").first.wait_for()
        async with page.expect_response("**/api/queues/default/pause"):
            await page.get_by_role("button", name="Pause").last.click()
    assert faults == []
    assert {status for _, _, status in answers} == {200}
    used = {path for _, path, _ in answers}
    assert {"/features", "/states", "/jobs", f"/jobs/{job_id}", "/queues"} <= used
    assert await schema.fetchval("SELECT state FROM river_job") == "available"
    assert await schema.fetchval("SELECT paused_at IS NOT NULL FROM river_queue")
