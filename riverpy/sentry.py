"""SentryPlugin: sends failed attempts to Sentry, and traces inserts and attempts."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

try:
    import sentry_sdk
    from sentry_sdk.utils import capture_internal_exceptions, event_from_exception
except ImportError as error:
    raise ImportError(
        "riverpy.sentry needs the Sentry SDK: pip install 'riverpy-queue[sentry]'"
    ) from error

from riverpy._work.failure import classify_attempt_ending

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from sentry_sdk.types import Event

    from riverpy._work.failure import AttemptEnding
    from riverpy.insert_opts import JobInsertParams
    from riverpy.job import Job
    from riverpy.middleware import InsertInner, WorkInner

_SPAN_ORIGIN = "auto.queue.riverpy"
_PERIODIC_JOB_ID_METADATA_KEY = "river:periodic_job_id"
_TRACE_HEADER_NAMES = ("sentry-trace", "baggage")
_SPAN_STATUS_BY_ENDING: dict[AttemptEnding, str] = {
    "completed": "ok",
    "snoozed": "ok",
    "cancelled": "cancelled",
    "stopped": "aborted",
    "failed": "internal_error",
}


class SentryPlugin:
    """A plugin that reports failed attempts to Sentry: `Config(plugins=[SentryPlugin()])`. The
    program must also call `sentry_sdk.init(…)`.

    Each attempt runs in its own isolation scope of Sentry, with the tags `river.kind`,
    `river.queue` and `river.attempt` and the context `river_job`. Snoozes, cancels and stops are
    not reported.

    If tracing is enabled, each attempt is a Sentry transaction `queue.process`, which continues the
    trace of the insert. The insert stores the trace in the job's metadata (`sentry-trace`,
    `baggage`).
    """

    def __init__(self, *, final_only: bool = False, include_args: bool = False) -> None:
        """Create the plugin.

        Args:
            final_only: report only failures of the last attempt, after which the job is not
                retried. Default False.
            include_args: send the args as JSON in the context `river_job`. Default False. Local
                variables of your code may contain args too: Sentry's option
                `include_local_variables` decides whether they are sent. Local variables of
                riverpy's code are never sent.
        """
        self._final_only, self._include_args = final_only, include_args

    async def insert_many(
        self, params: Sequence[JobInsertParams], do_inner: InsertInner, /
    ) -> None:
        """Insert the jobs in a new span, and store the trace in their metadata."""
        queues = sorted({job.queue for job in params})
        name = ", ".join(queues)
        with (
            _start_trace_if_periodic(params),
            sentry_sdk.start_span(op="queue.publish", name=name, origin=_SPAN_ORIGIN) as span,
        ):
            span.set_data("messaging.system", "river")
            span.set_data("messaging.destination.name", name)
            for job in params:
                if _TRACE_HEADER_NAMES[0] not in job.metadata:
                    job.metadata.update(_get_current_trace_headers())
            await do_inner()

    async def work(self, job: Job[Any], do_inner: WorkInner, /) -> None:
        """Run the attempt in a new Sentry transaction, and report its error if it fails."""
        with sentry_sdk.isolation_scope() as scope:
            scope.set_tag("river.kind", job.kind)
            scope.set_tag("river.queue", job.queue)
            scope.set_tag("river.attempt", job.attempt)
            scope.set_context("river_job", self._make_job_context(job))
            transaction = sentry_sdk.continue_trace(
                _get_stored_trace_headers(job.metadata),
                op="queue.process",
                name=job.kind,
                source="task",
                origin=_SPAN_ORIGIN,
            )
            with sentry_sdk.start_transaction(transaction) as trace:
                for key, value in _make_span_data(job).items():
                    trace.set_data(key, value)
                error: BaseException | None = None
                try:
                    await do_inner()
                except BaseException as raised:
                    # Do not let the error leave the span: Sentry would mark the span as failed.
                    error = raised
                end = classify_attempt_ending(error)
                trace.set_status(_SPAN_STATUS_BY_ENDING[end])
                if error is not None and end == "failed":
                    self._report_error(job, error)
            try:
                if error is not None:
                    raise error
            finally:
                error = None  # the traceback of the error would keep this frame alive

    def _make_job_context(self, job: Job[Any]) -> dict[str, Any]:
        context: dict[str, Any] = {
            "id": job.id,
            "kind": job.kind,
            "queue": job.queue,
            "attempt": job.attempt,
            "max_attempts": job.max_attempts,
            "priority": job.priority,
            "scheduled_at": job.scheduled_at.isoformat(),
        }
        if self._include_args:
            context["args"] = job.encoded_args
        return context

    def _report_error(self, job: Job[Any], error: BaseException) -> None:
        if self._final_only and job.attempt < job.max_attempts:
            return
        # Omit the first frame, `work`: if Sentry read its variables, the error would stay alive.
        trace = error.__traceback__ and error.__traceback__.tb_next
        with capture_internal_exceptions():  # an error here must not change the outcome of the job
            event, hint = event_from_exception(
                (type(error), error, trace),
                client_options=sentry_sdk.get_client().options,
                mechanism={"type": "riverpy", "handled": False},
            )
            _remove_riverpy_local_variables(event)
            sentry_sdk.capture_event(event, hint=hint)


@contextmanager
def _start_trace_if_periodic(params: Sequence[JobInsertParams]) -> Generator[None]:
    """Start a new trace if all jobs are periodic. Without it, all periodic jobs of a process would
    be in the same trace."""
    if not all(_PERIODIC_JOB_ID_METADATA_KEY in job.metadata for job in params):
        yield
        return
    with sentry_sdk.isolation_scope() as scope:
        scope.set_new_propagation_context()
        yield


def _get_current_trace_headers() -> dict[str, str]:
    values = (sentry_sdk.get_traceparent(), sentry_sdk.get_baggage())
    return {name: value for name, value in zip(_TRACE_HEADER_NAMES, values, strict=True) if value}


def _get_stored_trace_headers(metadata: dict[str, Any]) -> dict[str, str]:
    values = {name: metadata.get(name) for name in _TRACE_HEADER_NAMES}
    return {name: value for name, value in values.items() if isinstance(value, str)}


def _make_span_data(job: Job[Any]) -> dict[str, Any]:
    """Return the data of an attempt that Sentry shows on its pages about queues."""
    data: dict[str, Any] = {
        "messaging.system": "river",
        "messaging.destination.name": job.queue,
        "messaging.message.id": str(job.id),
        "messaging.message.retry.count": max(job.attempt - 1, 0),
    }
    if (claimed_at := job.attempted_at) is not None:
        wait = (claimed_at - max(job.scheduled_at, job.created_at)).total_seconds()
        data["messaging.message.receive.latency"] = max(wait, 0.0) * 1000
    return data


def _remove_riverpy_local_variables(event: Event) -> None:
    exceptions: Any = event.get("exception") or {}
    values: list[dict[str, Any]] = exceptions.get("values", [])
    for exception in values:
        trace: dict[str, Any] = exception.get("stacktrace") or {}
        frames: list[dict[str, Any]] = trace.get("frames", [])
        for frame in frames:
            if str(frame.get("module")).partition(".")[0] == "riverpy":
                frame.pop("vars", None)
