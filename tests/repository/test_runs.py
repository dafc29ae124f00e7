"""The end of a test run when tests hang."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT = 240
"""Timeout of a run in seconds. A run takes ten on an idle machine, and would hang without the code
that is tested here."""
SETTINGS = """
[tool.pytest]
strict = true
asyncio_mode = "auto"
asyncio_default_fixture_loop_scope = "function"
"""
CONFTEST = """
import time
from pathlib import Path

import pytest
from tests import _limits

_limits.GRACE = 4.0
pytest_plugins = ["tests._limits", "tests._scheduling"]

class Hasten:
    def __init__(self, limit):
        self.limit = limit

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logstart(self, nodeid):
        if "too_long" in nodeid:
            while not Path("begun").exists():
                time.sleep(0.01)
            self.limit.end()

@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    for plugin in config.pluginmanager.get_plugins():
        if isinstance(plugin, _limits.RunLimit):
            config.pluginmanager.register(Hasten(plugin))
"""
HANGS = """
import asyncio, os, time
from pathlib import Path

import pytest

BEGUN = Path("begun")

@pytest.fixture(autouse=True)
def begun(request):
    with BEGUN.open("a") as file:
        file.write(f"{request.node.name} {os.environ['PYTEST_XDIST_WORKER']}\\n")

@pytest.mark.parametrize("number", range(30))
def test_before(number):
    pass

@pytest.mark.timeout(0.1)
async def test_waits():
    async def for_ever():
        await asyncio.Event().wait()
    await for_ever()

@pytest.mark.timeout(0.1)
def test_blocks():
    time.sleep(1000)

@pytest.mark.parametrize("number", range(30))
def test_with_the_worker_that_takes_its_place(number):
    until = time.monotonic() + 90
    while "gw2" not in BEGUN.read_text():
        assert time.monotonic() < until
        time.sleep(0.01)
"""
STUCK = """
import time
from pathlib import Path

def test_of_a_run_that_takes_too_long():
    Path("begun").touch()
    time.sleep(1000)

def test_other():
    pass
"""


def run(directory: Path, tests: str) -> tuple[int, str]:
    """Run these tests on two workers, and return the exit code and all output."""
    (directory / "pyproject.toml").write_text(SETTINGS)
    (directory / "conftest.py").write_text(CONFTEST)
    (directory / "test_it.py").write_text(tests)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider"],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
        timeout=LIMIT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


@pytest.mark.timeout(LIMIT)
def test_tests_that_hang(tmp_path: Path) -> None:
    """Tests that wait forever or block their worker fail. Each is named at once with its current
    line, and all other tests run once, also in the worker that replaces the blocked one."""
    code, told = run(tmp_path, HANGS)
    assert code == 1, told
    assert "2 failed, 60 passed" in told
    begun = [line.split()[0] for line in (tmp_path / "begun").read_text().splitlines()]
    assert len(begun) == len(set(begun)) == 62
    while_running, _, at_the_end = told.partition("= FAILURES =")
    assert "\nFAILED test_it.py::test_waits\n" in while_running
    assert "\nFAILED test_it.py::test_blocks\n" in while_running
    assert re.search(r'test_it\.py", line \d+ in test_blocks', while_running)
    assert re.search(r"test_it\.py:\d+ test_waits\n.*test_it\.py:\d+ for_ever\n", at_the_end)


@pytest.mark.timeout(LIMIT)
def test_run_that_takes_too_long(tmp_path: Path) -> None:
    """A run that takes too long ends with the names and lines of the running tests."""
    code, told = run(tmp_path, STUCK)
    assert code == 1, told
    assert "still running: test_it.py::test_of_a_run_that_takes_too_long\n" in told
    assert re.search(r'test_it\.py", line \d+ in test_of_a_run_that_takes_too_long', told)
    assert "in pytest_runtestloop" in told
