"""Prints jobs as JSON objects or as text."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, cast

import msgspec

from riverpy._attempt_errors import (
    GO_ZERO_TIME,
    format_json_time,
    iterate_error_entries,
    parse_error_entry,
)
from riverpy._tools.text import format_seconds
from riverpy.cli._job_log import shorten_log_in_metadata
from riverpy.cli._output import make_printable, print_table, print_text
from riverpy.job import JobColumn, get_raw_state
from riverpy.progress import JobProgress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from riverpy.job import JobRow

JSON_LINE_LENGTH_MAX = 80
"""The maximum length of args or metadata that are shown on one line, in characters. Longer JSON is
indented."""


def job_to_json_object(job: JobRow) -> dict[str, object]:
    """Return the object for a job in the `--json` output. Its keys are the columns of the table
    `river_job`.

    `unique_key` is in hexadecimal digits. `unique_states` has one bit for each state, from the
    left: scheduled, running, retryable, pending, discarded, completed, cancelled, available. If a
    bit is 1, the key is unique among the jobs in that state.
    """
    columns = job.get_encoded_values()
    mask: int | None = columns[JobColumn.UNIQUE_STATES]
    return {
        "id": job.id,
        "kind": job.kind,
        "queue": job.queue,
        "state": get_raw_state(job),
        "priority": job.priority,
        "attempt": job.attempt,
        "max_attempts": job.max_attempts,
        "args": msgspec.Raw(job.encoded_args.encode()),
        "metadata": msgspec.Raw(columns[JobColumn.METADATA].encode()),
        "tags": job.tags,
        "created_at": job.created_at,
        "scheduled_at": job.scheduled_at,
        "attempted_at": job.attempted_at,
        "finalized_at": job.finalized_at,
        "attempted_by": job.attempted_by,
        "errors": [
            msgspec.Raw(text.encode()) for text in iterate_error_entries(columns[JobColumn.ERRORS])
        ],
        "unique_key": job.unique_key.hex() if job.unique_key else None,
        "unique_states": None if mask is None else f"{mask:08b}",
    }


def print_job(job: dict[str, object], now: datetime | None = None) -> None:
    """Print the columns of a job that are not empty, then its errors, the oldest first. If the time
    of the server is given as `now`, each time is also shown relative to it, such as "5m ago"."""
    cells = {name: _cell_to_lines(value, now) for name, value in job.items() if name != "errors"}
    cells["metadata"] = _cell_to_lines(
        shorten_log_in_metadata(cast("msgspec.Raw", job["metadata"])), now
    )
    shown = {name: lines for name, lines in cells.items() if any(lines)}
    width = max(map(len, shown))
    texts = [
        f"{name if number == 0 else '':{width}}  {make_printable(line)}".rstrip()
        for name, lines in shown.items()
        for number, line in enumerate(lines)
    ]
    print_text("\n".join(texts))
    for entry in cast("list[msgspec.Raw]", job["errors"]):
        lines = _error_to_lines(bytes(entry).decode(), now)
        print_text("\n".join(("", *map(make_printable, lines))))


def _cell_to_lines(value: object, now: datetime | None) -> list[str]:
    if isinstance(value, JobProgress):
        return [f"{value}{_format_relative_time(value.at, now) if value.at else ''}"]
    if isinstance(value, datetime):
        return [_format_cell(value) + _format_relative_time(value, now)]
    if isinstance(value, list):
        return [str(item) for item in cast("list[object]", value)]
    if isinstance(value, msgspec.Raw):
        text = bytes(value).decode()
        is_short = len(text) <= JSON_LINE_LENGTH_MAX
        return [text] if is_short else msgspec.json.format(text, indent=2).splitlines()
    return [_format_cell(value)]


def _format_relative_time(moment: datetime, now: datetime | None) -> str:
    """Return the difference between a time and `now` as text, such as ` (5m ago)` or ` (in 1h5m)`.
    The text is empty if `now` is None."""
    if now is None:
        return ""
    seconds = (moment - now).total_seconds()
    text = format_seconds(abs(seconds))
    return f" (in {text})" if seconds > 0 else f" ({text} ago)"


def _error_to_lines(encoded_error: str, now: datetime | None) -> list[str]:
    error = parse_error_entry(encoded_error)
    if not error.error and error.at == GO_ZERO_TIME:  # the error is not in River's format
        return [f"error {encoded_error}"]
    first, *others = error.error.splitlines() or [""]
    number = f" of attempt {error.attempt}" if error.attempt else ""
    at = ""
    if error.at != GO_ZERO_TIME:
        at = f" at {format_json_time(error.at)}{_format_relative_time(error.at, now)}"
    lines = [f"error{number}{at}: {first}", *others, *error.trace.splitlines()]
    return [lines[0], *(f"  {line}" for line in lines[1:])]


def print_job_table(jobs: Sequence[JobRow]) -> None:
    print_table(
        ("ID", "KIND", "QUEUE", "STATE", "ATTEMPT", "PRIORITY", "SCHEDULED AT"),
        [
            (
                job.id,
                job.kind,
                job.queue,
                get_raw_state(job),
                f"{job.attempt}/{job.max_attempts}",
                job.priority,
                _format_cell(job.scheduled_at),
            )
            for job in jobs
        ],
    )


def _format_cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, datetime):
        return value.isoformat(sep=" ", timespec="milliseconds")
    if isinstance(value, list):
        return " ".join(map(_format_cell, cast("list[object]", value)))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return bytes(value).decode() if isinstance(value, msgspec.Raw) else str(value)
