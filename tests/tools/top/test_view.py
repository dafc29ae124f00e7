"""What `riverpy top` makes of a look: lines, and frames of a terminal's size."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from riverpy._tools.top.status import (
    DomainStatus,
    FleetStatus,
    LeaderStatus,
    QueueStatus,
    WorkerStatus,
)
from riverpy._tools.top.view import Line, frame, view

AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
QUEUE = QueueStatus(
    name="mail",
    paused=False,
    workers=1,
    available=10_000,
    due_for=90.0,
    running=7,
    slots=50,
    scheduled=0,
    retryable=2,
    late=0,
    started_per_s=12.34,
    completed_per_s=0.04,
    failed_per_s=0.0,
    wait_p95=0.0123,
)
WORKER = WorkerStatus(
    client_id="host:1:abc",
    state="alive",
    running=7,
    longest=185.0,
    slots=60,
    version="1.2",
    queues=["mail", "slow"],
    candidate=True,
    started_at=AT,
    silent_for=3.0,
)
LOOK = FleetStatus(
    at=AT,
    took=0.01,
    leader=LeaderStatus("host:1:abc", AT - timedelta(hours=5), 12.0, foreign=False),
    candidates=1,
    queues=[QUEUE],
    workers=[WORKER],
    totals={
        "available": 10_000, "running": 7, "scheduled": 0, "retryable": 2, "pending": 0,
        "completed": 3, "cancelled": 0, "discarded": 1,
    },
    jobs_about=1_000_000,
    cap=10_000,
    rates_over=10.0,
)  # fmt: skip

EXPECTED = """
riverpy top   2026-01-02 03:04:05 UTC
leader    host:1:abc, for 5 h, lease 12 s more
jobs      10k+ available, 7 running, 0 scheduled, 2 retryable, 0 pending, 3 completed, \
0 cancelled, 1 discarded   (about 1,000,000 rows)

QUEUE  WORKERS  AVAILABLE  DUE FOR  RUNNING  SLOTS  SCHEDULED  RETRYABLE  START/S  DONE/S  FAIL/S  \
WAIT P95
mail         1       10k+     90 s        7     50          0          2       12    <0.1       -  \
   12 ms

WORKER      STATE  RUNNING  SLOTS  LONGEST     SEEN  VERSION  CANDIDATE  QUEUES
host:1:abc  alive        7     60    3 min  3 s ago  1.2      yes        mail,slow
"""


def changed(**fields: object) -> FleetStatus:
    """The look with other values."""
    return msgspec.structs.replace(LOOK, **fields)


def text_of(look: FleetStatus) -> str:
    """The lines of a look."""
    return "\n".join(line.text for line in view(look))


def mood_of(look: FleetStatus, start: str) -> str:
    """The mood of the line that begins so."""
    (line,) = [line for line in view(look) if line.text.startswith(start)]
    return line.mood


def test_view() -> None:
    """A look in words: what is capped, what is idle, how long things last."""
    assert f"\n{text_of(LOOK)}\n" == EXPECTED


def test_domains() -> None:
    """Each domain is a line below the leader's; one that nobody leads is told of, and so is a
    default without candidates."""
    leader = LeaderStatus("m1", AT - timedelta(minutes=5), 9.0, foreign=False, epoch=7)
    domains = [
        DomainStatus("archive", None, 0, 0, ["old"]),
        DomainStatus("mail", leader, 2, 1, ["mail", "slow"]),
        DomainStatus("report", None, 1, 0, []),
        DomainStatus("young", None, 1, 1, ["young"]),
    ]
    lines = view(changed(domains=domains, leader=None, candidates=0))
    assert [(line.text, line.mood) for line in lines[1:6]] == [
        ("leader    nobody, and no worker stands for default", "warn"),
        ("domain    archive: nobody leads, and no worker of it stands; queues old", "warn"),
        ("domain    mail: m1, for 5 min, lease 9 s more; queues mail,slow", ""),
        ("domain    report: nobody leads, and no worker of it stands; no queue", "bad"),
        ("domain    young: nobody leads; queues young", "warn"),
    ]


def test_rare_columns() -> None:
    """Late jobs, stuck jobs and rows that are set aside have a column where there are any."""
    queue = msgspec.structs.replace(QUEUE, late=3)
    worker = msgspec.structs.replace(WORKER, stuck=2, aside=3)
    text = text_of(changed(queues=[queue, QUEUE], workers=[worker, WORKER]))
    assert "RETRYABLE  LATE  START/S" in text
    assert "RUNNING  STUCK  ASIDE  SLOTS" in text
    assert "host:1:abc  alive        7      2      3     60" in text


def test_narrow_screen() -> None:
    """What tells least goes first where the screen is narrow: rates and waits stay."""
    lines = [line.text for line in view(LOOK, width=80)]
    assert max(len(line) for line in lines[4:]) <= 80
    queues, workers = (line.split() for line in lines if line.startswith(("QUEUE", "WORKER")))
    assert queues == [
        *("QUEUE", "WORKERS", "AVAILABLE", "DUE", "FOR", "RUNNING", "SLOTS", "START/S", "DONE/S"),
        *("WAIT", "P95"),
    ]
    assert workers == [
        *("WORKER", "STATE", "RUNNING", "SLOTS", "LONGEST", "SEEN", "VERSION", "QUEUES"),
    ]
    wide = [line.text for line in view(LOOK, width=300)]
    assert wide == text_of(LOOK).splitlines()


@pytest.mark.parametrize(
    ("look", "start", "mood"),
    [
        (changed(leader=None), "leader    nobody", "warn"),
        (changed(leader=None, candidates=0), "leader    nobody, and no worker stands", "bad"),
        (
            changed(leader=LeaderStatus("go", AT, -1.0, None)),
            "leader    nobody; last was go",
            "warn",
        ),
        (changed(leader=LeaderStatus("go", AT, 9.0, foreign=True)), "leader    go", "warn"),
        (LOOK, "leader", ""),
        (LOOK, "mail", ""),
        (changed(queues=[msgspec.structs.replace(QUEUE, paused=True)]), "mail (paused)", "warn"),
        (changed(queues=[msgspec.structs.replace(QUEUE, workers=0)]), "mail", "bad"),
        (changed(queues=[msgspec.structs.replace(QUEUE, failed_per_s=1.0)]), "mail", "warn"),
        (changed(workers=[msgspec.structs.replace(WORKER, state="silent")]), "host", "bad"),
        (changed(workers=[msgspec.structs.replace(WORKER, stuck=1)]), "host", "warn"),
        (changed(workers=[msgspec.structs.replace(WORKER, stuck=60)]), "host", "bad"),
        (changed(workers=[msgspec.structs.replace(WORKER, aside=1)]), "host", "warn"),
        (changed(queues=[msgspec.structs.replace(QUEUE, late=1)]), "mail", "warn"),
        (changed(workers=[]), "no worker", "warn"),
        (changed(workers=[], candidates=None), "workers that run nothing are not known", ""),
        (changed(queues=[]), "no queue yet", ""),
    ],
)
def test_moods(look: FleetStatus, start: str, mood: str) -> None:
    """What an operator should look into stands out."""
    assert mood_of(look, start) == mood


def test_names_cannot_write_on_the_terminal() -> None:
    """Names are data of others: what in them would steer the terminal is shown as `?`."""
    queue = msgspec.structs.replace(QUEUE, name="a\x1b[2Jb\r\nc\x9b")
    drawn = frame(view(changed(queues=[queue])), width=200, height=50, color=False)
    assert "a?[2Jb??c?" in drawn
    assert set(re.findall("\x1b[^A-Za-z]*[A-Za-z]", drawn)) == {"\x1b[H", "\x1b[K", "\x1b[J"}


@pytest.mark.parametrize(("width", "height"), [(1, 1), (10, 2), (40, 5), (80, 24), (300, 100)])
@pytest.mark.parametrize("color", [True, False])
def test_frame_fits(width: int, height: int, *, color: bool) -> None:
    """No frame is wider or higher than its terminal; what is left out is counted."""
    look = changed(queues=[QUEUE] * 30)
    drawn = frame(view(look), width=width, height=height, color=color)
    lines = re.sub("\x1b[^A-Za-z]*[A-Za-z]", "", drawn).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= max(height - 1, 1)
    if height < 30 and width > 20:
        assert lines[-1] == f"… {len(view(look)) - height + 2} more lines"
    assert color == ("\x1b[1m" in drawn)


def test_outage_is_told_above_what_was() -> None:
    """While the database does not answer, the reason stands above the last look."""
    lines = view(LOOK, "cannot connect", 75.0)
    assert lines[1].text == "NO ANSWER for 75 s: cannot connect"
    assert lines[1].mood == "bad"
    assert [line.text for line in lines[2:]] == [line.text for line in view(LOOK)[1:]]


def test_line_of_no_mood_has_no_color() -> None:
    """Plain text stays plain."""
    assert Line("x").drawn(None, color=True) == "x"
    assert Line("x", "bad").drawn(None, color=False) == "x"


@pytest.mark.parametrize(
    ("number", "cap", "shown"),
    [(332, 333, "332"), (333, 333, "333+"), (66_600, 333, "66k+"), (5_000, 5_000, "5k+")],
)
def test_totals_of_many_queues(number: int, cap: int, shown: str) -> None:
    """With many queues, of each of which fewer jobs are counted, a total is their sum."""
    look = changed(totals=dict.fromkeys(LOOK.totals, number), cap=cap)
    assert f"jobs      {shown} available, {shown} running" in "\n".join(
        line.text for line in view(look)
    )
