"""What `riverpy top` draws: a look as lines of text, and how lines get onto a terminal.

No mode of the terminal is changed: the screen is painted over from its top left corner. Whatever
ends the process, nothing is left to be put right.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from riverpy._tools.doctor.finding import jobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from riverpy._tools.top.status import (
        DomainStatus,
        FleetStatus,
        QueueStatus,
        UnworkedKind,
        WorkerStatus,
    )

_HOME, _END_OF_LINE, _END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
_RESET = "\x1b[0m"
_ROUNDED = 10_000
"""From which on a number that stands for more is told in thousands."""
_COLORS = {"bad": "\x1b[31m", "warn": "\x1b[33m", "head": "\x1b[1m", "": ""}
_STATES = (
    "available",
    "running",
    "scheduled",
    "retryable",
    "pending",
    "completed",
    "cancelled",
    "discarded",
)
_LEFT = frozenset({"QUEUE", "WORKER", "STATE", "VERSION", "QUEUES", "CANDIDATE"})
_RARE = frozenset({"LATE", "STUCK", "ASIDE"})
"""Columns that are shown only where there is something in them."""
_FIRST_TO_GO = ("CANDIDATE", "SCHEDULED", "RETRYABLE", "DUE FOR", "FAIL/S", "VERSION")
_LAST_TO_GO = ("SCHEDULED", "RETRYABLE", "WORKERS")
"""Columns that a narrow screen does without: at first those that tell nothing now."""
_NOTHING = frozenset({"0", "-"})


class Line:
    """One line, with what it should make the reader feel."""

    def __init__(self, text: str, mood: str = "") -> None:
        """Make it. `mood` is `bad`, `warn`, `head` or nothing."""
        self.text = "".join(sign if sign.isprintable() else "?" for sign in text)
        self.mood = mood

    def drawn(self, width: int | None, *, color: bool) -> str:
        """The text, cut at `width`."""
        text = self.text
        if width is not None and len(text) > width:
            text = text[: max(width - 1, 0)] + "…"
        return f"{_COLORS[self.mood]}{text}{_RESET}" if color and self.mood else text


def frame(lines: Sequence[Line], *, width: int, height: int, color: bool) -> str:
    """What paints a terminal of this size over. The cursor ends below, where a shell goes on."""
    most = max(height - 1, 1)
    shown = list(lines)
    if len(shown) > most:
        shown = [*shown[: most - 1], Line(f"… {len(lines) - most + 1} more lines", "head")]
    painted = "".join(f"{line.drawn(width, color=color)}{_END_OF_LINE}\n" for line in shown)
    return f"{_HOME}{painted}{_END_OF_SCREEN}"


def make_room(height: int) -> str:
    """What scrolls the text of before up, so that the first frame paints over nothing."""
    return "\n" * height


def view(
    look: FleetStatus, error: str | None = None, age: float = 0.0, *, width: int | None = None
) -> list[Line]:
    """A look as lines.

    Args:
        look: the last one that succeeded.
        error: why a later one did not.
        age: seconds since the last one that did.
        width: of the screen, for which columns are left out; None: there is room for all.
    """
    lines = [Line(f"riverpy top   {look.at:%Y-%m-%d %H:%M:%S} UTC", "head")]
    if error is not None:
        lines.append(no_answer(error, age))
    lines += [_leader(look), *(_domain(domain, look) for domain in look.domains)]
    lines.append(Line(_totals(look)))
    if look.kinds_without_worker:
        lines.append(_kinds(look.kinds_without_worker))
    if look.damaged:
        text = f"damaged   the server cannot read {jobs(look.damaged)}: docs/faults.md#damaged-rows"
        lines.append(Line(text, "bad"))
    lines.append(Line(""))
    lines += _table(
        (
            "QUEUE",
            "WORKERS",
            "AVAILABLE",
            "DUE FOR",
            "RUNNING",
            "SLOTS",
            "SCHEDULED",
            "RETRYABLE",
            "LATE",
            "START/S",
            "DONE/S",
            "FAIL/S",
            "WAIT P95",
        ),
        [(_queue_cells(queue, look.cap), _queue_mood(queue)) for queue in look.queues],
        width,
    )
    if not look.queues:
        lines.append(Line("no queue yet: nothing was inserted, and nobody works"))
    lines.append(Line(""))
    lines += _table(
        (
            "WORKER",
            "STATE",
            "RUNNING",
            "STUCK",
            "ASIDE",
            "SLOTS",
            "LONGEST",
            "SEEN",
            "VERSION",
            "CANDIDATE",
            "QUEUES",
        ),
        [(_worker_cells(worker), _worker_mood(worker)) for worker in look.workers],
        width,
    )
    if look.candidates is None:
        lines.append(Line("workers that run nothing are not known: run `riverpy migrate up`"))
    elif not look.workers:
        lines.append(Line("no worker", "warn"))
    return lines


def no_answer(error: str, age: float) -> Line:
    """That looks fail, and for how long."""
    return Line(f"NO ANSWER for {_seconds(age)}: {error}", "bad")


def _leader(look: FleetStatus) -> Line:
    leader = look.leader
    if leader is None or leader.expires_in < 0:
        if look.candidates == 0 and look.domains:
            return Line("leader    nobody, and no worker stands for default", "warn")
        if look.candidates == 0:
            return Line("leader    nobody, and no worker stands for election", "bad")
        last = "" if leader is None else f"; last was {leader.leader_id}"
        return Line(f"leader    nobody{last}", "warn")
    since = _ago(look.at - leader.elected_at)
    text = f"leader    {leader.leader_id}, for {since}, lease {_seconds(leader.expires_in)} more"
    if leader.foreign:
        return Line(f"{text}, not a client of riverpy's", "warn")
    return Line(text)


def _domain(domain: DomainStatus, look: FleetStatus) -> Line:
    queues = f"queues {','.join(domain.queues)}" if domain.queues else "no queue"
    leader = domain.leader
    if leader is None:
        why = "" if domain.candidates else ", and no worker of it stands"
        mood = "warn" if domain.candidates or not domain.workers else "bad"
        return Line(f"domain    {domain.name}: nobody leads{why}; {queues}", mood)
    since = _ago(look.at - leader.elected_at)
    lease = _seconds(leader.expires_in)
    text = f"domain    {domain.name}: {leader.leader_id}, for {since}, lease {lease} more; {queues}"
    return Line(text)


def _totals(look: FleetStatus) -> str:
    parts = [f"{_count(look.totals[state], look.cap)} {state}" for state in _STATES]
    about = "" if look.jobs_about is None else f"   (about {look.jobs_about:,} rows)"
    return f"jobs      {', '.join(parts)}{about}"


def _kinds(kinds: Sequence[UnworkedKind]) -> Line:
    parts = [f"{one.kind} ({one.jobs:,} in {','.join(one.queues)})" for one in kinds]
    return Line(f"waiting   no running worker has {', '.join(parts)}", "warn")


def _queue_cells(queue: QueueStatus, cap: int) -> list[str]:
    return [
        f"{queue.name} (paused)" if queue.paused else queue.name,
        _known(queue.workers),
        _count(queue.available, cap),
        _seconds(queue.due_for),
        _count(queue.running, cap),
        _known(queue.slots),
        _count(queue.scheduled, cap),
        _count(queue.retryable, cap),
        _count(queue.late, cap),
        _rate(queue.started_per_s),
        _rate(queue.completed_per_s),
        _rate(queue.failed_per_s),
        _seconds(queue.wait_p95),
    ]


def _queue_mood(queue: QueueStatus) -> str:
    if queue.available and queue.due_for is not None and queue.workers == 0:
        return "bad"
    return "warn" if queue.paused or queue.failed_per_s or queue.late else ""


def _worker_cells(worker: WorkerStatus) -> list[str]:
    candidate = {None: "?", True: "yes", False: "no"}[worker.candidate]
    return [
        worker.client_id or "(rows that name none)",
        worker.state,
        str(worker.running),
        str(worker.stuck),
        str(worker.aside),
        _known(worker.slots),
        _seconds(worker.longest),
        "-" if worker.silent_for is None else f"{_seconds(worker.silent_for)} ago",
        worker.version or "-",
        candidate,
        "?" if worker.queues is None else ",".join(worker.queues),
    ]


def _worker_mood(worker: WorkerStatus) -> str:
    if worker.state == "silent":
        return "bad" if worker.running else "warn"
    if worker.stuck:
        return "bad" if worker.slots is not None and worker.stuck >= worker.slots else "warn"
    return "warn" if worker.aside else ""


def _table(
    columns: Sequence[str], rows: Sequence[tuple[list[str], str]], width: int | None
) -> list[Line]:
    widths = {
        column: max(len(column), *(len(cells[i]) for cells, _ in rows), 0)
        for i, column in enumerate(columns)
    }
    empty = {
        column for i, column in enumerate(columns) if all(cells[i] in _NOTHING for cells, _ in rows)
    }
    for column in _RARE & empty:
        widths.pop(column, None)
    if width is not None:
        _make_narrow(widths, empty | {"CANDIDATE", "VERSION"}, width)

    def line(cells: Sequence[str]) -> str:
        aligned = [
            cell.ljust(widths[column]) if column in _LEFT else cell.rjust(widths[column])
            for cell, column in zip(cells, columns, strict=True)
            if column in widths
        ]
        return "  ".join(aligned).rstrip()

    return [Line(line(columns), "head"), *(Line(line(cells), mood) for cells, mood in rows)]


def _make_narrow(widths: dict[str, int], dispensable: set[str], width: int) -> None:
    """Leave columns out until a line is as wide at most, as far as that goes."""
    first = [column for column in _FIRST_TO_GO if column in dispensable]
    for column in (*first, *_LAST_TO_GO):
        if sum(widths.values()) + 2 * (len(widths) - 1) <= width:
            return
        widths.pop(column, None)


def _count(number: int, cap: int) -> str:
    if number < cap:
        return str(number)
    is_round = number % 1000 == 0 or number >= _ROUNDED
    return f"{number // 1000}k+" if is_round else f"{number:,}+"


def _known(number: int | None) -> str:
    return "?" if number is None else str(number)


def _rate(rate: float) -> str:
    if not rate:
        return "-"
    if rate < 0.1:
        return "<0.1"
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"


def _seconds(seconds: float | None) -> str:
    """As short as it tells something."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return _ago(timedelta(seconds=seconds))


def _ago(duration: timedelta) -> str:
    minutes = int(duration.total_seconds()) // 60
    if minutes < 2:
        return f"{max(duration.total_seconds(), 0.0):.0f} s"
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h" if minutes < 48 * 60 else f"{minutes // 1440} days"
