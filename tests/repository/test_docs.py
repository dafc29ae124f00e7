"""What README.md and docs/ show is run.

A page's blocks are used in their order, in one directory, with an empty database in DATABASE_URL:

    ```python that starts with "# jobs.py", ```toml file=a.toml   is written to that file
    ```sh run, ```python run     is run by `sh -eu` or by Python
    ```text output               is what the block before it printed; `…` stands for any text

Port 8000 in a block that is run becomes a free port. `riverpy migrate up` at the start of a block
is done in this process, since most pages begin with it; the pages about it run the command.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import socket
import subprocess
import sys
from itertools import pairwise, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

import riverpy
from riverpy._maintenance.base import MaintenanceService
from riverpy._maintenance.services import DefaultLeaderChangeCheck, LeaderFunctionService
from riverpy._tools.doctor import check_runner
from riverpy.cli._settings import SETTINGS
from riverpy.migrate import migrate_all
from tests._database import connected
from tests.repository.command_names import is_command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^```(\w+)(?: +(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE_COMMENT = re.compile(r"# (\w+\.py)\n")
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
_MIGRATE = re.compile(r"riverpy migrate up(?: ?> ?/dev/null)?\n")
BLOCK_TIMEOUT = 120
MIGRATING = {"README", "installation", "migrations"}
"""Pages whose reader migrates a database for the first time, or learns how."""
GUIDES = [page for page in PAGES if page.stem == "sync" or page.stem.startswith("coming-from-")]
BEFORE_A_COMMAND = ("|", "||", "&", "&&", ";", "(", "until", "while", "if", "do", "then", "!")


class Block(NamedTuple):
    """A fenced block that is used."""

    language: str
    use: str
    text: str


def blocks(text: str) -> list[Block]:
    """The used blocks of a page."""
    found: list[Block] = []
    for language, use, content in _FENCE.findall(text):
        comment = _FILE_COMMENT.match(content)
        if language == "python" and comment and not use:
            use = f"file={comment[1]}"
        if use:
            found.append(Block(language, use, content))
    return found


def environment(database_url: str) -> dict[str, str]:
    """The environment of a reader with this database and riverpy installed."""
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith(("RIVERPY_", "PG"))},
        "DATABASE_URL": database_url,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        # A reader has no such plugins of pytest. Their imports take longer than its tests.
        "PYTEST_ADDOPTS": "-p no:faker -p no:hypothesispytest",
    }


def find_free_port() -> str:
    """Return a port on which no program of this machine listens now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def pattern_of(text: str) -> str:
    """The pattern of an output. `…` stands for any text in its line. It stands for any lines if it
    is a line of its own, the first or the last character."""
    start, end = text.startswith("…"), text.endswith("…")
    lines = text.removeprefix("…").removesuffix("…").splitlines(keepends=True)
    pattern = "".join(
        r"(?:.*\n)*?" if line == "…\n" else ".*?".join(map(re.escape, line.split("…")))
        for line in lines
    )
    return r"[\s\S]*?" * start + pattern + r"[\s\S]*?" * end


def use(block: Block, directory: Path, printed: str, environ: dict[str, str]) -> str:
    """Use one block; what it printed."""
    match block:
        case Block("python" | "toml", use, text) if use.startswith("file="):
            if block.language == "python":
                compile(text, use, "exec")
            (directory / use.removeprefix("file=")).write_text(text)
            return ""
        case Block("sh" | "python" as language, "run", text):
            text = text.replace("8000", find_free_port()) if "8000" in text else text
            command = ["sh", "-eu"] if language == "sh" else [sys.executable, "-"]
            done = subprocess.run(
                command,
                input=text,
                cwd=directory,
                env=environ,
                capture_output=True,
                text=True,
                timeout=BLOCK_TIMEOUT,
                check=False,
            )
            assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
            return done.stdout
        case Block("text" | "json", "output", text):
            assert re.fullmatch(pattern_of(text.strip()), printed.strip()), printed
            return printed
        case _:
            raise AssertionError(f"unknown block: {block.language} {block.use}")


async def migrate_first(block: Block, database_url: str) -> Block:
    """Migrate the database as the first command of a block does; the rest of the block."""
    migration = _MIGRATE.match(block.text) if block[:2] == ("sh", "run") else None
    if migration is None:
        return block
    await migrate_all(database_url)
    return block._replace(text=block.text[migration.end() :])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
async def test_page(page: Path, fresh_database_url: str, tmp_path: Path) -> None:
    """Each block that is marked does what the page says."""
    environ = environment(fresh_database_url)
    printed = ""
    for block in blocks(page.read_text("utf-8")):
        if page.stem not in MIGRATING:
            block = await migrate_first(block, fresh_database_url)
        printed = await asyncio.to_thread(use, block, tmp_path, printed, environ)


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_python_of_guides_is_used(page: Path) -> None:
    """Each block of Python in a guide is run or imported. The programs of other libraries, before
    the change to riverpy, compile."""
    for section in re.split(r"^## ", page.read_text("utf-8"), flags=re.MULTILINE):
        for language, use, content in _FENCE.findall(section):
            if language == "python" and not use and not _FILE_COMMENT.match(content):
                assert section.startswith("Before\n"), content
                compile(content, page.name, "exec")


async def test_move_from_procrastinate(fresh_database_url: str, tmp_path: Path) -> None:
    """The program of the guide moves the waiting jobs of one task, with their times. A job that
    another session has locked stays."""
    page = (ROOT / "docs" / "coming-from-procrastinate.md").read_text("utf-8")
    environ = environment(fresh_database_url)
    (move,) = [block for block in blocks(page) if block.use == "file=move.py"]
    use(move, tmp_path, "", environ)
    await migrate_all(fresh_database_url)
    async with connected(fresh_database_url) as connection, connection.transaction():
        async with connected(fresh_database_url) as other:
            await other.execute(THEIR_JOBS)
        await connection.execute("select from procrastinate_jobs where id = 4 for update")
        run = Block("sh", "run", "python move.py tasks.welcome welcome")
        printed = await asyncio.to_thread(use, run, tmp_path, "", environ)
    assert printed == "2 jobs were moved\n"
    async with connected(fresh_database_url) as connection:
        jobs = await connection.fetch("select kind, args, queue, state from river_job order by id")
        left = await connection.fetch("select id from procrastinate_jobs where status = 'todo'")
    assert [tuple(job) for job in jobs] == [
        ("welcome", '{"user_id": 1}', "mail", "available"),
        ("welcome", '{"user_id": 2}', "mail", "scheduled"),
    ]
    assert [row["id"] for row in left] == [4, 5]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    """Links to files of this repository lead somewhere."""
    for target in _LINK.findall(page.read_text("utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words after `riverpy` of each command in the sh blocks of a page."""
    for language, _, content in _FENCE.findall(text):
        if language == "sh":
            for line in content.replace("\\\n", " ").splitlines():
                words = list(shlex.shlex(line, posix=True, punctuation_chars=True))
                for before, start in pairwise(range(-1, len(words))):
                    begins = before < 0 or words[before] in BEFORE_A_COMMAND
                    if begins and words[start] == "riverpy":
                        yield list(
                            takewhile(lambda word: word[0] not in "|&;<>", words[start + 1 :])
                        )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_exist(page: Path) -> None:
    """Each command of riverpy in a sh block exists, with its options, also if it is not run."""
    found = commands(page.read_text("utf-8"))
    assert [words for words in found if not is_command(words)] == []


def test_configuration_names_every_setting() -> None:
    """Each field of Config and QueueConfig has its row."""
    rows = (ROOT / "docs" / "configuration.md").read_text("utf-8")
    fields = (*riverpy.Config.__struct_fields__, *riverpy.QueueConfig.__struct_fields__)
    assert [name for name in fields if f"| `{name}` |" not in rows] == []


def service_names() -> list[str]:
    """Return the names of the services that have a row in the page about the leader."""
    others = {DefaultLeaderChangeCheck, LeaderFunctionService}
    return [
        one.name
        for one in MaintenanceService.__subclasses__()
        if one not in others and one.__module__.startswith("riverpy.")
    ]


LISTS: list[tuple[str, Callable[[], Iterable[str]], str]] = [
    ("configuration", lambda: [one.name for one in SETTINGS], "| `{}` |"),
    ("inserting", lambda: riverpy.InsertOpts.__struct_fields__, "| `{}` |"),
    ("doctor", lambda: [name for name, _ in check_runner.SCHEMA_CHECKS], "| `{}` |"),
    ("leader", service_names, "| {} |"),
]


@pytest.mark.parametrize(("page", "names", "row"), LISTS, ids=[page for page, *_ in LISTS])
def test_page_has_a_row_for_each(page: str, names: Callable[[], Iterable[str]], row: str) -> None:
    """The table of a page has a row for each setting, option, check or service."""
    text = (ROOT / "docs" / f"{page}.md").read_text("utf-8")
    assert [name for name in names() if row.format(name) not in text] == []


def test_api_page_has_every_public_name() -> None:
    """The API page documents each name of `riverpy.__all__`, and no other."""
    page = (ROOT / "docs" / "api.md").read_text("utf-8")
    named = re.findall(r"^\.\. (?:auto\w+|py:data):: riverpy\.(\w+)$", page, re.MULTILINE)
    assert sorted(named) == sorted(riverpy.__all__)


def test_index_links_every_page() -> None:
    """The first page of the site links each page once, and lists it once in the navigation."""
    index = (ROOT / "docs" / "index.md").read_text("utf-8")
    pages = sorted(page.stem for page in (ROOT / "docs").glob("*.md") if page.stem != "index")
    assert sorted(re.findall(r"^- \[.+\]\((\w[\w-]*)\.md\): .+$", index, re.MULTILINE)) == pages
    navigation = "".join(re.findall(r"^:hidden:\n(.*?)^```$", index, re.MULTILINE | re.DOTALL))
    assert sorted(navigation.split()) == pages


THEIR_JOBS = """
create table procrastinate_jobs (
  id bigint, status text, task_name text, args jsonb, scheduled_at timestamptz, queue_name text
);
insert into procrastinate_jobs values
  (1, 'todo', 'tasks.welcome', '{"user_id": 1}', null, 'mail'),
  (2, 'todo', 'tasks.welcome', '{"user_id": 2}', now() + interval '1 day', 'mail'),
  (3, 'doing', 'tasks.welcome', '{"user_id": 3}', null, 'mail'),
  (4, 'todo', 'tasks.welcome', '{"user_id": 4}', null, 'mail'),
  (5, 'todo', 'tasks.book', '{"user_id": 5}', null, 'mail')
"""
"""The columns of Procrastinate's table that the program uses."""

WEB = """
import asyncio, os, sys

import asyncpg, structlog
from jobs import client
from riverpy import EventKind
from web import app

structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))


async def main():
    connection = await asyncpg.connect(os.environ["DATABASE_URL"])
    to_app, from_app = asyncio.Queue(), asyncio.Queue()
    scope = {"type": "lifespan", "state": (state := {})}
    lifespan = asyncio.create_task(app(scope, to_app.get, from_app.put))
    await to_app.put({"type": "lifespan.startup"})
    assert (await from_app.get())["type"] == "lifespan.startup.complete"
    request = {"type": "http", "method": "POST", "path": "/users", "headers": [], "state": state}
    request["query_string"] = b"email=a@b"

    async def sign_up():
        sent = []

        async def send(message):
            sent.append(message)

        await app(dict(request), to_app.get, send)
        return sent[0]["status"]

    async with client.subscribe(EventKind.JOB_COMPLETED) as events:
        print(await sign_up())
        async for event in events:
            break
    try:
        await sign_up()
    except asyncpg.UniqueViolationError:
        print("refused")
    await to_app.put({"type": "lifespan.shutdown"})
    await lifespan
    print([row["state"] for row in await connection.fetch("select state from river_job")])
    await connection.close()


asyncio.run(main())
"""


LITESTAR = """
from litestar.testing import TestClient
from litestar_app import app

with TestClient(app) as http:
    print(http.post("/users/7/welcome").json())
"""


async def test_web_handler(fresh_database_url: str, tmp_path: Path) -> None:
    """The web handler of the docs inserts a job with its user, or none, and works it. The handler
    of Litestar inserts a job."""
    page = (ROOT / "docs" / "web-handler.md").read_text("utf-8")
    environ = environment(fresh_database_url)
    for block in blocks(page):
        if block.use.startswith("file="):
            use(block, tmp_path, "", environ)
    await migrate_all(fresh_database_url)
    printed = await asyncio.to_thread(use, Block("python", "run", WEB), tmp_path, "", environ)
    # The job may run before the answer to the request is printed.
    assert sorted(printed.splitlines()) == ["201", "['completed']", "refused", "welcome, user 1"]
    printed = await asyncio.to_thread(use, Block("python", "run", LITESTAR), tmp_path, "", environ)
    assert printed == "{'job_id': 2}\n"


def test_runner_can_fail(tmp_path: Path) -> None:
    """The runner sees a failing block, another output and an unknown mark."""
    environ = dict(os.environ)
    page = (
        "```python\n# a.py\nprint(6 * 7)\n```\n\n"
        "```sh\nfalse\n```\n\n"
        "```sh run\npython3 a.py\n```\n"
    )
    file, run = blocks(page)
    use(file, tmp_path, "", environ)
    printed = use(run, tmp_path, "", environ)
    use(Block("text", "output", "4…\n"), tmp_path, printed, environ)
    for wrong in (
        Block("text", "output", "43\n"),
        Block("sh", "run", "false\ntrue\n"),
        Block("python", "run", "1 / 0\n"),
        Block("sh", "rnu", "true\n"),
    ):
        with pytest.raises(AssertionError):
            use(wrong, tmp_path, printed, environ)
