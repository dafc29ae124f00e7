"""Go decodes every row that Python writes, and Python every row of Go's, with the same values."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from riverpy import (
    EventKind,
    InsertManyParams,
    InsertOpts,
    Job,
    JobCancel,
    JobSnooze,
    JobState,
    QueueConfig,
    RawArgs,
    UniqueOpts,
)
from tests.interop.inserting import SILENT_CANCEL, PythonSide, request
from tests.interop.read_rows import read_by_go, read_by_python
from tests.interop.test_unique import TEXTS, VALUES

if TYPE_CHECKING:
    from riverpy import Client
    from tests.interop.river_go import RiverGo
    from tests.work.rig import Rig

OBJECTS = st.dictionaries(TEXTS, VALUES, max_size=4)
ALL_STATES = set(JobState)
ODD_ERRORS: dict[str, BaseException] = {
    "empty": ValueError(),
    "nul": ValueError("a\0b"),
    "surrogate": ValueError("a\ud800b\udfff"),
    "escapes": ValueError('"\\ \b\f\n\r\t\x01\x7f <&> \u2028 é😀'),
    "long": ValueError("é" * 200_000),
    "group": ExceptionGroup("some", [ValueError("one"), KeyError("two")]),
    "no text": type("Quiet", (Exception,), {"__str__": lambda _: 1 / 0})(),
    "cancel": JobCancel("<no>\0"),
    "cancel without text": JobCancel(),
    "system exit": SystemExit(3),
}
ODD_OUTPUTS: dict[str, object] = {
    "null": None,
    "number": 2**70,
    "float": 1e300,
    "text": "a\0b\ud800",
    "nested": {"z": [1, {"a": None}], "": [], "<>": "\u2028"},
    "list": [[]] * 3,
}
METADATA = [
    {},
    {"k": "v", "n": 1.5, "deep": {"a": [1, None, {"b": "é😀<"}]}},
    {"": "", "river:something": 1, "snoozes": 3, "output": {"old": True}},
    SILENT_CANCEL,
]


async def check_all(go: RiverGo, client: Client) -> set[JobState]:
    """Check that both languages read every row alike, and return the states."""
    rows = await go.run("list")
    for row in rows:
        job = await client.job_get(row["id"])
        assert read_by_go(row) == read_by_python(job)
    ids = await client_ids(client)
    assert [row["id"] for row in rows] == ids
    return {JobState(row["state"]) for row in rows}


async def client_ids(client: Client) -> list[int]:
    """Return the ids of all jobs."""
    async with client._get_open_pool().acquire() as connection:
        return [
            row[0]
            for row in await connection.fetch(
                f'SELECT id FROM "{client.config.schema}".river_job ORDER BY id'
            )
        ]


def register(rig: Rig) -> None:
    """Jobs that end in every way that Python knows."""

    def args_of(kind: str) -> type[dict[str, Any]]:
        return type("Args", (dict,), {"kind": kind})

    @rig.job(args=args_of("odd_error"), next_retry=lambda job: timedelta(minutes=1))
    async def odd_error(job: Job[Any]) -> None:
        raise ODD_ERRORS[job.args["name"]]

    @rig.job(args=args_of("odd_output"))
    async def odd_output(job: Job[Any]) -> None:
        job.record_output(ODD_OUTPUTS[job.args["name"]])

    @rig.job(args=args_of("echo"))
    async def echo(job: Job[Any]) -> None:
        job.record_output(job.args)

    @rig.job(args=args_of("snooze"))
    async def snooze(job: Job[Any]) -> None:
        raise JobSnooze(timedelta(hours=1))

    @rig.job(args=args_of("slow"), timeout=timedelta(milliseconds=20))
    async def slow(job: Job[Any]) -> None:
        await asyncio.sleep(60)

    @rig.job(args=args_of("hold"))
    async def hold(job: Job[Any]) -> None:
        await asyncio.sleep(60)


def python_jobs() -> list[InsertManyParams]:
    """Return jobs that are worked at once, each with another end."""
    later = InsertOpts(max_attempts=1)
    return [
        *(InsertManyParams(RawArgs("odd_error", text), None) for text in names_of(ODD_ERRORS)),
        *(InsertManyParams(RawArgs("odd_error", text), later) for text in names_of(ODD_ERRORS)),
        *(InsertManyParams(RawArgs("odd_output", text), None) for text in names_of(ODD_OUTPUTS)),
        *(InsertManyParams(RawArgs("echo", "{}"), InsertOpts(metadata=one)) for one in METADATA),
        *(
            InsertManyParams(RawArgs("odd_error", '{"name":"nul"}'), InsertOpts(metadata=one))
            for one in METADATA
        ),
        InsertManyParams(RawArgs("snooze", "{}")),
        InsertManyParams(RawArgs("slow", "{}")),
        InsertManyParams(RawArgs("nobody_knows", "{}")),
    ]


def names_of(cases: dict[str, Any]) -> list[str]:
    return [f'{{"name":"{name}"}}' for name in cases]


def waiting_jobs() -> list[InsertManyParams]:
    """Return jobs that no client works, with options at the ends of their ranges."""
    unique = UniqueOpts(by_args=True, by_queue=True, by_period=timedelta(days=7))
    every = UniqueOpts(by_queue=True, by_state=list(JobState))
    options = [
        InsertOpts(pending=True),
        InsertOpts(scheduled_at=datetime(9999, 12, 30, tzinfo=UTC)),
        InsertOpts(scheduled_at=datetime(1, 1, 2, tzinfo=UTC)),
        InsertOpts(scheduled_at=datetime(2026, 1, 1, 0, 0, 0, 1, tzinfo=UTC)),
        InsertOpts(max_attempts=32767, priority=4, tags=["abc", "a-b_c"]),
        InsertOpts(unique_opts=unique),
        InsertOpts(unique_opts=every),
    ]
    args = RawArgs("k" * 127, '{"big":123456789012345678901234567890,"small":1e-300}')
    return [
        InsertManyParams(args, msgspec.structs.replace(one, queue="nowhere")) for one in options
    ]


@pytest.mark.usefixtures("mark_silently")
async def test_go_reads_what_python_writes(go: RiverGo, rig: Rig) -> None:
    """River's own list decodes whatever Python stores, in every state (MG-07)."""
    register(rig)
    queues = {name: QueueConfig(max_workers=50) for name in ("default", "held")}
    # Without a leader nothing changes while the two are compared.
    client = rig.client(
        queues=queues,
        soft_stop_timeout=timedelta(0),
        candidate=False,
        known_kinds_only=False,
    )
    async with rig.running(client):
        await client.insert_many(waiting_jobs())
        jobs = python_jobs()
        await client.insert_many(jobs)
        await rig.take(len(jobs))
        hold = InsertManyParams(RawArgs("hold", "{}"), InsertOpts(queue="held"))
        held = await client.insert_many([hold, hold])
        await rig.until_state("running", 2)
        await client.job_cancel(held[0].job.id)
        assert (await rig.event()).kind is EventKind.JOB_CANCELLED
        assert await check_all(go, client) == ALL_STATES
    async with client:
        await client.job_retry(held[0].job.id)
        assert JobState.AVAILABLE in await check_all(go, client)  # the other was interrupted


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(batch=st.lists(st.tuples(OBJECTS, OBJECTS), min_size=1, max_size=10))
async def test_go_reads_any_args_and_metadata(
    go: RiverGo, rig: Rig, batch: list[tuple[dict[str, Any], dict[str, Any]]]
) -> None:
    """Go reads back what Python wrote, whatever the args and the metadata."""
    async with rig.client() as client:
        args = type("Args", (dict,), {"kind": "task"})
        jobs = [InsertManyParams(args(one), InsertOpts(metadata=other)) for one, other in batch]
        await client.insert_many(jobs)
        await check_all(go, client)


async def test_python_reads_what_go_writes(go: RiverGo, rig: Rig) -> None:
    """Python decodes whatever Go stores, in every state (MG-07)."""
    requests = [
        request('{"a":[1,2.50,1e21,null],"b":"<é😀>"}', kind="echo", tags=["abc"]),
        request('{"msg":"no <b> \\"quoted\\" \\u2028"}', kind="fail"),
        request('{"msg":"no"}', kind="fail", max_attempts=1),
        request('{"msg":"oh"}', kind="panic", metadata={"k": {"deep": [1.5]}}),
        request('{"msg":"stop"}', kind="cancel"),
        request('{"ms":3600000}', kind="snooze"),
        request("{}", kind="complete_tx"),
        request("{}", kind="nobody_knows", max_attempts=1),
        request('{"ms":60000}', kind="sleep", metadata={"timeout_ms": 20}),
        request("{}", kind="output"),
    ]
    waiting = [
        request("{}", kind="echo", queue="nowhere", pending=True),
        request("{}", kind="echo", queue="nowhere", scheduled_at="9999-12-30T00:00:00Z"),
        request("{}", kind="echo", queue="nowhere", scheduled_at="2126-01-01T00:00:00.1234567Z"),
        request("{}", kind="echo", queue="nowhere", unique={"by_args": True, "by_period_s": 60}),
        request('{"ms":60000}', kind="sleep"),
    ]
    async with (
        rig.client() as client,
        go.worker("--queues", "default:50", "--soft-stop-timeout", "1ms") as worker,
        go.process("insert") as inserter,
    ):
        rows = await inserter.insert(*requests, *waiting)
        assert not [row for row in rows if "error" in row]
        for row in rows[: len(requests)]:
            await rig.until(
                "SELECT attempted_by IS NOT NULL AND state <> 'running' FROM river_job"
                " WHERE id = $1",
                True,
                row["id"],
            )
        await worker.until("job_started", id=rows[-1]["id"])
        await go.run("job-output", rows[0]["id"], '{"later":[1]}')
        await go.run("cancel", rows[-1]["id"])
        await worker.until("job_cancelled", id=rows[-1]["id"])
        again = await PythonSide(client).insert(request('{"ms":60000}', kind="sleep"))
        await worker.until("job_started", id=again)
        assert await check_all(go, client) == ALL_STATES
