"""Fixtures that give a test a server, a database, a schema or a connection.

All workers of all runs share one server: the one in RIVERPY_TEST_DATABASE_URL, whose role must be
allowed to create databases, or else an embedded one. Each worker has its own database there.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import structlog
import uvloop
from hypothesis import HealthCheck, settings
from structlog.testing import capture_logs

from riverpy._log import set_log_event_writer
from riverpy._work import outcomes
from riverpy.cli._log_stream import LogStream
from riverpy.embedded import EmbeddedPostgres
from tests._database import (
    SchemaPool,
    connected,
    create_database,
    drop_database,
    drop_orphans,
    new_database_name,
    run_apart,
)
from tests.kit.pgbouncer import through_pooler
from tests.work.rig import Rig

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator

    import asyncpg

    from tests._database import Schema

URL_VARIABLE = "RIVERPY_TEST_DATABASE_URL"
LOOP_VARIABLE = "RIVERPY_TEST_LOOP"
POOLER_VARIABLE = "RIVERPY_TEST_POOLER"
pytest_plugins = ["tests._limits", "tests._scheduling", "tests._skips"]
SERVER_SETTINGS = {
    "max_connections": "300",
    # No test cuts the power of the machine. A killed server still keeps all commits.
    "fsync": "off",
    "full_page_writes": "off",
    # Autovacuum would take time from tests, and change their query plans at random.
    "autovacuum_naptime": "1d",
}
MEMORY_NEEDED = 8 * 1024**3
"""In bytes. The data of the tests' server, with its log of changes, needs a quarter of it."""
_SYSTEM = sorted(path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb"))
_RENDER = structlog.processors.KeyValueRenderer(["timestamp", "level", "event"])
_HAS_FAILED = pytest.StashKey[bool]()

# The duration of an example depends on the machine.
settings.register_profile("riverpy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("riverpy")


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run async tests on uvloop, like the command line, or with RIVERPY_TEST_LOOP=asyncio."""
    if os.environ.get(LOOP_VARIABLE) == "asyncio":
        return {"asyncio": asyncio.new_event_loop}
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def log() -> Generator[list[Any]]:
    """Yield the list of logged lines."""
    with capture_logs() as entries:
        yield entries


@pytest.fixture(scope="session")
def server_url() -> Generator[str]:
    """Yield the URL of a server on which databases can be created."""
    if configured := os.environ.get(URL_VARIABLE):
        yield configured
        return
    with EmbeddedPostgres("test", base_dir=_memory_directory(), settings=SERVER_SETTINGS) as url:
        run_apart(drop_orphans, url)
        yield url


@pytest.fixture(scope="session", params=["own", *_SYSTEM], ids=str)
def each_server_url(request: pytest.FixtureRequest, server_url: str) -> Generator[str]:
    """Yield the URL of the tests' own server, and of one for each PostgreSQL on this machine."""
    if request.param == "own":
        yield server_url
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RIVERPY_PG_BIN", str(request.param))
        server = EmbeddedPostgres("test", base_dir=_memory_directory(), settings=SERVER_SETTINGS)
    with server as url:
        yield url


def _memory_directory() -> Path | None:
    """Return a directory in memory for the server, or None if there is not enough. On a disk, the
    creation of files takes as long as the fork of all server processes."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or shutil.disk_usage(memory).free < MEMORY_NEEDED:
        return None
    return memory / f"riverpy-tests-{os.geteuid()}"


@pytest.fixture(scope="session")
def database_url(server_url: str) -> Generator[str]:
    """Yield the URL of this worker's database, empty at the start of the run."""
    name = new_database_name()
    yield run_apart(create_database, server_url, name)
    run_apart(drop_database, server_url, name)


@pytest.fixture(scope="session", autouse=True)
def _through_pooler(request: pytest.FixtureRequest) -> Generator[None]:
    """With RIVERPY_TEST_POOLER=1, send the statements of clients and inserters through PgBouncer to
    this worker's database, and listen without it. Tests that find connections by their names fail
    then."""
    if os.environ.get(POOLER_VARIABLE) != "1":
        yield
        return
    with through_pooler(request.getfixturevalue("database_url")):
        yield


@pytest.fixture(autouse=True)
def _log() -> None:
    """Log everything to stderr. This undoes the configuration of an earlier test or of a command
    that ran in this process. The format is plain, since colours and formatted tracebacks would take
    a seventh of the tests' time."""
    set_log_event_writer(None)
    root = logging.getLogger()
    for handler in root.handlers[:]:
        if isinstance(handler, logging.StreamHandler) and isinstance(handler.stream, LogStream):
            root.removeHandler(handler)
            root.setLevel(logging.WARNING)
    structlog.reset_defaults()
    *processors, _ = structlog.get_config()["processors"]
    processors += [structlog.processors.format_exc_info, _RENDER]
    structlog.configure(processors, logger_factory=structlog.PrintLoggerFactory(sys.stderr))


@pytest.fixture
async def fresh_database_url(server_url: str) -> AsyncGenerator[str]:
    """Yield the URL of an empty database for this test alone, which is dropped with all its
    connections."""
    name = new_database_name()
    yield await create_database(server_url, name)
    await drop_database(server_url, name)


@pytest.fixture(scope="session")
def schema_pool(database_url: str) -> SchemaPool:
    """The migrated schemas of this worker's database."""
    return SchemaPool(database_url)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember whether the test failed."""
    report = yield
    item.stash[_HAS_FAILED] = report.failed
    return report


@pytest.fixture
async def schema(schema_pool: SchemaPool, request: pytest.FixtureRequest) -> AsyncGenerator[Schema]:
    """Yield an empty River schema for this test alone, at the newest version."""
    async with schema_pool.schema() as schema:
        yield schema
        schema.is_spoilt = request.node.stash.get(_HAS_FAILED, False)


@pytest.fixture
def rig(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """Workers, clients and jobs on the test's schema. Jobs that are due within 40 seconds are
    available at once, so that a slow machine does not reach their time during a test."""
    monkeypatch.setattr(outcomes, "AVAILABLE_STATE_DELAY_MAX", timedelta(seconds=40))
    return Rig(schema)


@pytest.fixture
async def conn(database_url: str) -> AsyncGenerator[asyncpg.Connection[Any]]:
    """Yield a connection to this worker's database."""
    async with connected(database_url) as connection:
        yield connection
