"""Finds the jobs that an assertion expects. If there are none, raises an AssertionError whose text
shows the most similar jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from riverpy.errors import ArgsError
from riverpy.testing.expected_job import shorten_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from riverpy.job import JobArgs, JobRow, RawArgs
    from riverpy.testing.expected_job import ExpectedJob
    from riverpy.testing.made_job import MadeJob

ArgsT = TypeVar("ArgsT", bound="JobArgs | RawArgs")
_SHOWN_JOBS_MAX = 3
"""The maximum number of jobs that an error text shows together with their differences."""
_SHOWN_LISTED_JOBS_MAX = 20
"""The maximum number of jobs that an error text lists, one per line."""


def find_single_job(jobs: Sequence[JobRow], expected: ExpectedJob[ArgsT]) -> MadeJob[ArgsT]:
    """Return the only job that matches `expected`. `jobs` are all jobs, in the order of their ids.

    Raises:
        AssertionError: no job matches, or several jobs do.
    """
    candidates = [job for job in jobs if job.kind in expected.kinds]
    found = [job for job in candidates if not expected.list_differences(job)]
    if len(found) > 1:
        raise AssertionError(
            f"{len(found)} inserted jobs are {expected}, and one was expected:\n"
            f"{format_job_list(found)}\n"
            "Name more fields or options to choose one, or use inserted(…), which returns a list."
        )
    if not found:
        raise AssertionError(
            f"no inserted job is {expected}\n{_describe_candidates(jobs, candidates, expected)}"
        )
    return _decode_job(found[0], expected)


def require_no_job(jobs: Sequence[JobRow], expected: ExpectedJob[Any]) -> None:
    """Check that no job matches `expected`.

    Raises:
        AssertionError: a job matches.
    """
    found = [
        job for job in jobs if job.kind in expected.kinds and not expected.list_differences(job)
    ]
    if found:
        raise AssertionError(
            f"no inserted job should be {expected}, and {len(found)} "
            f"{'is' if len(found) == 1 else 'are'}:\n{format_job_list(found)}"
        )


def find_matching_jobs(
    jobs: Sequence[JobRow], expected: ExpectedJob[ArgsT]
) -> list[MadeJob[ArgsT]]:
    """Return all jobs that match `expected`.

    Raises:
        AssertionError: the args of one of these jobs cannot be decoded.
    """
    return [
        _decode_job(job, expected)
        for job in jobs
        if job.kind in expected.kinds and not expected.list_differences(job)
    ]


def find_job_sequence(
    jobs: Sequence[JobRow], sequence: Sequence[ExpectedJob[Any]]
) -> list[MadeJob[Any]]:
    """Check that the jobs of the expected kinds match `sequence` one by one, and return them.
    `jobs` are all jobs, in the order of their ids.

    Raises:
        AssertionError: a job does not match, or there are more or fewer jobs.
    """
    kinds = {kind for expected in sequence for kind in expected.kinds}
    found = [job for job in jobs if job.kind in kinds]
    for index, (job, expected) in enumerate(zip(found, sequence, strict=False)):
        is_kind = job.kind in expected.kinds
        differences = _format_differences(job, expected) if is_kind else ""
        if not is_kind or differences:
            raise AssertionError(
                f"inserted job {index + 1} of {len(sequence)} should be {expected}, and is\n"
                f"{_describe_job(job)}\n{differences}{_format_found_jobs(found)}"
            )
    if len(found) != len(sequence):
        raise AssertionError(
            f"{_format_job_count(len(sequence))} of these kinds should be inserted, and there are "
            f"{len(found)}\n"
            f"{_format_found_jobs(found)}"
        )
    return [_decode_job(job, expected) for job, expected in zip(found, sequence, strict=True)]


def _decode_job(job: JobRow, expected: ExpectedJob[ArgsT]) -> MadeJob[ArgsT]:
    try:
        return expected.decode_job(job)
    except ArgsError as error:
        raise AssertionError(str(error)) from error


def _describe_candidates(
    jobs: Sequence[JobRow], candidates: Sequence[JobRow], expected: ExpectedJob[Any]
) -> str:
    if not candidates:
        kind = expected.kinds[0]
        if not jobs:
            return (
                "There are no jobs at all. In a database, jobs of another transaction are seen "
                "after its commit."
            )
        return f"There is no job of kind {kind!r}. There are\n{format_job_list(jobs)}"
    nearest = sorted(candidates, key=lambda job: (len(expected.list_differences(job)), -job.id))
    count = len(candidates)
    title = f"{_format_job_count(count)} of this kind, the nearest first:"
    shown = [
        f"{_describe_job(job)}\n{_format_differences(job, expected)}".rstrip()
        for job in nearest[:_SHOWN_JOBS_MAX]
    ]
    if count > _SHOWN_JOBS_MAX:
        shown.append(f"  … and {count - _SHOWN_JOBS_MAX} more")
    return "\n".join([title, *shown])


def _format_job_count(number: int) -> str:
    return "1 job" if number == 1 else f"{number} jobs"


def _format_differences(job: JobRow, expected: ExpectedJob[Any]) -> str:
    return "".join(
        f"    {one.name}: expected {one.expected}, found {one.found}\n"
        for one in expected.list_differences(job)
    )


def _format_found_jobs(found: Sequence[JobRow]) -> str:
    return (
        f"The inserted jobs of these kinds are\n{format_job_list(found)}"
        if found
        else "There are none"
    )


def format_job_list(jobs: Sequence[JobRow]) -> str:
    """Return a text with one line for each job. Of more than 20 jobs, only the newest are shown."""
    lines = [_describe_job(job) for job in jobs[-_SHOWN_LISTED_JOBS_MAX:]]
    if len(jobs) > _SHOWN_LISTED_JOBS_MAX:
        lines.insert(0, f"  … {len(jobs) - _SHOWN_LISTED_JOBS_MAX} older ones, and")
    return "\n".join(lines)


def _describe_job(job: JobRow) -> str:
    return (
        f"  job {job.id} of kind {job.kind!r}, {job.state} in queue {job.queue!r}, args "
        f"{shorten_text(job.encoded_args)}"
    )
