"""A server that refuses NOTIFY, like YugabyteDB by default."""

from __future__ import annotations

import asyncio
import re
from copy import copy
from typing import TYPE_CHECKING

import asyncpg
import pytest

from riverpy import Client, Config
from tests.interop.callers import GoCaller, PythonCaller
from tests.interop.conform import conform
from tests.interop.river_go import RiverGo
from tests.interop.test_jobs import ended
from tests.interop.working import LANGUAGES, OTHER, Fleet

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from tests._database import Schema
    from tests.interop.callers import Caller

    Callers = dict[str, Caller]

EITHER = pytest.mark.parametrize("language", LANGUAGES)
REFUSING = """
CREATE SCHEMA refusing;
CREATE FUNCTION refusing.version() RETURNS text LANGUAGE sql AS
    $$ SELECT 'PostgreSQL 15.2-YB-2025.1.0.0-b0' $$;
CREATE FUNCTION refusing.pg_notify(text, text) RETURNS void LANGUAGE plpgsql AS
    $$ BEGIN RAISE EXCEPTION 'NOTIFY is not supported'; END $$;
"""

MARKED = {"go": re.compile(r'{"river:unique_nonce": "[0-9a-f]{16}"}'), "python": re.compile("{}")}
"""The metadata of a unique job."""
POLLED = 6.0
"""Seconds within which a worker that polls every two seconds must act."""


@pytest.fixture
async def refusing(schema: Schema) -> AsyncGenerator[Schema]:
    """The schema on a server that looks like YugabyteDB and refuses NOTIFY."""
    await schema.execute(REFUSING)
    there = copy(schema)
    join = "&" if "?" in schema.url else "?"
    there.url = f"{schema.url}{join}options=-csearch_path%3Drefusing,pg_catalog"
    yield there
    await schema.execute("DROP SCHEMA refusing CASCADE")


@pytest.fixture
async def callers_there(go_there: RiverGo, refusing: Schema) -> AsyncGenerator[Callers]:
    """A client of each language on that server."""
    config = Config(schema=refusing.name, skip_unknown_job_check=True, insert_notify=False)
    async with (
        go_there.process("session") as process,
        Client(refusing.url, config=config) as client,
        refusing.connected() as connection,
    ):
        yield {"go": GoCaller(process), "python": PythonCaller(client, connection)}


@pytest.fixture
def go_there(go_binary: Path, refusing: Schema) -> RiverGo:
    """River in Go on that server."""
    return RiverGo(go_binary, refusing.url, refusing.name)


@EITHER
async def test_polling(
    language: str, callers_there: Callers, go_there: RiverGo, refusing: Schema
) -> None:
    """River in Go detects such a server. riverpy inserts and works there with settings for it, and
    finds a cancel by polling; its own cancel is refused, and changes nothing. A metadata key by
    which Go distinguishes its unique jobs from duplicates is left alone (CF-036,
    simulated_yugabyte_polling)."""
    caller = callers_there[OTHER[language]]
    settings = {} if language == "go" else {"poll_only": True}
    async with Fleet(go_there, refusing).worker(language, poll=0.2, **settings) as worker:
        request = conform("signal", message="end", unique={"by_args": True})
        job = await caller.insert(request)
        assert MARKED[caller.language].fullmatch(job["metadata"])
        await worker.until("job_started", id=job["id"])
        running = await caller.get(job["id"])
        assert await callers_there[language].insert_unique(request) == [(running, True)]
        with pytest.raises(asyncpg.PostgresError, match="NOTIFY is not supported"):
            await callers_there["python"].cancel(job["id"])
        assert await caller.get(job["id"]) == running
        worker.release("end")
        row = await ended(worker, callers_there, refusing, "job_completed", job["id"])
        assert row["metadata"] == job["metadata"]

        job = await caller.insert(conform("signal", message="never"))
        await worker.until("job_started", id=job["id"])
        async with asyncio.timeout(POLLED):
            await callers_there["go"].cancel(job["id"])
            await worker.until("job_cancelled", id=job["id"])
