"""The page /metrics: its format and its size."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

import riverpy
from riverpy import (
    ClientStats,
    Histogram,
    KindStats,
    LeaseLag,
    LeaseStats,
    QueueStats,
    SingletonStats,
)
from riverpy._tools.health import worker_health
from riverpy._tools.health.http import Address, Request
from riverpy._tools.health.metrics import render_metrics
from riverpy._tools.health.worker_health import HealthRequestHandler
from riverpy._tools.processes.merged_metrics import merge_metrics
from riverpy._tools.processes.slot import RestartCounts
from riverpy._work.counters import (
    CLAIM_SIZE_BUCKET_BOUNDS,
    RUN_TIME_BUCKET_BOUNDS,
    HistogramBuilder,
)
from riverpy.stats import UNKNOWN_KINDS_LABEL
from tests.work.rig import Task

if TYPE_CHECKING:
    from riverpy import Job
    from tests.work.rig import Rig

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
SERIES_MAX = 20
"""Of each kind."""
Sample = tuple[str, frozenset[tuple[str, str]]]


class Named(msgspec.Struct, frozen=True):
    """The args of a job without a worker."""

    kind: ClassVar[str] = "no worker"


def samples(page: str) -> dict[Sample, float]:
    """Parse the samples with Prometheus' own client."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def page_of(stats: ClientStats, lags: dict[str, timedelta] | None = None) -> dict[Sample, float]:
    """Return the samples of the page of these stats."""
    return samples("".join(render_metrics(stats, process_started_at=1.5, queue_lags=lags)))


def value(page: dict[Sample, float], name: str, **labels: str) -> float | None:
    """Return the value of one sample."""
    return page.get((f"riverpy_{name}", frozenset(labels.items())))


def test_histogram_buckets() -> None:
    """A bucket counts all values up to its bound, as Prometheus expects."""
    tally = HistogramBuilder((1.0, 2.5))
    for one in (0.0, 1.0, 1.1, 2.5, 100.0):
        tally.add_value(one)
    runs = tally.build_histogram()
    kind = KindStats(
        completed=5, failed=0, discarded=0, snoozed=0, cancelled=0, interrupted=0, runs=runs
    )
    page = page_of(ClientStats(client_id="c", kinds={"k": kind}))
    buckets = {
        le: value(page, "run_seconds_bucket", kind="k", le=le) for le in ("1", "2.5", "+Inf")
    }
    assert buckets == {"1": 2, "2.5": 4, "+Inf": 5}
    assert value(page, "run_seconds_count", kind="k") == 5
    assert value(page, "run_seconds_sum", kind="k") == pytest.approx(104.6)


@pytest.mark.parametrize(
    "name", ['<img src=x onerror="alert(1)">', "back\\slash", "line\nbreak", 'q"uote', "\\n", "é—"]
)
def test_labels_are_escaped(name: str) -> None:
    """Any name of a kind or queue is read back unchanged (SE-04)."""
    empty = Histogram(RUN_TIME_BUCKET_BOUNDS, (0,) * (len(RUN_TIME_BUCKET_BOUNDS) + 1), 0.0)
    kind = KindStats(
        completed=7, failed=0, discarded=0, snoozed=0, cancelled=0, interrupted=0, runs=empty
    )
    page = page_of(ClientStats(client_id="c", kinds={name: kind}), {name: timedelta(seconds=3)})
    assert value(page, "attempts_total", kind=name, outcome="completed") == 7
    assert value(page, "queue_lag_seconds", queue=name) == 3


def test_metrics_are_declared_once() -> None:
    """Each metric has its help and type once (OP-12)."""
    text = "".join(
        render_metrics(ClientStats(client_id="c"), process_started_at=0, queue_lags=None)
    )
    families = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    helped = [line.split()[2] for line in text.splitlines() if line.startswith("# HELP")]
    assert families == helped
    assert Counter(families).most_common(1)[0][1] == 1
    assert text.endswith("\n")


def test_unknown_values_are_left_out() -> None:
    """An unknown value has no sample."""
    page = page_of(ClientStats(client_id="c"))
    assert value(page, "heartbeat_age_seconds") is None
    assert value(page, "listener_proven") is None
    assert value(page, "leader", domain="default") == 0


def test_singletons_and_domain() -> None:
    """Each singleton has its series. It has no epoch while it does not run. The leader metric
    names the domain."""
    stats = ClientStats(
        client_id="c",
        domain="mail",
        is_leader=True,
        singletons={
            "one": SingletonStats(
                held=True,
                running=True,
                epoch=7,
                terms=2,
                failures=1,
                losses=1,
                waited=0.5,
                valid_for=9.5,
                lag=LeaseLag(count=40, age=None, reported_ago=3.0),
            ),
            "two": SingletonStats(
                held=False,
                running=False,
                epoch=None,
                terms=0,
                failures=0,
                losses=0,
                waited=None,
                standby=True,
            ),
        },
        leases=LeaseStats(
            held=1,
            renewals=9,
            renewal_failures=2,
            renewal_seconds=0.01,
            lags={
                f"stream-{n:02}": LeaseLag(count=n, age=0.5, reported_ago=1.0) for n in range(30)
            },
        ),
    )
    page = page_of(stats)
    assert value(page, "leader", domain="mail") == 1
    assert value(page, "singleton_running", singleton="one") == 1
    assert value(page, "singleton_running", singleton="two") == 0
    assert value(page, "singleton_epoch", singleton="one") == 7
    assert value(page, "singleton_epoch", singleton="two") is None
    assert value(page, "singleton_wait_seconds", singleton="one") == 0.5
    assert value(page, "singleton_losses_total", singleton="one") == 1
    assert [value(page, "lease_held", lease=name) for name in ("one", "two")] == [1, 0]
    assert [value(page, "lease_standby", lease=name) for name in ("one", "two")] == [0, 1]
    assert value(page, "lease_valid_seconds", lease="one") == 9.5
    assert value(page, "lease_valid_seconds", lease="two") is None
    assert value(page, "lease_lag_items", lease="one") == 40
    assert value(page, "lease_lag_seconds", lease="one") is None
    assert value(page, "lease_lag_report_age_seconds", lease="one") == 3
    assert value(page, "lease_lag_seconds", lease="stream-19") == 0.5
    assert value(page, "lease_lag_seconds", lease="stream-20") is None  # 20 names are the limit
    assert value(page, "leader_standby", domain="mail") == 0
    assert value(page, "leases_held") == 1
    assert value(page, "leases_renewals_total", result="failed") == 2


def test_each_metric_is_on_the_page() -> None:
    """docs/metrics.md names each metric, and no other."""
    named: set[str] = set()
    for cell in re.findall(r"^\| (`riverpy_.*?) \|", PAGE.read_text("utf-8"), re.MULTILINE):
        named |= set(re.findall(r"`(\w+)`", cell))
    page = "".join(
        render_metrics(ClientStats(client_id="c"), process_started_at=0, queue_lags=None)
    )
    page = merge_metrics({1: page}, {1: RestartCounts()}).decode()  # the page of a supervisor
    assert named == set(re.findall(r"^# TYPE (\w+)", page, re.MULTILINE))


async def test_jobs_run_while_the_page_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of many kinds is rendered in pieces, and other tasks run between them."""
    runs = HistogramBuilder(RUN_TIME_BUCKET_BOUNDS).build_histogram()
    counts = dict.fromkeys(
        ("completed", "failed", "discarded", "snoozed", "cancelled", "interrupted"), 0
    )
    kinds = {f"kind{n}": KindStats(**counts, runs=runs) for n in range(100)}
    stats = ClientStats(client_id="c", uptime=1.0, kinds=kinds)
    client: Any = SimpleNamespace(stats=lambda: stats, queue_lags=_no_lags, queues={})
    health = HealthRequestHandler(Address("127.0.0.1", 0))
    health.client = client
    monkeypatch.setattr(worker_health, "RENDER_SLICE_SECONDS", 0.0)
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    turning = asyncio.get_running_loop().create_task(turn())
    response = await health._answer_metrics(Request("GET", "/metrics", {}, "localhost"))
    turning.cancel()
    assert turns >= len(kinds)
    assert isinstance(response.body, bytes)
    assert value(samples(response.body.decode()), "run_seconds_count", kind="kind99") == 0


async def _no_lags(names: list[str]) -> dict[str, timedelta]:
    return {}


async def test_series_are_bounded(rig: Rig) -> None:
    """Ids, tags, args, attempts and errors of jobs create no series. A kind has at most 20, and
    all kinds without a worker share one (OP-06). An idle queue has its series (OP-08). The
    counts of two clients of a process add up (OP-12)."""
    jobs = 60

    @rig.job
    async def work(job: Job[Any]) -> None:
        if job.args.n % 3 == 0:
            raise ValueError(f"error {job.args.n}")

    queues = {"default": riverpy.QueueConfig(max_workers=4), "idle": riverpy.QueueConfig()}
    async with rig.working(queues=queues, known_kinds_only=False) as client:
        other = rig.client(slots=4, known_kinds_only=False)
        async with rig.running(other):
            params = [
                riverpy.InsertManyParams(
                    Task(n), riverpy.InsertOpts(tags=[f"tag{n}"], max_attempts=1)
                )
                for n in range(jobs)
            ]
            await rig.insert_rows(5, kind="one unknown")
            await rig.insert_rows(5, kind="another")
            await client.insert_many(params)  # notifies the workers
            await rig.until(
                "SELECT count(*) FROM river_job"
                " WHERE finalized_at IS NOT NULL OR cardinality(errors) = 1",
                jobs + 10,
            )
    pages = [page_of(one.stats()) for one in (client, other)]
    for page in pages:
        kinds = Counter(dict(labels)["kind"] for _, labels in page if "kind" in dict(labels))
        assert set(kinds) == {"task", UNKNOWN_KINDS_LABEL}
        assert max(kinds.values()) <= SERIES_MAX
    assert value(pages[0], "claim_jobs_sum", queue="idle") == 0

    def total(name: str, **labels: str) -> float:
        return sum(value(page, name, **labels) or 0 for page in pages)

    done = total("attempts_total", kind="task", outcome="completed")
    failed = total("attempts_total", kind="task", outcome="failed")
    assert (done, failed) == (jobs * 2 / 3, jobs / 3)
    assert total("jobs_discarded_total", kind="task") == jobs / 3
    assert total("attempts_total", kind=UNKNOWN_KINDS_LABEL, outcome="failed") == 10
    assert total("run_seconds_count", kind="task") == jobs
    assert total("wait_seconds_count", queue="default") == jobs + 10
    assert total("claim_jobs_sum", queue="default") == jobs + 10


async def test_waits_are_never_negative(rig: Rig) -> None:
    """A job that was due before its insert waits from its insert (OP-11)."""

    @rig.job
    async def work(job: Job[Any]) -> None: ...

    async with rig.working() as client:
        await client.insert(Task(1))
        await rig.insert_rows(1, scheduled_at=datetime(2001, 1, 1, tzinfo=UTC))
        client._run.producers["default"].wake()
        await rig.take(2)
        stats = client.stats()
    waits = stats.queues["default"].waits
    assert waits.count == 2
    assert 0 <= waits.sum < 3600


async def test_stats_of_a_client(rig: Rig) -> None:
    """A client has stats before, during and after a run."""
    begun = asyncio.Event()

    @rig.job
    async def work(job: Job[Any]) -> None:
        begun.set()
        await asyncio.sleep(3600)

    client = rig.client(slots=3)
    assert client.stats() == ClientStats(client_id=client.id)
    async with rig.running(client):
        await client.insert(Task(1))
        await begun.wait()
        stats = client.stats()
        assert (stats.state, stats.listener) == ("working", "proven")
        assert set(stats.connections) == {"claims", "results", "reserved", "listener"}
        assert all(stats.connections.values())
        queue = stats.queues["default"]
        assert (queue.running, queue.slots, queue.paused) == (1, 3, False)
        client.stop_and_cancel()
        assert client.stats().state == "stopping"
    stats = client.stats()
    assert (stats.state, stats.is_leader, stats.listener) == ("stopped", False, "off")
    assert not any(stats.connections.values())
    assert stats.kinds["task"].interrupted == 1
    assert isinstance(stats.queues["default"], QueueStats)
    assert stats.queues["default"].batches.bounds == CLAIM_SIZE_BUCKET_BOUNDS
