"""Runs `riverpy doctor` on the test's schema, and looks up what it found."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from riverpy._dsn import PG_VARIABLES
from riverpy._tools.doctor import listeners, server, session
from riverpy.cli import main

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests._database import Schema

    Doctor = Callable[..., Awaitable["Report"]]


@dataclass(frozen=True)
class Report:
    """What a run found."""

    exit_code: int
    findings: list[dict[str, Any]]

    def of(self, name: str, level: str | None = None) -> list[dict[str, Any]]:
        """The findings of this name, and level."""
        return [
            one for one in self.findings if one["name"] == name and level in {None, one["level"]}
        ]

    def one(self, name: str, level: str) -> dict[str, Any]:
        """The only finding of this name and level. What is not ok says what to do."""
        found = self.of(name, level)
        assert len(found) == 1, self.of(name)
        assert (found[0]["fix"] is None) == (level == "ok")
        return found[0]

    def problems(self) -> list[dict[str, Any]]:
        """All that is not ok."""
        return [one for one in self.findings if one["level"] != "ok"]


async def text_of(*args: str) -> tuple[int, str]:
    """The exit code of a run and what it printed: findings, or else its error. Nothing but the
    arguments names a database."""
    runner = CliRunner(env=dict.fromkeys(("DATABASE_URL", "RIVERPY_DATABASE_URL", *PG_VARIABLES)))
    result = await asyncio.to_thread(runner.invoke, main, ["doctor", *args])
    return result.exit_code, result.stdout or result.stderr


async def examine(*args: str) -> Report:
    """A run with these arguments."""
    exit_code, output = await text_of(*args, "--json")
    printed = json.loads(output)
    report = Report(exit_code, printed["findings"])
    worst = max((one["level"] for one in report.findings), key=["ok", "warn", "fail"].index)
    assert printed["level"] == worst
    assert exit_code == {"ok": 0, "warn": 5, "fail": 1}[worst]
    return report


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """No finding of these tests comes of a busy machine."""
    monkeypatch.setattr(server, "LATENCY_WARN", 20.0)
    monkeypatch.setattr(server, "SKEW_WARN", 20.0)
    monkeypatch.setattr(listeners, "PROBE_TIMEOUT", 20.0)
    monkeypatch.setattr(session, "READ_TIMEOUT", 40.0)
    monkeypatch.setattr(session, "STATEMENT_LIMIT", timedelta(seconds=20))
    monkeypatch.setattr(session, "LOCK_LIMIT", timedelta(seconds=20))


@pytest.fixture
def doctor(schema: Schema) -> Doctor:
    """Runs it on the test's schema."""

    async def run(*args: str, url: str = schema.url) -> Report:
        return await examine("--database-url", url, "--schema", schema.name, *args)

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
    """Let there be a client that gave its last sign of life `silent` seconds ago, and dies within
    60."""
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


async def seat(schema: Schema, leader_id: str, seconds: float = 1000) -> None:
    """Let somebody lead for so long."""
    await schema.execute(
        "INSERT INTO river_leader (leader_id, elected_at, expires_at)"
        " VALUES ($1, now(), now() + make_interval(secs => $2))",
        leader_id,
        seconds,
    )


async def seat_in(schema: Schema, lease: str, holder: str, seconds: float = 1000) -> None:
    """Let somebody hold a lease for so long."""
    await schema.execute(
        "INSERT INTO riverpy_lease (name, epoch, holder, ttl, expires_at)"
        " VALUES ($1, 1, $2, '1 h', now() + make_interval(secs => $3))",
        lease,
        holder,
        seconds,
    )


async def own(schema: Schema, domain: str, *queues: str, silent: float = 0) -> None:
    """Let a domain have these queues, of which a client gave its last sign of life so long ago."""
    await schema.execute(
        "INSERT INTO riverpy_queue_owner (queue, domain, claimed_by, last_seen_at)"
        " SELECT unnest($2::text[]), $1, 'x', now() - make_interval(secs => $3)",
        domain,
        queues,
        silent,
    )


async def put(
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
    """A job that is due for `due` seconds, or runs for `since` in a client, or failed so at the
    last of so many attempts of 25."""
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
