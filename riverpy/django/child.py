"""Sets up Django in child processes that run jobs with `executor="process"`."""

from __future__ import annotations

import os

import django
from django.apps import apps
from django.conf import ENVIRONMENT_VARIABLE


def set_up_django() -> None:
    """Set up Django if the environment names a settings module. After that, the app closes Django's
    connections around each job in this process."""
    if os.environ.get(ENVIRONMENT_VARIABLE) and not apps.ready:
        django.setup()
