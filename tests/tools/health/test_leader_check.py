"""`riverpy health` by database: whether each domain that has workers is led."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from riverpy._tools.domain_map import read_domains
from riverpy._tools.health.leader_check import check_leaders
from riverpy._tools.health.probes import Check
from riverpy.cli import main
from riverpy.cli._run import EXIT_NOT_READY
from tests.tools.doctor.conftest import register, set_leader, set_lease_holder

if TYPE_CHECKING:
    from tests._database import Schema

MOST = timedelta(seconds=60)


async def look(schema: Schema) -> Check:
    """What is said of the leaders."""
    async with schema.connected() as connection:
        return check_leaders(MOST, await read_domains(connection, schema.name))


async def http_get(schema: Schema, url: str) -> tuple[int, dict[str, Any]]:
    """The exit code of the command, and its checks."""
    where = ("health", f"--database-url={url}", f"--schema={schema.name}", "--json")
    result = await asyncio.to_thread(CliRunner().invoke, main, where)
    return result.exit_code, json.loads(result.stdout)["checks"]


async def test_led(schema: Schema) -> None:
    """Whoever leads is named; where no client lives nobody is missed."""
    assert await look(schema) == Check(True, "no leader of default, which has no client")
    await register(schema, "a")
    await set_leader(schema, "a")
    await register(schema, "m", domain="media")
    await set_lease_holder(schema, "d:media", "m")
    assert await look(schema) == Check(True, "a is the leader of default, m is the leader of media")


@pytest.mark.parametrize(
    ("over", "running", "is_well"),
    [(30, 3600, True), (90, 3600, False), (90, 30, True), (None, 3600, False), (None, 30, True)],
)
async def test_nobody_leads(
    schema: Schema, over: float | None, running: float, is_well: bool
) -> None:
    """Nobody leads for a minute, since the last lease or, if it was released, the start of the
    oldest client: that is not well. For a while, as when a leader dies, it is."""
    await register(schema, "a", running=running)
    if over is not None:
        await set_leader(schema, "gone", -over)
    check = await look(schema)
    assert check.ok is is_well
    assert check.reason.startswith("no leader of default")


async def test_domain_without_leader(schema: Schema) -> None:
    """A domain that has clients and no leader is named, beside others that are led."""
    await register(schema, "a")
    await set_leader(schema, "a")
    await register(schema, "m", domain="media", candidate=False)
    check = await look(schema)
    assert not check.ok
    assert check.reason.startswith("no leader of media for more than 1m: ")


async def test_command(schema: Schema) -> None:
    """The command ends with 3 while nobody leads."""
    await register(schema, "a")
    code, checks = await http_get(schema, schema.url)
    assert (code, checks["leaders"]["ok"], checks["workers"]["ok"]) == (EXIT_NOT_READY, False, True)
    await set_leader(schema, "a")
    code, checks = await http_get(schema, schema.url)
    assert (code, checks["leaders"]["reason"]) == (0, "a is the leader of default")


async def test_role_that_may_not_look(schema: Schema) -> None:
    """A role of before the tables of leases and domains is told what it may not read, and the rest
    decides."""
    role = f"{schema.name}_probe".lower()
    seen = "river_job, river_queue, river_leader, river_migration, riverpy_client"
    await register(schema, "a")
    await schema.execute(
        f"CREATE ROLE {role}; GRANT USAGE ON SCHEMA {schema.name} TO {role};"
        f" GRANT SELECT ON {seen} TO {role}"
    )
    try:
        code, checks = await http_get(schema, f"{schema.url}&role={role}")
    finally:
        await schema.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
    assert (code, checks["leaders"]["ok"]) == (0, True)
    assert checks["leaders"]["reason"].startswith("not known: permission denied for table riverpy_")
