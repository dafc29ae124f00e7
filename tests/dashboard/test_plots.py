"""The plots of the counts of jobs: what they show, in shapes and in words, and what they lack."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from riverpy import Client, Config
from riverpy._dashboard.job_count_cache import TIME_RANGES
from riverpy._dashboard.plots import (
    choose_count_scale_top,
    choose_wait_scale_top,
    draw_bars,
    make_plot_section,
    make_sparklines,
)
from riverpy._postgres.job_counts import JobCounts, QueueTimeStepCounts, TimeStepCounts
from riverpy.web import dashboard
from tests.dashboard.site_kit import Browser, insert_job

if TYPE_CHECKING:
    from tests._database import Schema

HOUR, _, WEEK = TIME_RANGES
OVER = dict.fromkeys([name for name in JobCounts._fields if "over" in name], 9)
ADD = """
INSERT INTO riverpy_job_count
SELECT 60, date_trunc('minute', now()) - {age}, queue, 1200, 1157, 41, 3, 600, 2.1, 900, 20, 0, 0, 0
FROM unnest(array['', '*', '<b>q']) AS queue
"""


def step_at(
    started_at: int, since: int | None = 0, attempts: int = 0, **values: float
) -> TimeStepCounts:
    """Return a step with these counts."""
    empty = JobCounts("", attempts, *[0] * 10)
    counts = empty._replace(**values)  # pyright: ignore[reportArgumentType]
    return TimeStepCounts(started_at, since, counts)


def test_shapes() -> None:
    """Bars stand at their step, and a small value can be seen. Scales end at round values. What was
    before the first count is unknown, which is not zero."""
    assert draw_bars([0, 5, 10, 0.001], 10) == (
        "M1.1 100v-50.0h.8v50.0zM2.1 100v-100.0h.8v100.0zM3.1 100v-1.5h.8v1.5z"
    )
    assert [choose_count_scale_top(n) for n in (0, 1, 3, 5, 6, 100, 101, 4_999_999)] == [
        *(1, 1, 5, 5, 10, 100, 200, 5_000_000),
    ]
    assert [choose_wait_scale_top(n) for n in (0, 0.3, 61, 86_401)] == [0.01, 0.5, 300, 172_800]
    steps = [
        step_at(
            3600 * n,
            3600 * 3 + 60,
            attempts=20 * (n == 5),
            wait_max=700 * (n == 5),
            **OVER,
        )
        for n in range(8)
    ]
    section = make_plot_section(steps, WEEK, [], [])
    assert (section.unknown_steps, section.width, len(section.rows)) == (3, 8, 1)
    assert section.notes == ["Nothing was counted before 01 Jan 03:00 (UTC). This part is grey."]
    assert "11m40s, and more than 5 % of the jobs waited longer than 5m." in section.text
    assert [plot.top for plot in section.plots] == ["20 attempts", "1 failure", "30m"]
    assert (
        make_plot_section([step_at(60, None)], HOUR, [], [])
        .notes[0]
        .startswith("Nothing was counted")
    )
    fresh = make_plot_section([step_at(60, 120)], HOUR, [], [])
    assert fresh.text == "Last hour: nothing was counted."
    assert fresh.notes == ["The counts of a minute are shown when it has ended."]
    idle = make_plot_section([step_at(60)], HOUR, [], [])
    assert (idle.text, idle.plots) == ("Last hour: no attempt ended.", [])
    now = datetime.fromtimestamp(3600 * 5 + 10, UTC)
    lines = make_sparklines(
        {
            "aa": [
                QueueTimeStepCounts("aa", 3600 * 5, 4, 1),
                QueueTimeStepCounts("aa", 3600 * 4 + 300, 8, 0),
            ],
            "old": [QueueTimeStepCounts("old", 0, 4, 0)],
        },
        now,
    )
    assert set(lines) == {"aa"}
    assert lines["aa"].attempts == 12
    assert lines["aa"].bars[0].path == "M0.1 100v-100.0h.8v100.0zM11.1 100v-50.0h.8v50.0z"


async def test_pages(schema: Schema) -> None:
    """Home and the page of a queue show each range as plots, in a sentence, and in a table. The
    links of the ranges keep the queue. Names are shown as text."""
    await insert_job(schema, queue="'<b>q'")
    for minutes in (3, 7, 600):
        await schema.execute(ADD.format(age=f"interval '{minutes} minutes'"))
    async with (
        Client(schema.url, config=Config(schema=schema.name, pool_size=2)) as client,
        Browser(dashboard(client)) as browser,
    ):
        home = await browser.see("/")
        assert (
            "Last hour: 2,400 attempts ended (2,314 completed, 82 failed). 6 jobs were "
            "discarded. The longest wait was 2.1s, and 95 % of the jobs waited less than 1s."
            in home
        )
        assert home.count('class="plot-area"') == 3
        assert re.search(r'aria-label="Failed attempts. Most: 41 at \d\d:\d\d."', home)
        assert 'aria-label="2,400 attempts ended in the last hour, 82 failed"' in home
        assert "River in Go" not in home
        assert "style=" not in home
        day = await browser.see("/?range=day")
        assert "Last day: 3,600 attempts ended" in day
        assert '<a href="/?range=day" aria-current="page">' in day
        assert "Last week: 3,600" in await browser.see("/?range=week")
        queue = await browser.see("/queue?name=%3Cb%3Eq&range=week")
        assert "Last week: 3,600" in queue
        assert "More than 200 queues had jobs at once" in queue
        assert "More than 200 queues" not in home
        assert 'href="/queue?name=%3Cb%3Eq&amp;range=hour"' in queue
        assert "<b>" not in queue
        assert "Choose hour, day or week" in await browser.see("/?range=year", status=400)
        await insert_job(
            schema, "running", attempted_by="array['go']", attempted_at="now()", attempt="1"
        )
    async with (
        Client(schema.url, config=Config(schema=schema.name, pool_size=2)) as client,
        Browser(dashboard(client)) as browser,
    ):
        assert "Jobs that clients of River in Go work are not counted here." in await browser.see(
            "/"
        )


@pytest.mark.parametrize(
    ("change", "undo", "expected"),
    [
        (
            "ALTER TABLE riverpy_job_count RENAME TO moved",
            "ALTER TABLE moved RENAME TO riverpy_job_count",
            "The plots need the table riverpy_job_count: run `riverpy migrate up`",
        ),
        (
            "ALTER TABLE riverpy_job_count RENAME COLUMN failed TO moved",
            "ALTER TABLE riverpy_job_count RENAME COLUMN moved TO failed",
            "The counts cannot be read: ",
        ),
    ],
)
async def test_table_that_cannot_be_read(
    schema: Schema, change: str, undo: str, expected: str
) -> None:
    """Without the table, or if it cannot be read, the pages say so, and show the rest."""
    await insert_job(schema)
    await schema.execute(change)
    try:
        async with (
            Client(schema.url, config=Config(schema=schema.name, pool_size=2)) as client,
            Browser(dashboard(client)) as browser,
        ):
            for path in ("/", "/queue?name=default"):
                page = await browser.see(path)
                assert expected in page
                assert "Workers" in page
    finally:
        await schema.execute(undo)
