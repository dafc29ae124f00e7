"""Fixtures for async tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from _riverpy_pytest.databases import keeping_transaction
from _riverpy_pytest.engines import make_engine_arguments
from _riverpy_pytest.event_loops import is_async, open_in_loop
from _riverpy_pytest.failures import fail

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    import asyncpg
    import sqlalchemy.ext.asyncio

    import riverpy
    from riverpy import Transaction as CallerTransaction
    from riverpy.testing import FixedClock
    from riverpy.testing.async_fixtures import SessionMaker
    from riverpy.testing.session_jobs import SessionJobs
    from riverpy.testing.session_time import SessionTime

_TRANSACTION_FIXTURES: Final = ("riverpy_session", "riverpy_connection", "riverpy_client")


@pytest.fixture
def riverpy_connection(
    request: pytest.FixtureRequest, riverpy_url: str, _riverpy_refused_sessions: None
) -> Generator[asyncpg.Connection[asyncpg.Record]]:
    """An asyncpg connection in a transaction, which is rolled back after the test."""
    from riverpy.testing.async_fixtures import open_connection

    with keeping_transaction(request):
        yield from open_in_loop(request, open_connection(riverpy_url))


@pytest.fixture(scope="session")
def riverpy_engine(riverpy_url: str) -> sqlalchemy.ext.asyncio.AsyncEngine:
    """The engine of `riverpy_session`. To use another driver than asyncpg, override this fixture
    and create the engine with `poolclass=NullPool`. The pool of the default engine keeps
    connections for later tests in the same event loop."""
    arguments = make_engine_arguments("riverpy_session", riverpy_url, "asyncpg")
    from sqlalchemy.ext.asyncio import create_async_engine

    from riverpy._postgres.driver import ConnectionWithKnownArrayTypes
    from riverpy.testing.loop_pool import LoopPool

    # Without it, asyncpg would query types in each test, which takes 6 ms.
    arguments["connect_args"] = {"connection_class": ConnectionWithKnownArrayTypes}
    return create_async_engine(**arguments, poolclass=LoopPool)


@pytest.fixture
def riverpy_session(
    request: pytest.FixtureRequest,
    riverpy_engine: sqlalchemy.ext.asyncio.AsyncEngine,
    riverpy_session_makers: Sequence[SessionMaker],
    _riverpy_refused_sessions: None,
) -> Generator[sqlalchemy.ext.asyncio.AsyncSession]:
    """A session of SQLAlchemy in a transaction, which is rolled back after the test. A commit of
    the session only releases a savepoint."""
    from riverpy.testing.async_fixtures import open_session

    manager = open_session(riverpy_engine, riverpy_session_makers)
    with keeping_transaction(request):
        yield from open_in_loop(request, manager)


@pytest.fixture
def riverpy_client(
    request: pytest.FixtureRequest,
    riverpy_url: str,
    riverpy_workers: riverpy.Workers | None,
    riverpy_queues: Mapping[str, riverpy.QueueConfig],
    riverpy_periodic_jobs: Sequence[riverpy.PeriodicJob],
    _riverpy_settings: riverpy.Config,
    riverpy_empty_tables: None,
) -> Generator[riverpy.Client]:
    """An open client. What it inserts is committed, and deleted after the test."""
    from riverpy import Client

    client = Client(
        riverpy_url,
        workers=riverpy_workers,
        queues=riverpy_queues,
        periodic_jobs=riverpy_periodic_jobs,
        config=_riverpy_settings,
    )
    yield from open_in_loop(request, client)


@pytest.fixture
def riverpy_tx(
    request: pytest.FixtureRequest, riverpy_session_makers: Sequence[SessionMaker]
) -> CallerTransaction | riverpy.Client:
    """The session, connection or client that `riverpy_jobs` and `riverpy_time` use: the first of
    `riverpy_session`, `riverpy_connection` and `riverpy_client` that the test uses. If the test
    uses none of them: `riverpy_session` if async sessions of the application can join its
    transaction, otherwise `riverpy_connection`."""
    if not is_async(request.function):
        fail(
            "riverpy_jobs and riverpy_time are for async tests: write `async def "
            f"{request.node.name}`, or use riverpy.testing with `tx=riverpy_sync_session`: "
            "TestWorker(workers).work(args, tx=…), drain, advance and require_inserted"
        )
    used = [name for name in _TRANSACTION_FIXTURES if name in request.fixturenames]
    if not used and riverpy_session_makers and "riverpy_empty_tables" not in request.fixturenames:
        from riverpy.testing.async_fixtures import select_session_makers

        if select_session_makers(riverpy_session_makers, is_async=True):
            return request.getfixturevalue("riverpy_session")
    return request.getfixturevalue((used or ["riverpy_connection"])[0])


@pytest.fixture
def _riverpy_client_of_jobs(
    riverpy_tx: CallerTransaction | riverpy.Client,
    riverpy_workers: riverpy.Workers | None,
    riverpy_queues: Mapping[str, riverpy.QueueConfig],
    riverpy_periodic_jobs: Sequence[riverpy.PeriodicJob],
    _riverpy_settings: riverpy.Config,
) -> riverpy.Client:
    from riverpy import Client

    if isinstance(riverpy_tx, Client):
        return riverpy_tx
    return Client(
        workers=riverpy_workers,
        queues=riverpy_queues,
        periodic_jobs=riverpy_periodic_jobs,
        config=_riverpy_settings,
    )


@pytest.fixture
def riverpy_jobs(
    riverpy_tx: CallerTransaction | riverpy.Client, _riverpy_client_of_jobs: riverpy.Client
) -> SessionJobs:
    """The jobs that the test has inserted, with assertions on them and methods that work them in
    the transaction of the test."""
    from riverpy.testing.session_jobs import SessionJobs

    return SessionJobs(riverpy_tx, _riverpy_client_of_jobs)


@pytest.fixture
def riverpy_time(
    riverpy_tx: CallerTransaction | riverpy.Client,
    _riverpy_client_of_jobs: riverpy.Client,
    riverpy_clock: FixedClock,
) -> SessionTime:
    """Moves the time of the test's jobs: `await riverpy_time.advance(timedelta(days=1))`."""
    from riverpy.testing.session_time import SessionTime

    return SessionTime(riverpy_tx, _riverpy_client_of_jobs, riverpy_clock)
