"""The admin pages for jobs and queues. They change rows only by calls of a riverpy client.

The table of jobs may have millions of rows. So no page counts all of them, and each filter uses an
index.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.core.paginator import Paginator
from django.db.models import Q
from django.db.models.functions import Now
from django.http import HttpResponseRedirect
from django.utils.html import format_html, format_html_join

from riverpy._postgres.jobs import FINAL_STATES
from riverpy.django.django_client import client
from riverpy.django.lookups import SEARCHED_KINDS_MAX, list_job_kinds, list_queue_names
from riverpy.django.models import Job, Queue
from riverpy.errors import NotFoundError
from riverpy.job import JobColumn, JobState
from riverpy.job_list import JobChanges

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from django.db.models.query import QuerySet
    from django.http import HttpRequest, HttpResponse

    from riverpy.job import JobRow

if TYPE_CHECKING:
    _Paginator = Paginator[Any]
    _ModelAdmin = admin.ModelAdmin[Any]
else:  # at run time, these classes of Django take no type parameters
    _Paginator, _ModelAdmin = Paginator, admin.ModelAdmin

COUNTED_ROWS_MAX = 10_000
"""The maximum number of rows that a page counts. The list also shows at most this many rows, the
newest ones."""
ACTION_ROWS_MAX = 10_000
"""The maximum number of rows that one action changes."""
SHOWN_REASONS_MAX = 10
"""The maximum number of rows for which a page shows why they were not changed."""
_JOB_ID_MAX = 2**63 - 1
_JOB_ROW_ATTRIBUTE = "_riverpy_row"


class _AdminAction(NamedTuple):
    """An action of the admin pages: the function that changes rows, and texts about its result."""

    change: Callable[[list[Any]], JobChanges]
    """Changes the rows with the primary keys that it gets, and returns the result."""
    done_text: str
    """The text about changed rows, such as "cancelled"."""
    unchanged_reason: str
    """The text that explains why rows were not changed, such as "ended already"."""
    running_text: str = ""
    """The text about changed jobs that were running. If it is empty, the message does not show the
    number of these jobs separately."""


class BoundedPaginator(_Paginator):
    """A paginator that counts at most `COUNTED_ROWS_MAX` rows."""

    @cached_property
    def count(self) -> int:
        """The number of rows, at most `COUNTED_ROWS_MAX`."""
        rows = cast("QuerySet[Any]", self.object_list)
        return rows.order_by()[:COUNTED_ROWS_MAX].count()


class _ColumnValueFilter(admin.SimpleListFilter):
    """The base class of filters in which the user selects one value of a column."""

    def list_values(self) -> Sequence[str]:
        """Return the values that the user can select."""
        raise NotImplementedError

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return the values that the user can select, each with its label, as Django requires."""
        return [(name, name) for name in self.list_values()]


class KindFilter(_ColumnValueFilter):
    """A filter for jobs of one kind."""

    title, parameter_name = "kind", "kind"

    def list_values(self) -> Sequence[str]:
        """Return the kinds of the stored jobs."""
        return list_job_kinds()

    def queryset(self, request: HttpRequest, queryset: QuerySet[Job]) -> QuerySet[Job]:
        """Return the jobs of the selected kind, or all jobs if none is selected."""
        return queryset if self.value() is None else queryset.filter(kind=self.value())


class QueueFilter(_ColumnValueFilter):
    """A filter for jobs of one queue."""

    title, parameter_name = "queue", "queue"

    def list_values(self) -> Sequence[str]:
        """Return the names of the queues."""
        return list_queue_names()

    def queryset(self, request: HttpRequest, queryset: QuerySet[Job]) -> QuerySet[Job]:
        """Return the jobs of the selected queue, or all jobs if none is selected. The query has a
        condition with all states, because the index on `queue` begins with the state."""
        if self.value() is None:
            return queryset
        return queryset.filter(queue=self.value(), state__in=[*map(str, JobState)])


class _RiverAdmin(_ModelAdmin):
    """The base class of the admin pages for River's tables. Only actions can change rows."""

    list_per_page = 100
    list_max_show_all = 100
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    sortable_by = ()
    paginator = BoundedPaginator

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Return False, because users cannot add rows on these pages."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return False, because users cannot delete rows on these pages."""
        return False

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Return all fields, so that the page shows them as text and not as inputs."""
        return self.fields or ()

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Do not save the row, because it may have changed since the page was loaded. Only actions
        change rows."""

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> Any:
        """Return the page of one row, without the buttons that save the row."""
        hidden = {"show_save": False, "show_save_and_continue": False}
        return super().changeform_view(
            request, object_id, form_url, {**hidden, **(extra_context or {})}
        )

    def log_change(self, request: HttpRequest, obj: Any, message: Any) -> Any:
        """Do not log a change, because the form does not save the row. Actions log their own
        changes."""

    def run_action_on_rows(
        self, request: HttpRequest, rows: QuerySet[Any], action: _AdminAction, changeable_filter: Q
    ) -> None:
        """Run an action on the selected rows that it can change, and show how many rows were
        changed.

        Args:
            request: the request of the user.
            rows: the selected rows.
            action: the function that changes rows, and texts about its result.
            changeable_filter: the condition for rows that the action can change. A changed row must
                not match it any more. Then the user can repeat the action to change the next rows.
        """
        changeable = list(rows.filter(changeable_filter).order_by("pk")[: ACTION_ROWS_MAX + 1])
        is_limited = len(changeable) > ACTION_ROWS_MAX
        del changeable[ACTION_ROWS_MAX:]
        left_count = rows.exclude(changeable_filter).order_by()[:COUNTED_ROWS_MAX].count()
        changes = action.change([row.pk for row in changeable]) if changeable else JobChanges()
        if changes.changed:
            self._log_action(
                request,
                [row for row in changeable if row.pk not in changes.reasons],
                action.done_text,
            )
        self._show_changes(request, changes, action, left_count)
        if is_limited:
            self.message_user(
                request,
                f"An action changes at most {ACTION_ROWS_MAX} rows: repeat it for the others.",
                messages.WARNING,
            )

    def _show_changes(
        self, request: HttpRequest, changes: JobChanges, action: _AdminAction, left_count: int
    ) -> None:
        for key, reason in [*changes.reasons.items()][:SHOWN_REASONS_MAX]:
            self.message_user(request, f"{key}: {reason}", messages.WARNING)
        unchanged = changes.unchanged + changes.missing + left_count
        if changes.changed or not (unchanged or changes.refused):
            done = action.done_text
            if changes.running and action.running_text:
                done = f"{done}, {changes.running} {action.running_text}"
            self._show_row_count_message(request, changes.changed, done, messages.SUCCESS)
        if changes.refused:
            self._show_row_count_message(
                request, changes.refused, "could not be changed", messages.WARNING
            )
        if unchanged:
            text = f"left unchanged: {action.unchanged_reason}"
            is_minimum = left_count >= COUNTED_ROWS_MAX
            self._show_row_count_message(
                request, unchanged, text, messages.INFO, is_minimum=is_minimum
            )

    def _show_row_count_message(
        self, request: HttpRequest, count: int, text: str, level: int, *, is_minimum: bool = False
    ) -> None:
        noun = self.opts.verbose_name if count == 1 else self.opts.verbose_name_plural
        self.message_user(
            request, f"{'at least ' if is_minimum else ''}{count} {noun} {text}.", level
        )

    def _log_action(self, request: HttpRequest, rows: Sequence[Any], done: str) -> None:
        """Add the action to Django's history of each row."""
        content_type = ContentType.objects.get_for_model(self.model).pk
        entries = [
            LogEntry(
                user_id=cast("Any", request.user).pk,
                content_type_id=content_type,
                object_id=str(row.pk),
                object_repr=str(row)[:200],
                action_flag=CHANGE,
                change_message=f"{done.capitalize()}.",
            )
            for row in rows
        ]
        LogEntry.objects.bulk_create(entries, batch_size=1_000)


@admin.register(Job)
class JobAdmin(_RiverAdmin):
    """The admin pages for jobs."""

    change_form_template = "admin/riverpy/job/change_form.html"
    list_display = ("id", "kind", "state", "queue", "priority", "attempts", "scheduled_at")
    list_filter = ("state", QueueFilter, KindFilter)
    search_fields = ("id", "kind")
    search_help_text = "the id of a job, or a part of its kind"
    ordering = ("-id",)
    actions = ("retry_jobs", "cancel_jobs")
    fields = (
        *("id", "kind", "state", "queue", "priority", "attempts", "created_at", "scheduled_at"),
        *("attempted_at", "finalized_at", "attempted_by", "tags"),
        *("shown_args", "shown_metadata", "shown_errors"),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Job]:
        """Return the query for the list of jobs. It does not read the large columns."""
        return super().get_queryset(request).defer("args", "metadata")

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Job], search_term: str
    ) -> tuple[QuerySet[Job], bool]:
        """Return the job with the id that the user has entered, or the jobs whose kind contains the
        text."""
        term = search_term.strip()
        if not term:
            return queryset, False
        if term.isascii() and term.isdigit():
            return queryset.filter(pk=min(int(term[:20]), _JOB_ID_MAX)), False
        known = list_job_kinds(SEARCHED_KINDS_MAX)
        kinds = [kind for kind in known if term.casefold() in kind.casefold()]
        return queryset.filter(kind__in=[*kinds, term]), False

    @admin.action(description="Retry selected jobs now", permissions=["change"])
    def retry_jobs(self, request: HttpRequest, queryset: QuerySet[Job]) -> None:
        """Make jobs available now. Running jobs are not changed, and neither are available jobs
        whose scheduled time has come."""
        waiting = {JobState.PENDING, JobState.SCHEDULED, JobState.RETRYABLE}
        changeable = Q(state__in=[*map(str, waiting | FINAL_STATES)]) | Q(
            state=str(JobState.AVAILABLE), scheduled_at__gt=Now()
        )
        self.run_action_on_rows(
            request,
            queryset,
            _AdminAction(_retry_jobs, "retried", "running or due"),
            changeable,
        )

    @admin.action(description="Cancel selected jobs", permissions=["change"])
    def cancel_jobs(self, request: HttpRequest, queryset: QuerySet[Job]) -> None:
        """Cancel jobs that have not ended. The clients of running jobs are notified."""
        action = _AdminAction(
            _cancel_jobs,
            "cancelled",
            "ended already",
            "of them running: workers stop running jobs",
        )
        changeable = Q(state__in=[str(state) for state in JobState if state not in FINAL_STATES])
        self.run_action_on_rows(request, queryset, action, changeable)

    def response_change(self, request: HttpRequest, obj: Job) -> HttpResponse:
        """Handle the buttons on the page of one job, which retry or cancel this job."""
        for name, action in (("_retry", self.retry_jobs), ("_cancel", self.cancel_jobs)):
            if name in request.POST:
                action(request, self.get_queryset(request).filter(pk=obj.pk))
        return HttpResponseRedirect(request.path)

    @admin.display(description="attempt")
    def attempts(self, job: Job) -> str:
        """Return the number of the current attempt and the maximum number of attempts, such as
        "1/25"."""
        return f"{job.attempt}/{job.max_attempts}"

    @admin.display(description="attempted by")
    def attempted_by(self, job: Job) -> str:
        """Return the ids of the clients that have claimed the job."""
        row = _read_job_row(job)
        return ", ".join(row.attempted_by) if row else "-"

    @admin.display(description="tags")
    def tags(self, job: Job) -> str:
        """Return the tags of the job."""
        row = _read_job_row(job)
        return ", ".join(row.tags) if row else "-"

    @admin.display(description="args")
    def shown_args(self, job: Job) -> str:
        """Return the args of the job as JSON."""
        row = _read_job_row(job)
        return _format_json_as_html(row.encoded_args if row else "null")

    @admin.display(description="metadata")
    def shown_metadata(self, job: Job) -> str:
        """Return the metadata of the job as JSON."""
        row = _read_job_row(job)
        return _format_json_as_html(row.get_encoded_values()[JobColumn.METADATA] if row else "null")

    @admin.display(description="errors")
    def shown_errors(self, job: Job) -> str:
        """Return the errors of the failed attempts, the newest first."""
        row = _read_job_row(job)
        errors = [
            (error.attempt, error.at.isoformat(timespec="seconds"), error.error, error.trace)
            for error in reversed(row.errors if row else [])
        ]
        return format_html_join("", "<p>{}: {} {}</p><pre>{}</pre>", errors) or "-"


def _retry_jobs(job_ids: list[int]) -> JobChanges:
    return client().job_retry_many(ids=job_ids)


def _cancel_jobs(job_ids: list[int]) -> JobChanges:
    return client().job_cancel_many(ids=job_ids)


@admin.register(Queue)
class QueueAdmin(_RiverAdmin):
    """The admin pages for queues."""

    list_display = ("name", "paused_at", "updated_at", "created_at")
    ordering = ("name",)
    actions = ("pause_queues", "resume_queues")
    fields = ("name", "paused_at", "updated_at", "created_at", "metadata")

    @admin.action(description="Pause selected queues", permissions=["change"])
    def pause_queues(self, request: HttpRequest, queryset: QuerySet[Queue]) -> None:
        """Pause queues, so that no client claims their jobs."""
        action = _AdminAction(
            partial(_pause_or_resume_queues, client().queue_pause), "paused", "paused already"
        )
        self.run_action_on_rows(request, queryset, action, Q(paused_at__isnull=True))

    @admin.action(description="Resume selected queues", permissions=["change"])
    def resume_queues(self, request: HttpRequest, queryset: QuerySet[Queue]) -> None:
        """Resume queues, so that clients claim their jobs again."""
        action = _AdminAction(
            partial(_pause_or_resume_queues, client().queue_resume), "resumed", "not paused"
        )
        self.run_action_on_rows(request, queryset, action, Q(paused_at__isnull=False))


def _pause_or_resume_queues(change: Callable[[str], None], names: Sequence[str]) -> JobChanges:
    """Call `change` for each queue name, and count the queues that were not found."""
    missing = 0
    for name in names:
        try:
            change(name)
        except NotFoundError:
            missing += 1
    return JobChanges(changed=len(names) - missing, missing=missing)


def _read_job_row(job: Job) -> JobRow | None:
    """Return the row of a job with all columns. The row is read only once for each page. None: the
    job was deleted."""
    if not hasattr(job, _JOB_ROW_ATTRIBUTE):
        try:
            row = client().job_get(job.pk)
        except NotFoundError:
            row = None
        setattr(job, _JOB_ROW_ATTRIBUTE, row)
    return getattr(job, _JOB_ROW_ATTRIBUTE)


def _format_json_as_html(text: str) -> str:
    """Return a JSON text as indented HTML. Numbers are shown as they are stored."""
    return format_html("<pre>{}</pre>", msgspec.json.format(text, indent=2))
