"""Run `riverpy doctor` on the test's schema, and write rows for it to find."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from riverpy._dsn import PG_VARIABLES
from riverpy._tools.doctor import notifications, server, session
from riverpy.cli import main

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from tests._database import Schema

    Doctor = Callable[..., Awaitable["Report"]]


@dataclass(frozen=True)
class Report:
    """The findings and the exit code of a run."""

    exit_code: int
    findings: list[dict[str, Any]]

    def named(self, name: str, level: str | None = None) -> list[dict[str, Any]]:
        """Return the findings of this name and level."""
        return [
            one for one in self.findings if one["name"] == name and level in {None, one["level"]}
        ]

    def one(self, name: str, level: str) -> dict[str, Any]:
        """Return the only finding of this name and level. It has a fix unless it is ok."""
        found = self.named(name, level)
        assert len(found) == 1, self.named(name)
        assert (found[0]["fix"] is None) == (level == "ok")
        return found[0]

    def problems(self) -> list[dict[str, Any]]:
        """Return the findings that are not ok."""
        return [one for one in self.findings if one["level"] != "ok"]


async def run_text(*args: str) -> tuple[int, str]:
    """Run doctor; return its exit code and its output, or its error. Only the arguments name a
    database."""
    runner = CliRunner(env=dict.fromkeys(("DATABASE_URL", "RIVERPY_DATABASE_URL", *PG_VARIABLES)))
    result = await asyncio.to_thread(runner.invoke, main, ["doctor", *args])
    return result.exit_code, result.stdout or result.stderr


async def run_doctor(*args: str) -> Report:
    """Run doctor with these arguments."""
    exit_code, output = await run_text(*args, "--json")
    printed = json.loads(output)
    report = Report(exit_code, printed["findings"])
    worst = max((one["level"] for one in report.findings), key=["ok", "warn", "fail"].index)
    assert printed["level"] == worst
    assert exit_code == {"ok": 0, "warn": 5, "fail": 1}[worst]
    return report


@pytest.fixture(autouse=True)
def long_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the timeouts, so that a busy machine causes no finding."""
    monkeypatch.setattr(server, "LATENCY_WARN_SECONDS", 20.0)
    monkeypatch.setattr(server, "CLOCK_SKEW_WARN_SECONDS", 20.0)
    monkeypatch.setattr(notifications, "TEST_NOTIFICATION_TIMEOUT", 20.0)
    monkeypatch.setattr(session, "READ_TIMEOUT", 40.0)
    monkeypatch.setattr(session, "STATEMENT_TIMEOUT", timedelta(seconds=20))
    monkeypatch.setattr(session, "LOCK_TIMEOUT", timedelta(seconds=20))


@pytest.fixture
def doctor(schema: Schema) -> Doctor:
    """Return a function that runs doctor on the test's schema."""

    async def run(*args: str, url: str = schema.url) -> Report:
        return await run_doctor("--database-url", url, "--schema", schema.name, *args)

    return run


async def register(
    schema: Schema,
    client_id: str,
    *,
    kinds: tuple[str, ...] = (),
    queues: tuple[str, ...] = ("default",),
    silent: float = 0,
    running: float = 3600,
    candidate: bool = True,
    poll_only: bool = True,
    slots: tuple[int, ...] | None = None,
    stuck: tuple[int, ...] | None = None,
    domain: str = "default",
    settings: str | None = "same",
) -> None:
    """Insert a client whose last heartbeat is `silent` seconds old. Its `dead_after` is 60 s."""
    await schema.execute(
        "INSERT INTO riverpy_client (client_id, queues, kinds, candidate, poll_only, version,"
        " dead_after, heartbeat_at, started_at, slots, stuck, domain, settings)"
        " VALUES ($1, $2, $3, $4, $5, '1', '60 s', now() - make_interval(secs => $6),"
        " now() - make_interval(secs => $7), $8, $9, $10, $11)",
        client_id,
        list(queues),
        list(kinds),
        candidate,
        poll_only,
        silent,
        running,
        slots,
        stuck,
        domain,
        settings,
    )


async def set_leader(schema: Schema, leader_id: str, seconds: float = 1000) -> None:
    """Insert a leader of `default` whose lease lasts `seconds`."""
    await schema.execute(
        "INSERT INTO river_leader (leader_id, elected_at, expires_at)"
        " VALUES ($1, now(), now() + make_interval(secs => $2))",
        leader_id,
        seconds,
    )


async def set_lease_holder(schema: Schema, lease: str, holder: str, seconds: float = 1000) -> None:
    """Insert the holder of a lease that lasts `seconds`."""
    await schema.execute(
        "INSERT INTO riverpy_lease (name, epoch, holder, ttl, expires_at)"
        " VALUES ($1, 1, $2, '1 h', now() + make_interval(secs => $3))",
        lease,
        holder,
        seconds,
    )


async def set_queue_owner(schema: Schema, domain: str, *queues: str, silent: float = 0) -> None:
    """Give a domain these queues. Its last heartbeat is `silent` seconds old."""
    await schema.execute(
        "INSERT INTO riverpy_queue_owner (queue, domain, claimed_by, last_seen_at)"
        " SELECT unnest($2::text[]), $1, 'x', now() - make_interval(secs => $3)",
        domain,
        queues,
        silent,
    )


async def insert_job(
    schema: Schema,
    state: str = "available",
    *,
    kind: str = "task",
    queue: str = "default",
    due: float = 0,
    client_id: str | None = None,
    since: float = 0,
    priority: int = 1,
    error: str | None = None,
    attempts: int = 1,
) -> int:
    """Insert a job that is due for `due` seconds, runs for `since` seconds in a client, or
    failed with `error` at the last of `attempts` attempts. It has 25."""
    return await schema.fetchval(
        "INSERT INTO river_job (state, kind, queue, priority, max_attempts, args, scheduled_at,"
        " attempted_by, attempted_at, attempt, errors, finalized_at) VALUES"
        " ($1::text::river_job_state, $2, $3, $4, 25, '{}', now() - make_interval(secs => $5),"
        " CASE WHEN $6::text IS NOT NULL THEN array['other', $6] END,"
        " now() - make_interval(secs => $7), $8,"
        " CASE WHEN $9::text IS NOT NULL THEN array[jsonb_build_object('error', $9::text)] END,"
        " CASE WHEN $1 = 'discarded' THEN now() END) RETURNING id",
        state,
        kind,
        queue,
        priority,
        due,
        client_id,
        since,
        attempts,
        error,
    )


@asynccontextmanager
async def holding(schema: Schema, begin: str, *statements: str) -> AsyncGenerator[int]:
    """Open a transaction, execute the statements in it, and yield the process id of the session."""
    async with schema.connected(application_name="report") as connection:
        await connection.execute(begin)
        for statement in statements:
            await connection.execute(statement)
        yield connection.get_server_pid()
