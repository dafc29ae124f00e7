"""Help for tests of code that inserts or works jobs."""

from __future__ import annotations

from riverpy.testing.assertions import require_inserted
from riverpy.testing.expected_job import ExpectedJob, expect_job
from riverpy.testing.made_job import JobColumns, MadeJob, make_job
from riverpy.testing.test_worker import TestWorker
from riverpy.testing.work_result import WorkResult

__all__ = [
    "ExpectedJob",
    "JobColumns",
    "MadeJob",
    "TestWorker",
    "WorkResult",
    "expect_job",
    "make_job",
    "require_inserted",
]
