"""The setting RIVERPY, its system checks, and the URL of a database of Django's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.db import connection, connections
from django.test import override_settings

import riverpy
from riverpy._dsn import validate_url
from riverpy._postgres.driver import connect
from riverpy.django import checks
from riverpy.django.database import format_libpq_url, make_database_url
from riverpy.django.settings import find_setting_problems, read_settings
from riverpy.migrate import Migrator
from tests._database import run_apart

if TYPE_CHECKING:
    from pathlib import Path

WRONG: list[tuple[Any, str, str]] = [
    ([], "must be a dict, got list", "write RIVERPY"),
    ({"WORKER": "a:b"}, "unknown key 'WORKER'", "did you mean 'WORKERS'?"),
    ({"x": 1}, "unknown key 'x'", "the keys are WORKERS, DATABASE"),
    ({"WORKERS": "shop/jobs.py"}, "RIVERPY['WORKERS'] must be a text MODULE:ATTR", "shop.jobs:w"),
    ({"WORKERS": "shop.jobs"}, "must be a text MODULE:ATTR", "as in"),
    ({"DATABASE": "jobs"}, "must be an alias of DATABASES, got 'jobs'", "default, other"),
    ({"SCHEMA": "a-b"}, "RIVERPY['SCHEMA'] is not allowed", "name a schema"),
    ({"SCHEMA": 3}, "must be a text, got 3", "name a schema"),
    ({"MIGRATIONS": "alembic"}, "must be 'django' or 'riverpy'", "manage.py migrate"),
    ({"QUEUES": {}}, "at least one queue", '{"default": 100}'),
    ({"QUEUES": {"A": 1}}, "queue whose name is not allowed", "at most 100 jobs"),
    ({"QUEUES": {"a": 0}}, "'a' must be a number from 1, got 0", "at most 100 jobs"),
    ({"CONFIG": {}}, "must be a riverpy.Config, got dict", "riverpy.Config("),
    ({"SCHEMA": "a", "CONFIG": riverpy.Config(schema="b")}, "CONFIG has one too", "keep one"),
]


@pytest.mark.parametrize(("value", "message", "hint"), WRONG)
def test_wrong_settings(value: Any, message: str, hint: str) -> None:
    """Each wrong key or value is one error of `manage.py check`, with a hint."""
    with override_settings(RIVERPY=value):
        (problem,) = find_setting_problems()
        assert message in problem.message
        assert hint in problem.hint
        (error,) = checks.check_settings()
        assert (error.msg, error.hint, error.id) == (*problem, checks.WRONG_SETTING_ID)
        assert list(checks.check_workers()) == []
        with pytest.raises(ImproperlyConfigured):
            read_settings()


def test_other_engine() -> None:
    """A database that is not PostgreSQL is refused, and the text names another alias as the way."""
    connections.settings["lite"] = {
        **connections.settings["default"],
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": ":memory:",
        "OPTIONS": {},
    }
    try:
        with override_settings(RIVERPY={"DATABASE": "lite"}):
            (problem,) = find_setting_problems()
        assert "has the engine django.db.backends.sqlite3" in problem.message
        assert "DATABASE" in problem.hint
    finally:
        del connections.settings["lite"], connections["lite"]


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        ("tests.django.missing:workers", "cannot be imported: ModuleNotFoundError"),
        ("tests.django.shop.jobs:worker", "cannot be imported: AttributeError"),
        ("tests.django.shop.jobs:__name__", "is a str"),
    ],
)
def test_wrong_workers(workers: str, message: str) -> None:
    """The check imports the workers, and says why it cannot."""
    with override_settings(RIVERPY={"WORKERS": workers}):
        (error,) = checks.check_workers()
    assert message in error.msg


def test_right_settings() -> None:
    """Without the setting there are defaults. A right setting has no errors."""
    defaults = (None, "default", None, "django", {"default": 100})
    with override_settings(RIVERPY=None):
        assert read_settings()[:5] == defaults
    given = {"SCHEMA": "jobs", "CONFIG": riverpy.Config(max_attempts=3), "QUEUES": {"mail": 5}}
    with override_settings(RIVERPY=given):
        config = read_settings().config
        assert (config.schema, config.max_attempts) == ("jobs", 3)
    assert [*checks.check_settings(), *checks.check_workers()] == []


def test_tables(project_url: str) -> None:
    """The check of the database reports missing tables and missing versions, with the command that
    creates them. Without a database nothing is read."""
    assert list(checks.check_tables(["default"])) == []
    with connection.cursor() as cursor:
        cursor.execute("create schema empty; create schema partial")
    try:
        with override_settings(RIVERPY={"SCHEMA": "empty", "MIGRATIONS": "riverpy"}):
            assert list(checks.check_tables()) == []
            main, own = checks.check_tables(["default"])
        assert main.msg == "schema 'empty' has none of the tables of line 'main'"
        assert own.hint == "run `manage.py riverpy migrate up`"
        run_apart(_migrate_partly, project_url)
        with override_settings(RIVERPY={"SCHEMA": "partial"}):
            main, own = checks.check_tables(["default"])
        assert main.msg == "schema 'partial' lacks the versions 7, 8 of line 'main'"
        assert main.hint == "run `manage.py riverpy migrate up`"  # Django has recorded them
        with connection.cursor() as cursor:
            cursor.execute("delete from django_migrations where name ~ '_main_00[78]|_riverpy_'")
        with override_settings(RIVERPY={"SCHEMA": "partial"}):
            main, own = checks.check_tables(["default"])
        assert main.hint == "run `manage.py migrate --database default`"
        with override_settings(RIVERPY={"SCHEMA": "missing"}):
            (warning,) = checks.check_tables(["default"])
        assert "schema 'missing' does not exist" in warning.msg
        assert (warning.hint or "").startswith("correct DATABASES")
    finally:
        with connection.cursor() as cursor:
            cursor.execute("drop schema empty cascade; drop schema partial cascade")
        call_command("migrate", verbosity=0)


async def _migrate_partly(url: str) -> None:
    await Migrator(url, schema="partial").up(target=6)


@pytest.mark.parametrize(
    ("parameters", "url"),
    [
        ({"dbname": "shop"}, "postgresql:///shop"),
        (
            {"dbname": "a b/c", "user": "u@x", "password": "p:/?#@ä", "host": "h", "port": "6000"},
            "postgresql://u%40x:p%3A%2F%3F%23%40%C3%A4@h:6000/a%20b%2Fc",
        ),
        ({"dbname": "d", "host": "::1", "port": 5432}, "postgresql://[::1]:5432/d"),
        (
            {"dbname": "d", "user": "u", "host": "/run/pg", "port": "5432"},
            "postgresql://u@/d?host=%2Frun%2Fpg&port=5432",
        ),
        (
            {
                "dbname": "d",
                "host": "a,b",
                "port": "1,2",
                "sslmode": "verify-full",
                "keepalives": True,
            },
            "postgresql:///d?host=a%2Cb&port=1%2C2&sslmode=verify-full&keepalives=1",
        ),
        (
            {"service": "shop", "passfile": "/x", "options": "-c search_path=jobs", "pool": {}},
            "postgresql://?service=shop&passfile=%2Fx&options=-c%20search_path%3Djobs",
        ),
    ],
)
def test_url_of_parameters(parameters: dict[str, Any], url: str) -> None:
    """Names, passwords, sockets, several hosts and libpq's parameters are in the URL."""
    validate_url(url)
    assert format_libpq_url(parameters) == url


async def test_url_of_settings(project_url: str) -> None:
    """The URL has what Django would connect to, without arguments of psycopg, and with the role."""
    options = connections["other"].settings_dict["OPTIONS"]
    options.update(assume_role="pg_monitor", pool=False, isolation_level=4, connect_timeout=5)
    try:
        url = make_database_url("other")
    finally:
        options.clear()
    assert "connect_timeout=5&" in url
    assert url.endswith("&role=pg_monitor")
    found = await connect(url)
    row = await found.fetchrow("select current_database(), current_user")
    await found.close()
    assert tuple(row or ()) == (connections["other"].settings_dict["NAME"], "pg_monitor")


async def test_url_of_a_service(
    project_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without NAME, the worker connects to the database of the service, as Django does."""
    entry = connections["other"].settings_dict
    name, host, port = entry["NAME"], entry["HOST"], entry["PORT"]
    (tmp_path / "services").write_text(f"[shop]\ndbname={name}\nhost={host}\nport={port}\n")
    monkeypatch.setenv("PGSERVICEFILE", str(tmp_path / "services"))
    monkeypatch.setitem(entry, "OPTIONS", {"service": "shop"})
    for key in ("NAME", "HOST", "PORT"):
        monkeypatch.setitem(entry, key, "")
    url = make_database_url("other")
    validate_url(url)
    found = await connect(url)
    assert await found.fetchval("select current_database()") == name
    await found.close()
