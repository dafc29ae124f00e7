"""Reads and prints the log that is stored with a job."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from riverpy._tools.text import format_count
from riverpy.cli._output import make_printable, print_note, print_text
from riverpy.job import JobColumn
from riverpy.joblog import LOG_METADATA_KEY, decode_log_entries

if TYPE_CHECKING:
    from collections.abc import Sequence

    from riverpy.job import JobRow


class _StoredAttemptLog(msgspec.Struct):
    """An entry of the stored log of a job: an attempt and the text that it logged."""

    attempt: int
    log: str


def decode_job_log(job: JobRow) -> list[msgspec.Raw]:
    """Return the stored log of a job as a list with one entry for each attempt, the oldest first.
    Each entry is JSON that is not decoded yet."""
    return [
        msgspec.Raw(entry)
        for entry in decode_log_entries(job.get_encoded_values()[JobColumn.METADATA])
    ]


def print_job_log(job_id: int, entries: Sequence[msgspec.Raw]) -> None:
    """Print the log of each attempt below a line with the number of the attempt. An entry that is
    not in the expected format is printed as it is stored."""
    if not entries:
        print_note(f"job {job_id} has no stored log")
    for number, raw in enumerate(entries):
        text = bytes(raw).decode()
        try:
            entry = msgspec.json.decode(raw, type=_StoredAttemptLog)
        except (msgspec.DecodeError, RecursionError):
            lines = [f"entry {number + 1} is not in River's form:", text]
        else:
            lines = [f"attempt {entry.attempt}:", *entry.log.splitlines()]
        first, *others = map(make_printable, lines)
        print_text("\n".join((*([""] if number else []), first, *(f"  {one}" for one in others))))


def shorten_log_in_metadata(metadata: msgspec.Raw) -> msgspec.Raw:
    """Return the metadata of a job with a short note instead of the stored log."""
    text = bytes(metadata).decode()
    entries = decode_log_entries(text)
    if not entries:
        return metadata
    members = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    note = f"{format_count(len(entries), 'entry', plural='entries')}: show them with --log"
    members[LOG_METADATA_KEY] = msgspec.Raw(msgspec.json.encode(note))
    return msgspec.Raw(msgspec.json.encode(members))
