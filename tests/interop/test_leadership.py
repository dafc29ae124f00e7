"""A mixed fleet under load: the leader changes between the languages, and no job is lost."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any

from riverpy import Client, Config
from tests.interop.inserting import params_of, request
from tests.interop.mixed_fleet import LANGUAGES, PATIENCE, language_of, mixed_fleet

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from tests.interop.mixed_fleet import MixedFleet

PAUSE = 0.2
"""Seconds between two rounds of inserts of one language."""


def jobs(number: int) -> list[dict[str, Any]]:
    """Return the jobs that a language inserts in one round: a plain job, a scheduled one, and a
    unique one that the other language inserts too."""
    soon = (datetime.now(UTC) + timedelta(seconds=0.5)).isoformat()
    unique = json.dumps({"ms": 1, "number": number})
    return [
        request('{"ms": 1000}', kind="sleep"),
        request('{"ms": 1}', kind="sleep", scheduled_at=soon),
        request(unique, kind="sleep", unique={"by_args": True}),
    ]


async def insert_by_go(fleet: MixedFleet) -> None:
    """Insert rounds of jobs by Go until cancelled."""
    async with fleet.go.process("insert") as inserter:
        for number in count():
            for row in await inserter.insert(*jobs(number)):
                assert "error" not in row, row
            await asyncio.sleep(PAUSE)


async def insert_by_python(url: str) -> None:
    """Insert rounds of jobs by Python until cancelled."""
    async with Client(url, config=Config(skip_unknown_job_check=True)) as client:
        for number in count():
            for job in jobs(number):
                params = params_of(job)
                await client.insert(params.args, params.opts)
            await asyncio.sleep(PAUSE)


@asynccontextmanager
async def inserting(fleet: MixedFleet, url: str) -> AsyncGenerator[None]:
    """Insert by both languages during the block."""
    async with asyncio.TaskGroup() as tasks:
        inserters = [
            tasks.create_task(insert_by_go(fleet)),
            tasks.create_task(insert_by_python(url)),
        ]
        yield
        for inserter in inserters:
            inserter.cancel()


async def kill_leader(fleet: MixedFleet, language: str) -> tuple[str, set[int]]:
    """Kill the leader while it runs jobs, and return its id and theirs."""
    leader_id = await fleet.until_led_by(language)
    await fleet.until_it_works(leader_id)
    await fleet.kill(leader_id)
    job_ids = await fleet.running(leader_id)
    assert job_ids
    await fleet.expire_lease_of(leader_id)
    await fleet.start(language)
    return leader_id, job_ids


async def until_all_is_done(fleet: MixedFleet) -> None:
    """Wait until no worker can run any job, except the newest periodic one."""
    left: list[Any] = []
    try:
        async with asyncio.timeout(PATIENCE):
            while left := await fleet.connection.fetch(
                "SELECT * FROM river_job WHERE finalized_at IS NULL AND kind <> 'marker'"
                " AND created_at < now() - interval '1 second'"
            ):
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"jobs are left: {left[:3]}") from None


async def check_jobs(fleet: MixedFleet, killed: dict[str, set[int]]) -> None:
    """Check that each job was completed once, at its first attempt unless its worker was killed."""
    rows = await fleet.connection.fetch(
        "SELECT *, (SELECT count(*) FROM completion_history WHERE job_id = id) AS completions"
        " FROM river_job WHERE kind <> 'marker' AND finalized_at IS NOT NULL"
    )
    again: dict[str, set[int]] = {}
    for row in rows:
        assert row["state"] == "completed", dict(row)
        assert row["completions"] == 1, dict(row)
        assert row["attempt"] == len(row["attempted_by"]) == len(row["errors"] or []) + 1, dict(row)
        for worker in row["attempted_by"][:-1]:
            again.setdefault(worker, set()).add(row["id"])
    assert again == killed


async def check_unique(fleet: MixedFleet) -> None:
    """Check that each unique job that both languages inserted exists once, and that each language
    inserted some."""
    twice = await fleet.connection.fetch(
        "SELECT args FROM river_job WHERE unique_key IS NOT NULL AND kind = 'sleep'"
        " GROUP BY args HAVING count(*) > 1"
    )
    assert not twice
    twice = await fleet.connection.fetch(
        "SELECT slot FROM slot_history GROUP BY slot HAVING count(*) > 1"
    )
    assert not twice
    rows = await fleet.connection.fetch("SELECT DISTINCT language FROM slot_history")
    assert {row["language"] for row in rows} == set(LANGUAGES)


async def test_mixed_fleet(go_binary: Path, fresh_database_url: str, tmp_path: Path) -> None:
    """Three workers of each language share a queue. The leader changes from one language to the
    other six times: by a request to resign, by SIGTERM and by SIGKILL. Maintenance runs under each
    leader, and no two terms overlap. Each job of either language is completed once, and no slot of
    a periodic job of both languages is inserted twice. The job of a leader that is killed is
    completed at a later attempt by another client (CF-059, mixed_leader_failover_both_directions;
    CF-085, multi_engine_process_kill_rescue_failover)."""
    url = fresh_database_url
    killed: dict[str, set[int]] = {}
    async with mixed_fleet(go_binary, url, tmp_path, each=3) as fleet:
        async with inserting(fleet, url):
            await fleet.until_led_by("go")
            await fleet.until_led_by("python")
            killed.update([await kill_leader(fleet, "python")])
            await fleet.terminate(await fleet.until_led_by("go"))
            await fleet.start("go")
            await fleet.terminate(await fleet.until_led_by("python"))
            await fleet.start("python")
            killed.update([await kill_leader(fleet, "go")])
            await fleet.until_led_by("python")
            await fleet.until_led_by("go")
            await fleet.until_led_by("python")
        await until_all_is_done(fleet)
        await check_jobs(fleet, killed)
        await check_unique(fleet)
        terms = await fleet.terms()
        changes = sum(before != after for before, after in pairwise(terms))
        assert changes >= 6, terms
        acts = await fleet.maintainers()
    for language in LANGUAGES:
        assert acts >= {(language, act, language) for act in ("scheduled", "cleaned")}
    assert {language_of(worker) for worker in killed} == set(LANGUAGES)
