"""The admin pages for jobs and queues, by requests to a project."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from django.contrib.auth.models import Permission, User
from django.core import serializers
from django.db import NotSupportedError, connection
from django.test import Client, override_settings
from django.test.utils import CaptureQueriesContext

import riverpy.django
from riverpy import InsertManyParams, InsertOpts, RawArgs
from riverpy.django import admin, models
from tests.django.shop.jobs import Pack

if TYPE_CHECKING:
    from collections.abc import Callable

    from riverpy import JobRow

JOBS, QUEUES = "/admin/riverpy/job/", "/admin/riverpy/queue/"
SCRIPT = "<script>alert(1)</script>"
FAST_HASHER = ["django.contrib.auth.hashers.MD5PasswordHasher"]


@pytest.fixture
def browse() -> Callable[..., Client]:
    """Return a function that logs a user with these permissions in; None: all of them."""

    def log_in(*codenames: str) -> Client:
        with override_settings(PASSWORD_HASHERS=FAST_HASHER):
            user = User.objects.create_user("-".join(codenames) or "all", is_staff=True)
        user.is_superuser = not codenames
        user.save()
        user.user_permissions.set(Permission.objects.filter(codename__in=codenames))
        browser = Client()
        browser.force_login(user)
        return browser

    return log_in


def insert(kind: str = "pack", args: str = "{}", **opts: Any) -> JobRow:
    """Insert a job."""
    return riverpy.django.client().insert(RawArgs(kind, args), InsertOpts(**opts)).job


def shown_ids(browser: Client, query: str) -> list[int]:
    """Return the ids of the jobs on the page of a list."""
    response = browser.get(JOBS + query)
    assert response.status_code == 200, response.content
    return [
        int(found)
        for found in re.findall(rb'name="_selected_action" value="(\d+)"', response.content)
    ]


def read_state(job: JobRow) -> str:
    """Return the state that a job has now."""
    return riverpy.django.client().job_get(job.id).state


def test_list_filters_and_search(browse: Callable[..., Client]) -> None:
    """The list has the newest jobs first. Filters and the search find jobs by state, queue, kind
    and id."""
    browser = browse()
    first = insert()
    second = insert("send", queue="mail", pending=True)
    both = [second.id, first.id]
    for query, expected in (
        ("", both),
        ("?state__exact=pending", [second.id]),
        ("?queue=mail", [second.id]),
        ("?kind=pack", [first.id]),
        ("?kind=pack&queue=mail", []),
        (f"?q={first.id}", [first.id]),
        ("?q=SEN", [second.id]),
        ("?q=nothing", []),
        ("?q=99999999999999999999", []),
    ):
        assert shown_ids(browser, query) == expected, query
    page = browser.get(JOBS).content.decode()
    assert all(f"{name}" in page for name in ("?kind=send", "?queue=mail", "?state__exact=pending"))


def test_no_page_counts_all_jobs(
    browse: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list counts a limited number of jobs, and reads only those of the page, without their
    args. An action changes a limited number of them."""
    monkeypatch.setattr(admin, "COUNTED_ROWS_MAX", 150)
    riverpy.django.client().insert_many_fast([InsertManyParams(Pack(n)) for n in range(160)])
    browser = browse()
    with CaptureQueriesContext(connection) as captured:
        response = browser.get(JOBS)
    assert (len(shown_ids(browser, "")), len(shown_ids(browser, "?p=2"))) == (100, 50)
    assert b"150 jobs" in response.content
    statements = [one["sql"] for one in captured if "river_job" in one["sql"]]
    assert all("LIMIT" in one or "limit" in one for one in statements), statements
    assert not any('"args"' in one for one in statements)


def act(browser: Client, action: str, *ids: int) -> str:
    """Run an action for these jobs, or for all of them. Return the page after it."""
    chosen = {"_selected_action": ids or (1,), "select_across": "0" if ids else "1"}
    page = browser.post(JOBS, {"action": action, **chosen}, follow=True).content.decode()
    return " ".join(re.findall(r'<li class="(?:success|info|warning)">(.*?)</li>', page))


def test_actions_report_what_was_changed(
    browse: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An action tells how many rows it changed, left and could not change. It has a limit, and
    goes on after it when it is repeated, whatever rows come first."""
    monkeypatch.setattr(admin, "ACTION_ROWS_MAX", 3)
    monkeypatch.setattr(admin, "COUNTED_ROWS_MAX", 3)
    browser, limit = browse(), "An action changes at most 3 rows: repeat it for the others."
    jobs = [insert() for _ in range(5)]
    for job in jobs:
        riverpy.django.client().job_cancel(job.id)
    last = [insert() for _ in range(4)]
    with connection.cursor() as cursor:
        cursor.execute(
            "update river_job set state = 'running', attempted_at = now(), finalized_at = null "
            "where id = %s",
            [last[0].id],
        )
    assert act(browser, "cancel_jobs", jobs[0].id) == "1 job left unchanged: ended already."
    assert act(browser, "retry_jobs", last[0].id) == "1 job left unchanged: running or due."
    assert act(browser, "cancel_jobs") == (
        "3 jobs cancelled, 1 of them running: workers stop running jobs. "
        f"At least 3 jobs left unchanged: ended already. {limit}"
    )
    riverpy.django.client().job_cancel(last[1].id)
    with connection.cursor() as cursor:
        cursor.execute("update river_job set state = 'completed', finalized_at = now()")
        cursor.execute(
            "update river_job set unique_key = 'x', unique_states = b'00000001' where id = any(%s)",
            [[last[2].id, last[3].id]],
        )
    assert act(browser, "retry_jobs", *(job.id for job in last[2:])).startswith(
        f"{last[3].id}: another job has the same unique key"
    )
    assert act(browser, "retry_jobs").endswith(limit)
    assert len(riverpy.django.client().job_list(states=["available"]).jobs) == 4
    history = browser.get(f"{JOBS}{last[2].id}/history/").content
    assert (history.count(b"Retried."), history.count(b"Cancelled.")) == (1, 1)
    assert b"Retried." not in browser.get(f"{JOBS}{last[3].id}/history/").content


def test_unknown_states(browse: Callable[..., Client]) -> None:
    """A filter for a state that does not exist is answered as Django answers wrong filters. In a
    query it is a ValueError. Other lookups hold."""
    browser = browse()
    for query in ("state__exact=nix", "state=nix", "state__in=a,b"):
        response = browser.get(f"{JOBS}?{query}")
        assert (response.status_code, response["Location"]) == (302, f"{JOBS}?e=1"), query
    for query in ("state__in=pending,running", "state__contains=x", "state__isnull=0"):
        assert browser.get(f"{JOBS}?{query}").status_code == 200, query
    with pytest.raises(ValueError, match="there is no state 'nix': use available"):
        models.Job.objects.filter(state="nix")


def test_models_only_read() -> None:
    """Whatever would write to River's tables past riverpy is refused."""
    job = models.Job.objects.get(pk=insert().id)
    dump = serializers.serialize("json", [job])
    rows = models.Job.objects.all()
    for write in (
        job.save,
        job.delete,
        rows.delete,
        lambda: rows.update(kind="x"),
        lambda: models.Job.objects.create(kind="x"),
        lambda: models.Queue.objects.bulk_create([models.Queue(name="x")]),
        lambda: [one.save() for one in serializers.deserialize("json", dump)],
    ):
        with pytest.raises(NotSupportedError, match="the models of riverpy only read"):
            write()
    assert models.Job.objects.using("other").get().kind == "pack"


def test_actions(browse: Callable[..., Client]) -> None:
    """Actions of the list and the buttons of the page cancel and retry jobs, and pause and resume
    queues. Storing the page changes nothing."""
    browser, job = browse(), insert()
    chosen = {"_selected_action": [str(job.id)]}
    browser.post(JOBS, {"action": "cancel_jobs", **chosen})
    assert read_state(job) == "cancelled"
    browser.post(JOBS, {"action": "retry_jobs", **chosen})
    assert read_state(job) == "available"
    page = f"{JOBS}{job.id}/change/"
    for data, state in (
        ({"_cancel": "1"}, "cancelled"),
        ({"_save": "1"}, "cancelled"),
        ({"_retry": "1"}, "available"),
    ):
        assert browser.post(page, {**data, "state": "running", "kind": "other"}).status_code == 302
        assert read_state(job) == state
        assert riverpy.django.client().job_get(job.id).kind == "pack"
    assert b"Cancelled." in browser.get(f"{JOBS}{job.id}/history/").content
    with connection.cursor() as cursor:
        cursor.execute("insert into river_queue (name, updated_at) values ('mail', now())")
    for action, is_paused in (("pause_queues", True), ("resume_queues", False)):
        browser.post(QUEUES, {"action": action, "_selected_action": ["mail"]})
        assert (riverpy.django.client().queue_get("mail").paused_at is not None) is is_paused
    history = browser.get(f"{QUEUES}mail/history/").content
    assert (history.count(b"Paused."), history.count(b"Resumed.")) == (1, 1)
    assert browser.get(f"{QUEUES}mail/change/").status_code == 200


def test_page_of_a_job(browse: Callable[..., Client]) -> None:
    """The page shows args with exact numbers, metadata and errors, all of them escaped. It has no
    button that stores or deletes the job."""
    args = f'{{"text":"{SCRIPT}","big":12345678901234567890123.50}}'
    job = insert(args=args, metadata={"note": SCRIPT}, tags=["a-tag"])
    with connection.cursor() as cursor:
        cursor.execute(
            "update river_job set attempted_by = '{host:1}', errors = array[%s::jsonb]",
            [f'{{"at":"2026-01-01T00:00:00Z","attempt":1,"error":"{SCRIPT}","trace":"line 7"}}'],
        )
    page = browse().get(f"{JOBS}{job.id}/change/").content.decode()
    for text in ("12345678901234567890123.50", "host:1", "a-tag", "line 7", "2026-01-01"):
        assert text in page
    assert SCRIPT not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 3
    assert "_save" not in page
    assert "/delete/" not in page


def test_permissions(browse: Callable[..., Client]) -> None:
    """With the permission to view, the pages have no actions and no buttons, and requests for them
    do nothing. Nobody adds or deletes rows. Without a permission there are no pages."""
    job = insert()
    viewer = browse("view_job", "view_queue")
    page = viewer.get(f"{JOBS}{job.id}/change/").content
    assert b"_cancel" not in page
    assert b"cancel_jobs" not in viewer.get(JOBS).content
    viewer.post(JOBS, {"action": "cancel_jobs", "_selected_action": [str(job.id)]})
    assert viewer.post(f"{JOBS}{job.id}/change/", {"_cancel": "1"}).status_code == 403
    assert read_state(job) == "available"
    for path in (f"{JOBS}add/", f"{JOBS}{job.id}/delete/", f"{QUEUES}add/"):
        assert browse_all(browse).get(path).status_code == 403
    assert browse("view_order").get(JOBS).status_code == 403


def browse_all(browse: Callable[..., Client]) -> Client:
    """Return a browser of a user with all permissions."""
    User.objects.filter(username="all").delete()
    return browse()
