"""The queue cleaner: which queues are forgotten, and which never."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest

from riverpy._leading.queue_scope import NO_QUEUES, only_queues
from riverpy._maintenance import batch_runner
from riverpy._maintenance.queue_cleaner import RUN_INTERVAL, QueueCleaner
from riverpy.errors import FencedOutError
from tests.leading.term_context import held_term

if TYPE_CHECKING:
    from tests._database import Schema
    from tests.leading.term_context import HeldTerm


async def insert_queue(schema: Schema, name: str, age: str, **columns: str) -> None:
    """A queue that was touched so long ago."""
    extra = "".join(f", {column}" for column in columns)
    values = "".join(f", {value}" for value in columns.values())
    await schema.execute(
        f"INSERT INTO river_queue (name, updated_at{extra})"
        f" VALUES ($1, now() - interval '{age}'{values})",
        name,
    )


async def names_of(schema: Schema) -> list[str]:
    """The queues that are known."""
    return [row[0] for row in await schema.fetch("SELECT name FROM river_queue ORDER BY name")]


async def test_stale_queues(held: HeldTerm, schema: Schema, log: list[dict[str, Any]]) -> None:
    """Queues that no client touched for a day are deleted, and logged. Others stay (QC1)."""
    await insert_queue(schema, "fresh", "23 hours 59 min")
    await insert_queue(schema, "stale", "24 hours 1 min")
    await insert_queue(schema, "older", "1 year")
    assert await held.run(QueueCleaner(held.context)) == RUN_INTERVAL
    assert await names_of(schema) == ["fresh"]
    assert [(entry["count"], sorted(entry["queues"])) for entry in log] == [(2, ["older", "stale"])]


async def test_batches(held: HeldTerm, schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """QC2: more queues than a batch has are all forgotten."""
    monkeypatch.setattr(batch_runner, "BATCH_ROWS_MAX", 4)
    for number in range(11):
        await insert_queue(schema, f"q{number}", "25 hours")
    await held.run(QueueCleaner(held.context))
    assert await names_of(schema) == []


async def test_paused_or_described(held: HeldTerm, schema: Schema) -> None:
    """QC3: a queue that is paused, or has metadata, is never forgotten."""
    await insert_queue(schema, "paused", "1 year", paused_at="now() - interval '1 year'")
    await insert_queue(schema, "described", "1 year", metadata="""'{"team": "a"}'""")
    await insert_queue(schema, "odd", "1 year", metadata="'null'")
    await insert_queue(schema, "stale", "1 year")
    await held.run(QueueCleaner(held.context))
    assert await names_of(schema) == ["described", "odd", "paused"]


async def test_some_queues(held: HeldTerm, schema: Schema) -> None:
    """A cleaner of some queues forgets only those; one of none asks nothing."""
    for name in ("aa", "bb", "cc"):
        await insert_queue(schema, name, "25 hours")
    held.scope = only_queues({"aa", "cc", "dd"})
    await held.run(QueueCleaner(held.context))
    assert await names_of(schema) == ["bb"]
    await held.take_over()
    held.scope = NO_QUEUES
    await held.run(QueueCleaner(held.context))
    assert await names_of(schema) == ["bb"]


async def test_touched_meanwhile(held: HeldTerm, schema: Schema) -> None:
    """A queue that a client touches at this moment is neither waited for nor forgotten."""
    for name in ("back", "stale"):
        await insert_queue(schema, name, "25 hours")
    async with schema.connected() as client, client.transaction():
        await client.execute("UPDATE river_queue SET updated_at = now() WHERE name = 'back'")
        await held.run(QueueCleaner(held.context))
        assert await names_of(schema) == ["back"]
    await held.run(QueueCleaner(held.context))
    assert await names_of(schema) == ["back"]


async def test_two_leaders(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """MC11: two cleaners at once do no harm to each other."""
    monkeypatch.setattr(batch_runner, "BATCH_ROWS_MAX", 3)
    for number in range(40):
        await insert_queue(schema, f"q{number}", "25 hours")
    async with (
        held_term(schema) as held,
        held_term(schema, term=held.term) as second,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(held.run, QueueCleaner(held.context))
        tasks.start_soon(second.run, QueueCleaner(second.context))
    assert await names_of(schema) == []


async def test_deposed(held: HeldTerm, schema: Schema) -> None:
    """A deposed leader forgets nothing."""
    await insert_queue(schema, "stale", "25 hours")
    await held.take_over()
    with pytest.raises(FencedOutError):
        await held.run(QueueCleaner(held.context))
    assert await names_of(schema) == ["stale"]
