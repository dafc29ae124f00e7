"""scripts/chaos work: its checker finds each kind of violation, a seed always has the same plan,
and a limited run finds no violation."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from riverpy._log_events import JOB_FAILED
from riverpy._postgres.job_maintenance import RESCUE_ERROR_TEXT
from scripts.chaos import parse_arguments
from scripts.chaos_work import run_chaos
from tests.kit.chaos_plan import FaultKind, make_plan
from tests.kit.work_history import (
    ALL,
    CANCEL_ERROR,
    LINES_MAX,
    LOST,
    RESTORED,
    UNSTORABLE_ERROR,
    Act,
    Cancel,
    ClockStep,
    History,
    JobEnd,
    LogLine,
    Span,
    check,
)

START = 1_800_000_000.0
SEED = 7
"""Seed of the limited run, with nearly every kind of fault."""
RATE = 100
"""Jobs per second of the limited run, since other tests run at the same time."""
BUSY_BOUND = 30.0
"""Seconds until jobs run again, for the same reason."""


def claim(seconds: float) -> int:
    """Return the claim time that is this many seconds after the start."""
    return round((START + seconds - 946684800) * 1e6)


def act(what: str, job_id: int, attempt: int, claimed: float, at: float, **values: Any) -> Act:
    return Act(
        **{
            "process": "w0:1",
            "what": what,
            "at": START + at,
            "job_id": job_id,
            "attempt": attempt,
            "claim": claim(claimed),
        }
        | values
    )


def attempt(
    job_id: int,
    number: int = 1,
    *,
    at: float,
    how: str = "returned",
    stored: str | None = "job_completed",
    process: str = "w0:1",
) -> list[Act]:
    """Return the acts of an attempt of 20 ms."""
    acts = [
        act("begin", job_id, number, at, at + 0.01, process=process),
        act("end", job_id, number, at, at + 0.03, how=how, process=process),
    ]
    if stored:
        acts.append(act("stored", job_id, number, at, at + 0.04, how=stored, process=process))
    return acts


def job(job_id: int, *, claimed: float, kind: str = "quick", **values: Any) -> JobEnd:
    return JobEnd(
        **{
            "id": job_id,
            "number": job_id,
            "kind": kind,
            "state": "completed",
            "attempt": 1,
            "claim": claim(claimed),
            "created": START + claimed - 0.01,
        }
        | values
    )


def log(event: str, at: float, **values: Any) -> LogLine:
    return LogLine(**{"event": event, "level": "info", "at": START + at, "client_id": "a"} | values)


def span(kind: str, began: float, ended: float, worker: str = "w0", **values: Any) -> Span:
    return Span(kind, worker, START + began, START + ended, **values)


def alive(job_id: int, number: int, claimed: float, monotonic: float) -> Act:
    """Return the act of a child process that runs an attempt."""
    return act("alive", job_id, number, claimed, claimed + 0.02, monotonic=monotonic)


# Job 1 completed; 2 failed as planned, then snoozed; 3 was rescued from a killed worker; 4 was
# cancelled while it ran; 5 is unique; 6 was interrupted; 7 was lost by a crash and started again.
ACTS = {
    1: attempt(1, at=0.1),
    2: [
        *attempt(2, at=0.2, how="RuntimeError", stored="job_failed"),
        *attempt(2, 2, at=0.5, how="JobSnooze", stored=None),
        act("stored", 2, 1, 0.5, 0.54, how="job_snoozed"),
        *attempt(2, 2, at=0.8),
    ],
    3: [act("begin", 3, 1, 1.0, 1.01), *attempt(3, 2, at=4.0)],
    4: attempt(4, at=4.3, how="CancelledError", stored="job_cancelled"),
    5: attempt(5, at=4.5),
    6: [
        *attempt(6, at=4.6, how="CancelledError", stored=None),
        act("stored", 6, 0, 4.6, 4.64, how="job_interrupted"),
        *attempt(6, at=4.9),
    ],
    7: [*attempt(7, at=5.2, stored=None), *attempt(7, at=6.2)],
}
JOBS = {
    1: job(1, claimed=0.1),
    2: job(
        2,
        claimed=0.8,
        kind="flaky",
        attempt=2,
        failures=1,
        failed=[1],
        errors=["planned failure 1"],
        failed_at=[START + 0.23],
    ),
    3: job(
        3, claimed=4.0, attempt=2, failed=[1], errors=[RESCUE_ERROR_TEXT], failed_at=[START + 3.9]
    ),
    4: job(
        4,
        claimed=4.3,
        kind="endless",
        state="cancelled",
        failed=[1],
        errors=[CANCEL_ERROR],
        failed_at=[START + 4.33],
    ),
    5: job(5, claimed=4.5, kind="once"),
    6: job(6, claimed=4.9),
    7: job(7, claimed=6.2),
}
SPANS = [
    span("worker killed", 1.1, 2.0),
    span("server crashed", 5.3, 5.9, ALL),
]
LOGS = {
    "w0": [
        log(LOST, 5.35, level="warning"),
        log(RESTORED, 6.0),
        log(JOB_FAILED, 0.23, level="warning"),
    ],
    "w1": [],
}


def history(**changes: Any) -> History:
    """Return a history with every kind of record, after these changes."""
    values: dict[str, Any] = {
        "jobs": list(JOBS.values()),
        "acts": [one for acts in ACTS.values() for one in acts],
        "committed": set(JOBS),
        "rolled_back": {99},
        "unique": [5],
        "cancels": [Cancel(4, START + 4.32)],
        "spans": SPANS,
        "crashes": [(START + 5.3, START + 5.9)],
        "logs": LOGS,
        "ended": START + 8.0,
        "dead_after": 1.0,
    }
    return History(**values | changes)


def with_job(number: int, *acts: Act, **values: Any) -> History:
    """Return the history with another final state of a job, and more acts of it."""
    changed = JOBS | {number: msgspec.structs.replace(JOBS[number], **values)}
    return history(jobs=list(changed.values()), acts=[*history().acts, *acts])


def with_acts(number: int, acts: list[Act]) -> History:
    """Return the history with other acts of a job."""
    return history(acts=[one for each in (ACTS | {number: acts}).values() for one in each])


def rules(broken: History) -> set[str]:
    """Return the rules that a history breaks."""
    found = check(broken)
    assert all(violation.text for violation in found)
    return {violation.rule for violation in found}


def test_good_history() -> None:
    """The good history has no violation."""
    assert check(history()) == []
    assert check(History()) == []


BESIDE = [alive(3, 1, 1.0, 1.1), alive(3, 1, 1.0, 4.2), alive(3, 2, 4.0, 4.1)]
TWICE = act("stored", 1, 1, 0.1, 0.5, how="job_completed")
BROKEN = {
    "a committed job is gone": (
        history(committed={*JOBS, 8}),
        "no committed job lost",
    ),
    "a job that a job inserted is gone": (
        history(acts=[*history().acts, Act(process="w0:1", what="child", at=START, child_id=8)]),
        "no committed job lost",
    ),
    "a job of a rolled back transaction exists": (
        history(rolled_back={1}),
        "nothing of a rolled back transaction",
    ),
    "a job of a rolled back transaction ran": (
        history(acts=[*history().acts, *attempt(8, at=1.0)]),
        "nothing of a rolled back transaction",
    ),
    "a job never ends": (with_job(1, state="running"), "every job ends"),
    "a job is discarded": (with_job(1, state="discarded"), "every job ends"),
    "a claim has two results": (with_job(1, TWICE), "one result per claim"),
    "a job is finished by two claims": (
        with_job(1, *attempt(1, 2, at=0.3, process="w1:1")),
        "no job finished twice",
    ),
    "a stored result is gone": (
        with_job(1, state="cancelled", failed=[1], errors=[CANCEL_ERROR], failed_at=[START]),
        "a stored result stays",
    ),
    "a stored failure is gone": (
        with_acts(1, attempt(1, at=0.1, how="RuntimeError", stored="job_failed")),
        "a stored result stays",
    ),
    "a job is completed whose handler did not end": (
        with_acts(1, ACTS[1][:1]),
        "the handler of a completed job returned",
    ),
    "a job is completed by another claim than its last": (
        with_job(1, claim=claim(0.3)),
        "the handler of a completed job returned",
    ),
    "an attempt is not counted": (
        with_job(2, attempt=1, failed=[1]),
        "one error per attempt except the last",
    ),
    "an attempt has two errors": (
        with_job(2, failed=[1, 1], errors=["planned"] * 2, failed_at=[START] * 2, failures=2),
        "one error per attempt except the last",
    ),
    "a job did not fail as it should": (with_job(2, failures=2), "a job fails as planned"),
    "a job failed too often": (with_job(2, failures=0), "a job fails as planned"),
    "an error that no handler raised": (
        with_job(2, errors=["oh"], failures=0),
        "an error has a reason",
    ),
    "a rescue from a worker that was well": (
        history(spans=[SPANS[1], span("worker killed", 1.1, 2.0, "w1")]),
        "a rescue has a reason",
    ),
    "a rescue because of a step of the clock": (
        history(spans=[SPANS[1], span(FaultKind.CLOCK_STEP, 1.1, 2.0, ALL, is_reason=False)]),
        "a rescue has a reason",
    ),
    "a result that nothing refused and that could not be stored": (
        with_job(2, errors=[UNSTORABLE_ERROR], failures=0),
        "an error has a reason",
    ),
    "a child that outlives its worker": (
        history(acts=[*history().acts, alive(3, 1, 1.0, 12.0)], ends={"w0:1": 10.0}),
        "a child ends with its worker",
    ),
    "an attempt beside the next": (
        history(
            acts=[*history().acts, *BESIDE],
            spans=[span("worker killed", 1.1, 2.0, ends_worker=True), SPANS[1]],
        ),
        "no attempt runs beside the next",
    ),
    "a claim that begins twice": (with_job(1, ACTS[1][0]), "a claim starts once"),
    "an attempt that begins again": (
        with_job(1, *attempt(1, at=0.05, stored=None)),
        "an attempt starts again for a reason",
    ),
    "an attempt that begins again without the crash": (
        history(crashes=[]),
        "an attempt starts again for a reason",
    ),
    "a unique job twice": (
        history(jobs=[*JOBS.values(), job(8, number=5, claimed=0.1, kind="once")]),
        "a unique job exists once",
    ),
    "a unique job inserted twice": (history(unique=[5, 5]), "a unique job is inserted once"),
    "a cancelled job continues": (
        with_job(4, state="completed", failed=[], errors=[], failed_at=[]),
        "a cancelled job ends",
    ),
    "a cancelled job runs again": (
        with_job(4, *attempt(4, 2, at=4.5)),
        "a cancelled job does not run again",
    ),
    "a worker does not work again": (
        history(ended=START + 60, spans=[*SPANS, span("cut", 7.0, 7.0)]),
        "jobs run soon after a fault",
    ),
    "jobs wait while workers could work": (
        history(
            ended=START + 60,
            jobs=[*JOBS.values(), job(8, claimed=50.0, created=START + 7.0)],
            acts=[*history().acts, *attempt(8, at=50.0)],
        ),
        "no stall",
    ),
    "a traceback": (
        history(logs={"w0": [log(JOB_FAILED, 1, exception="Traceback …")]}),
        "no unexpected log lines",
    ),
    "an error": (history(logs={"w0": [log("oh", 1, level="error")]}), "no unexpected log lines"),
    "many lines": (
        history(logs=LOGS | {"w0": [log(f"{n}", 5.5) for n in range(LINES_MAX + 1)]}),
        "no storm of log lines",
    ),
    "many lines about one job": (
        history(logs=LOGS | {"w0": [log("refused", 5.5, job_id=1)] * (LINES_MAX + 2)}),
        "no storm of log lines",
    ),
    "two lines about one loss": (
        history(logs=LOGS | {"w0": [*LOGS["w0"][:1], *LOGS["w0"]]}),
        "one log line per outage",
    ),
    "two losses in one outage": (
        history(logs=LOGS | {"w0": [*LOGS["w0"][:2], *LOGS["w0"]]}),
        "one log line per outage",
    ),
    "a loss that never ends": (
        history(logs=LOGS | {"w0": LOGS["w0"][:1]}),
        "one log line per recovery",
    ),
}


def test_a_line_for_each_job() -> None:
    """Many rows may be refused at once, and each may have one log line."""
    lines = [log("refused", 5.5, job_id=number) for number in range(LINES_MAX + 1)]
    assert not rules(history(logs=LOGS | {"w0": [*LOGS["w0"], *lines]}))


@pytest.mark.parametrize(("broken", "rule"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_history(broken: History, rule: str) -> None:
    """Each kind of violation is found."""
    assert rule in rules(broken)


def test_rescue_without_a_start() -> None:
    """A worker may be killed with a claim that has not started, of a job that another worker has
    snoozed."""
    acts = [
        *attempt(3, at=0.3, how="JobSnooze", stored=None, process="w1:1"),
        act("stored", 3, 0, 0.3, 0.34, how="job_snoozed", process="w1:1"),
        *attempt(3, 2, at=4.0),
    ]
    assert check(with_acts(3, acts)) == []


@pytest.mark.parametrize("ended", [False, True])
def test_blocked_worker(ended: bool) -> None:
    """A worker that is stopped while its event loop is blocked releases jobs of any kind, finished
    or not, whose results it could not store. A worker that is stopped otherwise does not."""
    acts = attempt(1, at=0.1, stored=None)[: 2 if ended else 1]
    begins_again = with_acts(1, [*acts, *attempt(1, at=4.0, process="w1:1")])
    begins_again.jobs = list((JOBS | {1: job(1, claimed=4.0)}).values())
    for kind, expected in (
        (FaultKind.STOP_BLOCKED, set[str]()),
        (FaultKind.STOP, {"an attempt starts again for a reason"}),
    ):
        begins_again.spans = [*SPANS, span(kind, 0.1, 3.9, ends_worker=True)]
        assert rules(begins_again) == expected


def test_stepped_clock() -> None:
    """Times of a clock that was stepped are converted to true times."""
    acts = [act(one.what, 4, 1, 604.3, 4.33, how=one.how) for one in ACTS[4]]
    stepped = with_acts(4, acts)
    jobs = JOBS | {3: msgspec.structs.replace(JOBS[3], failed_at=[START + 603.9])}
    stepped.jobs = list(jobs.values())
    assert rules(stepped) == {"a rescue has a reason", "a cancelled job does not run again"}
    stepped.clock_steps = [ClockStep(START + 3.5, START + 4.5, 600)]
    assert check(stepped) == []


def test_refused_rows() -> None:
    """A result that could not be stored is an explained error where rows were refused."""
    refused = with_job(2, errors=[UNSTORABLE_ERROR], failures=0)
    refused.spans = [*SPANS, span(FaultKind.REFUSED_ROWS, 0.1, 0.3, ALL, halts=False)]
    assert check(refused) == []


def test_children() -> None:
    """A child process may be alive a moment longer than its worker, and during the next attempt if
    its worker could not reach the database."""
    acts = [*history().acts, *BESIDE]
    assert check(history(acts=acts, ends={"w0:1": 4.0})) == []


def test_times_without_working_workers() -> None:
    """No worker can work while the server is broken, or every worker is."""
    spans = [
        span("down", 1, 2, ALL),
        span("frozen", 2, 5, "w0"),
        span("killed", 4, 6, "w1"),
        span("locked", 6, 9, ALL, halts=False),
    ]
    found = history(spans=spans).halts()
    assert found == [(START + 1, START + 2), (START + 4, START + 5)]


def test_recoveries() -> None:
    """A worker has recovered when it stores results again. Faults that start before that count as
    one."""
    spans = [span("cut", 0, 1), span("frozen", 2, 3), span("down", 2.5, 3.5, ALL)]
    acts = [act("stored", 1, 1, 0, at) for at in (0.5, 1.25, 3.1, 4.0)]
    found = history(spans=spans, acts=acts, logs={"w0": []}).recoveries()
    assert [(one.kind, one.seconds, one.spans) for one in found] == [
        ("cut", 0.25, 1),
        ("several at once", 0.5, 2),
    ]


def test_plan() -> None:
    """A seed always has the same plan, a long plan has faults of every kind, and another seed has
    another plan."""
    plan = make_plan(1, seconds=300, workers=3, dead_after=6)
    assert plan == make_plan(1, seconds=300, workers=3, dead_after=6)
    assert plan != make_plan(2, seconds=300, workers=3, dead_after=6)
    assert plan[:20] == make_plan(1, seconds=plan[20].at, workers=3, dead_after=6)
    assert {fault.kind for fault in plan} == set(FaultKind)
    assert {fault.number for fault in plan} == {0, 1, 2}


def test_long_outages() -> None:
    """A long run has outages of two minutes."""
    plan = make_plan(1, seconds=3600, workers=3, dead_after=6)
    assert max(fault.seconds for fault in plan) == 120


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """Invalid arguments are refused with exit code 2."""
    with pytest.raises(SystemExit) as raised:
        parse_arguments(["work", "--rate", "0"])
    assert raised.value.code == 2
    assert "usage: scripts/chaos" in capsys.readouterr().err


@pytest.mark.timeout(600)
async def test_short_chaos() -> None:
    """During faults of a fixed seed no committed job is lost, none finishes twice, every
    attempt has a reason, and jobs run again soon after each fault."""
    found = await run_chaos(SEED, seconds=20, workers=3, rate=RATE, bound=BUSY_BOUND, outages_max=2)
    assert found["violations"] == []
    assert found["faults"]
    for name in ("completed", "cancelled", "rolled_back"):
        assert found[name] > 0, name
