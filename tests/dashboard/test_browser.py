"""The dashboard in a real browser, with and without JavaScript, on a narrow screen."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest
from playwright.async_api import async_playwright

from tests.cli.test_web import serving
from tests.dashboard.site_kit import insert_job

if TYPE_CHECKING:
    from tests._database import Schema

CHROMIUM = shutil.which("chromium")
PATIENCE_MS = 60_000


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize("has_script", [True, False], ids=["script", "no script"])
async def test_retry_a_job(schema: Schema, has_script: bool) -> None:
    """On a screen of 320 pixels no page is wider than the screen. From home, a user finds the job
    that failed, and retries it. With JavaScript, home shows a change without a new load."""
    await insert_job(schema, "discarded")
    database = ("--database-url", schema.url, "--schema", schema.name)
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    async with serving(*database) as (_, url), async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        context = await browser.new_context(
            java_script_enabled=has_script, viewport={"width": 320, "height": 700}
        )
        page = await context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda line: faults.append(line.text) if line.type == "error" else None)
        await page.goto(url)
        if has_script:
            await insert_job(schema, "discarded")
            await page.get_by_text("2 jobs have failed in all attempts").wait_for()
        await page.get_by_role("link", name="Discarded jobs").click()
        await page.get_by_role("link", name="1", exact=True).click()
        await page.get_by_role("button", name="Retry").click()
        await page.get_by_text("Job 1 was retried.").wait_for()
        for path in ("/", "/jobs", "/jobs/1"):
            await page.goto(url + path)
            if has_script:
                width = await page.evaluate("document.documentElement.scrollWidth")
                assert width <= 320, path
        assert faults == []
        await context.close()
        await browser.close()
