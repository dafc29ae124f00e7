"""Checks and encodes two options of an insert: `replace` and `expires_in`."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from riverpy.errors import InsertError
from riverpy.insert_opts import INSERT_DURATION_MAX, ReplaceOpts
from riverpy.job import JobState

if TYPE_CHECKING:
    from riverpy._postgres.inserts import InsertRow

_REPLACEABLE_FIELDS = ("args", "scheduled_at", "priority", "metadata")
_MICROSECOND = timedelta(microseconds=1)


def encode_replace_opts(opts: object) -> str | None:
    """Return `ReplaceOpts` as JSON text for the insert statement. None: nothing is replaced.

    Raises:
        InsertError: the options are not allowed.
    """
    if opts is None:
        return None
    if not isinstance(opts, ReplaceOpts):
        raise InsertError(f"replace must be ReplaceOpts, got {type(opts).__name__}")
    chosen: dict[str, object] = {}
    for name in _REPLACEABLE_FIELDS:
        value: object = getattr(opts, name)
        if not isinstance(value, bool):
            raise InsertError(f"replace.{name} must be bool, got {type(value).__name__}")
        if value:
            chosen[name] = True
    if not chosen:
        raise InsertError(f"replace must select at least one of {', '.join(_REPLACEABLE_FIELDS)}")
    if opts.max_wait is not None:
        if not opts.scheduled_at:
            raise InsertError("replace.max_wait requires replace.scheduled_at")
        chosen["max_wait"] = _to_microseconds("replace.max_wait", opts.max_wait)
    return msgspec.json.encode(chosen).decode()


def encode_expires_in(value: object) -> str | None:
    """Return the microseconds until a job expires, as text. None: the job does not expire.

    Raises:
        InsertError: the time is not allowed.
    """
    return None if value is None else str(_to_microseconds("expires_in", value))


def check_expiry_after_due_time(
    expires_in: timedelta | None, scheduled_at: datetime | None, now: datetime
) -> None:
    """Check that a job does not expire before it is due. `scheduled_at` and `now` are from the same
    clock, so an error of this clock does not matter.

    Raises:
        InsertError: the job would never run.
    """
    if expires_in is None or scheduled_at is None:
        return
    delay = scheduled_at - now
    if delay >= expires_in:
        raise InsertError(
            f"expires_in ({expires_in}) must be longer than the time until scheduled_at ({delay}): "
            "it counts from the insert, so the job would expire before it is due"
        )


def _to_microseconds(name: str, value: object) -> int:
    if not isinstance(value, timedelta):
        raise InsertError(f"{name} must be timedelta, got {type(value).__name__}")
    if not timedelta(0) < value <= INSERT_DURATION_MAX:
        raise InsertError(
            f"{name} must be more than 0 and at most {INSERT_DURATION_MAX.days:,} days, got {value}"
        )
    return value // _MICROSECOND


def check_replacing_row(row: InsertRow) -> None:
    """Check that a row may replace an existing job.

    Raises:
        InsertError: the row has the option `replace` but no unique key; or the row is pending and
            its option `replace` selects `scheduled_at`. A pending row must not change
            `scheduled_at`, because the existing job may not be pending.
    """
    if row.replace is None:
        return
    if row.unique_key is None:
        raise InsertError("replace requires unique_opts, which find the job to replace")
    if row.state == JobState.PENDING and "scheduled_at" in _decode_replace_opts(row.replace):
        raise InsertError(
            "an insert with pending cannot replace scheduled_at: set "
            "replace=ReplaceOpts(scheduled_at=False, ...)"
        )


def merge_replacing_row(first: InsertRow, later: InsertRow) -> InsertRow:
    """Merge two rows of a batch that have the same unique key. Return a copy of `first` with the
    values of `later` that `later.replace` selects. The `replace` option of the copy combines the
    `replace` options of both rows. If `later.replace` is None, return `first` unchanged."""
    if later.replace is None:
        return first
    chosen = _decode_replace_opts(later.replace)
    if "args" in chosen:
        first = first._replace(args=later.args)
    if "priority" in chosen:
        first = first._replace(priority=later.priority)
    if "metadata" in chosen:
        first = first._replace(metadata=later.metadata)
    if "scheduled_at" in chosen:
        state = first.state if first.state == JobState.PENDING else later.state
        first = first._replace(
            scheduled_at=later.scheduled_at, state=state, expires_in=later.expires_in
        )
    merged = _decode_replace_opts(first.replace or "{}") | chosen
    return first._replace(replace=msgspec.json.encode(merged).decode())


def _decode_replace_opts(replace: str) -> dict[str, Any]:
    return msgspec.json.decode(replace, type=dict[str, Any])
