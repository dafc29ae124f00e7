"""Periodic jobs of a leader of either language."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import pytest

from riverpy._maintenance.due_times import find_due_times
from riverpy.schedules import cron, find_next_due_time
from tests.interop.inserting import request
from tests.interop.notifications import notifications
from tests.interop.test_outages import having
from tests.interop.test_wakeups import KILL, LISTENS, NAMES
from tests.interop.working import LANGUAGES, OTHER, Periodic
from tests.work.rig import metadata_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from riverpy.schedules import PeriodicSchedule
    from tests._database import Schema
    from tests.interop.callers import Caller
    from tests.interop.river_go import RiverGo
    from tests.interop.working import Fleet, Worker
    from tests.work.rig import Rig

    Callers = dict[str, Caller]

EITHER = pytest.mark.parametrize("language", LANGUAGES)
VECTORS = Path(__file__).parents[1] / "vectors" / "cron.jsonl"
DAY = timedelta(days=1)
DAY_MS = DAY // timedelta(milliseconds=1)
PERIODIC = [
    Periodic(id="marker", every_ms=DAY_MS, run_on_start=True, queue="work"),
    Periodic(
        id="daily",
        kind="noop",
        every_ms=DAY_MS,
        unique={"by_period_s": DAY_MS / 1000},
        run_on_start=True,
        queue="none",
    ),
    Periodic(id="ticks", cron="@every 1s", unique={"by_period_s": 1}, queue="ticks"),
]
NOTE = """
CREATE TABLE inserts (id bigint, state text);
CREATE FUNCTION note_insert() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE format('INSERT INTO %I.inserts VALUES ($1, $2)', TG_TABLE_SCHEMA)
        USING NEW.id, NEW.state::text;
    RETURN NULL;
END $$;
CREATE TRIGGER note_insert AFTER INSERT ON river_job FOR EACH ROW EXECUTE FUNCTION note_insert();
"""
NO_NOTE = "DROP FUNCTION note_insert CASCADE; DROP TABLE inserts"
COUNT = """
SELECT count(*) FROM river_job
WHERE metadata ->> 'river:periodic_job_id' = $1 AND args ->> 'by' = coalesce($2, args ->> 'by')
"""


class Terms:
    """Leaders that follow each other, with the same periodic jobs."""

    def __init__(self, fleet: Fleet, rig: Rig) -> None:
        self._fleet, self._rig = fleet, rig
        self.number = 0

    @asynccontextmanager
    async def leader(self, language: str) -> AsyncGenerator[Worker]:
        """Run the next leader; it works no queue of the jobs."""
        self.number += 1
        async with self._fleet.worker(
            language, candidate=True, queues={"idle": 1}, periodic=PERIODIC
        ) as leader:
            await self._rig.until("SELECT leader_id FROM river_leader", leader.id)
            await self._rig.until(COUNT, self.number, "marker", None)
            yield leader
            leader.stop()
            await leader.stopped()

    async def until_tick(self, language: str) -> None:
        """Wait until the leader has inserted one more job by its schedule."""
        known = await self._rig.schema.fetchval(COUNT, "ticks", language)
        await self._rig.until(
            COUNT.replace("count(*)", "count(*) >= $3"), True, "ticks", language, known + 1
        )


@EITHER
async def test_terms(language: str, go: RiverGo, fleet: Fleet, schema: Schema, rig: Rig) -> None:
    """The leader passes from one language to the other and back.

    A due job is inserted as available, its queue is notified once, and a worker of the other
    language works it (CF-067, periodic_due_job_available). A job that runs on start is inserted
    once per term, not by a follower, and not after the leader's connections were lost; then its
    schedule applies (CF-068, periodic_run_on_start). A job that is unique by day is a duplicate for
    the next leader, in any time zone (CF-069, periodic_unique_cross_engine). An interval `@every`
    is inserted once per period, whichever client is the leader (CF-109).
    """
    go.zone = "Pacific/Kiritimati"
    terms = Terms(fleet, rig)
    async with having(schema, NOTE, NO_NOTE), notifications(schema) as sent:
        async with terms.leader(language):
            insert = ("river_insert", {"queue": "work"})
            assert (await sent.take()).count(insert) == 1
            async with fleet.worker(
                OTHER[language],
                id="follower",
                queues={"work": 5},
                candidate=True,
                periodic=PERIODIC,
            ) as follower:
                await terms.until_tick(language)
                await schema.execute(KILL, NAMES[language], LISTENS[False])
                await terms.until_tick(language)
                await rig.until(COUNT + " AND state = 'completed'", 1, "marker", language)
                assert await schema.fetchval(COUNT, "marker", None) == 1
                follower.stop()
                await follower.stopped()
        async with terms.leader(OTHER[language]):
            await terms.until_tick(OTHER[language])
        async with terms.leader(language):
            await terms.until_tick(language)
        states = await schema.fetch("SELECT DISTINCT state FROM inserts")
        assert [row["state"] for row in states] == ["available"]
    rows: dict[str, list[Any]] = {}
    for row in await schema.jobs():
        metadata = metadata_of(row)
        rows.setdefault(metadata["river:periodic_job_id"], []).append(row)
        assert metadata.pop("periodic") is True
        metadata.pop("riverpy:periodic_run", None)
        assert set(metadata) == {"river:periodic_job_id"}
    days = {row["scheduled_at"].date() for row in rows["marker"]}
    assert len(rows["marker"]) == 3
    assert len(rows["daily"]) == len(days)
    assert rows["marker"][0]["attempted_by"] == ["follower"]
    seconds = [row["scheduled_at"] for row in rows["ticks"]]
    assert all(at.microsecond == 0 for at in seconds)
    assert len(set(seconds)) == len(seconds)
    assert {json.loads(row["args"])["by"] for row in rows["ticks"]} == set(LANGUAGES)


def vectors() -> list[dict[str, Any]]:
    """Return the lines of the vectors."""
    return [json.loads(line) for line in VECTORS.read_bytes().splitlines()]


async def test_cron_vectors(go: RiverGo) -> None:
    """The vectors of `tests/periodic/test_schedules.py` are what Go's parser prints (CF-070,
    cron_schedule_goldens; CF-109)."""
    lines = vectors()
    assert await go.run("cron", requests=lines) == lines


class Slots:
    """Inserts of leaders of both languages with a periodic job of the same cron text."""

    def __init__(self, in_go: list[datetime], schedule: PeriodicSchedule) -> None:
        self._in_go, self._schedule = in_go, schedule
        after = in_go[0] - timedelta(hours=1)
        self.in_python: list[datetime] = []
        while (due := find_next_due_time(schedule, after)) is not None and due <= in_go[-1]:
            self.in_python.append(due)
            after = due
        self.all = sorted({*in_go, *self.in_python})
        self._stored = self.in_python[0]
        """The next slot in riverpy's table."""

    def due(self, language: str, now: datetime) -> list[datetime]:
        """Return what a leader of the language inserts now."""
        if language == "go":
            return [slot for slot in self._in_go if slot == now]
        if now < self._stored:
            return []
        due = find_due_times(self._schedule, "one", self._stored, now)
        assert due.next_time is not None
        self._stored = due.next_time
        return due.times_with_job


async def slots_in_go(go: RiverGo, text: str, after: str) -> list[datetime]:
    """Return the next three slots in Go."""
    line = {"expression": text, "zone": "UTC", "after": after, "count": 3}
    (vector,) = await go.run("cron", requests=[line])
    return [datetime.fromisoformat(at) for at in vector["next"]]


async def inserted(
    callers: Callers,
    schema: Schema,
    in_go: list[datetime],
    schedule: PeriodicSchedule,
    period: timedelta,
) -> list[list[datetime]]:
    """Return the times of the jobs that leaders of both languages insert, unique by this period,
    for each order of languages. A leader starts twenty minutes before its slot; riverpy then
    catches up on missed slots."""
    unique = {"by_period_s": int(period.total_seconds())}
    found: list[list[datetime]] = []
    for number, leaders in enumerate(product(LANGUAGES, repeat=len(in_go))):
        slots, kind = Slots(in_go, schedule), f"report_{number}"
        for leader, slot in zip(leaders, slots.all, strict=True):
            for now in (slot - timedelta(minutes=20), slot):
                for due in slots.due(leader, now):
                    await callers[leader].insert(
                        request("{}", kind=kind, scheduled_at=due.isoformat(), unique=unique)
                    )
        rows = await schema.fetch(
            "SELECT scheduled_at FROM river_job WHERE kind = $1 ORDER BY scheduled_at", kind
        )
        found.append([row["scheduled_at"] for row in rows])
    return found


REPEATED = {
    "CRON_TZ=America/New_York 30 1 * * *": "2026-10-31T12:00:00Z",
    "CRON_TZ=Europe/Berlin 30 2 * * *": "2026-10-24T12:00:00Z",
    "CRON_TZ=Australia/Sydney 30 2 * * *": "2026-04-04T00:00:00Z",
    "CRON_TZ=Asia/Jerusalem 30 1 * * *": "2026-10-24T12:00:00Z",
}
"""Times that occur twice on the day after this one."""


@pytest.mark.parametrize("text", REPEATED)
async def test_repeated_hour(text: str, go: RiverGo, callers: Callers, schema: Schema) -> None:
    """A daily periodic job of the same cron text, on a day on which clocks show its time twice:
    riverpy has only the first time, Go both. Unique by half a day it is inserted once a day,
    whichever client is the leader. Both schedules and both clients show this."""
    in_go, zone = await slots_in_go(go, text, REPEATED[text]), ZoneInfo(text.split()[0][8:])
    first, second, later = in_go
    assert (second - first, later - second) == (timedelta(hours=1), DAY)
    assert Slots(in_go, cron(text)).in_python == [first, later]
    for times in await inserted(callers, schema, in_go, cron(text), DAY / 2):
        assert [at.astimezone(zone).date() for at in times] == [
            at.astimezone(zone).date() for at in (first, later)
        ]


@pytest.mark.parametrize("text", REPEATED)
async def test_repeated_hour_as_in_river(
    text: str, go: RiverGo, callers: Callers, schema: Schema
) -> None:
    """With `clock_changes="river"` a time that occurs twice is inserted twice, each once, whichever
    client is the leader, if it is unique by a period shorter than an hour."""
    in_go = await slots_in_go(go, text, REPEATED[text])
    schedule = cron(text, clock_changes="river")
    assert Slots(in_go, schedule).in_python == in_go
    for times in await inserted(callers, schema, in_go, schedule, timedelta(minutes=1)):
        assert times == in_go


@pytest.mark.parametrize(("period", "lost"), [(DAY / 2, 0), (DAY, 1)])
async def test_short_day(
    period: timedelta, lost: int, go: RiverGo, callers: Callers, schema: Schema
) -> None:
    """Twice a year two times of a daily periodic job are less than a day apart, so that both may be
    on one UTC day. Unique by half a day both are inserted; unique by a day the second is a
    duplicate, as docs/go.md warns."""
    text = "CRON_TZ=America/New_York 30 19 * * *"
    in_go = await slots_in_go(go, text, "2026-03-07T12:00:00Z")
    for times in await inserted(callers, schema, in_go, cron(text), period):
        assert len(times) == len(in_go) - lost
