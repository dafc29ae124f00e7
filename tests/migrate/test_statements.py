"""The statements for other migration tools, and the recipe for Alembic."""

from __future__ import annotations

import asyncio
import io
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import create_engine, inspect, make_url, text
from sqlalchemy.dialects import postgresql

from riverpy._postgres.schema import load_migrations
from riverpy.migrate import Direction, Migrator, is_riverpy_table, migrate_all
from tests.migrate.catalog import catalog_vector, read_catalog, without_history

if TYPE_CHECKING:
    import asyncpg

VERSIONS = range(1, 9)


@pytest.mark.parametrize("schema", ["public", "MixedCase_1"])
async def test_statements(connection: asyncpg.Connection[Any], schema: str) -> None:
    """Each statement migrates one version, up or down, and changes nothing when it is repeated. The
    result is that of the migrator."""
    for version, statement in zip(VERSIONS, Migrator.statements(schema=schema), strict=True):
        for _ in range(2):
            await connection.execute(statement)
            assert await read_catalog(connection, schema) == catalog_vector(version)
    for statement in Migrator.statements(line="riverpy", schema=schema):
        await connection.execute(statement)
    assert not any(result.steps for result in await migrate_all(connection, schema=schema))
    for line in ("riverpy", "main"):
        versions = sorted(load_migrations(line), reverse=True)
        statements = Migrator.statements(line=line, schema=schema, direction=Direction.DOWN)
        for version, statement in zip(versions, statements, strict=True):
            for _ in range(2):
                await connection.execute(statement)
            if line == "main" and version > 1:
                found = without_history(await read_catalog(connection, schema))
                assert found == without_history(catalog_vector(version - 1))
    assert not any((await read_catalog(connection, schema)).values())


async def test_statement_is_atomic(connection: asyncpg.Connection[Any]) -> None:
    """A statement that fails changes nothing, and succeeds when it is repeated."""
    *statements, _ = Migrator.statements(versions=[1, 2, 3, 4])
    for statement in statements:
        await connection.execute(statement)
    before = await read_catalog(connection, "public")
    broken = Migrator.statements(versions=[4])[0].replace("VALUES (4)", "VALUES (0)")
    with pytest.raises(Exception, match="violates check constraint"):
        await connection.execute(broken)
    assert await read_catalog(connection, "public") == before
    await connection.execute(Migrator.statements(versions=[4])[0])
    found = without_history(await read_catalog(connection, "public"))
    assert found == without_history(catalog_vector(4))


async def test_other_drivers(fresh_database_url: str) -> None:
    """Every statement passes through SQLAlchemy as it is: it has no parameter and no `%`. psycopg
    runs each one, and `is_riverpy_table` knows every table that they create."""
    statements = [
        statement for line in ("main", "riverpy") for statement in Migrator.statements(line=line)
    ]
    both = statements + [
        statement
        for line in ("riverpy", "main")
        for statement in Migrator.statements(line=line, direction=Direction.DOWN)
    ]
    for statement in both:
        assert str(text(statement).compile(dialect=postgresql.dialect())) == statement
        assert "%" not in statement

    def run() -> None:
        url = make_url(fresh_database_url).set(drivername="postgresql+psycopg")
        engine = create_engine(url, isolation_level="AUTOCOMMIT")
        tables: set[str] = set()
        with engine.connect() as connection:
            for statement in statements:
                connection.execute(text(statement))
                tables.update(inspect(connection).get_table_names())
            assert len(tables) > 10
            assert [name for name in tables if not is_riverpy_table(name)] == []
            for statement in both[len(statements) :]:
                connection.execute(text(statement))
            assert inspect(connection).get_table_names() == []
        engine.dispose()

    await asyncio.to_thread(run)
    assert not is_riverpy_table("river_levels")
    assert not is_riverpy_table(None)


PSQL = shutil.which("psql")
ENVIRONMENT = """
from alembic import context

context.configure(dialect_name="postgresql", dialect_opts={"paramstyle": "named"})
with context.begin_transaction():
    context.run_migrations()
"""


@pytest.mark.skipif(PSQL is None, reason="there is no psql")
async def test_offline_sql_of_alembic(
    connection: asyncpg.Connection[Any], fresh_database_url: str, tmp_path: Path
) -> None:
    """psql runs what `alembic upgrade --sql` and `downgrade --sql` print for the docs' revision."""
    page = (Path(__file__).parents[2] / "docs" / "alembic.md").read_text("utf-8")
    pattern = re.compile(
        r"^```python file=migrations/versions/\S+\n(.*?)^```$", re.MULTILINE | re.DOTALL
    )
    revision = pattern.search(page)
    assert revision
    (tmp_path / "versions").mkdir()
    (tmp_path / "versions" / "0001_riverpy.py").write_text(revision[1])
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    (tmp_path / "script.py.mako").write_text("")

    async def run(migrate: Any, revision: str) -> None:
        printed = io.StringIO()
        config = Config(output_buffer=printed)
        config.set_main_option("script_location", str(tmp_path))
        await asyncio.to_thread(migrate, config, revision, sql=True)
        process = await asyncio.create_subprocess_exec(
            *(str(PSQL), "-X", "-q", "-v", "ON_ERROR_STOP=1", fresh_database_url),
            stdin=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        _, errors = await process.communicate(printed.getvalue().encode())
        assert process.returncode == 0, errors

    await run(command.upgrade, "head")
    assert not any(result.steps for result in await migrate_all(connection))
    await run(command.downgrade, "head:base")
    assert await connection.fetchval("SELECT to_regclass('river_job')") is None
    assert await connection.fetchval("SELECT count(*) FROM alembic_version") == 0
