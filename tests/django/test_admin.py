"""The admin pages for jobs and queues, by requests to a project."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client, override_settings
from django.test.utils import CaptureQueriesContext

import riverpy.django
from riverpy import InsertManyParams, InsertOpts, RawArgs
from riverpy.django import admin
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
    monkeypatch.setattr(admin, "ACTION_ROWS_MAX", 120)
    riverpy.django.client().insert_many_fast([InsertManyParams(Pack(n)) for n in range(160)])
    browser = browse()
    with CaptureQueriesContext(connection) as captured:
        response = browser.get(JOBS)
    assert (len(shown_ids(browser, "")), len(shown_ids(browser, "?p=2"))) == (100, 50)
    assert b"150 jobs" in response.content
    statements = [one["sql"] for one in captured if "river_job" in one["sql"]]
    assert all("LIMIT" in one or "limit" in one for one in statements), statements
    assert not any('"args"' in one for one in statements)
    response = browser.post(
        JOBS,
        {"action": "cancel_jobs", "select_across": "1", "_selected_action": ["1"]},
        follow=True,
    )
    assert b"120 jobs cancelled." in response.content
    assert b"at most 120 rows" in response.content


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
