"""scripts/chaos: its checker finds each kind of violation, a seed always has the same plan, and its
fleet leaves nothing behind."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import msgspec
import pytest

from scripts.chaos import parse_arguments
from scripts.chaos_fleet import FaultKind, make_plan
from scripts.chaos_leader import SHORT, run_chaos
from tests.kit.fleet import WorkerSettings, running_fleet
from tests.kit.history import (
    Act,
    Broken,
    ClockStep,
    Crash,
    History,
    JobEnd,
    Slot,
    Term,
    TermWrite,
    check,
)

if TYPE_CHECKING:
    from pathlib import Path

START = datetime(2026, 1, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


OLD, NEW = Term(at(0), "one:1:a"), Term(at(10), "two:2:b")


def act(what: str, seconds: float, term: Term | None = None, process: str = "one:1") -> Act:
    return Act(process=process, what=what, at=at(seconds), term=term)


def stall(since: float, until: float, process: str = "one:1") -> Act:
    return Act(process=process, what="stall", at=at(until), stalled_since=at(since))


def job(number: int, state: str = "completed", **values: int) -> JobEnd:
    return JobEnd(
        **{"id": number, "state": state, "attempt": 1, "rescues": 0, "errors": 0} | values
    )


def attempt(job_id: int, number: int = 1) -> Act:
    return Act(process="one:1", what="attempt", at=at(1), job_id=job_id, attempt=number)


def slots(periodic_id: str, *times: tuple[float, float]) -> list[Slot]:
    return [Slot(periodic_id, at(due), at(inserted)) for due, inserted in times]


def good_history() -> History:
    """Return a history with every kind of record and no violation."""
    return History(
        acts=[
            act("begin", 0.01, OLD),
            act("pass", 5, OLD),
            act("end", 9, OLD),
            act("begin", 10.01, NEW, "two:2"),
            act("pass", 11, NEW, "two:2"),
            attempt(1),
            attempt(2),
            attempt(2, 2),
            attempt(3, 2),
        ],
        writes=[TermWrite(OLD, 1, at(5)), TermWrite(OLD, 2, at(9.5)), TermWrite(NEW, 1, at(11))],
        slots=[
            *slots("all", (1, 1.1), (2, 8.1), (3, 8.1), (4, 8.1)),
            *slots("one", (1, 1.1), (4, 4.9), (5, 5.1)),
            *slots("skip", (1, 1.1), (4, 4.9), (5, 5.1)),
        ],
        jobs=[
            job(1),
            job(2, attempt=2, rescues=1, errors=1),
            job(3, attempt=2, rescues=1, errors=1),  # killed before its first attempt started
        ],
        inserted=[1, 2],
        validity=timedelta(seconds=1),
    )


def rules(**changes: object) -> list[str]:
    """Return the rules that the good history breaks after these changes."""
    found = check(msgspec.structs.replace(good_history(), **changes))
    assert all(violation.text for violation in found)
    return [violation.rule for violation in found]


def test_good_history() -> None:
    """The good history has no violation, and its times without a leader are measured."""
    assert check(good_history()) == []
    assert good_history().gaps() == [1.0]
    assert check(History()) == []


OVERLAPS = {
    "an end after the next election": [act("begin", 0, OLD), act("end", 10.2, OLD)],
    "a pass after its own end": [act("begin", 0, OLD), act("end", 9, OLD), act("pass", 10.2, OLD)],
    "no end, and a late pass": [act("begin", 0, OLD), act("pass", 10.2, OLD)],
    "a pass after a thaw": [act("begin", 0, OLD), stall(5, 12), act("pass", 12.1, OLD)],
}


@pytest.mark.parametrize("acts", OVERLAPS.values(), ids=OVERLAPS.keys())
def test_overlap(acts: list[Act]) -> None:
    """A process that reports to lead, or acts, after the next election is an overlap."""
    found = rules(
        acts=[*acts, act("begin", 10.01, NEW, "two:2"), attempt(1), *good_history().acts[-3:]]
    )
    assert found == ["no overlap of terms"]


def test_frozen_process_reports_late() -> None:
    """A process that did not run reports the end of its term late, so its last act counts."""
    acts = [act("pass", 5, OLD), stall(5, 12), act("end", 12.1, OLD)]
    assert rules(acts=[*acts, *good_history().acts[3:]]) == []
    acts[1] = stall(5, 12, "two:2")
    assert rules(acts=[*acts, *good_history().acts[3:]]) == ["no overlap of terms"]


def test_overlap_after_a_crash() -> None:
    """A crash of the server loses the leader, whose lease may stay valid until its deadline, but no
    longer."""
    acts = [act("begin", 0, OLD), act("end", 10.2, OLD), *good_history().acts[3:]]
    assert rules(acts=acts, crashes=[Crash(at(9), at(9.9))]) == []
    assert rules(acts=acts, crashes=[Crash(at(8), at(9))]) == ["no overlap of terms"]
    assert rules(acts=acts, crashes=[Crash(at(10.1), at(10.1))]) == ["no overlap of terms"]


def test_overlap_after_a_step() -> None:
    """A step of the server's clock ends a lease early in the database. Its holder may act until its
    local deadline, but no longer."""
    acts = [act("begin", 0, OLD), act("end", 10.2, OLD), *good_history().acts[3:]]
    assert rules(acts=acts, clock_steps=[ClockStep(at(9), at(9.9))]) == []
    assert rules(acts=acts, clock_steps=[ClockStep(at(8), at(9))]) == ["no overlap of terms"]


def test_term_that_begins_while_the_clock_is_back() -> None:
    """A client that is elected while the server's clock is set back gets an earlier time than the
    term before. Its writes are not late; those of the term before are, after its election."""
    later = Term(at(10) - timedelta(minutes=10), "three:3")
    acts = [*good_history().acts[:3], act("begin", 10, later), act("pass", 11, later)]
    writes = [TermWrite(OLD, 1, at(5)), TermWrite(later, 1, at(11))]
    step = [ClockStep(at(9.5), at(12))]
    assert rules(acts=acts, writes=writes, clock_steps=step, jobs=[], inserted=[]) == []
    late = [*writes, TermWrite(OLD, 2, at(11.5))]
    assert rules(acts=acts, writes=late, clock_steps=step, jobs=[], inserted=[]) == [
        "no write of an older term after one of a newer"
    ]


def test_slot_read_before_a_clock_step() -> None:
    """A slot that is read before the clock is set back, and inserted after it, is not early. The
    same insert at another time is."""
    slot = slots("skip", (10, 4))
    step = ClockStep(at(9.5), at(12))
    assert check(History(slots=slot, clock_steps=[step])) == []
    assert check(History(slots=slot, clock_steps=[ClockStep(at(20), at(22))])) != []


def test_rescues() -> None:
    """An attempt that is repeated without a fault is a violation."""
    assert rules(broken=[Broken("one", at(0.5), at(1.5))]) == []
    assert rules(broken=[Broken("two", at(0.5), at(1.5))]) == ["a rescue has a reason"]
    good = good_history()
    stalled = [*good.acts, stall(0.5, 1.5)]
    assert rules(broken=[], acts=stalled) == []


def test_two_holders_of_a_term() -> None:
    """A term in which two processes act is a violation."""
    acts = [*good_history().acts, act("pass", 4, OLD, "two:2")]
    assert rules(acts=acts) == ["one process per term"]


def test_late_write() -> None:
    """A write of an older term is a violation if it is committed after a write or the start of a
    newer one."""
    rule = "no write of an older term after one of a newer"
    new = TermWrite(NEW, 1, at(11))
    assert rules(writes=[new, TermWrite(OLD, 2, at(11.5))]) == [rule]
    assert rules(writes=[TermWrite(OLD, 2, at(10.5)), new]) == [rule]
    # A crash explains no late write.
    crashes = [Crash(at(9), at(9.9))]
    assert rules(writes=[new, TermWrite(OLD, 2, at(11.5))], crashes=crashes) == [rule]


SLOTS = {
    "twice": slots("all", (1, 1.1), (1, 1.2)),
    "missing of all": slots("all", (1, 1.1), (3, 3.1)),
    "beside its times": slots("one", (1, 1.1), (2.5, 2.6)),
    "two at once": slots("one", (1, 1.1), (4, 5.1), (5, 5.1)),
    "an old one caught up": slots("one", (1, 1.1), (4, 8.1)),
    "skipped ones caught up": slots("skip", (1, 1.1), (4, 8.1)),
    "early": slots("skip", (1, 0.9)),
}


@pytest.mark.parametrize("found", SLOTS.values(), ids=SLOTS.keys())
def test_slots(found: list[Slot]) -> None:
    """A periodic slot that its policy does not allow is a violation."""
    assert rules(slots=found) == ["every slot follows its policy"]


def test_jobs() -> None:
    """Jobs that are unfinished, lost, finished twice, or have unexplained attempts are
    violations."""
    acts = good_history().acts[:5]
    one = {"acts": [*acts, attempt(1)], "inserted": [1]}
    assert rules(jobs=[job(1)], **one) == []
    assert rules(jobs=[job(1, "running")], **one) == ["every job completed"]
    explained = "one attempt plus one per rescue"
    assert rules(jobs=[job(1, attempt=2)], **one) == [explained]
    assert rules(jobs=[job(1, errors=1)], **one) == [explained]
    assert rules(jobs=[job(1, attempt=2, errors=1)], **one) == [explained]
    assert rules(jobs=[], acts=acts, inserted=[1]) == ["no job lost"]
    assert rules(jobs=[job(1)], acts=acts, inserted=[1]) == ["no job without an attempt"]
    twice = {"jobs": [job(1)], "acts": [*acts, attempt(1), attempt(1)], "inserted": [1]}
    assert rules(**twice) == ["no attempt starts twice"]
    assert rules(**twice, crashes=[Crash(at(1.5), at(2))]) == []  # the server lost the claim
    assert rules(**twice, crashes=[Crash(at(3), at(4))]) == ["no attempt starts twice"]


def test_plan() -> None:
    """A seed always has the same plan, a long plan has faults of every kind, and another seed has
    another plan."""
    plan = make_plan(1, seconds=600, workers=4, ttl=1.5)
    assert plan == make_plan(1, seconds=600, workers=4, ttl=1.5)
    assert plan != make_plan(2, seconds=600, workers=4, ttl=1.5)
    assert {fault.kind for fault in plan} == set(FaultKind)
    assert plan[:20] == make_plan(1, seconds=plan[20].at, workers=4, ttl=1.5)
    assert {fault.number for fault in plan} == {0, 1, 2, 3}


@pytest.mark.parametrize("arguments", [[], ["leader", "--seconds", "0"], ["leader", "--workers=0"]])
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Invalid arguments are refused with exit code 2."""
    with pytest.raises(SystemExit) as raised:
        parse_arguments(arguments)
    assert raised.value.code == 2
    assert "usage: scripts/chaos" in capsys.readouterr().err


async def test_fleet_leaves_nothing() -> None:
    """A frozen worker, the server and the files of a fleet are removed after an error."""
    pids: list[int] = []
    directories: list[Path] = []

    async def fail() -> None:
        async with running_fleet() as fleet:
            worker = await fleet.add("one", WorkerSettings())
            await worker.start()
            worker.freeze()
            pids.append(worker.pid)
            directories.append(fleet.directory)
            raise RuntimeError("midway")

    with pytest.raises(RuntimeError, match="midway"):
        await fail()
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
    assert not directories[0].exists()


@pytest.mark.timeout(240)
async def test_short_chaos() -> None:
    """A few seconds of faults of a fixed seed end with leaders, writes, slots and finished jobs,
    and without violations."""
    found = await run_chaos(1, seconds=8, workers=2, settings=SHORT)
    assert found["violations"] == []
    assert found["faults"]
    for name in ("terms", "writes", "slots", "jobs"):
        assert found[name] > 0, name
