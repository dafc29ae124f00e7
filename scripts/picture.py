"""Runs two workers on jobs of a small shop, and draws what `riverpy top` prints of them."""

from __future__ import annotations

import argparse
import asyncio
import html
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import riverpy
from riverpy.embedded import EmbeddedPostgres

RIVERPY = Path(sys.executable).with_name("riverpy")
SECONDS = 20.0
"""How long jobs are inserted. The picture is taken at three quarters of it."""
CELL, LINE, MARGIN = 7.83, 19, 18
"""The width of a character, the height of a line and the margin of the picture, in pixels."""
JOBS = """
import asyncio, random
from typing import ClassVar

import msgspec
import riverpy

workers = riverpy.Workers()


class Order(msgspec.Struct):
    kind: ClassVar[str] = "order"
    number: int


class Mail(msgspec.Struct):
    kind: ClassVar[str] = "mail"
    number: int

    def insert_opts(self):
        return riverpy.InsertOpts(queue="mail")


@workers.job
async def order(job: riverpy.Job[Order]) -> None:
    await asyncio.sleep(random.uniform(0.02, 0.2))


@workers.job
async def mail(job: riverpy.Job[Mail]) -> None:
    await asyncio.sleep(random.uniform(0.2, 0.6))
    if job.args.number % 40 == 0:
        raise ConnectionError("the mail server hangs up")


client = riverpy.Client(
    workers=workers,
    queues={
        "default": riverpy.QueueConfig(max_workers=50),
        "mail": riverpy.QueueConfig(max_workers=10),
    },
)
"""


async def observe(url: str, directory: Path, environ: dict[str, str]) -> str:
    """What `riverpy top` prints while jobs are inserted at a steady rate."""
    sys.path.insert(0, str(directory))
    from jobs import Mail, Order, client

    client.configure(database=url)
    printed: asyncio.Task[str] | None = None
    async with client, asyncio.TaskGroup() as group:
        for number in range(int(SECONDS * 20)):
            jobs = [*(Order(number * 5 + n) for n in range(5)), Mail(number)]
            await client.insert_many([riverpy.InsertManyParams(job) for job in jobs])
            await asyncio.sleep(0.05)
            if printed is None and number > SECONDS * 15:
                top = [RIVERPY, "top", "--once"]
                print_top = asyncio.to_thread(subprocess.check_output, top, env=environ, text=True)
                printed = group.create_task(print_top)
    assert printed is not None
    return printed.result()


def run_workers(url: str) -> str:
    """What `riverpy top` prints of two workers."""
    environ = {**os.environ, "RIVERPY_DATABASE_URL": url, "COLUMNS": "120"}
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "jobs.py").write_text(JOBS)
        subprocess.run([RIVERPY, "migrate", "up"], env=environ, check=True)
        command = [RIVERPY, "worker", "jobs:client", "--log-level", "error", "--name"]
        workers = [
            subprocess.Popen([*command, host], env=environ, cwd=name) for host in ("web1", "web2")
        ]
        try:
            return asyncio.run(observe(url, Path(name), environ))
        finally:
            for worker in workers:
                worker.terminate()
                worker.wait()


def colour_of(text: str) -> str:
    """The attribute for a text that has a colour."""
    return ' fill="#4ade80"' if text == "alive" else ""


def draw(text: str) -> str:
    """The text as a terminal, in SVG."""
    lines = ["$ riverpy top", *text.rstrip().splitlines()]
    width = max(map(len, lines)) * CELL + 2 * MARGIN
    height = len(lines) * LINE + 2 * MARGIN
    size = f'width="{width:.0f}" height="{height}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" {size} '
        f'role="img" aria-label="riverpy top">\n<rect {size} rx="8" fill="#0f172a"/>\n'
        '<g font-family="ui-monospace, Menlo, Consolas, monospace" font-size="13" '
        'fill="#cbd5e1" xml:space="preserve">'
    )
    drawn = [head]
    for number, line in enumerate(lines):
        if line.strip():
            is_heading = line.startswith(("$", "QUEUE", "WORKER"))
            weight = ' font-weight="bold"' if is_heading else ""
            words = "".join(
                f'<tspan x="{MARGIN + word.start() * CELL:.0f}"{colour_of(word[0])}>'
                f"{html.escape(word[0])}</tspan>"
                for word in re.finditer(r"\S+(?: \S+)*", line)
            )
            drawn.append(f'<text y="{MARGIN + 13 + number * LINE}"{weight}>{words}</text>')
    return "\n".join([*drawn, "</g>", "</svg>", ""])


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=Path("docs/top.svg"), help="file")
    to = parser.parse_args().to
    with EmbeddedPostgres("picture") as url:
        text = run_workers(url)
    EmbeddedPostgres("picture").remove()
    to.write_text(draw(text), "utf-8")


if __name__ == "__main__":
    main()
