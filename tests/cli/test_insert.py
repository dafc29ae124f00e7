"""`riverpy insert` and `riverpy job`."""

from __future__ import annotations

import asyncio
import hashlib
import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from riverpy._dsn import PG_VARIABLES
from riverpy.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable

    from click.testing import Result

    from tests._database import Schema

    Command = Callable[..., Result]


@pytest.fixture
def command(schema: Schema) -> Command:
    """Runs a command on the test's schema."""
    runner = CliRunner(env=dict.fromkeys(("DATABASE_URL", "RIVERPY_DATABASE_URL", *PG_VARIABLES)))

    def run(*args: str, stdin: str | bytes = "") -> Result:
        place = ("--database-url", schema.url, "--schema", schema.name)
        return runner.invoke(main, [*args, *place], input=stdin)

    return run


async def call(command: Command, *args: str, **kwargs: Any) -> Any:
    """The JSON that a command prints, which must succeed."""
    result = await asyncio.to_thread(command, *args, "--json", **kwargs)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


async def test_insert_prints_the_row(command: Command, schema: Schema) -> None:
    """With no options the job has River's defaults; --json is the row in one object."""
    printed = await call(command, "insert", "welcome", '{"b": 1.0, "a": "<"}')
    (row,) = await schema.jobs()
    assert {key: printed[key] for key in printed if not key.endswith("_at")} == {
        "id": row["id"],
        "kind": "welcome",
        "queue": "default",
        "state": "available",
        "priority": 1,
        "attempt": 0,
        "max_attempts": 25,
        "args": {"a": "<", "b": 1.0},
        "metadata": {},
        "tags": [],
        "attempted_by": [],
        "errors": [],
        "unique_key": None,
        "unique_states": None,
        "duplicate": False,
        "replaced": False,
    }
    assert datetime.fromisoformat(printed["created_at"]) == row["created_at"]
    assert (printed["attempted_at"], printed["finalized_at"]) == (None, None)


async def test_every_option(command: Command, schema: Schema) -> None:
    """Each option reaches its column."""
    args = (
        *("insert", "welcome", "-", "--queue", "q1", "--at", "2027-03-01T12:34:56+02:00"),
        *("--priority", "3", "--tags", "one, two", "--metadata", '{"k": {"z": 1}}'),
        *("--max-attempts", "4", "--unique-by-args", "--unique-by-queue"),
        *("--unique-by-period", "1h", "--unique-exclude-kind"),
        *("--unique-states", "available,pending,running,scheduled"),
    )
    printed = await call(command, *args, stdin='{"x": "é"}\n')
    (row,) = await schema.fetch("SELECT *, unique_states::text AS states FROM river_job")
    assert json.loads(row["args"]) == {"x": "é"} == printed["args"]
    assert (row["queue"], row["priority"], row["max_attempts"]) == ("q1", 3, 4)
    assert row["tags"] == ["one", "two"] == printed["tags"]
    assert json.loads(row["metadata"]) == {"k": {"z": 1}} == printed["metadata"]
    assert row["scheduled_at"] == datetime(2027, 3, 1, 10, 34, 56, tzinfo=UTC)
    assert row["state"] == "scheduled" == printed["state"]
    assert row["states"] == "11010001" == printed["unique_states"]
    assert row["unique_key"].hex() == printed["unique_key"]
    text = '&args={"x":"é"}&period=2027-03-01T10:00:00Z&queue=q1'
    assert printed["unique_key"] == hashlib.sha256(text.encode()).hexdigest()


async def test_in_and_pending(command: Command) -> None:
    """--in counts from now; --pending wins over it."""
    before = datetime.now(UTC)
    later = await call(command, "insert", "welcome", "--in", "1h30m")
    wait = datetime.fromisoformat(later["scheduled_at"]) - before
    assert timedelta(hours=1.5) <= wait <= timedelta(hours=1.6)
    assert later["state"] == "scheduled"
    assert (await call(command, "insert", "welcome", "--pending"))["state"] == "pending"


async def test_a_duplicate_prints_the_job_that_exists(command: Command) -> None:
    """The second insert reports the duplicate and prints the existing row. Its exit code is 0."""
    args = ("insert", "welcome", '{"a":1}', "--unique-by-args")
    first, second = await call(command, *args), await call(command, *args)
    assert second == {**first, "duplicate": True}
    text = await asyncio.to_thread(command, *args)
    assert text.exit_code == 0
    lines = dict(line.split(maxsplit=1) for line in text.stdout.splitlines())
    assert lines["id"] == str(first["id"])
    assert lines["duplicate"] == "yes"
    assert lines["unique_key"] == first["unique_key"]
    assert "finalized_at" not in lines


async def test_replace_and_expires_in(command: Command) -> None:
    """--replace changes the waiting job, at most by --replace-max-wait, and --expires-in is stored
    with it."""
    args = ("insert", "welcome", "--unique-by-queue", "--in", "1h")
    first = await call(command, *args)
    options = ("--replace", "scheduled_at, priority", "--replace-max-wait", "2h")
    second = await call(
        command, *args[:-1], "9h", "--priority", "3", *options, "--expires-in", "10h"
    )
    assert (second["id"], second["duplicate"], second["replaced"]) == (first["id"], True, True)
    assert second["priority"] == 3
    created, due, expires = (
        datetime.fromisoformat(text)
        for text in (
            second["created_at"],
            second["scheduled_at"],
            second["metadata"]["riverpy:expires_at"],
        )
    )
    assert due - created == timedelta(hours=2)
    assert expires - created >= timedelta(hours=10)


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("insert", "welcome", "{'a': 1}"), 2, "args: the text is not JSON"),
        (("insert", "welcome", "[1]"), 2, "args: must be a JSON object"),
        (("insert", "welcome", r'{"a": "\u0000"}'), 2, "NUL"),
        (("insert", "bad kind"), 2, "job kind"),
        (("insert", "welcome", "--queue", "Bad"), 2, "queue name"),
        (("insert", "welcome", "--priority", "5"), 2, "is not a whole number from 1 to 4"),
        (("insert", "welcome", "--priority", "0"), 2, "is not a whole number from 1 to 4"),
        (("insert", "welcome", "--max-attempts", "-1"), 2, "is not a whole number from 1 to 32767"),
        (("insert", "welcome", "--tags", "ok1,,x"), 2, "tag"),
        (("insert", "welcome", "--metadata", "[1]"), 2, "metadata: must be a JSON object"),
        (("insert", "welcome", "--metadata", "{"), 2, "metadata: the text is not JSON"),
        (("insert", "welcome", "--at", "2026-01-01T00:00:00"), 2, "has no time zone"),
        (("insert", "welcome", "--at", "10001-01-01T00:00:00Z"), 2, "is not a time"),
        (("insert", "welcome", "--in", "soon"), 2, "is not a duration"),
        (("insert", "welcome", "--replace", "queue"), 2, "'queue' is not one of args, scheduled"),
        (("insert", "welcome", "--replace", "args"), 2, "replace requires unique_opts"),
        (("insert", "welcome", "--replace-max-wait", "1m"), 2, "needs --replace"),
        (("insert", "welcome", "--expires-in", "0s"), 2, "expires_in must be more than 0"),
        (("insert", "welcome", "--in", "900000000d"), 2, "after the year 9999"),
        (
            ("insert", "welcome", "--in", "1h", "--at", "2027-01-01T00:00:00Z"),
            2,
            "exclude each other",
        ),
        (("insert", "welcome", "--unique-states", "available"), 2, "missing: pending, running"),
        (("insert", "welcome", "--unique-states", "nope"), 2, "the states are available"),
        (("insert", "welcome", "--unique-by-period", "500ms"), 2, "one second or longer"),
        (("insert", "welcome", "--unique-by-period", "0s"), 2, "one second or longer, got 0:00"),
        (
            ("insert", "welcome", "--unique-exclude-kind"),
            2,
            "requires by_args, by_queue or by_period",
        ),
        (("insert", "welcome", '{"a":"\udcff"}'), 2, "is not UTF-8 (at index 6)"),
        (("insert", "welcome\udcff"), 2, r"'welcome\udcff' is not UTF-8"),
        (("insert", "welcome", "--queue", "\udcff"), 2, "'--queue': '\\udcff' is not UTF-8"),
        (("insert", "welcome", "--tags", "\udcff"), 2, "a tag must have"),
        (("insert", "welcome", "--metadata", '{"\udcff":1}'), 2, "is not UTF-8"),
        (("insert", "welcome", "--unique-states", "\udcff"), 2, "the states are available"),
        (("insert", "welcome", "--at", "\udcff"), 2, r"'\udcff' is not a time"),
        (("job", "list", "--kind", "\udcff"), 2, r"'--kind': '\udcff' is not UTF-8"),
        (("job", "list", "--queue", "\udcff"), 2, r"'--queue': '\udcff' is not UTF-8"),
        (("job", "show", "7"), 1, "there is no job 7"),
        (("job", "show", "0"), 2, "whole number"),
        (("job", "show", "99999999999999999999"), 2, "whole number"),
        (("job", "list", "--limit", "0"), 2, "whole number"),
        (("job", "list", "--state", "nope"), 2, "nope"),
    ],
)
async def test_invalid_arguments_are_refused(
    command: Command, schema: Schema, args: tuple[str, ...], code: int, words: str
) -> None:
    """A refused insert prints one line, has an exit code other than 0, and stores nothing."""
    result = await asyncio.to_thread(command, *args)
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.startswith("riverpy: ")
    assert result.stderr.count("\n") == 1
    assert words in result.stderr
    assert not await schema.jobs()


async def test_stdin_that_is_no_text(command: Command) -> None:
    """Bytes that are not UTF-8 are refused in one line."""
    result = await asyncio.to_thread(command, "insert", "welcome", "-", stdin=b'{"a":"\xff"}')
    assert result.exit_code == 2
    assert "the args on stdin are not UTF-8" in result.stderr


async def test_job_list_and_show(command: Command, schema: Schema) -> None:
    """The newest first, filtered by state, kind and queue; show has every column."""
    for number in range(6):
        kind, queue = ("even", "odd-")[number % 2], f"q{number // 3}"
        options = ["--pending"] if number == 5 else []
        await call(command, "insert", kind, f'{{"n":{number}}}', "--queue", queue, *options)

    async def found(*filters: str) -> list[int]:
        listed = await call(command, "job", "list", *filters)
        return [job["args"]["n"] for job in listed["jobs"]]

    assert await found() == [5, 4, 3, 2, 1, 0]
    assert await found("--limit", "2") == [5, 4]
    assert await found("--state", "available") == [4, 3, 2, 1, 0]
    assert await found("--state", "available", "--state", "pending") == [5, 4, 3, 2, 1, 0]
    assert await found("--state", "running") == []
    assert await found("--kind", "even") == [4, 2, 0]
    assert await found("--queue", "q1") == [5, 4, 3]
    assert await found("--kind", "odd-", "--queue", "q0", "--state", "available") == [1]
    assert await found("--kind", "even", "--kind", "odd-") == [5, 4, 3, 2, 1, 0]

    await schema.execute(
        "UPDATE river_job SET state = 'discarded', attempt = 1, finalized_at = now(),"
        " attempted_at = now(), attempted_by = '{me}', errors = ARRAY[jsonb_build_object("
        "'at', '2026-01-01T00:00:00Z', 'attempt', 1, 'error', 'broken', 'trace', '')]"
        " WHERE kind = 'odd-' AND queue = 'q0'"
    )
    (listed,) = (await call(command, "job", "list", "--state", "discarded"))["jobs"]
    shown = await call(command, "job", "show", str(listed["id"]))
    assert shown == {**listed, "progress": None}
    assert shown["attempted_by"] == ["me"]
    assert [error["error"] for error in shown["errors"]] == ["broken"]
    assert shown["finalized_at"] == shown["attempted_at"]
    assert "duplicate" not in shown

    text = await asyncio.to_thread(command, "job", "list", "--limit", "1")
    head, line = text.stdout.splitlines()
    assert head.split() == [
        *("ID", "KIND", "QUEUE", "STATE", "ATTEMPT", "PRIORITY", "SCHEDULED", "AT"),
    ]
    assert line.split()[1:6] == ["odd-", "q1", "pending", "0/25", "1"]
    text = await asyncio.to_thread(command, "job", "show", str(listed["id"]))
    assert "broken" in text.stdout


@pytest.mark.parametrize("args", [("insert", "welcome"), ("job", "list"), ("job", "show", "1")])
async def test_a_database_without_the_tables(
    command: Command, fresh_database_url: str, args: tuple[str, ...]
) -> None:
    """The error names the command that creates the tables."""
    result = await asyncio.to_thread(
        CliRunner().invoke, main, [*args, "--database-url", fresh_database_url]
    )
    assert result.exit_code == 1
    assert "riverpy migrate up" in result.stderr
    assert result.stderr.count("\n") == 1
