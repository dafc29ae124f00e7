"""`manage.py riverpy`: riverpy's commands in a Django project, and its worker in processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from django.test import override_settings

import riverpy.django
from riverpy import Client, ConfigError, QueueConfig, Workers
from riverpy.django.command import main
from riverpy.django.worker import make_client
from tests.django.shop import jobs
from tests.django.shop.jobs import Pack, PackAsync, PackInProcess
from tests.django.shop.models import Order

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60.0
"""How many seconds a test waits at most."""
MANAGE = """
import os, sys
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "site_settings")
from django.core.management import execute_from_command_line
if __name__ == "__main__":
    execute_from_command_line(sys.argv)
"""
SETTINGS = """
from tests.django.project import make_settings
globals().update(make_settings({url!r}))
DATABASES["default"]["OPTIONS"]["application_name"] = "shop"
"""


def read_value(sql: str) -> Any:
    """Return the first value of a statement."""
    with connection.cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetchone()[0]


def wait_until(sql: str) -> None:
    """Wait until a statement returns true."""
    give_up_at = time.monotonic() + PATIENCE
    while not read_value(sql):
        assert time.monotonic() < give_up_at, sql
        read_value("select pg_sleep(0.05)::text")


def test_worker_processes(project_url: str, tmp_path: Path) -> None:
    """`manage.py riverpy worker --processes 2` runs blocking, async and process jobs with the
    models of the project, keeps no connection of Django's after a job, and stops at SIGTERM with
    exit code 0."""
    (tmp_path / "manage.py").write_text(MANAGE)
    (tmp_path / "site_settings.py").write_text(SETTINGS.format(url=project_url))
    Order.objects.create(number=7)
    command = [sys.executable, "manage.py", "riverpy", "worker", "--processes", "2"]
    worker = subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RIVERPY_LOG_LEVEL": "error"},
    )
    try:
        for args in (Pack(7), Pack(7), PackInProcess(7), PackAsync(7)):
            riverpy.django.insert(args)
        wait_until("select count(*) = 4 from river_job where state = 'completed'")
        found = "select count(*) from river_job where metadata->'output'->>'orders' = '1'"
        assert read_value(found) == 4
        pids = "select count(distinct metadata->'output'->>'pid') from river_job"
        assert read_value(pids) == 3
        wait_until("select count(*) = 0 from pg_stat_activity where application_name = 'shop'")
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(PATIENCE) == 0
    finally:
        worker.kill()
        worker.wait()


def test_commands_in_this_process(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`call_command` runs commands on the database of the settings. A failure is a CommandError.
    Without Django there would be no database, and with a wrong setting the text names it."""
    monkeypatch.setenv("RIVERPY_SCHEMA", "elsewhere")  # inserts do not read it, so neither do these
    call_command("riverpy", "migrate", "validate")
    assert "line main is complete" in capfd.readouterr().out
    with pytest.raises(CommandError, match="is a path: give a module"):
        call_command("riverpy", "worker", "jobs.py")
    with pytest.raises(CommandError, match="no job 12345") as failed:
        call_command("riverpy", "job", "show", "12345")
    assert failed.value.returncode == 1
    for value, match in (
        ({"WORKER": "x:y"}, "did you mean 'WORKERS'"),
        ({"SCHEMA": "jobs"}, "schema 'jobs' does not exist"),
        ({"SCHEMA": "pg_catalog"}, "run `manage.py riverpy migrate up`"),
    ):
        with override_settings(RIVERPY=value), pytest.raises(CommandError, match=match):
            call_command("riverpy", "job", "list")


WORK_IN_THIS_PROCESS = """
import json, os, signal, sys, time
from io import StringIO
from tests.django import project
project.set_up(sys.argv[1])
import riverpy.django
from django.core.management import CommandError, call_command
from tests.django.shop.jobs import Pack
before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
for count in (1, 2):
    riverpy.django.insert(Pack(count))
    call_command("riverpy", "worker", "--drain", "--log-level", "error")
    output = StringIO()
    call_command("riverpy", "job", "list", "--json", stdout=output, verbosity=0)
    assert output.getvalue().count("completed") == count, output.getvalue()
assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
try:
    call_command("riverpy", "worker", "--drain", "--database-url", "postgres://x/y")
except CommandError as error:
    assert "must use the same settings" in str(error), error
else:
    raise AssertionError
from riverpy.cli import _signals
import threading
for thread in threading.enumerate():
    if thread.name == "riverpy signals":
        thread.join(30)  # the process ended here, 3 seconds after the worker
        assert not thread.is_alive()
print("goes on")
"""


def test_worker_in_this_process(project_url: str) -> None:
    """`call_command` takes options of riverpy and `stdout`. A worker in a test leaves the process
    alone when it ends: its threads are gone and its signal handlers are replaced. A database
    beside the settings is refused."""
    done = subprocess.run(
        [sys.executable, "-c", WORK_IN_THIS_PROCESS, project_url],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stdout) == (0, "goes on\n"), done.stderr


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["worker", "--help"], ["job", "list", "--help"], ["worker", "--print-config"]],
)
def test_help(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """The help names `manage.py riverpy`, and lists no command that has no Django. The settings of
    the worker name their source."""
    with pytest.raises(SystemExit) as ended:
        main(arguments, prog_name="manage.py riverpy")
    assert not ended.value.code
    output = capfd.readouterr().out
    if "--print-config" in arguments:
        assert "DATABASES['default']" in output
        return
    assert "RIVERPY_DATABASE_URL" not in output
    assert output.startswith("Usage: manage.py riverpy ")
    assert "\n  dev " not in output
    assert ("[MODULE:ATTR]" in output) is ("worker" in arguments)


async def test_client_of_the_settings() -> None:
    """`WORKERS` names a registry, a client, or a function, async or not, that returns one."""
    client = await make_client()
    kinds = [kind for kind in client.workers or () if not kind.startswith("django:")]
    assert kinds == ["pack", "pack_in_process", "pack_async"]
    assert {name: one.max_workers for name, one in client.queues.items()} == {
        "default": 100,
        "mail": 100,
    }
    for name, queues in (("client", {"mail"}), ("make_async", {"default", "mail"})):
        with override_settings(RIVERPY={"WORKERS": f"{__name__}:{name}"}):
            assert {*(await make_client()).queues} == queues
    for name, text in (("nothing", "which is no riverpy.Workers"), ("no_workers", "no worker")):
        setting = override_settings(RIVERPY={"WORKERS": f"{__name__}:{name}"}, TASKS={})
        with setting, pytest.raises(ConfigError, match=text):
            await make_client()


client = Client(workers=jobs.workers, queues={"mail": QueueConfig()})
no_workers = Workers()


async def make_async() -> Workers:
    """Return the workers of the app."""
    return jobs.workers


def nothing() -> None:
    """Return no workers."""
