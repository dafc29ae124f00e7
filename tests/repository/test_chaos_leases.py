"""scripts/chaos leases: its checker finds each kind of violation, and a short run finds none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from scripts.chaos import parse_arguments
from scripts.chaos_leases import run_chaos
from tests.kit.lease_history import (
    ClockStep,
    Grant,
    LeaseHistory,
    Note,
    Span,
    Write,
    check,
    read_notes,
)
from tests.kit.stepped_server import CLOCK_STEP

if TYPE_CHECKING:
    from pathlib import Path

BUSY_BOUND = 20.0
"""Seconds until a free lease is acquired, on a machine that also runs other tests."""


def grant(place: int, epoch: int, at: float, free_since: float | None, holder: str = "") -> Grant:
    return Grant("s:one", place, epoch, holder or f"holder {epoch}", at, free_since)


def write(place: int, epoch: int, number: int, *, is_fenced: bool = True) -> Write:
    return Write("s:one", is_fenced, place, epoch, f"process {epoch}", number)


def note(at: float, what: str, epoch: int, number: int = 0, process: str = "") -> Note:
    return Note(at, what, process or f"process {epoch}", "s:one", epoch, number)


def good_history() -> LeaseHistory:
    """Return a history with every kind of record and no violation."""
    return LeaseHistory(
        grants=[grant(1, 10, 1.0, None), grant(3, 20, 5.0, 4.5), grant(5, 30, 9.0, 8.0)],
        writes=[
            *(write(2, 10, 1), write(4, 20, 1), write(6, 30, 1)),
            *(write(1, 20, 2, is_fenced=False), write(2, 10, 2, is_fenced=False)),
        ],
        notes=[
            *(note(1.1, "held", 10), note(4.4, "held", 10), note(2.0, "wrote", 10, 1)),
            *(note(5.1, "held", 20), note(9.5, "refused", 20)),
        ],
        broken=[Span("w0", 4.0, 6.0)],
        workers=["w0", "w1"],
        bound=2.0,
    )


def rules(**changes: object) -> list[str]:
    """Return the rules that the good history breaks after these changes."""
    found = check(msgspec.structs.replace(good_history(), **changes))
    assert all(violation.text for violation in found)
    return [violation.rule for violation in found]


def test_good_history() -> None:
    """The good history has no violation. Stale writes of the control are counted."""
    history = good_history()
    assert rules() == check(LeaseHistory()) == []
    assert [seconds for _, seconds in history.takeovers()] == [0.5, 1.0]
    assert [stale.epoch for stale in history.stale_writes(is_fenced=False)] == [10]


def test_epochs() -> None:
    """An epoch that does not rise, or has two holders, is a violation."""
    grants = good_history().grants
    assert rules(grants=[*grants, grant(7, 25, 12.0, 11.5)]) == ["epochs rise"]
    twice = [*grants, grant(7, 30, 12.0, 11.5, "another")]
    assert rules(grants=twice) == ["epochs rise", "one process per epoch"]
    notes = [*good_history().notes, note(5.2, "held", 20, process="process 10")]
    assert rules(notes=notes) == ["one process per epoch"]


def test_validity() -> None:
    """A lease that is still valid locally after the grant of a newer term is a violation."""
    notes = [*good_history().notes, note(5.01, "held", 10)]
    assert rules(notes=notes) == ["no lease is valid beside a newer term"]


def test_stepped_clock() -> None:
    """A step of the server's clock may end a lease early in the database while it is valid locally,
    until the local deadline. Its writes stay fenced. Times of that clock are converted to true
    times."""
    early = {"clock_steps": [ClockStep(4.4, 4.9)], "validity": 1.0}
    notes = [*good_history().notes, note(5.5, "held", 10)]
    assert rules(notes=notes) == ["no lease is valid beside a newer term"]
    assert rules(notes=notes, **early) == []
    late = [*notes, note(6.0, "held", 10)]
    assert rules(notes=late, **early) == ["no lease is valid beside a newer term"]
    grants = good_history().grants
    grants[1] = grant(3, 20, 5.0 - CLOCK_STEP, 4.5)
    assert rules(grants=grants) == ["no lease is valid beside a newer term"]
    assert rules(grants=grants, clock_steps=[ClockStep(4.9, 5.05)]) == []
    stale = [*good_history().writes, write(7, 20, 3)]
    assert rules(writes=stale, **early) == ["no fenced write after the grant of a newer term"]


def test_writes() -> None:
    """A fenced write after the grant of a newer term, a write without a term, and a lost write are
    violations."""
    writes = good_history().writes
    stale = "no fenced write after the grant of a newer term"
    assert rules(writes=[*writes, write(7, 20, 3)]) == [stale]
    assert rules(writes=[*writes[1:], write(4, 10, 1)]) == [stale]
    assert rules(writes=[*writes, write(7, 40, 1)]) == ["no write without a term"]
    assert rules(writes=writes[1:]) == ["no write lost"]


def test_takeovers() -> None:
    """A lease that is free for too long while a worker runs undisturbed is a violation. The time in
    which the server was away does not count."""
    slow = {"grants": [*good_history().grants[:2], grant(5, 30, 9.0, 6.5)]}
    assert rules(**slow) == ["a free lease is acquired in time"]
    assert rules(**slow, broken=[Span("", 7.0, 7.6)]) == []
    assert rules(**slow, broken=[Span("", 7.0, 7.1)]) == ["a free lease is acquired in time"]
    assert rules(**slow, broken=[Span("w0", 5.0, 5.1), Span("w1", 8.0, 9.0)]) == []
    assert rules(**slow, broken=[Span("w0", 5.0, 5.1)]) == ["a free lease is acquired in time"]
    down = [Span("w0", 5.0, 5.1), Span("w1", 1.0, 2.0, is_restart=True)]
    notes = [*good_history().notes, Note(3.0, "up", "w1:1")]
    assert rules(**slow, broken=down) == []
    assert rules(**slow, broken=down, notes=notes) == ["a free lease is acquired in time"]
    one = {"candidates": {"s:one": ["w0"]}}
    assert rules(**slow, **one, broken=[Span("w0", 5.0, 5.1)]) == []
    # A fault of long ago is no reason.
    late = [*good_history().grants[:2], grant(5, 30, 36.0, 15.0)]
    assert rules(grants=late, bound=BUSY_BOUND, broken=[Span("", 1.0, 9.0)]) == [
        "a free lease is acquired in time"
    ]
    hit = [Span("w0", 4.0, 6.0), Span("w1", 10.0, 11.0)]
    assert rules(grants=late, bound=BUSY_BOUND, broken=hit) == ["a free lease is acquired in time"]


def test_notes(tmp_path: Path) -> None:
    """The last record of a killed process may be cut off."""
    lines = [msgspec.json.encode(found) for found in good_history().notes]
    path = tmp_path / "w0.notes"
    path.write_bytes(b"\n".join(lines)[:-3])
    assert read_notes([path, tmp_path / "none"]) == good_history().notes[:-1]


@pytest.mark.parametrize("arguments", [["--break", "all"], ["--seconds=0"], ["--workers=0"]])
def test_wrong_usage(arguments: list[str]) -> None:
    """Invalid arguments are refused with exit code 2."""
    with pytest.raises(SystemExit) as raised:
        parse_arguments(["leases", *arguments])
    assert raised.value.code == 2


@pytest.mark.timeout(300)
async def test_short_chaos() -> None:
    """In a few seconds of faults of a fixed seed, leases change their holders, fenced writes are in
    order, and there are no violations."""
    found = await run_chaos(1, seconds=12, workers=3, bound=BUSY_BOUND)
    assert found["violations"] == []
    assert found["faults"]
    for name in ("takeovers", "writes", "refused", "unfenced"):
        assert found[name] > 0, name
