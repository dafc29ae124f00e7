"""Runs two workers on jobs of a small shop, and takes screenshots of the dashboard."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import riverpy
from riverpy.embedded import EmbeddedPostgres
from scripts.picture import JOBS, RIVERPY
from tests.kit.chromium import running_chromium

if TYPE_CHECKING:
    from collections.abc import Mapping

    from playwright.async_api import Browser

SIZE_MAX = 150_000
"""The maximum number of bytes of a picture."""


class Screenshot(NamedTuple):
    """A picture of one page."""

    name: str
    path: str


SCREENSHOTS = (
    Screenshot("home", "/"),
    Screenshot("jobs", "/jobs?state=retryable"),
    Screenshot("queue", "/queue?name=mail"),
    Screenshot("doctor", "/doctor"),
)


async def insert_jobs(directory: Path, url: str, seconds: int) -> None:
    """Insert jobs at a steady rate."""
    sys.path.insert(0, str(directory))
    from jobs import Mail, Order, client

    client.configure(database=url)
    async with client:
        for number in range(seconds * 10):
            jobs = [*(Order(number * 5 + n) for n in range(5)), Mail(number)]
            await client.insert_many([riverpy.InsertManyParams(job) for job in jobs])
            await asyncio.sleep(0.1)


async def take(browser: Browser, url: str, one: Screenshot, directory: Path) -> None:
    """Open a page, and write its picture."""
    page = await browser.new_page(viewport={"width": 1280, "height": 800})
    answer = await page.goto(url + one.path)
    assert answer is not None
    assert answer.ok, f"{one.path} has the status {answer.status}"
    if one.name == "doctor":
        await page.get_by_text("The checks ran").wait_for()
    content = await page.screenshot(path=directory / f"{one.name}.png")
    assert len(content) <= SIZE_MAX, f"{one.name} has {len(content):,} bytes"
    await page.close()


async def take_all(url: str, directory: Path) -> None:
    """Write a picture of each page."""
    async with running_chromium() as browser:
        for one in SCREENSHOTS:
            await take(browser, url, one, directory)


def run(directory: Path, seconds: int, environ: Mapping[str, str]) -> None:
    """Start two workers and the dashboard, insert jobs for some time, and write the pictures."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as processes:
        program = Path(name)
        (program / "jobs.py").write_text(JOBS)
        subprocess.run([RIVERPY, "migrate", "up"], env=environ, check=True)
        worker = [RIVERPY, "worker", "jobs:client", "--log-level", "error", "--name"]
        commands: list[list[str | Path]] = [[*worker, "web1"], [*worker, "web2"]]
        commands.append([RIVERPY, "web", "--port", "0"])
        for command in commands:
            process = subprocess.Popen(
                command, env=environ, cwd=program, stderr=subprocess.PIPE, text=True
            )
            processes.enter_context(process)
            processes.callback(process.terminate)
        assert process.stderr is not None
        found = re.search(r"http://\S+", process.stderr.readline())
        assert found is not None

        async def insert_and_take() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(insert_jobs(program, environ["RIVERPY_DATABASE_URL"], seconds))
                await asyncio.sleep(seconds * 0.7)
                await take_all(found[0].rstrip("/"), directory)

        asyncio.run(insert_and_take())


def main() -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=Path("docs/images"), help="directory")
    parser.add_argument("--seconds", type=int, default=180, help="how long jobs are inserted")
    arguments = parser.parse_args()
    arguments.to.mkdir(exist_ok=True)
    with EmbeddedPostgres("screenshots") as url:
        run(arguments.to, arguments.seconds, {**os.environ, "RIVERPY_DATABASE_URL": url})
    EmbeddedPostgres("screenshots").remove()


if __name__ == "__main__":
    main()
