"""Expiry: whether a claimed job has expired, so that its attempt must not start."""

from __future__ import annotations

import re

import msgspec

from riverpy._names import EXPIRES_AT_METADATA_KEY
from riverpy._timestamps import format_raw_timestamp

EXPIRED_ERROR_TEXT = "expired"
"""The reason in the error of a job that was cancelled because it expired."""
_EXPIRY_TIME_PATTERN = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", re.ASCII)


def is_job_expired(metadata: str, server_time: int) -> bool:
    """Return whether a job has expired at `server_time`, which is in microseconds since 2000.

    `metadata` is the job's metadata as JSON text. An insert with `expires_in` stores the expiry
    time in one fixed format. An expiry time in another format is ignored.
    """
    if EXPIRES_AT_METADATA_KEY not in metadata:
        return False
    try:
        members = msgspec.json.decode(metadata, type=dict[str, msgspec.Raw])
        expires_at = msgspec.json.decode(members[EXPIRES_AT_METADATA_KEY], type=str)
    except (msgspec.DecodeError, KeyError, RecursionError):
        return False
    is_time = _EXPIRY_TIME_PATTERN.fullmatch(expires_at) is not None
    return is_time and expires_at <= format_raw_timestamp(server_time)
