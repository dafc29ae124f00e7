"""The check of `riverpy health` that each domain with clients has a leader."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from riverpy._tools.domain_map import read_domains
from riverpy._tools.health.probes import CheckResult, check_leaders
from riverpy.cli import main
from riverpy.cli._run import EXIT_NOT_READY
from riverpy.migrate import migrate_all
from tests._database import connected
from tests.tools.doctor.conftest import register, set_leader, set_lease_holder

if TYPE_CHECKING:
    from tests._database import Schema

MOST = timedelta(seconds=60)


async def result_for(schema: Schema) -> CheckResult:
    """Return the result of the check."""
    async with schema.connected() as connection:
        return check_leaders(MOST, await read_domains(connection, schema.name))


async def run_command(schema: Schema, url: str) -> tuple[int, dict[str, Any]]:
    """Return the exit code of the command and its checks."""
    where = ("health", f"--database-url={url}", f"--schema={schema.name}", "--json")
    result = await asyncio.to_thread(CliRunner().invoke, main, where)
    return result.exit_code, json.loads(result.stdout)["checks"]


async def test_leaders(schema: Schema) -> None:
    """Leaders are named. A domain without a live client needs no leader."""
    assert await result_for(schema) == CheckResult(
        True, "no leader of default, which has no client"
    )
    await register(schema, "a")
    await set_leader(schema, "a")
    await register(schema, "m", domain="media")
    await set_lease_holder(schema, "d:media", "m")
    assert await result_for(schema) == CheckResult(
        True, "a is the leader of default, m is the leader of media"
    )


@pytest.mark.parametrize(
    ("over", "running", "is_well"),
    [(30, 3600, True), (90, 3600, False), (90, 30, True), (None, 3600, False), (None, 30, True)],
)
async def test_no_leader(schema: Schema, over: float | None, running: float, is_well: bool) -> None:
    """The check fails if there is no leader for a minute. The time starts at the end of the last
    lease or, after a release, at the start of the oldest client."""
    await register(schema, "a", running=running)
    if over is not None:
        await set_leader(schema, "gone", -over)
    check = await result_for(schema)
    assert check.ok is is_well
    assert check.reason.startswith("no leader of default")


async def test_domain_without_leader(schema: Schema) -> None:
    """A domain with clients and without a leader is named."""
    await register(schema, "a")
    await set_leader(schema, "a")
    await register(schema, "m", domain="media", candidate=False)
    check = await result_for(schema)
    assert not check.ok
    assert check.reason.startswith("no leader of media for more than 1m: ")


async def test_command(schema: Schema) -> None:
    """The exit code is 3 while there is no leader."""
    await register(schema, "a")
    code, checks = await run_command(schema, schema.url)
    assert (code, checks["leaders"]["ok"], checks["workers"]["ok"]) == (EXIT_NOT_READY, False, True)
    await set_leader(schema, "a")
    code, checks = await run_command(schema, schema.url)
    assert (code, checks["leaders"]["reason"]) == (0, "a is the leader of default")


async def test_role_without_grants(schema: Schema) -> None:
    """A role without grants on the tables of leases and domains gets an error for this check,
    and the other checks decide."""
    role = f"{schema.name}_probe".lower()
    seen = "river_job, river_queue, river_leader, river_migration, riverpy_client"
    await register(schema, "a")
    await schema.execute(
        f"CREATE ROLE {role}; GRANT USAGE ON SCHEMA {schema.name} TO {role};"
        f" GRANT SELECT ON {seen} TO {role}"
    )
    try:
        code, checks = await run_command(schema, f"{schema.url}&role={role}")
    finally:
        await schema.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
    assert (code, checks["leaders"]["ok"]) == (0, True)
    assert checks["leaders"]["reason"].startswith("not known: permission denied for table riverpy_")


async def test_missing_schema_or_table(fresh_database_url: str) -> None:
    """The check `schema` fails if tables are missing. The reason names the schema and the command
    that helps."""

    async def reason() -> str:
        args = ["health", f"--database-url={fresh_database_url}", "--schema=public", "--json"]
        result = await asyncio.to_thread(CliRunner().invoke, main, args)
        checks = json.loads(result.stdout)["checks"]
        assert (result.exit_code, list(checks)) == (EXIT_NOT_READY, ["schema"])
        return checks["schema"]["reason"]

    assert "schema 'public' does not have River's tables: run `riverpy migrate up" in await reason()
    await migrate_all(fresh_database_url)
    async with connected(fresh_database_url) as connection:
        await connection.execute("DROP TABLE riverpy_client")
    text = await reason()
    assert text.startswith('relation "public.riverpy_client" does not exist: schema "public" lacks')
    assert "Run `riverpy doctor --database-url" in text
