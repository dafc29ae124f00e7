"""Fixtures for tests that are not async."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from _riverpy_pytest.databases import keeping_transaction
from _riverpy_pytest.engines import make_engine_arguments

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    import sqlalchemy
    import sqlalchemy.orm

    import riverpy
    import riverpy.sync
    from riverpy.testing.async_fixtures import SessionMaker


@pytest.fixture(scope="session")
def riverpy_sync_engine(riverpy_url: str) -> sqlalchemy.Engine:
    """The engine of `riverpy_sync_session`. To use another driver than psycopg, override this
    fixture and create the engine with `poolclass=NullPool`."""
    arguments = make_engine_arguments("riverpy_sync_session", riverpy_url, "psycopg")
    from sqlalchemy import NullPool, create_engine

    return create_engine(**arguments, poolclass=NullPool)


@pytest.fixture
def riverpy_sync_session(
    request: pytest.FixtureRequest,
    riverpy_sync_engine: sqlalchemy.Engine,
    riverpy_session_makers: Sequence[SessionMaker],
    _riverpy_refused_sessions: None,
) -> Generator[sqlalchemy.orm.Session]:
    """A session of SQLAlchemy for code that is not async, in a transaction, which is rolled back
    after the test. A commit of the session only releases a savepoint."""
    from riverpy.testing.async_fixtures import open_sync_session

    with (
        keeping_transaction(request),
        open_sync_session(riverpy_sync_engine, riverpy_session_makers) as session,
    ):
        yield session


@pytest.fixture
def riverpy_sync_client(
    riverpy_url: str,
    riverpy_workers: riverpy.Workers | None,
    _riverpy_settings: riverpy.Config,
    riverpy_empty_tables: None,
) -> Generator[riverpy.sync.Client]:
    """A client for code that is not async. What it inserts is committed, and deleted after the
    test."""
    import riverpy.sync

    with riverpy.sync.Client(
        riverpy_url, workers=riverpy_workers, config=_riverpy_settings
    ) as client:
        yield client
