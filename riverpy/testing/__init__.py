"""Tools for tests of code that inserts or works jobs."""

from __future__ import annotations

from riverpy.testing.advance import advance
from riverpy.testing.assertions import (
    inserted,
    require_inserted,
    require_many_inserted,
    require_not_inserted,
)
from riverpy.testing.clock import FixedClock
from riverpy.testing.drain import drain
from riverpy.testing.expected_job import ExpectedJob, expect_job
from riverpy.testing.inserted_jobs import InsertedJobs
from riverpy.testing.made_job import JobColumns, MadeJob, make_job
from riverpy.testing.recording import RecordedJobs, recording
from riverpy.testing.resuming import resumable_after, resumable_at
from riverpy.testing.session_jobs import SessionJobs
from riverpy.testing.session_time import SessionTime
from riverpy.testing.test_worker import TestWorker
from riverpy.testing.work_result import WorkResult

__all__ = [
    "ExpectedJob",
    "FixedClock",
    "InsertedJobs",
    "JobColumns",
    "MadeJob",
    "RecordedJobs",
    "SessionJobs",
    "SessionTime",
    "TestWorker",
    "WorkResult",
    "advance",
    "drain",
    "expect_job",
    "inserted",
    "make_job",
    "recording",
    "require_inserted",
    "require_many_inserted",
    "require_not_inserted",
    "resumable_after",
    "resumable_at",
]
