"""JobProgress: how far a job has come, as the job has reported it."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from numbers import Integral

import msgspec

from riverpy import _json
from riverpy.errors import ArgsError

PROGRESS_METADATA_KEY = "riverpy:progress"
"""The metadata key of the progress of a job."""
PROGRESS_TEXT_LENGTH_MAX = 1_000
"""The maximum number of characters of the text of a progress."""
PROGRESS_NUMBER_MAX = 2**63 - 1
"""The maximum of the numbers of a progress."""


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
            if self.total > 0:
                line += f" ({math.floor(100 * self.done / self.total)} %)"
        return f"{line}: {self.text}" if self.text else line


def make_progress(done: object, total: object, text: object) -> JobProgress:
    """Check the values of a progress, and return it with the time now.

    Raises:
        ArgsError: a value cannot be stored.
    """
    if text is not None:
        if not isinstance(text, str):
            raise ArgsError(f"progress: text must be a str or None, got {type(text).__name__}")
        if len(text) > PROGRESS_TEXT_LENGTH_MAX:
            raise ArgsError(
                f"progress: text may have at most {PROGRESS_TEXT_LENGTH_MAX:,} characters, "
                f"got {len(text):,}"
            )
        _json.encode({"text": text})  # refuses characters that PostgreSQL cannot store
    return JobProgress(
        done=_check_number("done", done),
        total=None if total is None else _check_number("total", total),
        text=text,
        at=datetime.now(UTC),
    )


def _check_number(name: str, value: object) -> int | float:
    if isinstance(value, bool) or not isinstance(value, Integral | float):
        raise ArgsError(f"progress: {name} must be an int or a float, got {type(value).__name__}")
    number = float(value) if isinstance(value, float) else int(value)
    if not 0 <= number <= PROGRESS_NUMBER_MAX:  # this is also true for NaN
        raise ArgsError(f"progress: {name} must be from 0 to 2^63 - 1, got {value}")
    return number


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
