"""Jobs of riverqueue, River's own client for Python, beside jobs of riverpy."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, ClassVar

import msgspec
import pytest
import riverqueue
from riverqueue.driver import riversqlalchemy
from sqlalchemy import make_url
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

import riverpy

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

    from tests.work.rig import Rig


class Sort(msgspec.Struct):
    """Args that both libraries take."""

    kind: ClassVar[str] = "sort"
    strings: list[str]

    def to_json(self) -> str:
        """Return the args as JSON, for riverqueue."""
        return json.dumps({"strings": self.strings})


def make_engine(rig: Rig) -> AsyncEngine:
    """Make an engine on the schema of the test: riverqueue has no setting for a schema."""
    return create_async_engine(
        make_url(rig.schema.url).set(drivername="postgresql+asyncpg"),
        poolclass=NullPool,
        connect_args={"server_settings": {"search_path": rig.schema.name}},
    )


async def test_jobs_of_both_are_worked(rig: Rig) -> None:
    """One transaction inserts jobs with both libraries. After a rollback there is none, after a
    commit a worker runs them all, also one with a time."""
    ran: list[str] = []

    @rig.job(args=Sort)
    async def work(job: riverpy.Job[Sort]) -> None:
        ran.append("".join(sorted(job.args.strings)))

    engine = make_engine(rig)
    theirs = riverqueue.AsyncClient(riversqlalchemy.AsyncDriver(engine))
    past = riverqueue.InsertOpts(scheduled_at=datetime.now(UTC) - timedelta(hours=1), tags=["abc"])
    for end in ("rollback", "commit"):
        async with engine.connect() as tx:
            await theirs.insert_tx(tx, Sort(["d", "c"]))
            await theirs.insert_tx(tx, Sort(["h", "g"]), past)
            assert await theirs.insert_many_tx(tx, [Sort(["f", "e"])]) == 1
            await rig.client().insert(Sort(["b", "a"]), tx=tx)
            await getattr(tx, end)()
        assert len(await rig.work_due_jobs()) == (4 if end == "commit" else 0)
    assert sorted(ran) == ["ab", "cd", "ef", "gh"]


async def test_unique_jobs(rig: Rig) -> None:
    """The unique keys of riverqueue are not River's, as docs/coming-from-riverqueue.md says. A
    changed result here is a reason to change that page."""
    engine = make_engine(rig)
    theirs = riverqueue.AsyncClient(riversqlalchemy.AsyncDriver(engine))
    states = ["available", "completed", "running", "retryable", "scheduled"]
    by_args = riverqueue.UniqueOpts(by_args=True)
    by_state = riverqueue.UniqueOpts(
        by_args=True, by_state=[riverqueue.JobState(state) for state in states]
    )
    unique = riverpy.InsertOpts(unique_opts=riverpy.UniqueOpts(by_args=True))
    async with rig.client() as client:
        with pytest.raises(ProgrammingError, match="no unique or exclusion constraint matching"):
            await theirs.insert(Sort(["a"]), riverqueue.InsertOpts(unique_opts=by_args))
        ours = await client.insert(Sort(["a"]), unique)
        found = await theirs.insert(Sort(["a"]), riverqueue.InsertOpts(unique_opts=by_state))
        assert (found.unique_skipped_as_duplicated, found.job.id) == (True, ours.job.id)
        first = await theirs.insert(Sort(["b"]), riverqueue.InsertOpts(unique_opts=by_state))
        assert first.job.unique_key is None
        assert not (await client.insert(Sort(["b"]), unique)).unique_skipped_as_duplicate
