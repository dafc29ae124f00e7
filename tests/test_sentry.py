"""The events that Sentry's SDK sends."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import sentry_sdk
from sentry_sdk.transport import Transport

from riverpy import Client, Config, InsertOpts, Job, JobCancel, JobSnooze, RawArgs
from riverpy.periodic import PeriodicJob
from riverpy.schedules import every
from riverpy.sentry import SentryPlugin
from riverpy.testing import advance
from tests.work.rig import Task, errors_of, metadata_of

if TYPE_CHECKING:
    from collections.abc import Generator

    from sentry_sdk.envelope import Envelope

    from tests._database import Schema
    from tests.work.rig import Rig


SECRET = 987654321


class Memory(Transport):
    """A transport that stores events."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self.events: list[Any] = []
        self.transactions: list[Any] = []

    def capture_envelope(self, envelope: Envelope) -> None:
        for item in envelope.items:
            if (event := item.get_event()) is not None:
                self.events.append(event)
            elif (transaction := item.get_transaction_event()) is not None:
                self.transactions.append(transaction)


@pytest.fixture
def sent() -> Generator[Memory]:
    """Collect the events that are sent."""
    sentry_sdk.init(
        "https://public@sentry.invalid/1",
        transport=Memory,
        default_integrations=False,
        auto_enabling_integrations=False,
        auto_session_tracking=False,
        traces_sample_rate=1.0,
    )
    client = sentry_sdk.get_client()
    assert isinstance(client.transport, Memory)
    yield client.transport
    client.close(timeout=0)
    sentry_sdk.get_global_scope().set_client(None)


def tags_of(event: dict[str, Any]) -> dict[str, Any]:
    """Return the tags that riverpy set."""
    return {key: value for key, value in event["tags"].items() if key.startswith("river.")}


async def test_failure(rig: Rig, sent: Memory) -> None:
    """A failure is sent with its kind, queue and attempt, without the args. The next attempt has
    another scope."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        if job.args.n > 2:
            sentry_sdk.set_tag("mine", "yes")
        raise ValueError("bad")

    await rig.work_in_order(Task(SECRET), Task(2), plugins=[SentryPlugin()])
    first, second = sent.events
    tags = {"river.kind": "task", "river.queue": "default", "river.attempt": 1}
    assert tags_of(first) == tags_of(second) == tags
    assert first["tags"]["mine"] == "yes"
    assert "mine" not in second["tags"]
    (exception,) = first["exception"]["values"]
    assert (exception["type"], exception["value"]) == ("ValueError", "bad")
    assert exception["mechanism"] == {"type": "riverpy", "handled": False}
    frames = exception["stacktrace"]["frames"]
    assert frames[-1]["function"] == "work"
    assert frames[-1]["module"] == __name__
    assert all("vars" not in frame for frame in frames if frame["module"].startswith("riverpy"))
    assert first["contexts"]["river_job"]["max_attempts"] == 25
    assert str(SECRET) not in json.dumps(first, default=str)


async def test_args(rig: Rig, sent: Memory) -> None:
    """With `include_args`, the args are sent."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        raise ValueError("bad")

    await rig.run_one(Task(7), plugins=[SentryPlugin(include_args=True)])
    (event,) = sent.events
    assert event["contexts"]["river_job"]["args"] == '{"n": 7}'


async def test_final_only(rig: Rig, sent: Memory) -> None:
    """With `final_only`, a failure is sent only if the job is not retried."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        raise ValueError(str(job.args.n))

    await rig.run_one(Task(1), plugins=[SentryPlugin(final_only=True)])
    await rig.run_one(Task(2), InsertOpts(max_attempts=1), plugins=[SentryPlugin(final_only=True)])
    assert [event["exception"]["values"][0]["value"] for event in sent.events] == ["2"]


async def test_no_failures(rig: Rig, sent: Memory) -> None:
    """Snoozes and cancels are not sent. Timeouts, unknown kinds and undecodable args are sent."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        raise JobSnooze(timedelta(hours=1)) if job.args.n else JobCancel("enough")

    await rig.work_in_order(Task(0), Task(1), plugins=[SentryPlugin()])
    assert sent.events == []
    args = [RawArgs("nobody", "{}"), RawArgs("task", '{"n":"x"}')]
    await rig.work_in_order(*args, plugins=[SentryPlugin()], known_kinds_only=False)
    types = [event["exception"]["values"][-1]["type"] for event in sent.events]
    assert types == ["LookupError", "ValidationError"]
    statuses = [one["contexts"]["trace"]["status"] for one in sent.transactions]
    assert statuses == ["cancelled", "ok", "internal_error", "internal_error"]


async def test_trace(rig: Rig, sent: Memory) -> None:
    """The attempt continues the trace of the insert."""
    rig.register_task()
    with sentry_sdk.start_transaction(op="test", name="request") as request:
        job = (await rig.insert(client=rig.client(plugins=[SentryPlugin()]))).job
    await rig.work_due_jobs(plugins=[SentryPlugin()])
    first, second = sorted(sent.transactions, key=lambda one: one["transaction"])
    assert (first["transaction"], second["transaction"]) == ("request", "task")
    (publish,) = first["spans"]
    assert publish["op"] == "queue.publish"
    trace = second["contexts"]["trace"]
    assert trace["op"] == "queue.process"
    assert trace["trace_id"] == request.trace_id
    assert trace["parent_span_id"] == publish["span_id"]
    assert trace["data"]["messaging.message.id"] == str(job.id)
    assert trace["data"]["messaging.destination.name"] == "default"
    assert metadata_of(await rig.row(job.id))["sentry-trace"].startswith(request.trace_id)


async def test_traces_of_periodic_jobs(schema: Schema, sent: Memory) -> None:
    """Each run of a periodic job starts a new trace, so that each is sampled separately."""
    job = PeriodicJob(every(timedelta(minutes=1)), Task(), id="ticks")
    config = Config(schema=schema.name, plugins=[SentryPlugin()])
    client = Client(periodic_jobs=[job], config=config)
    async with schema.connection.transaction():
        await advance(timedelta(minutes=3), client=client, tx=schema.connection)
    traces = {metadata_of(row)["sentry-trace"].split("-")[0] for row in await schema.jobs()}
    assert len(traces) == 3


class Broken(Memory):
    """A transport that raises."""

    def capture_envelope(self, envelope: Envelope) -> None:
        raise OSError("broken")


async def test_broken_transport(rig: Rig, sent: Memory) -> None:
    """An error in the SDK does not change the outcome of a job."""
    sentry_sdk.get_client().transport = Broken({})

    @rig.job
    async def work(job: Job[Task]) -> None:
        raise ValueError("bad")

    row = await rig.run_one(plugins=[SentryPlugin()])
    assert errors_of(row)[0]["error"] == "ValueError: bad"


async def test_without_sdk(rig: Rig) -> None:
    """Jobs are worked normally if the SDK is not set up."""

    @rig.job
    async def work(job: Job[Task]) -> None:
        if job.args.n:
            raise ValueError("bad")

    good, bad = await rig.work_in_order(Task(0), Task(1), plugins=[SentryPlugin()])
    assert (good["state"], bad["state"]) == ("completed", "available")
