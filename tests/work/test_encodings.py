"""Databases whose encoding is not UTF8: texts that they cannot encode are refused or replaced, and
delay no other job."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, ClassVar

import msgspec
import pytest

from riverpy import (
    ArgsError,
    Client,
    EventKind,
    InsertManyParams,
    InsertOpts,
    Job,
    JobCancel,
    QueueConfig,
    Workers,
)
from riverpy.migrate import migrate_all
from tests._database import connected, create_database, drop_database, new_database_name
from tests.cli.invoking import invoke

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

TEXT = "\u65e5\u672c"
"""A text that LATIN1 cannot encode and SQL_ASCII accepts as bytes."""
ONCE = InsertOpts(max_attempts=1)
UNSTORABLE = "the result of this attempt could not be stored"


class Task(msgspec.Struct):
    """The action of the handler, and its text."""

    kind: ClassVar[str] = "task"
    act: str = ""
    text: str = ""


@asynccontextmanager
async def database(server_url: str, encoding: str) -> AsyncGenerator[str]:
    """Yield the URL of a database with River's tables in this encoding."""
    name = new_database_name()
    options = f"ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C'"
    url = await create_database(server_url, name, options)
    try:
        async with connected(url) as connection:
            await migrate_all(connection)
        yield url
    finally:
        await drop_database(server_url, name)


workers = Workers()


@workers.job
async def work(job: Job[Task]) -> None:
    """Fail, cancel, record the text, or do nothing."""
    if job.args.act == "fail":
        raise ValueError(TEXT)
    if job.args.act == "cancel":
        raise JobCancel(TEXT)
    if job.args.act == "output":
        job.record_output(TEXT)


async def ends_of(url: str) -> dict[str, tuple[str, str | None]]:
    """Work one job for each kind of end. Returns the state and the error of each."""
    acts = ("nothing", "fail", "cancel", "output")
    client = Client(url, workers=workers, queues={"default": QueueConfig(max_workers=10)})
    async with client, client.subscribe(*EventKind) as events:
        await client.insert_many([InsertManyParams(Task(act), ONCE) for act in acts])
        async with client.working(), asyncio.timeout(30):
            for _ in acts:
                await anext(events)
    async with connected(url) as connection:
        rows = await connection.fetch("SELECT args, state::text, errors[1] AS error FROM river_job")
    return {
        json.loads(row["args"])["act"]: (
            row["state"],
            row["error"] and json.loads(row["error"])["error"],
        )
        for row in rows
    }


async def test_latin1(server_url: str) -> None:
    """Errors that the encoding cannot represent are stored with `?`, and their attempts end as
    usual. Such an output makes the attempt fail. Inserting such a text raises ArgsError."""
    async with database(server_url, "LATIN1") as url:
        assert await ends_of(url) == {
            "nothing": ("completed", None),
            "fail": ("discarded", "ValueError: ??"),
            "cancel": ("cancelled", "JobCancelError: ??"),
            "output": ("discarded", UNSTORABLE),
        }
        async with Client(url) as client:
            for insert in (client.insert_many, client.insert_many_fast):
                with pytest.raises(ArgsError, match='no equivalent in encoding "LATIN1"'):
                    await insert([InsertManyParams(Task(text=TEXT))])
            assert await client.insert_many_fast([InsertManyParams(Task(text="\xe9"))]) == 1
        result = await asyncio.to_thread(invoke, "job", "list", "--json", "--database-url", url)
        assert json.loads(result.stdout)["jobs"][0]["args"]["text"] == "\xe9"


async def test_sql_ascii(server_url: str) -> None:
    """A database of encoding SQL_ASCII accepts any bytes. riverpy stores UTF-8. A job of another
    program that is not UTF-8 is reported, and the others are listed."""
    async with database(server_url, "SQL_ASCII") as url:
        assert await ends_of(url) == {
            "nothing": ("completed", None),
            "fail": ("discarded", f"ValueError: {TEXT}"),
            "cancel": ("cancelled", f"JobCancelError: {TEXT}"),
            "output": ("completed", None),
        }
        async with connected(url) as connection:
            await connection.execute(
                "UPDATE river_job SET tags = array[convert_from('\\xe9', 'SQL_ASCII')] WHERE id = 2"
            )
        result = await asyncio.to_thread(invoke, "job", "list", "--database-url", url)
        assert [line.split()[0] for line in result.stdout.splitlines()] == ["ID", "4", "3", "1"]
        assert result.exit_code == 1
        assert "the server cannot read job 2 (invalid byte sequence" in result.stderr
