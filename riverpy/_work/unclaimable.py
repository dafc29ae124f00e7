"""UnclaimableJobs: finds the jobs of a queue that cannot be claimed, and lets claims skip them.

One job can make a whole claim fail, for example if its row has a damaged value, or if a trigger
raises an error. Then claims request fewer and fewer jobs, down to one, until the failing job is
found. Later claims skip this job. From time to time, the client tries to claim this job alone.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from riverpy._log_events import CLAIM_SIZE_REDUCED, JOB_CLAIM_FAILED
from riverpy._postgres.batch_sender import (
    FAILED_BATCHES_BEFORE_RETRY_OF_SKIPPED_ROWS,
    AdaptiveBatchSize,
    ErrorCause,
    RepeatedErrorDetector,
    find_error_cause,
)
from riverpy._postgres.driver import describe_error
from riverpy._postgres.skipped_rows import SkippedRows

if TYPE_CHECKING:
    from riverpy._postgres.skipped_rows import SkippedRow

SKIPPED_JOBS_MAX = 1000
"""The maximum number of jobs of one queue that claims skip because they cannot be claimed. If more
jobs fail, the cause is probably not in the jobs. Then no further jobs are skipped, and failed
claims are repeated after a delay."""


class UnclaimableJobs:
    """Finds the jobs of one queue that cannot be claimed, and lets claims skip them."""

    def __init__(self, jobs_per_claim_limit: int, claim_timeout: float, log: Any) -> None:
        """`jobs_per_claim_limit` is the maximum number of jobs in a claim. `claim_timeout` is the
        timeout of a claim in seconds."""
        self._claim_batch_size = AdaptiveBatchSize(jobs_per_claim_limit, claim_timeout)
        self._suspect_job_count = 0
        """The number of next jobs of this queue that may include a failing job. It is set when a
        job has probably made a claim from several queues fail. This may also be a job of another
        queue. 0: no failing job is suspected."""
        self._skipped_jobs = SkippedRows[int](SKIPPED_JOBS_MAX)
        self._error_detector = RepeatedErrorDetector()
        self._logged_job_ids: set[int] = set()
        """The ids of the skipped jobs that were logged as skipped."""
        self._consecutive_failed_claims = 0
        """The number of failed claims in a row."""
        self._was_last_claim_retry = False
        """Whether the last claim tried a skipped job again."""
        self._limited_log = log.with_rate_limit()

    @property
    def is_claiming_one_by_one(self) -> bool:
        """Whether each claim is for a single job. The id of this job is read before the claim."""
        return self._claim_batch_size.row_count == 1

    @property
    def may_include_failing_job(self) -> bool:
        """Whether the next claim may include a job that makes it fail. Then the claim must not
        include other queues. True after a failed claim: while jobs are skipped, while the next jobs
        may include the failing job, or while claims are smaller than the maximum."""
        return bool(
            self._skipped_jobs
            or self._suspect_job_count
            or not self._claim_batch_size.is_at_maximum
        )

    @property
    def skipped_job_ids(self) -> list[int]:
        """The ids of the jobs that are skipped when jobs are claimed, because earlier claims of
        these jobs failed."""
        return [aside.row for aside in self._skipped_jobs.rows]

    @property
    def skipped_jobs(self) -> list[SkippedRow[int]]:
        """The jobs that claims skip, with their errors."""
        return self._skipped_jobs.rows

    @property
    def next_retry_at(self) -> float:
        """The time at which a skipped job is tried again, in seconds of `time.monotonic`. Infinity
        if no job is skipped."""
        return self._skipped_jobs.next_retry_at if self._skipped_jobs else math.inf

    def set_claim_size_limit(self, jobs_per_claim_limit: int) -> None:
        """Set the maximum number of jobs in a claim."""
        self._claim_batch_size.set_maximum(jobs_per_claim_limit)

    def choose_claim_size(self, wanted_job_count: int) -> int:
        """Return how many jobs to claim, at most `wanted_job_count`."""
        return min(wanted_job_count, self._claim_batch_size.row_count)

    def choose_job_id_to_retry(self) -> int | None:
        """Return the id of a skipped job that the next claim tries again. Return None if the next
        claim is for other jobs."""
        due = (
            self._skipped_jobs.first_due_row()
            if self._skipped_jobs and not self._was_last_claim_retry
            else None
        )
        self._was_last_claim_retry = due is not None
        return None if due is None else due.row

    def record_successful_claim(self, job_count: int, limit: int, seconds: float) -> None:
        """Record a claim that returned `job_count` of `limit` jobs in `seconds` seconds."""
        self._claim_batch_size.grow_if_fast(job_count, seconds)
        self._suspect_job_count = max(self._suspect_job_count - job_count, 0)
        if job_count < limit:
            self._suspect_job_count = 0
            self._claim_batch_size.allow_growth()
            if not self._skipped_jobs:  # every job of the queue was claimed, so none can fail
                self._claim_batch_size.grow_to_maximum()
        if job_count and self._consecutive_failed_claims:
            if self._consecutive_failed_claims >= FAILED_BATCHES_BEFORE_RETRY_OF_SKIPPED_ROWS:
                self._skipped_jobs.make_all_rows_due()
            self._consecutive_failed_claims = 0

    def stop_skipping_job(self, job_id: int) -> None:
        """Stop skipping a job, because it was claimed or does not exist any more."""
        self._logged_job_ids.discard(job_id)
        self._skipped_jobs.remove_row(job_id)
        self._skipped_jobs.make_all_rows_due()

    def record_failed_multi_queue_claim(self, limit: int, error: Exception) -> bool:
        """Record a failed claim from several queues that requested `limit` jobs of this queue.
        Return whether to claim again at once, from this queue alone."""
        self._consecutive_failed_claims += 1
        if not self._error_detector.record_and_check_if_caused_by_row(error):
            return False
        self._suspect_job_count = limit
        return True

    def record_failed_claim(
        self, limit: int, job_id: int | None, error: Exception, seconds: float
    ) -> bool:
        """Record a failed claim that requested `limit` jobs and took `seconds` seconds. Return
        whether to claim again at once. If the claim was for a single job, `job_id` is the id of
        this job. It is None if the claim was for several jobs, or if the claim failed before the
        id was read."""
        self._consecutive_failed_claims += job_id is None or job_id not in self._skipped_jobs
        if not self._error_detector.record_and_check_if_caused_by_row(error):
            return False
        if job_id is not None:
            return self._skip_job(job_id, error, seconds)
        may_shrink = not self.is_claiming_one_by_one
        self._claim_batch_size.shrink_after_failed_selection(limit)
        if find_error_cause(error) is ErrorCause.TIMEOUT:
            self._limited_log.warning(
                CLAIM_SIZE_REDUCED,
                rows=self._claim_batch_size.row_count,
                error=describe_error(error),
            )
        return may_shrink

    def _skip_job(self, job_id: int, error: Exception, seconds: float) -> bool:
        if self._skipped_jobs.is_full and job_id not in self._skipped_jobs:
            return False
        aside = self._skipped_jobs.add_failure(job_id, job_id, error, seconds)
        self._claim_batch_size.allow_growth()
        if job_id not in self._logged_job_ids and (
            aside.failure_count > 1 or find_error_cause(error) is ErrorCause.BAD_ROW
        ):
            self._logged_job_ids.add(job_id)
            self._limited_log.warning(
                JOB_CLAIM_FAILED,
                effect="the job is skipped, and tried again later",
                job_id=job_id,
                error=aside.error,
            )
        return True
