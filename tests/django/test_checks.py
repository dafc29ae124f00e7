"""System checks for the queues of Django's tasks, their options, and pools."""

from __future__ import annotations

from typing import Any

import pytest
from asgiref.local import Local
from django.core.checks import run_checks
from django.db import connections
from django.test import override_settings

from riverpy import Client, QueueConfig
from riverpy.django import checks
from riverpy.django.tasks_api import task_backends
from tests.django.shop import jobs

BACKEND = "riverpy.django.tasks.RiverpyBackend"
client = Client(workers=jobs.workers, queues={"mail": QueueConfig(max_workers=3)})


def make_client() -> Client:
    """Return a client."""
    return client


@pytest.mark.parametrize(
    ("backend", "texts"),
    [
        ({"OPTIONS": {"MAX_ATTEMPTS": 0}}, ["`int` >= 1", "the options are MODULES, MAX_ATTEMPTS"]),
        ({"OPTIONS": {"NIX": 1}}, ["unknown field `NIX`", "TIMEOUT"]),
        ({"OPTIONS": {"TIMEOUT": 5}}, ["Expected `duration | null`"]),
        ({"OPTIONS": {"MODULES": ["hidden.nix"]}}, ["'hidden.nix' cannot be imported: Module"]),
        ({"QUEUES": ["a b"]}, ["a queue name must have lower-case", "rename"]),
        ({"QUEUES": []}, ["so a task may have any queue. The worker works: default"]),
        ({"QUEUES": ["mail", "default"], "WORKERS": "client"}, ["does not work: default"]),
        ({"QUEUES": ["mail"], "WORKERS": "client"}, []),
        ({"QUEUES": ["mail"], "WORKERS": "make_client"}, []),
        ({"QUEUES": ["mail"]}, []),
    ],
)
def test_wrong_tasks(
    backend: dict[str, Any], texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`manage.py check` names each wrong value of TASKS once, and queues that no worker works."""
    workers = f"{__name__}:{backend.pop('WORKERS')}" if "WORKERS" in backend else None
    settings = {"default": {"BACKEND": BACKEND, **backend}}
    monkeypatch.setattr(task_backends, "settings", settings)
    monkeypatch.setattr(task_backends, "_connections", Local())
    with override_settings(RIVERPY={"WORKERS": workers}):
        found = [one for one in run_checks() if (one.id or "").startswith("riverpy.")]
    assert len(found) == bool(texts), found
    assert all(text in f"{found[0].msg} {found[0].hint}" for text in texts), found


@pytest.mark.parametrize(
    ("pool", "workers", "text"),
    [
        (True, None, "at most 4 connections, and the worker runs up to 9 jobs"),
        ({"min_size": 2}, None, "at most 2 connections"),
        ({"max_size": 8}, None, "at most 8 connections"),
        ({"max_size": 9}, None, ""),
        ({"max_size": 2}, f"{__name__}:client", "the worker runs up to 3 jobs"),
        ({"max_size": 3}, f"{__name__}:client", ""),
        (False, None, ""),
    ],
)
def test_small_pools(pool: Any, workers: str | None, text: str) -> None:
    """The check compares the size of Django's pool with the jobs that a worker runs at once."""
    options = connections["default"].settings_dict["OPTIONS"]
    options["pool"] = pool
    setting = {"WORKERS": workers, "QUEUES": {"default": 4, "mail": 5}}
    try:
        with override_settings(RIVERPY=setting):
            messages = [message.msg for message in checks.check_pools()]
    finally:
        del options["pool"]
    assert len(messages) == bool(text)
    assert all(text in message for message in messages), messages


def test_class_in_place_of_workers() -> None:
    """A class is no registry of workers, although it can be called."""
    with override_settings(RIVERPY={"WORKERS": "tests.django.shop.jobs:Pack"}):
        (error,) = checks.check_workers()
    assert error.msg.endswith("is a class")
