"""Entries in a job's `errors` that other programs wrote, in another form than River's."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from riverpy import AttemptError, Client, Config, Job
from riverpy._attempt_errors import format_json_time, parse_error_entry
from riverpy.cli import main
from tests.tools.doctor.conftest import run_doctor
from tests.work.rig import Rig, Task

if TYPE_CHECKING:
    from tests._database import Schema

ZERO = datetime(1, 1, 1, tzinfo=UTC)
AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
ODD = {
    "null": (ZERO, 0, "", ""),
    "42": (ZERO, 0, "42", ""),
    '"x"': (ZERO, 0, "x", ""),
    "true": (ZERO, 0, "true", ""),
    '[1, "a"]': (ZERO, 0, '[1,"a"]', ""),
    "{}": (ZERO, 0, "", ""),
    '{"attempt": 1, "error": "e", "trace": "t"}': (ZERO, 1, "e", "t"),
    '{"at": "2026-01-02 03:04:05Z", "attempt": 1, "error": "e"}': (ZERO, 1, "e", ""),
    '{"at": "2026-01-02T03:04:05", "attempt": true, "error": null}': (ZERO, 0, "", ""),
    '{"at": "2026-01-02t03:04:05Z", "attempt": "1.9", "trace": null}': (ZERO, 0, "", ""),
    '{"at": "2026-01-02T03:04:60Z", "attempt": 1.9, "trace": 5}': (ZERO, 0, "", "5"),
    '{"at": "12026-01-02T03:04:05Z", "attempt": "x7"}': (ZERO, 0, "", ""),
    '{"at": 5, "attempt": null, "error": true, "trace": ["x"]}': (ZERO, 0, "true", '["x"]'),
    '{"at": "2026-01-02T03:04:05Z", "attempt": "7", "error": {"a": [1, "b"]}}': (
        AT,
        7,
        '{"a":[1,"b"]}',
        "",
    ),
    '{"at": "2026-01-02T03:04:05.123456789Z", "attempt": " 3 ", "error": 1.50}': (
        AT.replace(microsecond=123457),
        3,
        "1.50",
        "",
    ),
    '{"at": "2026-01-02T08:34:05+05:30", "attempt": "1e3", "error": "e"}': (AT, 1000, "e", ""),
    '{"at": "2026-01-02T03:04:05Z", "attempt": 99999999999999999999}': (AT, 0, "", ""),
    '{"AT": "2026-01-02T03:04:05Z", "Attempt": -3, "ERROR": "e", "Trace": "t"}': (AT, -3, "e", "t"),
}
"""JSON texts, and what River reads in them."""


@pytest.fixture
def rig(schema: Schema) -> Rig:
    return Rig(schema)


@pytest.mark.parametrize("text", ODD)
def test_entry(text: str) -> None:
    """An entry of any form is read as River in Go reads it."""
    assert parse_error_entry(text) == AttemptError(*ODD[text])


def test_hostile_entries() -> None:
    """Entries that Python's JSON cannot read, and endless numbers and times, are read all the
    same."""
    deep = "[" * 5000 + "]" * 5000
    for text in (deep, f'{{"error": {deep}}}', f'{{"attempt": {"9" * 100_000}}}', "1e400"):
        assert parse_error_entry(text).attempt == 0
    endless = f'{{"at": "2026-01-02T03:04:05.{"9" * 100_000}", "attempt": "{" " * 100_000}1"}}'
    assert parse_error_entry(endless) == AttemptError(ZERO, 1, "")


@pytest.mark.parametrize(
    ("at", "text"),
    [
        (AT, "2026-01-02T03:04:05Z"),
        (AT.replace(microsecond=70_000), "2026-01-02T03:04:05.07Z"),
        (AT.replace(second=0, microsecond=1), "2026-01-02T03:04:00.000001Z"),
    ],
)
def test_times(at: datetime, text: str) -> None:
    """Times in JSON have the shortest fraction, as Go writes them."""
    assert format_json_time(at) == text


async def test_row_of_odd_entries(rig: Rig, schema: Schema) -> None:
    """No verb, command or claim fails for odd entries: they are read, stay as they are stored, and
    new ones follow them."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        assert [error.error for error in job.errors] == [*(one[2] for one in ODD.values()), ""]
        raise ValueError("one more")

    await schema.execute(
        "INSERT INTO river_job (kind, args, max_attempts, attempt, errors)"
        " SELECT 'task', '{}', 25, 3, array_agg(e::jsonb ORDER BY n) || NULL::jsonb"
        " FROM unnest($1::text[]) WITH ORDINALITY AS given (e, n)",
        list(ODD),
    )
    async with Client(rig.url, config=Config(schema=schema.name)) as client:
        for call in (client.job_get, client.job_cancel, client.job_retry):
            assert len((await call(1)).errors) == len(ODD) + 1
    where = [f"--database-url={schema.url}", f"--schema={schema.name}"]
    for command in (["job", "show", "1"], ["job", "list"], ["top", "--once"]):
        result = await asyncio.to_thread(CliRunner().invoke, main, [*command, *where])
        assert result.exit_code == 0, result.output
    report = await run_doctor(*where)
    assert not [one for one in report.findings if "this check failed" in one["text"]]
    before = await schema.fetchval("SELECT errors::text[] FROM river_job")
    (result,) = await rig.work_due_jobs()
    assert [error.error for error in result.job.errors[-2:]] == ["", "ValueError: one more"]
    stored = await schema.fetchval("SELECT errors::text[] FROM river_job")
    assert stored[:-1] == before
    assert json.loads(stored[-1])["error"] == "ValueError: one more"


async def test_errors_of_two_dimensions(schema: Schema) -> None:
    """Errors in an array of several dimensions are read one after the other."""
    await schema.execute(
        "INSERT INTO river_job (kind, args, max_attempts, errors) SELECT 'task', '{}', 25,"
        " array[array['1'::jsonb, '2'::jsonb], array['3'::jsonb, null]]"
    )
    async with Client(schema.url, config=Config(schema=schema.name)) as client:
        job = await client.job_get(1)
    assert [error.error for error in job.errors] == ["1", "2", "3", ""]
