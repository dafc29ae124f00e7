"""Names that contain SQL."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from riverpy import Client, Config, ConfigError, InsertError, InsertOpts, QueueConfig, RawArgs
from riverpy.cli import main
from riverpy.errors import NotFoundError
from riverpy.migrate import Migrator
from tests.work.rig import Rig

if TYPE_CHECKING:
    from tests._database import Schema

EVIL = '"; DROP TABLE river_job; --'
QUOTED = "'; DROP TABLE river_job; --"


@pytest.mark.parametrize("name", [EVIL, QUOTED])
async def test_names_given_to_riverpy(schema: Schema, name: str) -> None:
    """A name of a schema, queue, kind or tag that contains SQL is refused or not found. No SQL in
    it runs (SE-03)."""
    async with Client(schema.url, config=Config(schema=schema.name)) as client:
        for refused in (
            lambda: Config(schema=name),
            lambda: Migrator(schema.url, schema=name),
            lambda: Client(schema.url, queues={name: QueueConfig()}),
        ):
            with pytest.raises(ConfigError):
                refused()
        for args, opts in (
            (RawArgs(name, "{}"), None),
            (RawArgs("task", "{}"), InsertOpts(queue=name)),
            (RawArgs("task", "{}"), InsertOpts(tags=[name])),
        ):
            with pytest.raises((InsertError, ConfigError)):
                await client.insert(args, opts)
        for call in (client.queue_get, client.queue_pause, client.queue_resume):
            with pytest.raises((NotFoundError, ConfigError)):
                await call(name)
        await client.insert(RawArgs("task", json.dumps({name: name})))
    assert [json.loads(job["args"]) for job in await schema.jobs()] == [{name: name}]


async def test_names_in_the_table(schema: Schema) -> None:
    """Rows with names that riverpy refuses, inserted by SQL, are listed, found by name and worked
    (SE-03, BI-05)."""
    rig = Rig(schema)

    rig.register_task()
    kinds = [EVIL, QUOTED, "new\nline", "tägé", "x" * 127, "%s $1 {}", "task"]
    for kind in kinds[:-1]:
        await rig.insert_rows(1, kind=kind)
    await rig.insert_rows(1, queue="Bad Queue\n")
    await rig.insert_rows(1)
    where = ["--json", f"--database-url={schema.url}", f"--schema={schema.name}"]
    for options, count in (([], 8), (["--kind", EVIL], 1), (["--queue", "Bad Queue\n"], 1)):
        command = ["job", "list", *options, *where]
        listed = await asyncio.to_thread(CliRunner().invoke, main, command)
        assert len(json.loads(listed.stdout)["jobs"]) == count
    assert len(await rig.work_due_jobs(known_kinds_only=False)) == len(kinds)
    rows = await schema.jobs()
    assert [row["kind"] for row in rows[:6]] == kinds[:-1]
    assert {row["state"] for row in rows[:6]} == {"available"}
    assert [row["state"] for row in rows[6:]] == ["available", "completed"]
    assert all(row["errors"] for row in rows[:6])
