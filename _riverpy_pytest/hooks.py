"""Hooks of pytest: the option for the URL, the number of the run, and a hint."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

from _riverpy_pytest.databases import RUN_NUMBER, URL_ENV_VARIABLE
from _riverpy_pytest.event_loops import make_asyncio_loops

if TYPE_CHECKING:
    from collections.abc import Generator


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option and the setting for the URL of a server."""
    text = (
        "the postgres:// URL of a database on the server for tests with riverpy's fixtures, whose "
        "role may create databases; the tests use databases of their own there. The default is "
        f"{URL_ENV_VARIABLE} or else an embedded PostgreSQL"
    )
    parser.getgroup("riverpy").addoption("--riverpy-url", metavar="URL", help=text)
    parser.addini("riverpy_url", f"without --riverpy-url and {URL_ENV_VARIABLE}: {text}")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the number of this run, which is part of the names of its databases. Register fixtures
    for the event loops of pytest-asyncio."""
    given: dict[str, Any] = getattr(config, "workerinput", {})  # in a worker of pytest-xdist
    config.stash[RUN_NUMBER] = given.get("riverpy_run") or _make_run_number()
    if config.pluginmanager.hasplugin("asyncio"):
        config.pluginmanager.register(make_asyncio_loops())


def _make_run_number() -> int:
    return int.from_bytes(os.urandom(4), "big") >> 1  # positive as an `integer` of PostgreSQL


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Send the number of the run to the workers of pytest-xdist."""
    node.workerinput["riverpy_run"] = node.config.stash[RUN_NUMBER]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """If a test fails because a client lacks a job kind, add a hint: the fixture
    `riverpy_workers`."""
    try:
        return (yield)
    except Exception as error:
        errors = sys.modules.get("riverpy.errors")
        if (
            errors is not None
            and isinstance(error, errors.UnknownJobKindError)
            and "riverpy_workers" in getattr(item, "fixturenames", ())
        ):
            error.add_note(
                "The clients of this test have the workers that the fixture riverpy_workers "
                "returns: register the function of this kind there"
            )
        raise
