"""The screen of `riverpy top`. This module turns the status into lines of text and terminal output.

The output does not change the mode of the terminal, so the process need not restore a mode when it
ends. Each frame overwrites the screen from the top left corner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from riverpy._tools.text import format_job_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from riverpy._tools.top.lease_status import LeaseStatus
    from riverpy._tools.top.status import (
        DomainStatus,
        KindWithoutWorker,
        LeaderStatus,
        OverallStatus,
        QueueStatus,
        WorkerStatus,
    )

ItemT = TypeVar("ItemT")

_CURSOR_HOME, _CLEAR_REST_OF_LINE, _CLEAR_REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
_RESET_STYLE = "\x1b[0m"
_ROUNDED_COUNT_MIN = 10_000
"""A count that has reached its limit is rounded down to thousands, such as `10k+`, from this number
on."""
_STYLE_COLORS = {"bad": "\x1b[31m", "warn": "\x1b[33m", "head": "\x1b[1m", "": ""}
_JOB_STATES = (
    "available",
    "running",
    "scheduled",
    "retryable",
    "pending",
    "completed",
    "cancelled",
    "discarded",
)
_LEFT_ALIGNED_COLUMNS = frozenset(
    {"QUEUE", "WORKER", "STATE", "VERSION", "QUEUES", "CANDIDATE", "LEASE", "HOLDER"}
)
_COLUMNS_HIDDEN_IF_EMPTY = frozenset({"LATE", "STUCK", "ASIDE", "ITEMS", "LAG", "REPORTED"})
"""Columns that are shown only if a cell of the column has a value other than `0` and `-`."""
_COLUMNS_DROPPED_IF_EMPTY = ("CANDIDATE", "SCHEDULED", "RETRYABLE", "DUE FOR", "FAIL/S", "VERSION")
"""Columns that a narrow screen drops first, if all cells of the column are `0` or `-`. `CANDIDATE`
and `VERSION` are dropped even if they have other values."""
_COLUMNS_DROPPED_NEXT = ("SCHEDULED", "RETRYABLE", "WORKERS", "EPOCH", "HELD FOR")
"""Columns that a narrow screen drops after `_COLUMNS_DROPPED_IF_EMPTY`, whatever values they
have."""
_EMPTY_CELL_TEXTS = frozenset({"0", "-"})


class ScreenLine:
    """One line of the screen. Characters that are not printable become `?`. The style is `bad`,
    `warn`, `head` or empty."""

    def __init__(self, text: str, style: str = "") -> None:
        self.text = "".join(sign if sign.isprintable() else "?" for sign in text)
        self.style = style

    def render(self, width: int | None, *, color: bool) -> str:
        """Return the text, shortened to at most `width` characters. With `color`, the text has the
        colour of the line's style."""
        text = self.text
        if width is not None and len(text) > width:
            text = text[: max(width - 1, 0)] + "…"
        return f"{_STYLE_COLORS[self.style]}{text}{_RESET_STYLE}" if color and self.style else text


def render_frame(lines: Sequence[ScreenLine], *, width: int, height: int, color: bool) -> str:
    """Return the text that replaces the content of a terminal of this size with `lines`. The cursor
    ends below the last line."""
    limit = max(height - 1, 1)
    shown = list(lines)
    if len(shown) > limit:
        shown = [*shown[: limit - 1], ScreenLine(f"… {len(lines) - limit + 1} more lines", "head")]
    text = "".join(f"{line.render(width, color=color)}{_CLEAR_REST_OF_LINE}\n" for line in shown)
    return f"{_CURSOR_HOME}{text}{_CLEAR_REST_OF_SCREEN}"


def status_lines(
    status: OverallStatus, error: str | None = None, age: float = 0.0, *, width: int | None = None
) -> list[ScreenLine]:
    """Return the lines of the screen for a status. A narrow screen has fewer columns.

    If the newest read failed, `error` is its error, and `status` was read `age` seconds ago.
    """
    lines = [ScreenLine(f"riverpy top   {status.at:%Y-%m-%d %H:%M:%S} UTC", "head")]
    if error is not None:
        lines.append(no_answer_line(error, age))
    lines += [_leader_line(status), *(_domain_line(domain, status) for domain in status.domains)]
    lines.append(ScreenLine(_job_totals_text(status)))
    if status.kinds_without_worker:
        lines.append(_kinds_without_worker_line(status.kinds_without_worker))
    if status.damaged:
        text = (
            f"the server cannot read {format_job_ids(status.damaged)}: docs/faults.md#damaged-rows"
        )
        lines.append(ScreenLine(f"damaged   {text}", "bad"))
    lines.append(ScreenLine(""))
    lines += _table_lines(_queue_columns(status.cap), status.queues, _queue_style, width)
    if not status.queues:
        lines.append(ScreenLine("no queue yet: no job was inserted and no worker runs"))
    if status.leases:
        lines.append(ScreenLine(""))
        lines += _table_lines(_LEASE_COLUMNS, status.leases, _lease_style, width)
    if status.leases_left_out:
        lines.append(ScreenLine(f"and {status.leases_left_out:,} more: riverpy lease list"))
    if status.leases_partial:
        text = "there are many leases, and only the first by name were read: riverpy lease list"
        lines.append(ScreenLine(text))
    lines.append(ScreenLine(""))
    lines += _table_lines(_WORKER_COLUMNS, status.workers, _worker_style, width)
    if status.candidates is None:
        lines.append(ScreenLine("idle workers are not known: run `riverpy migrate up`"))
    elif not status.workers:
        lines.append(ScreenLine("no worker runs", "warn"))
    return lines


def no_answer_line(error: str, silent_seconds: float) -> ScreenLine:
    """Return the line that shows a failed read. `silent_seconds` is the time since the last
    successful read."""
    return ScreenLine(f"NO ANSWER for {_format_duration(silent_seconds)}: {error}", "bad")


def _leader_line(status: OverallStatus) -> ScreenLine:
    leader = status.leader
    if leader is None or leader.expires_in < 0:
        if status.candidates == 0:
            text = "leader    none, and no worker of default can become leader"
            return ScreenLine(text, "warn" if status.domains else "bad")
        last = "" if leader is None else f". The last one was {leader.leader_id}"
        return ScreenLine(f"leader    none{last}", "warn")
    text = f"leader    {_leader_text(leader, status)}"
    if leader.foreign:
        return ScreenLine(f"{text}, not a riverpy client", "warn")
    return ScreenLine(text)


def _domain_line(domain: DomainStatus, status: OverallStatus) -> ScreenLine:
    queues = f"queues {','.join(domain.queues)}" if domain.queues else "no queue"
    if domain.leader is None:
        reason = "" if domain.candidates else ", and no worker of it can become leader"
        style = "warn" if domain.candidates or not domain.workers else "bad"
        return ScreenLine(f"domain    {domain.name}: no leader{reason}; {queues}", style)
    return ScreenLine(f"domain    {domain.name}: {_leader_text(domain.leader, status)}; {queues}")


def _leader_text(leader: LeaderStatus, status: OverallStatus) -> str:
    since = _format_duration((status.at - leader.elected_at).total_seconds())
    expiry = _format_duration(leader.expires_in)
    return f"{leader.leader_id}, for {since}, lease expires in {expiry}"


def _job_totals_text(status: OverallStatus) -> str:
    parts = [f"{_format_count(status.totals[state], status.cap)} {state}" for state in _JOB_STATES]
    about = "" if status.jobs_about is None else f"   (about {status.jobs_about:,} rows)"
    return f"jobs      {', '.join(parts)}{about}"


def _kinds_without_worker_line(kinds: Sequence[KindWithoutWorker]) -> ScreenLine:
    parts = [f"{kind.kind} ({kind.jobs:,} in {','.join(kind.queues)})" for kind in kinds]
    return ScreenLine(f"waiting   no running worker has {', '.join(parts)}", "warn")


def _queue_columns(count_limit: int) -> dict[str, Callable[[QueueStatus], str]]:
    return {
        "QUEUE": lambda queue: f"{queue.name} (paused)" if queue.paused else queue.name,
        "WORKERS": lambda queue: _format_number(queue.workers),
        "AVAILABLE": lambda queue: _format_count(queue.available, count_limit),
        "DUE FOR": lambda queue: _format_duration(queue.due_for),
        "RUNNING": lambda queue: _format_count(queue.running, count_limit),
        "SLOTS": lambda queue: _format_number(queue.slots),
        "SCHEDULED": lambda queue: _format_count(queue.scheduled, count_limit),
        "RETRYABLE": lambda queue: _format_count(queue.retryable, count_limit),
        "LATE": lambda queue: _format_count(queue.late, count_limit),
        "START/S": lambda queue: _format_rate(queue.started_per_s),
        "DONE/S": lambda queue: _format_rate(queue.completed_per_s),
        "FAIL/S": lambda queue: _format_rate(queue.failed_per_s),
        "WAIT P95": lambda queue: _format_duration(queue.wait_p95),
    }


def _queue_style(queue: QueueStatus) -> str:
    if queue.available and queue.due_for is not None and queue.workers == 0:
        return "bad"
    return "warn" if queue.paused or queue.failed_per_s or queue.late else ""


_LEASE_COLUMNS: Mapping[str, Callable[[LeaseStatus], str]] = {
    "LEASE": lambda lease: lease.name,
    "HOLDER": lambda lease: lease.holder if lease.state == "held" else f"none ({lease.holder})",
    "EPOCH": lambda lease: str(lease.epoch),
    "HELD FOR": lambda lease: "-" if lease.state != "held" else _format_duration(lease.held_for),
    "EXPIRES": lambda lease: (
        f"in {_format_duration(lease.expires_in)}"
        if lease.state == "held"
        else f"{_format_duration(max(-lease.expires_in, 0.0))} ago"
    ),
    "STANDBYS": lambda lease: "?" if lease.standbys is None else str(len(lease.standbys)),
    "ITEMS": lambda lease: (
        "-" if lease.lag is None or lease.lag.count is None else f"{lease.lag.count:,}"
    ),
    "LAG": lambda lease: "-" if lease.lag is None else _format_duration(lease.lag.age),
    "REPORTED": lambda lease: (
        "-" if lease.lag is None else f"{_format_duration(lease.lag.reported_ago)} ago"
    ),
}


def _lease_style(lease: LeaseStatus) -> str:
    if lease.state == "held":
        return ""
    return "warn" if lease.standbys else "bad"


_WORKER_COLUMNS: Mapping[str, Callable[[WorkerStatus], str]] = {
    "WORKER": lambda worker: worker.client_id or "(unknown client)",
    "STATE": lambda worker: worker.state,
    "RUNNING": lambda worker: str(worker.running),
    "STUCK": lambda worker: str(worker.stuck),
    "ASIDE": lambda worker: str(worker.aside),
    "SLOTS": lambda worker: _format_number(worker.slots),
    "LONGEST": lambda worker: _format_duration(worker.longest),
    "SEEN": lambda worker: (
        "-" if worker.silent_for is None else f"{_format_duration(worker.silent_for)} ago"
    ),
    "VERSION": lambda worker: worker.version or "-",
    "CANDIDATE": lambda worker: {None: "?", True: "yes", False: "no"}[worker.candidate],
    "QUEUES": lambda worker: "?" if worker.queues is None else ",".join(worker.queues),
}


def _worker_style(worker: WorkerStatus) -> str:
    if worker.state == "silent":
        return "bad" if worker.running else "warn"
    if worker.stuck:
        return "bad" if worker.slots is not None and worker.stuck >= worker.slots else "warn"
    return "warn" if worker.aside else ""


def _table_lines(
    columns: Mapping[str, Callable[[ItemT], str]],
    items: Sequence[ItemT],
    style_of: Callable[[ItemT], str],
    width: int | None,
) -> list[ScreenLine]:
    """Return the lines of a table: a line of column names, then a line for each item."""
    cells = {column: [cell_of(item) for item in items] for column, cell_of in columns.items()}
    empty = {column for column in columns if _EMPTY_CELL_TEXTS.issuperset(cells[column])}
    widths = {
        column: max(map(len, [column, *cells[column]]))
        for column in columns
        if column not in _COLUMNS_HIDDEN_IF_EMPTY & empty
    }
    if width is not None:
        _drop_columns(widths, empty | {"CANDIDATE", "VERSION"}, width)

    def join_cells(text_of: Callable[[str], str]) -> str:
        aligned = [
            text_of(column).ljust(size)
            if column in _LEFT_ALIGNED_COLUMNS
            else text_of(column).rjust(size)
            for column, size in widths.items()
        ]
        return "  ".join(aligned).rstrip()

    lines = [ScreenLine(join_cells(str), "head")]
    for number, item in enumerate(items):
        text = join_cells(lambda column, n=number: cells[column][n])
        lines.append(ScreenLine(text, style_of(item)))
    return lines


def _drop_columns(widths: dict[str, int], droppable: set[str], screen_width: int) -> None:
    """Drop columns until a line fits into `screen_width`. If no column is left to drop, the line
    stays too long."""
    first = [column for column in _COLUMNS_DROPPED_IF_EMPTY if column in droppable]
    for column in (*first, *_COLUMNS_DROPPED_NEXT):
        if sum(widths.values()) + 2 * (len(widths) - 1) <= screen_width:
            return
        widths.pop(column, None)


def _format_count(count: int, count_limit: int) -> str:
    if count < count_limit:
        return str(count)
    is_round = count % 1000 == 0 or count >= _ROUNDED_COUNT_MIN
    return f"{count // 1000}k+" if is_round else f"{count:,}+"


def _format_number(number: int | None) -> str:
    return "?" if number is None else str(number)


def _format_rate(rate: float) -> str:
    if not rate:
        return "-"
    if rate < 0.1:
        return "<0.1"
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"


def _format_duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{max(seconds, 0) * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = int(seconds) // 60
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h" if minutes < 48 * 60 else f"{minutes // 1440} days"
