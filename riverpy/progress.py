"""JobProgress: how far a job has come, as the job has reported it."""

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
"""The maximum number of characters of the text of a progress. A longer text is cut."""
PROGRESS_NUMBER_MAX = 2**63 - 1
"""The maximum of the numbers of a progress."""
_REFUSED_CHARACTER_PATTERN = re.compile("[\0\ud800-\udfff]")
"""NUL and lone surrogates, which PostgreSQL refuses."""


class JobProgress(msgspec.Struct, frozen=True):
    """How far a job has come, as it has reported with `job.progress`."""

    done: int | float
    """How much is done, in a unit of the job's choice."""
    total: int | float | None = None
    """How much there is to do, in the same unit; None: unknown."""
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
    """Return a progress with the time now. Values that a job may have computed never raise, because
    a report must not fail its job: see `Job.progress`. None: `done` is not finite.

    Raises:
        ArgsError: a value has a wrong type.
    """
    if text is not None:
        if not isinstance(text, str):
            raise ArgsError(f"progress: text must be a str or None, got {type(text).__name__}")
        if len(text) > PROGRESS_TEXT_LENGTH_MAX:
            text = text[: PROGRESS_TEXT_LENGTH_MAX - 1] + "…"
        text = _REFUSED_CHARACTER_PATTERN.sub("\N{REPLACEMENT CHARACTER}", text)
    done_number = _convert_number("done", done)
    total_number = None if total is None else _convert_number("total", total)
    if done_number is None:
        return None
    return JobProgress(done=done_number, total=total_number, text=text, at=datetime.now(UTC))


def _convert_number(name: str, value: object) -> int | float | None:
    """Return a number from 0 to `PROGRESS_NUMBER_MAX`; None: the value is not finite."""
    if isinstance(value, bool) or not isinstance(value, Real | Decimal):
        raise ArgsError(f"progress: {name} must be a number, got {type(value).__name__}")
    if isinstance(value, Integral):
        return min(max(int(value), 0), PROGRESS_NUMBER_MAX)
    try:
        number = float(value)
    except (OverflowError, ValueError):  # a fraction that is too large, or a signaling NaN
        return None
    return min(max(number, 0.0), PROGRESS_NUMBER_MAX) if math.isfinite(number) else None


def decode_progress(metadata_text: str) -> JobProgress | None:
    """Return the progress in the metadata of a job, given as JSON text; None: there is none, or it
    has an unexpected form."""
    if PROGRESS_METADATA_KEY not in metadata_text:
        return None
    try:
        members = msgspec.json.decode(metadata_text, type=dict[str, msgspec.Raw])
        return msgspec.json.decode(
            members.get(PROGRESS_METADATA_KEY, b"null"), type=JobProgress | None
        )
    except (msgspec.DecodeError, RecursionError):
        return None
