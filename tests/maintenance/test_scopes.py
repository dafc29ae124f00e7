"""Scopes: each service of a leader changes the rows of the queues that it maintains, and no
others."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import msgspec
import pytest

from riverpy import Job, JobRetention, Workers
from riverpy._leading.queue_scope import (
    ALL_QUEUES,
    NO_QUEUES,
    QUEUES_PER_FILTER_MAX,
    all_queues_except,
    only_queues,
)
from riverpy._maintenance.job_cleaner import JobCleaner
from riverpy._maintenance.job_expirer import JobExpirer
from riverpy._maintenance.job_rescuer import JobRescuer
from riverpy._maintenance.job_scheduler import JobScheduler
from riverpy._maintenance.queue_cleaner import QueueCleaner
from riverpy._postgres.clients import client_list_heartbeats
from riverpy._postgres.sql_files import get_query
from tests._statements import record_statements
from tests.leading.term_context import QuickTimer, held_term

if TYPE_CHECKING:
    from collections.abc import Callable

    from riverpy._leading.queue_scope import QueueScope
    from riverpy._leading.term_context import TermContext
    from riverpy._maintenance.base import MaintenanceService
    from tests._database import Schema
    from tests.leading.term_context import HeldTerm

QUEUES = frozenset({"aa", "bb", "cc"})
SECOND = timedelta(seconds=1)
HOUR = JobRetention(completed=timedelta(hours=1))
FOREVER = JobRetention(completed=None)


class Task(msgspec.Struct, frozen=True):
    """The args of all jobs here."""

    kind: ClassVar[str] = "task"


def registry() -> Workers:
    """A worker whose jobs may run for a second, and run again at once."""
    workers = Workers()

    @workers.job(timeout=SECOND, next_retry=lambda job: timedelta(0))
    async def task(job: Job[Task]) -> None: ...

    return workers


class Case(NamedTuple):
    """A service, and what it has to do in each queue."""

    make: Callable[[TermContext], MaintenanceService]
    insert: str
    """Makes a row in the queue `$1`."""
    untouched: str
    """Reads the queues whose row is as it was."""
    blocks: list[tuple[str, str]]
    """What a pass that is about all queues says to tables, but for the fence."""
    settings: dict[str, Any]


def _job(columns: str, values: str) -> str:
    return (
        f"INSERT INTO river_job (kind, args, max_attempts, queue, state, {columns})"
        f" VALUES ('task', '{{}}', 25, $1, {values})"
    )


_ENDED = _job("finalized_at", "'completed', now() - interval '25 hours'")
_RUNNING = "SELECT queue FROM river_job WHERE state = 'running'"
_CLEANED = "SELECT queue FROM river_job"
_SWEEP = [("river_job_maintenance", "job_ended"), ("river_job_maintenance", "job_delete_ended")]
_CLEAN = [("river_job_maintenance", "job_states_to_clean"), *_SWEEP]


def _by_age(context: TermContext) -> JobRescuer:
    return JobRescuer(context, None)


def _by_liveness(context: TermContext) -> JobRescuer:
    return JobRescuer(context, lambda: 1e6)


CASES = {
    "cleaner": Case(
        JobCleaner,
        _ENDED,
        _CLEANED,
        _CLEAN,
        {},
    ),
    "cleaner by queue": Case(
        JobCleaner,
        _ENDED,
        _CLEANED,
        [*_CLEAN, *_SWEEP],
        {"retention_by_queue": {"aa": HOUR, "bb": HOUR, "other": HOUR}},
    ),
    "cleaner by kind": Case(
        JobCleaner, _ENDED, _CLEANED, [*_CLEAN, _SWEEP[0]], {"retention_by_kind": {"task": HOUR}}
    ),
    "scheduler": Case(
        JobScheduler,
        _job("scheduled_at", "'scheduled', now() - interval '1 hour'"),
        "SELECT queue FROM river_job WHERE state = 'scheduled'",
        [
            ("river_job_maintenance", "job_due"),
            ("river_job_maintenance", "job_schedule"),
        ],
        {},
    ),
    "expirer": Case(
        JobExpirer,
        _job("metadata", """'pending', '{"riverpy:expires_at": "2026-01-31T18:00:00.000000Z"}'"""),
        "SELECT queue FROM river_job WHERE state = 'pending'",
        [
            ("river_job_maintenance", "job_expired"),
            ("river_job_maintenance", "job_cancel_expired"),
        ],
        {},
    ),
    "rescuer by age": Case(
        _by_age,
        _job(
            "attempt, attempted_at, attempted_by",
            "'running', 1, now() - interval '1 day', array['unregistered']",
        ),
        _RUNNING,
        [
            ("river_job_maintenance", "job_stuck"),
            ("river_job_maintenance", "job_stuck_rows"),
            ("river_job_maintenance", "job_rescue"),
        ],
        {},
    ),
    "rescuer by liveness": Case(
        _by_liveness,
        _job("attempt, attempted_at, attempted_by", "'running', 1, now(), array['dead']"),
        _RUNNING,
        [
            ("riverpy_client", "client_heartbeats"),
            ("river_job_maintenance", "job_running_of"),
            ("riverpy_client", "client_lock_dead"),
            ("river_job_maintenance", "job_rescue"),
            ("river_job_maintenance", "job_stuck"),
        ],
        {"dead_after": SECOND},
    ),
    "queue cleaner": Case(
        QueueCleaner,
        "INSERT INTO river_queue (name, updated_at) VALUES ($1, now() - interval '2 days')",
        "SELECT name FROM river_queue",
        [("river_queue", "queue_unused"), ("river_queue", "queue_delete_unused")],
        {},
    ),
}


@pytest.fixture(params=CASES.values(), ids=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    """Each service."""
    return request.param


async def put(schema: Schema, case: Case, queues: frozenset[str] = QUEUES) -> None:
    """Something to do in each of these queues."""
    async with schema.connected() as connection:
        await connection.executemany(case.insert, [(queue,) for queue in queues])
    await schema.execute(
        "INSERT INTO riverpy_client (client_id, queues, kinds, candidate, poll_only, version,"
        " dead_after) VALUES ('dead', '{}', '{}', true, false, '1', '1s') ON CONFLICT DO NOTHING"
    )


async def done_in(schema: Schema, case: Case, queues: frozenset[str] = QUEUES) -> frozenset[str]:
    """The queues in which everything is done."""
    return queues - {row[0] for row in await schema.fetch(case.untouched)}


async def run(held: HeldTerm, service: MaintenanceService) -> None:
    """A pass, a minute after the last one, which has read the heartbeats."""
    assert isinstance(held.timer, QuickTimer)
    if isinstance(service, JobRescuer) and service._heartbeat_observer is not None:
        async with held.schema.connected() as connection:
            service._heartbeat_observer.observe(
                *await client_list_heartbeats(connection, held.schema.name)
            )
    held.timer.skipped += 60
    await held.run(service)


def only(*queues: str) -> QueueScope:
    return only_queues(queues)


def all_but(*queues: str) -> QueueScope:
    return all_queues_except(queues)


@pytest.mark.parametrize(
    ("scope", "meant"),
    [
        (only("aa"), {"aa"}),
        (only("bb", "cc", "unknown"), {"bb", "cc"}),
        (all_but("bb", "unknown"), {"aa", "cc"}),
        (all_but(*QUEUES), frozenset[str]()),
    ],
    ids=["one", "two", "all but one", "all but all"],
)
async def test_rows_of_the_scope(
    schema: Schema, case: Case, scope: QueueScope, meant: set[str]
) -> None:
    """A pass changes exactly the rows of the queues in its scope, whatever rules there are for
    queues and kinds."""
    await put(schema, case)
    async with held_term(schema, workers=registry(), **case.settings) as held:
        held.scope = scope
        await run(held, case.make(held.context))
    assert await done_in(schema, case) == meant


@pytest.mark.parametrize(
    ("first", "second", "meant"),
    [
        (only("aa"), only("aa", "bb"), {"aa", "bb"}),
        (NO_QUEUES, only("cc"), {"cc"}),
        (all_but("aa", "bb"), all_but("bb"), {"aa", "cc"}),
    ],
    ids=["one more", "the first", "one less left out"],
)
async def test_scope_that_changes(
    schema: Schema, case: Case, first: QueueScope, second: QueueScope, meant: set[str]
) -> None:
    """A scope that changes between two passes counts from the next one on, also for what an
    earlier pass has gone by."""
    await put(schema, case)
    async with held_term(schema, workers=registry(), **case.settings) as held:
        service = case.make(held.context)
        for scope in (first, second):
            held.scope = scope
            await run(held, service)
    assert await done_in(schema, case) == meant


async def test_scope_that_shrinks(schema: Schema, case: Case) -> None:
    """What has left the scope is left alone from the next pass on."""
    async with held_term(schema, workers=registry(), **case.settings) as held:
        service = case.make(held.context)
        await run(held, service)
        await put(schema, case)
        held.scope = all_but("bb")
        await run(held, service)
        assert await done_in(schema, case) == {"aa", "cc"}
        held.scope = only("aa")
        await run(held, service)
    assert await done_in(schema, case) == {"aa", "cc"}


async def test_no_queue(schema: Schema, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scope without a queue asks the server nothing: it never stands for all."""
    await put(schema, case)
    sent = record_statements(monkeypatch, "context")
    async with held_term(schema, workers=registry(), **case.settings) as held:
        held.scope = NO_QUEUES
        await run(held, case.make(held.context))
    assert sent == []
    assert await done_in(schema, case) == frozenset()


@pytest.mark.parametrize("scope", [ALL_QUEUES, all_but()], ids=["all", "all but none"])
async def test_all_queues(
    schema: Schema, case: Case, scope: QueueScope, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader of all queues changes the rows of all, by the statements that know of no queues, and
    no others."""
    await put(schema, case)
    sent = record_statements(monkeypatch, "context")
    async with held_term(schema, workers=registry(), **case.settings) as held:
        held.scope = scope
        await run(held, case.make(held.context))
    fence = get_query("river_leader", "leader_fence", schema.name).text
    texts = [one.text for one in sent if f'"{schema.name}"' in one.text]
    expected = [get_query(file, name, schema.name).text for file, name in case.blocks]
    assert [text for text in texts if text != fence] == expected
    assert await done_in(schema, case) == QUEUES


async def test_rules_that_meet_nothing(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cleaner sends no statement for a retention that no queue of its scope is under."""
    await put(schema, CASES["cleaner"])
    sent = record_statements(monkeypatch, "context")
    async with held_term(schema, retention_by_queue={"aa": HOUR, "other": FOREVER}) as held:
        held.scope = only("aa")
        await run(held, JobCleaner(held.context))
    sweep = get_query("river_job_maintenance", "job_ended", schema.name).text
    assert [one.text for one in sent].count(sweep) == 1
    assert await done_in(schema, CASES["cleaner"]) == {"aa"}


async def test_many_queues(schema: Schema, case: Case) -> None:
    """More queues than one statement takes are all maintained, and none beside them."""
    many = frozenset(f"q{number:03}" for number in range(2 * QUEUES_PER_FILTER_MAX + 1))
    await put(schema, case, many | QUEUES)
    async with held_term(schema, workers=registry(), **case.settings) as held:
        held.scope = only_queues(many)
        await run(held, case.make(held.context))
    assert await done_in(schema, case, many | QUEUES) == many


def test_filters() -> None:
    """A long list of queues is cut, and nothing is in two parts; a scope of none has no part."""
    many = frozenset(map(str, range(2 * QUEUES_PER_FILTER_MAX + 1)))
    parts = [part.queues for part in only_queues(many).make_statement_filters() if part is not None]
    assert [len(part) for part in parts] == [QUEUES_PER_FILTER_MAX, QUEUES_PER_FILTER_MAX, 1]
    assert frozenset().union(*parts) == many
    assert list(NO_QUEUES.make_statement_filters()) == []
    assert (
        list(all_queues_except(frozenset()).make_statement_filters())
        == list(ALL_QUEUES.make_statement_filters())
        == [None]
    )
    assert [
        part is not None and len(part.queues)
        for part in all_queues_except(many).make_statement_filters()
    ] == [len(many)]
