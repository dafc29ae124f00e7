"""`riverpy migrate`: what it prints, where, and its exit codes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest
from click.testing import CliRunner

from riverpy._postgres.schema import RIVERPY_MIGRATION_LINE, load_migrations
from riverpy.cli import main
from riverpy.migrate import Direction, Migrator
from tests._database import connected, run_apart

if TYPE_CHECKING:
    from collections.abc import Callable

    from click.testing import Result

    Command = Callable[..., Result]

LINES_UP = [
    "main 001 up create river migration",
    "main 002 up initial schema",
    "main 003 up river job tags non null",
    "main 004 up pending and more",
    "main 005 up migration unique client",
    "main 006 up bulk unique",
    "main 007 up notification outbox sqlite jsonb and sql cleanup",
    "main 008 up job id autoincrement",
]
OWN = load_migrations(RIVERPY_MIGRATION_LINE)
OWN_LINES_UP = [f"riverpy {version:03} up {OWN[version].name}" for version in OWN]


@pytest.fixture
def command(fresh_database_url: str) -> Command:
    """Runs `riverpy migrate` on a database of its own."""

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(
            main, ["migrate", *arguments, "--database-url", fresh_database_url]
        )

    return run


def execute(url: str, statement: str) -> None:
    """Run a statement apart from the command."""

    async def run() -> None:
        async with connected(url) as connection:
            await connection.execute(statement)

    run_apart(run)


def output(result: Result) -> Any:
    """The JSON that a command printed: one object, and nothing beside it."""
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


def test_up_and_down(command: Command) -> None:
    """Each migration prints one line. An `up` without work prints a note. The exit code is 0
    (MG-02)."""
    result = command("up")
    assert result.exit_code == 0
    assert [line.partition(" (")[0] for line in result.stdout.splitlines()] == [
        f"applied: {line}" for line in LINES_UP + OWN_LINES_UP
    ]
    assert result.stderr == ""
    result = command("up")
    assert (result.exit_code, result.stdout) == (0, "nothing to migrate up\n")
    result = command("down", "--to", "5")
    assert [line.partition(" (")[0] for line in result.stdout.splitlines()] == [
        "undone: main 008 down job id autoincrement",
        "undone: main 007 down notification outbox sqlite jsonb and sql cleanup",
        "undone: main 006 down bulk unique",
    ]
    result = command("down")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "0 first, with `riverpy migrate down --line riverpy --to 0`" in result.stderr
    assert command("down", "--line", "riverpy", "--to", "0").stdout.count("undone: riverpy") == len(
        OWN
    )
    assert command("down").stdout.startswith("undone: main 005 down")
    assert command("down", "--max-steps", "2").stdout.count("undone:") == 2
    assert command("down", "--to", "0").stdout.count("undone:") == 2
    assert command("down", "--to", "0").stdout == "nothing to migrate down\n"


def test_dry_run_and_sql(command: Command) -> None:
    """A dry run prints what would be done, and --show-sql prints the SQL."""
    result = command("up", "--dry-run", "--to", "2", "--show-sql", "--schema", "public")
    assert result.exit_code == 0
    assert "would be applied: main 001 up create river migration\n" in result.stdout
    assert 'CREATE TABLE "public".river_job (' in result.stdout
    assert "would be applied: main 003" not in result.stdout
    (main_line, _own) = output(command("list", "--json"))["lines"]
    assert main_line["migrations"][0]["applied_at"] is None
    result = command("up", "--dry-run")
    assert [line.removeprefix("would be applied: ") for line in result.stdout.splitlines()] == (
        LINES_UP + OWN_LINES_UP
    )
    assert result.stderr == "line 'riverpy' needs version 5 of line 'main' before it\n"


def test_json(command: Command) -> None:
    """--json prints one object alone."""
    found = output(command("up", "--to", "6", "--json"))
    assert [step["version"] for step in found["migrations"]] == [1, 2, 3, 4, 5, 6]
    assert all(step["duration_ms"] > 0 for step in found["migrations"])
    del found["migrations"]
    assert found == {
        "line": "main",
        "schema": "public",
        "direction": "up",
        "dry_run": False,
        "notices": [],
    }
    found = output(command("up", "--dry-run", "--show-sql", "--json"))["lines"]
    assert [one["line"] for one in found] == ["main", "riverpy"]
    found = found[0]
    assert [step["version"] for step in found["migrations"]] == [7, 8]
    assert "river_notification" in found["migrations"][0]["sql"]
    found = output(command("list", "--line", "main", "--json"))["migrations"]
    assert [entry["version"] for entry in found] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert found[0]["applied_at"].endswith("Z")
    assert found[6] == {
        "version": 7,
        "name": "notification outbox sqlite jsonb and sql cleanup",
        "applied_at": None,
    }


def test_list(command: Command) -> None:
    """The list shows every version of every line, and a dash for the time of one that is not
    applied."""
    command("up", "--to", "1")
    lines = command("list").stdout.splitlines()
    assert lines[0].split() == ["LINE", "VERSION", "NAME", "APPLIED", "AT"]
    assert lines[1].split()[:5] == ["main", "1", "create", "river", "migration"]
    assert lines[2].split() == ["main", "2", "initial", "schema", "-"]
    assert lines[9].split() == ["riverpy", "1", "clients", "-"]
    assert len(lines) == 9 + len(OWN)
    assert len(command("list", "--line", "riverpy").stdout.splitlines()) == 1 + len(OWN)


def test_validate(command: Command) -> None:
    """Exit code 1 and the reason on stderr if something is missing, else 0."""
    command("up", "--to", "5")
    result = command("validate")
    assert (result.exit_code, result.stdout) == (1, "")
    first, second = result.stderr.splitlines()
    lacks = "line 'main' in schema 'public' lacks versions 6, 7, 8"
    assert first == f"{lacks}: run `riverpy migrate up`"
    assert second.startswith("line 'riverpy' in schema 'public' lacks version")
    result = command("validate", "--line", "main", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["missing"] == [6, 7, 8]
    assert command("validate", "--to", "5").exit_code == 0
    command("up")
    result = command("validate")
    assert (result.exit_code, result.stdout) == (
        0,
        "line main is complete\nline riverpy is complete\n",
    )
    command("down", "--line", "riverpy")
    assert command("validate").exit_code == 1
    assert command("validate", "--line", "main").exit_code == 0


def test_notices(command: Command, fresh_database_url: str) -> None:
    """A newer version and an unknown line print a note on stderr, and are not errors (MG-06)."""
    command("up")
    execute(
        fresh_database_url,
        "INSERT INTO river_migration (line, version) VALUES ('main', 9), ('pro', 1)",
    )
    for verb in ("up", "validate"):
        result = command(verb)
        assert result.exit_code == 0
        assert "line 'main' has version 9, which this riverpy does not know" in result.stderr
        assert "line 'pro' is not one of riverpy's: left alone" in result.stderr
    assert len(output(command("up", "--line", "main", "--json"))["notices"]) == 2
    assert "9  (unknown to this riverpy)" in command("list").stdout
    result = command("down")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (("up", "--schema", "absent"), 1, 'CREATE SCHEMA "absent"'),
        (("up", "--schema", "1x"), 2, "a schema name must have"),
        (("up", "--to", "9"), 2, "riverpy knows 1 to 8"),
        (("down", "--to", "3"), 1, "version 3 of line 'main' is not applied"),
        (("up", "--lock-timeout", "0s"), 2, "lock_timeout is 1 ms to 24 days"),
        (("up", "--lock-timeout", "soon"), 2, "'soon' is not a duration"),
        (("up", "--max-steps", "-1"), 2, "--max-steps"),
        (("up", "--line", "mian"), 2, "--line"),
        (("down", "--to", "-1"), 2, "--to"),
        (("down", "--to", "9"), 2, "riverpy knows 1 to 8"),
        (("validate", "--to", "9"), 2, "riverpy knows 1 to 8"),
        (("up", "7"), 2, "unexpected extra argument"),
    ],
)
def test_errors(command: Command, arguments: tuple[str, ...], exit_code: int, message: str) -> None:
    """Each error is one line on stderr: exit code 1 for a failure, 2 for a wrong call."""
    result = command(*arguments)
    assert (result.exit_code, result.stdout) == (exit_code, "")
    assert message in result.stderr
    if exit_code == 1:
        assert result.stderr.count("\n") == 1


def test_unreachable_database() -> None:
    """No server: one line, without the password."""
    url = "postgres://app:top-secret@127.0.0.1:1/shop"
    result = CliRunner().invoke(main, ["migrate", "up", "--database-url", url])
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "top-secret" not in result.stderr


def test_sql() -> None:
    """`sql` prints the migrations without a database, all or the named ones, up or down (MG-01)."""
    result = CliRunner().invoke(main, ["migrate", "sql"])
    assert result.stdout == f"{Migrator.sql()}\n{Migrator.sql(line='riverpy')}"
    result = CliRunner().invoke(main, ["migrate", "sql", "--down"])
    own, river = (Migrator.sql(line=line, direction=Direction.DOWN) for line in ("riverpy", "main"))
    assert result.stdout == f"{own}\n{river}"
    for arguments, options in (
        (["--line", "main"], {}),
        (["--line", "riverpy"], {"line": "riverpy"}),
        (["--line", "main", "--schema", "jobs"], {"schema": "jobs"}),
        (["--version", "4", "--version", "6"], {"versions": [4, 6]}),
        (["--down", "--version", "2"], {"versions": [2], "direction": Direction.DOWN}),
    ):
        result = CliRunner().invoke(main, ["migrate", "sql", *arguments])
        assert result.exit_code == 0
        assert result.stdout == Migrator.sql(**options)
    result = CliRunner().invoke(main, ["migrate", "sql", "--version", "9"])
    assert (result.exit_code, result.stdout) == (2, "")


async def test_sql_in_one_transaction_fails(fresh_database_url: str) -> None:
    """In one transaction the printed SQL fails, as its comment explains (MG-01)."""
    async with connected(fresh_database_url) as connection:
        for version in (1, 2, 3):
            await connection.execute(Migrator.sql(versions=[version]))
        with pytest.raises(asyncpg.UnsafeNewEnumValueUsageError):
            await connection.execute(Migrator.sql(versions=[4, 5, 6]))
