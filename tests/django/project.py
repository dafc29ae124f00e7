"""The settings of a Django project for a database."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import django
from django.conf import settings
from django.db import connections

from riverpy import _plugins

APP_NAMES = (
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "riverpy.django",
    "tests.django.shop",
)


def make_database_settings(url: str, **options: object) -> dict[str, Any]:
    """Return the entry of DATABASES for a URL."""
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": unquote(parts.path[1:]),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": parts.hostname or query.get("host", ""),
        "PORT": str(parts.port or query.get("port", "")),
        "OPTIONS": options,
    }


def make_settings(url: str) -> dict[str, Any]:
    """Return the settings of a project. It has several aliases for its database."""
    return {
        "ALLOWED_HOSTS": ["*"],
        "DATABASES": {
            "default": make_database_settings(url),
            "other": make_database_settings(url),
            "bound": make_database_settings(url, server_side_binding=True, isolation_level=4),
            "contract": make_database_settings(url),
        },
        "DEFAULT_AUTO_FIELD": "django.db.models.BigAutoField",
        "INSTALLED_APPS": list(APP_NAMES),
        "LOGGING_CONFIG": None,
        "MIDDLEWARE": [
            "django.contrib.sessions.middleware.SessionMiddleware",
            "django.contrib.auth.middleware.AuthenticationMiddleware",
            "django.contrib.messages.middleware.MessageMiddleware",
        ],
        "RIVERPY": {"WORKERS": "tests.django.shop.jobs:workers"},
        "ROOT_URLCONF": "tests.django.urls",
        "SECRET_KEY": "not a secret",
        "TASKS": {
            "default": {
                "BACKEND": "riverpy.django.tasks.RiverpyBackend",
                "QUEUES": ["default", "mail"],
                "OPTIONS": {"MAX_ATTEMPTS": 2},
            },
            "other": {
                "BACKEND": "riverpy.django.tasks.RiverpyBackend",
                "QUEUES": [],
                "OPTIONS": {"MODULES": [__name__]},
            },
        },
        "TEMPLATES": [
            {
                "BACKEND": "django.template.backends.django.DjangoTemplates",
                "APP_DIRS": True,
                "OPTIONS": {
                    "context_processors": [
                        "django.template.context_processors.request",
                        "django.contrib.auth.context_processors.auth",
                        "django.contrib.messages.context_processors.messages",
                    ]
                },
            }
        ],
        "TIME_ZONE": "UTC",
        "USE_TZ": True,
    }


def set_up(url: str = "postgresql:///unknown") -> None:
    """Set up Django in this process, once. `use_database` sets another database later."""
    if not settings.configured:
        settings.configure(**make_settings(url))
        django.setup()
        _plugins.process_wide_plugins.clear()  # other tests run clients in this process


def use_database(url: str, *aliases: str) -> None:
    """Use this database for these aliases, or for all."""
    connections.close_all()
    for alias, values in make_settings(url)["DATABASES"].items():
        if not aliases or alias in aliases:
            connections[alias].settings_dict.update(values)
            connections.settings[alias].update(values)
