"""JobProgress: how much of its work a job has done, as reported by the job."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from decimal import Decimal
from numbers import Integral, Real

import msgspec

from riverpy.errors import ArgsError

PROGRESS_METADATA_KEY = "riverpy:progress"
"""The metadata key of the progress of a job."""
PROGRESS_TEXT_LENGTH_MAX = 1_000
"""The maximum number of characters of `JobProgress.text`. A longer text is cut."""
PROGRESS_NUMBER_MAX = 2**63 - 1
"""The largest value that `JobProgress.done` and `JobProgress.total` can have."""
_REFUSED_CHARACTER_PATTERN = re.compile("[\0\ud800-\udfff]")
"""NUL and lone surrogates, which PostgreSQL refuses."""


class JobProgress(msgspec.Struct, frozen=True):
    """How much of its work a job has done. The job reports it with `job.progress`."""

    done: int | float
    """The amount of work that is done, in a unit that the job chooses."""
    total: int | float | None = None
    """The amount of work of the whole job, in the same unit; None: unknown."""
    text: str | None = None
    """What the job does now."""
    at: datetime | None = None
    """The time of the report."""

    def __str__(self) -> str:
        """Return the progress as one line, such as `30 of 120 (25 %): copying`."""
        line = f"{self.done:,}"
        if self.total is not None:
            line += f" of {self.total:,}"
            percentage = 100 * self.done / self.total if self.total > 0 else math.inf
            if math.isfinite(percentage):
                line += f" ({math.floor(percentage)} %)"
        return f"{line}: {self.text}" if self.text else line


def make_progress(done: object, total: object, text: object) -> JobProgress | None:
    """Return a progress with the current time, or None if `done` is not finite.

    Numbers and texts with unexpected values are changed and never raise an error, because a report
    of progress must not make its job fail. `Job.progress` describes these changes.

    Raises:
        ArgsError: a value has a wrong type.
    """
    if text is not None:
        if not isinstance(text, str):
            raise ArgsError(f"progress: text must be a str or None, got {type(text).__name__}")
        if len(text) > PROGRESS_TEXT_LENGTH_MAX:
            text = text[: PROGRESS_TEXT_LENGTH_MAX - 1] + "…"
        text = _REFUSED_CHARACTER_PATTERN.sub("\N{REPLACEMENT CHARACTER}", text)
    done_number = _clamp_progress_number("done", done)
    total_number = None if total is None else _clamp_progress_number("total", total)
    if done_number is None:
        return None
    return JobProgress(done=done_number, total=total_number, text=text, at=datetime.now(UTC))


def _clamp_progress_number(name: str, value: object) -> int | float | None:
    """Return the value as a number. A value below 0 becomes 0, and a value above
    `PROGRESS_NUMBER_MAX` becomes this maximum. Return None if the value is not finite, or if it is
    a fraction that is too large for a float."""
    if isinstance(value, bool) or not isinstance(value, Real | Decimal):
        raise ArgsError(f"progress: {name} must be a number, got {type(value).__name__}")
    if isinstance(value, Integral):
        return min(max(int(value), 0), PROGRESS_NUMBER_MAX)
    try:
        number = float(value)
    except (OverflowError, ValueError):  # a `Fraction` too large for a float, or a signaling NaN
        return None
    return min(max(number, 0.0), PROGRESS_NUMBER_MAX) if math.isfinite(number) else None


def decode_progress(metadata_text: str) -> JobProgress | None:
    """Return the progress that a job's metadata contain. Return None if there is none, or if it has
    an unexpected form."""
    if PROGRESS_METADATA_KEY not in metadata_text:
        return None
    try:
        members = msgspec.json.decode(metadata_text, type=dict[str, msgspec.Raw])
        return msgspec.json.decode(
            members.get(PROGRESS_METADATA_KEY, b"null"), type=JobProgress | None
        )
    except (msgspec.DecodeError, RecursionError):
        return None
