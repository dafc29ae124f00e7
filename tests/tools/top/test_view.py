"""The screen of `riverpy top`."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from riverpy import LeaseLag
from riverpy._tools.top.lease_status import LeaseStatus
from riverpy._tools.top.status import (
    DomainStatus,
    LeaderStatus,
    OverallStatus,
    QueueStatus,
    WorkerStatus,
)
from riverpy._tools.top.view import ScreenLine, render_frame, status_lines

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
STATUS = OverallStatus(
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
leader    host:1:abc, for 5 h, lease expires in 12 s
jobs      10k+ available, 7 running, 0 scheduled, 2 retryable, 0 pending, 3 completed, \
0 cancelled, 1 discarded   (about 1,000,000 rows)

QUEUE  WORKERS  AVAILABLE  DUE FOR  RUNNING  SLOTS  SCHEDULED  RETRYABLE  START/S  DONE/S  FAIL/S  \
WAIT P95
mail         1       10k+     90 s        7     50          0          2       12    <0.1       -  \
   12 ms

WORKER      STATE  RUNNING  SLOTS  LONGEST     SEEN  VERSION  CANDIDATE  QUEUES
host:1:abc  alive        7     60    3 min  3 s ago  1.2      yes        mail,slow
"""


def changed(**fields: object) -> OverallStatus:
    """Return the status with other values."""
    return msgspec.structs.replace(STATUS, **fields)


def text_of(status: OverallStatus) -> str:
    """Return the screen as text."""
    return "\n".join(line.text for line in status_lines(status))


def style_of(status: OverallStatus, start: str) -> str:
    """Return the style of the line that starts with `start`."""
    (line,) = [line for line in status_lines(status) if line.text.startswith(start)]
    return line.style


def test_view() -> None:
    """The screen shows limited counts, rates near zero and durations."""
    assert f"\n{text_of(STATUS)}\n" == EXPECTED


def test_domains() -> None:
    """Each domain has a line below the leader's. It shows a missing leader or candidate."""
    leader = LeaderStatus("m1", AT - timedelta(minutes=5), 9.0, foreign=False, epoch=7)
    domains = [
        DomainStatus("archive", None, 0, 0, ["old"]),
        DomainStatus("mail", leader, 2, 1, ["mail", "slow"]),
        DomainStatus("report", None, 1, 0, []),
        DomainStatus("young", None, 1, 1, ["young"]),
    ]
    lines = status_lines(changed(domains=domains, leader=None, candidates=0))
    assert [(line.text, line.style) for line in lines[1:6]] == [
        ("leader    none, and no worker of default can become leader", "warn"),
        ("domain    archive: no leader, and no worker of it can become leader; queues old", "warn"),
        ("domain    mail: m1, for 5 min, lease expires in 9 s; queues mail,slow", ""),
        ("domain    report: no leader, and no worker of it can become leader; no queue", "bad"),
        ("domain    young: no leader; queues young", "warn"),
    ]


def test_rare_columns() -> None:
    """Late jobs, stuck jobs and rows set aside have a column only if there are any."""
    queue = msgspec.structs.replace(QUEUE, late=3)
    worker = msgspec.structs.replace(WORKER, stuck=2, aside=3)
    text = text_of(changed(queues=[queue, QUEUE], workers=[worker, WORKER]))
    assert "RETRYABLE  LATE  START/S" in text
    assert "RUNNING  STUCK  ASIDE  SLOTS" in text
    assert "host:1:abc  alive        7      2      3     60" in text


LEASE = LeaseStatus(
    name="totals",
    state="held",
    holder="host:1:abc",
    epoch=7,
    acquired_at=AT,
    held_for=185.0,
    expires_in=12.0,
    standbys=["two"],
    lag=LeaseLag(count=1_040, age=65.0, reported_ago=3.0),
)
EXPECTED_LEASES = """
LEASE   HOLDER             EPOCH  HELD FOR    EXPIRES  STANDBYS  ITEMS   LAG  REPORTED
totals  host:1:abc             7     3 min    in 12 s         1  1,040  65 s   3 s ago
e-mail  none (host:1:abc)      7         -  3 min ago         0      -     -         -
old     none (host:1:abc)      7         -  3 min ago         ?      -     -         -
and 1,200 more: riverpy lease list

"""


def test_leases() -> None:
    """Leases have a section with the standbys and the lag, if there are any. A lease without a
    holder needs attention, above all if no client stands by for it."""
    ended = msgspec.structs.replace(
        LEASE, name="e-mail", state="expired", standbys=[], expires_in=-180.0, lag=None
    )
    unknown = msgspec.structs.replace(ended, name="old", standbys=None)
    status = changed(leases=[LEASE, ended, unknown], leases_left_out=1_200)
    assert EXPECTED_LEASES in text_of(status)
    assert "many leases" not in text_of(status)
    assert "\nthere are many leases" in text_of(changed(leases_partial=True))
    assert not {"ITEMS", "LAG"} & set(text_of(changed(leases=[ended])).split())
    assert (style_of(status, "totals"), style_of(changed(leases=[ended]), "e-mail  none")) == (
        "",
        "bad",
    )
    waiting = msgspec.structs.replace(ended, standbys=["two"])
    assert style_of(changed(leases=[waiting]), "e-mail  none") == "warn"
    narrow = [line.text for line in status_lines(status, width=76)]
    assert any(line.split()[:3] == ["LEASE", "HOLDER", "EXPIRES"] for line in narrow)


def test_narrow_screen() -> None:
    """A narrow screen drops the least useful columns. Rates and waits stay."""
    lines = [line.text for line in status_lines(STATUS, width=80)]
    assert max(len(line) for line in lines[4:]) <= 80
    queues, workers = (line.split() for line in lines if line.startswith(("QUEUE", "WORKER")))
    assert queues == [
        *("QUEUE", "WORKERS", "AVAILABLE", "DUE", "FOR", "RUNNING", "SLOTS", "START/S", "DONE/S"),
        *("WAIT", "P95"),
    ]
    assert workers == [
        *("WORKER", "STATE", "RUNNING", "SLOTS", "LONGEST", "SEEN", "VERSION", "QUEUES"),
    ]
    wide = [line.text for line in status_lines(STATUS, width=300)]
    assert wide == text_of(STATUS).splitlines()


@pytest.mark.parametrize(
    ("status", "start", "style"),
    [
        (changed(leader=None), "leader    none", "warn"),
        (changed(leader=None, candidates=0), "leader    none, and no worker", "bad"),
        (
            changed(leader=LeaderStatus("go", AT, -1.0, None)),
            "leader    none. The last one was go",
            "warn",
        ),
        (changed(leader=LeaderStatus("go", AT, 9.0, foreign=True)), "leader    go", "warn"),
        (STATUS, "leader", ""),
        (STATUS, "mail", ""),
        (changed(queues=[msgspec.structs.replace(QUEUE, paused=True)]), "mail (paused)", "warn"),
        (changed(queues=[msgspec.structs.replace(QUEUE, workers=0)]), "mail", "bad"),
        (changed(queues=[msgspec.structs.replace(QUEUE, failed_per_s=1.0)]), "mail", "warn"),
        (changed(workers=[msgspec.structs.replace(WORKER, state="silent")]), "host", "bad"),
        (changed(workers=[msgspec.structs.replace(WORKER, stuck=1)]), "host", "warn"),
        (changed(workers=[msgspec.structs.replace(WORKER, stuck=60)]), "host", "bad"),
        (changed(workers=[msgspec.structs.replace(WORKER, aside=1)]), "host", "warn"),
        (changed(queues=[msgspec.structs.replace(QUEUE, late=1)]), "mail", "warn"),
        (changed(workers=[]), "no worker", "warn"),
        (changed(workers=[], candidates=None), "idle workers are not known", ""),
        (changed(queues=[]), "no queue yet", ""),
    ],
)
def test_styles(status: OverallStatus, start: str, style: str) -> None:
    """Lines that need attention are coloured."""
    assert style_of(status, start) == style


def test_names_cannot_write_on_the_terminal() -> None:
    """Control characters in names are shown as `?`, so that they cannot change the terminal."""
    queue = msgspec.structs.replace(QUEUE, name="a\x1b[2Jb\r\nc\x9b")
    text = render_frame(status_lines(changed(queues=[queue])), width=200, height=50, color=False)
    assert "a?[2Jb??c?" in text
    assert set(re.findall("\x1b[^A-Za-z]*[A-Za-z]", text)) == {"\x1b[H", "\x1b[K", "\x1b[J"}


@pytest.mark.parametrize(("width", "height"), [(1, 1), (10, 2), (40, 5), (80, 24), (300, 100)])
@pytest.mark.parametrize("color", [True, False])
def test_frame_fits(width: int, height: int, *, color: bool) -> None:
    """No frame is wider or higher than its terminal. The last line counts the missing lines."""
    status = changed(queues=[QUEUE] * 30)
    text = render_frame(status_lines(status), width=width, height=height, color=color)
    lines = re.sub("\x1b[^A-Za-z]*[A-Za-z]", "", text).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= max(height - 1, 1)
    if height < 30 and width > 20:
        assert lines[-1] == f"… {len(status_lines(status)) - height + 2} more lines"
    assert color == ("\x1b[1m" in text)


def test_failed_read() -> None:
    """While the database does not answer, the error is shown above the last status."""
    lines = status_lines(STATUS, "cannot connect", 75.0)
    assert lines[1].text == "NO ANSWER for 75 s: cannot connect"
    assert lines[1].style == "bad"
    assert [line.text for line in lines[2:]] == [line.text for line in status_lines(STATUS)[1:]]


def test_line_without_style_has_no_color() -> None:
    """A line has a colour only with a style and if colours are allowed."""
    assert ScreenLine("x").render(None, color=True) == "x"
    assert ScreenLine("x", "bad").render(None, color=False) == "x"


@pytest.mark.parametrize(
    ("number", "cap", "shown"),
    [(332, 333, "332"), (333, 333, "333+"), (66_600, 333, "66k+"), (5_000, 5_000, "5k+")],
)
def test_totals_of_many_queues(number: int, cap: int, shown: str) -> None:
    """With many queues fewer jobs of each are counted. A total is the sum of these counts."""
    status = changed(totals=dict.fromkeys(STATUS.totals, number), cap=cap)
    assert f"jobs      {shown} available, {shown} running" in "\n".join(
        line.text for line in status_lines(status)
    )
