"""The rows that River's own worker left in each scenario, and riverpy's rows for the same jobs."""

from __future__ import annotations

import asyncio
import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from riverpy import (
    EventKind,
    InsertManyParams,
    InsertOpts,
    Job,
    JobCancel,
    JobSnooze,
    QueueConfig,
    RawArgs,
    UniqueOpts,
)
from riverpy.testing import drain

if TYPE_CHECKING:
    from riverpy import Client, JobRow
    from tests.work.rig import Rig

VECTORS = json.loads(
    (Path(__file__).parent.parent / "vectors" / "rows.json").read_text(encoding="utf-8")
)
SCENARIOS: dict[str, dict[str, str | None]] = {
    entry["scenario"]: entry["row"] for entry in VECTORS["jobs"]
}
HOUR = timedelta(hours=1)
CLIENT = "rig-client"


def register(rig: Rig) -> None:
    """Register the jobs of River's recording in Python."""

    def args_of(name: str) -> type[dict[str, Any]]:
        return type("Args", (dict,), {"kind": name})

    @rig.job(args=args_of("rig_echo"))
    async def echo(job: Job[Any]) -> None:
        pass

    @rig.job(args=args_of("rig_fail"), next_retry=retries)
    async def fail(job: Job[Any]) -> None:
        raise ValueError(job.args["msg"])

    @rig.job(args=args_of("rig_panic"), next_retry=retries)
    async def panic(job: Job[Any]) -> None:
        raise RuntimeError(job.args["msg"])

    @rig.job(args=args_of("rig_snooze"))
    async def snooze(job: Job[Any]) -> None:
        raise JobSnooze(timedelta(milliseconds=job.args["ms"]))

    @rig.job(args=args_of("rig_cancel"))
    async def cancel(job: Job[Any]) -> None:
        raise JobCancel(job.args["msg"])

    @rig.job(args=args_of("rig_output"))
    async def output(job: Job[Any]) -> None:
        job.record_output(job.args.get("output", {"hello": "world", "n": 1}))

    @rig.job(args=args_of("rig_sleep"), next_retry=retries)
    async def sleep(job: Job[Any]) -> None:
        try:
            await rig.release.wait()  # with a time from the recording, the test would race
        except asyncio.CancelledError:
            if not job.args.get("ignore_ctx"):
                raise
        match job.args.get("then"):
            case "fail":
                raise ValueError("failed after sleep")
            case "panic":
                raise RuntimeError("panic after sleep")
            case "snooze":
                raise JobSnooze(HOUR)
            case "cancel":
                raise JobCancel("cancel after sleep")


def retries(job: JobRow) -> timedelta:
    """Retry at once, until the attempt whose row is compared."""
    return timedelta(0) if job.attempt < job.metadata.get("until", 0) else timedelta(minutes=1)


class Retries:
    """Retries in the same way kinds without a worker."""

    def next_retry(self, job: JobRow, /) -> timedelta:
        return retries(job)


def opts_of(row: dict[str, str | None], **more: Any) -> InsertOpts:
    """Return the insert options of the recorded job."""
    tags = (row["tags"] or "{}").strip("{}")
    metadata = json.loads(row["metadata"] or "{}")
    for key in ("snoozes", "output", "cancel_attempted_at"):
        metadata.pop(key, None)
    return InsertOpts(
        max_attempts=int(row["max_attempts"] or 25),
        priority=int(row["priority"] or 1),
        queue=row["queue"],
        tags=tags.split(",") if tags else [],
        metadata=metadata,
        **more,
    )


async def insert(client: Client, row: dict[str, str | None], **more: Any) -> int:
    """Insert the recorded job again. Returns its id."""
    assert row["kind"] is not None
    assert row["args"] is not None
    args = RawArgs(row["kind"], row["args"])
    return (await client.insert(args, opts_of(row, **more))).job.id


async def just_work(rig: Rig, client: Client, row: dict[str, str | None]) -> int:
    """Insert and work."""
    job_id = await insert(client, row)
    assert len(await drain(client)) == max(int(row["attempt"] or 0), 1)
    return job_id


async def fail_until_the_attempt(rig: Rig, client: Client, row: dict[str, str | None]) -> int:
    """Insert, and let it fail until the recorded attempt."""
    assert row["kind"] is not None
    assert row["args"] is not None
    number = int(row["attempt"] or 0)
    opts = InsertOpts(metadata={"until": number}, queue=row["queue"])
    inserted = await client.insert(RawArgs(row["kind"], row["args"]), opts)
    assert len(await drain(client)) == number
    await rig.schema.execute("UPDATE river_job SET metadata = '{}'")
    return inserted.job.id


async def cancel_running(rig: Rig, client: Client, row: dict[str, str | None]) -> int:
    """Insert, and cancel while it runs."""
    job_id = await insert(client, row)
    await rig.until_state("running")
    await client.job_cancel(job_id)
    await rig.event()
    return job_id


async def cancel_unheard(rig: Rig, client: Client, row: dict[str, str | None]) -> int:
    """Insert, and set the cancel mark while the job runs, without a notification."""
    client._run.running_attempts.cancel_attempts = lambda _: None  # type: ignore[union-attr, method-assign]
    job_id = await insert(client, row)
    await rig.until_state("running")
    await client.job_cancel(job_id)
    rig.release.set()
    await rig.event()
    return job_id


async def only_insert(rig: Rig, client: Client, row: dict[str, str | None]) -> int:
    """Only insert."""
    return await insert(client, row)


async def schedule(rig: Rig, client: Client, row: dict[str, str | None]) -> int:
    """Insert for later."""
    return await insert(client, row, scheduled_at=datetime.now(UTC) + HOUR)


async def unique(rig: Rig, client: Client, row: dict[str, str | None]) -> int:
    """Insert as unique by args."""
    job_id = await insert(client, row, unique_opts=UniqueOpts(by_args=True))
    await drain(client)
    return job_id


async def unique_and_queue(rig: Rig, client: Client, row: dict[str, str | None]) -> int:
    """Insert as unique by args and queue."""
    return await insert(client, row, unique_opts=UniqueOpts(by_args=True, by_queue=True))


async def unique_cancelled(rig: Rig, client: Client, row: dict[str, str | None]) -> int:
    """Insert as unique, and cancel before it runs."""
    job_id = await unique(rig, client, row)
    await client.job_cancel(job_id)
    return job_id


async def unique_after_cancel(rig: Rig, client: Client, row: dict[str, str | None]) -> int:
    """Insert again after such a job."""
    await unique_cancelled(rig, client, row)
    return await unique(rig, client, row)


async def snapshot(rig: Rig, client: Client, row: dict[str, str | None]) -> int:
    """Insert, and read the row while the job runs."""
    job_id = await insert(client, row)
    await rig.until_state("running")
    return job_id


async def work_again(rig: Rig, client: Client, row: dict[str, str | None]) -> int:
    """Insert, work, retry by hand, work again."""
    job_id = await insert(client, row)
    assert len(await drain(client)) == 1
    await client.job_retry(job_id)
    assert len(await drain(client)) == 1
    return job_id


async def insert_fast(rig: Rig, client: Client, row: dict[str, str | None]) -> int:
    """Insert by COPY."""
    assert row["kind"] is not None
    assert row["args"] is not None
    params = InsertManyParams(RawArgs(row["kind"], row["args"]), opts_of(row))
    assert await client.insert_many_fast([params]) == 1
    return await rig.schema.fetchval("SELECT max(id) FROM river_job")


async def interrupt(rig: Rig, client: Client, row: dict[str, str | None]) -> int:
    """Insert, and stop hard while it runs."""
    job_id = await insert(client, row)
    await rig.until_state("running")
    client.stop_and_cancel()
    assert (await rig.event()).kind is EventKind.JOB_INTERRUPTED
    return job_id


async def cancel_retryable(rig: Rig, client: Client, row: dict[str, str | None]) -> int:
    """Cancel a job that waits for its retry."""
    job_id = await insert(client, row)
    await rig.schema.execute(
        "UPDATE river_job SET state = 'retryable', attempt = 1, scheduled_at = now() + '1 hour'"
    )
    await client.job_cancel(job_id)
    return job_id


INTERRUPTED = (
    "running when its client got SIGTERM with SoftStopTimeout=1s (worker returned ctx error)"
)
REMOTE = "remote cancel while running at a poll-only client; worker then: "
PLAYS: dict[str, Any] = {
    "completed": just_work,
    "completed, tags+metadata+priority+queue+max_attempts": just_work,
    "errored, repeatedly retried (snapshot after a few attempts)": fail_until_the_attempt,
    "errored once with max_attempts=1 -> discarded": just_work,
    "panicked -> retryable": fail_until_the_attempt,
    "snoozed 1h": just_work,
    "snoozed 1h, with metadata": just_work,
    "cancelled by worker (JobCancel error)": just_work,
    "output recorded (default)": just_work,
    "output recorded, with metadata": just_work,
    "kind not registered at the worker": fail_until_the_attempt,
    "cancelled remotely while running (worker returns ctx error)": cancel_running,
    "scheduled (+1h)": schedule,
    "unique by args, completed": unique,
    "unique by args+queue, available in a queue without worker": unique_and_queue,
    "unique, then cancelled (unique_key kept?)": unique_cancelled,
    "unique, inserted after same-key job was cancelled": unique_after_cancel,
    "running past JobTimeout default 1m / long runner": snapshot,
    "completed, then JobRetry -> worked again": work_again,
    "inserted with InsertManyFast (COPY), queue without a worker": insert_fast,
    INTERRUPTED: interrupt,
    f"{REMOTE}fail": cancel_unheard,
    f"{REMOTE}snooze": cancel_unheard,
    f"{REMOTE}panic": cancel_unheard,
    f"{REMOTE}cancel": cancel_unheard,
    "remote cancel while running; worker ignores ctx and returns nil": cancel_running,
    "remote cancel while running; worker ignores ctx and snoozes 1h": cancel_running,
    "cancelled while retryable": cancel_retryable,
    "job timeout (JobTimeout=1s)": fail_until_the_attempt,
    "snoozed 4s (< scheduler interval), snapshot ~1s after": just_work,
    "running (snapshot)": snapshot,
}
PLAYS_OF_A_RUN = {cancel_running, cancel_unheard, snapshot, interrupt}
"""The plays in which something happens while the job runs. The others work it with the test
kit."""
NEED_A_LEADER = {
    # The scheduler moves it on.
    "scheduled in the past (-1h), queue without a worker (snapshot after scheduler ran)",
    # The scheduler resolves its conflict.
    "unique (required states only), same key as the conflict job",
}
OURS: dict[str, dict[str, str | None]] = {
    # An interrupted attempt is released and leaves no error.
    INTERRUPTED: {"attempt": "0", "errors": None},
    # A job with a cancel mark is not run again, even if the cancel did not reach its client.
    f"{REMOTE}fail": {"state": "cancelled", "finalized_at": "set"},
    f"{REMOTE}panic": {"state": "cancelled", "finalized_at": "set"},
}
"""The columns that differ on purpose."""


def comparable(row: dict[str, str | None]) -> dict[str, Any]:
    """Return a row without the values that differ from run to run: ids, times, client ids,
    traces."""
    plain: dict[str, Any] = {key: value for key, value in row.items() if key != "id"}
    for column in ("attempted_at", "created_at", "scheduled_at", "finalized_at"):
        plain[column] = "set" if plain[column] else None
    if plain["attempted_by"]:
        plain["attempted_by"] = re.sub(rf"{CLIENT}-\d", CLIENT, plain["attempted_by"])
    if plain["metadata"]:
        metadata = json.loads(plain["metadata"])
        if "cancel_attempted_at" in metadata:
            metadata["cancel_attempted_at"] = "set"
        plain["metadata"] = metadata
    return plain


def entries_of(errors: Any) -> list[dict[str, Any]]:
    """Return the error entries of a row as text, without times, traces and the error type with
    which riverpy's text starts."""
    if not errors:
        return []
    texts = re.findall(r'"((?:[^"\\]|\\.)*)"', errors)
    entries = [json.loads(re.sub(r"\\(.)", r"\1", text)) for text in texts]
    for entry in entries:
        assert datetime.fromisoformat(entry.pop("at")[:19])
        assert isinstance(entry.pop("trace"), str)
        entry["error"] = re.sub("^(?:Runtime|Timeout|Value)Error: ", "", entry["error"])
        entry["error"] = re.sub("ctx: context deadline.*", "timeout", entry["error"])
        entry["error"] = re.sub("job exceeded its timeout.*", "timeout", entry["error"])
    return entries


def test_every_scenario_is_played() -> None:
    """Each scenario of the recording has a test."""
    assert set(PLAYS) | NEED_A_LEADER == set(SCENARIOS)


@pytest.mark.parametrize("scenario", PLAYS)
async def test_row(rig: Rig, scenario: str) -> None:
    """riverpy's worker leaves the same columns as River's, except for the deviations above."""
    register(rig)
    recorded = SCENARIOS[scenario]
    queues = {name: QueueConfig(max_workers=10) for name in ("default", "q2", "sq", "pq", "tq")}
    timeout = timedelta(milliseconds=50) if "JobTimeout=1s" in scenario else timedelta(minutes=1)
    client = rig.client(
        known_kinds_only=False,
        id=f"{CLIENT}-1",
        queues=queues,
        job_timeout=timeout,
        soft_stop_timeout=timedelta(0),
        retry_policy=Retries(),
    )
    play = PLAYS[scenario]
    async with rig.running(client) if play in PLAYS_OF_A_RUN else client:
        job_id = await play(rig, client, recorded)
        columns = ", ".join(f"{name}::text AS {name}" for name in recorded)
        row = await rig.schema.fetchrow(f"SELECT {columns} FROM river_job WHERE id = $1", job_id)
    assert row is not None
    ours, theirs = comparable(dict(row)), comparable(recorded) | OURS.get(scenario, {})
    assert entries_of(ours.pop("errors")) == entries_of(theirs.pop("errors"))
    assert ours == theirs
