"""Fixtures that users override: the parts of the clients of tests, and the sessions."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    import riverpy
    from riverpy.testing import FixedClock
    from riverpy.testing.async_fixtures import SessionMaker


@pytest.fixture
def riverpy_workers() -> riverpy.Workers | None:
    """Override this to return the workers of your application."""
    return None


@pytest.fixture
def riverpy_config() -> riverpy.Config:
    """Override this to return the settings of the clients of your tests."""
    from riverpy import Config

    return Config()


@pytest.fixture
def riverpy_queues(riverpy_workers: riverpy.Workers | None) -> Mapping[str, riverpy.QueueConfig]:
    """Override this to return the queues that `riverpy_client` works. The default is `default` if
    there are workers."""
    from riverpy import QueueConfig

    return {} if riverpy_workers is None else {"default": QueueConfig(max_workers=10)}


@pytest.fixture
def riverpy_periodic_jobs() -> Sequence[riverpy.PeriodicJob]:
    """Override this to return the periodic jobs of the client of your tests."""
    return ()


@pytest.fixture
def riverpy_session_makers() -> Sequence[SessionMaker]:
    """Override this to return the `async_sessionmaker`s and `sessionmaker`s of your application.
    During a test their sessions join the transaction of `riverpy_session` or
    `riverpy_sync_session`, or use the database of `riverpy_client`. In a test whose transaction
    they cannot join, their statements raise ConfigError."""
    return ()


@pytest.fixture
def _riverpy_refused_sessions(riverpy_session_makers: Sequence[SessionMaker]) -> Generator[None]:
    """Let the sessions of the application raise ConfigError at their first statement, unless
    another fixture lets them use the database of the test."""
    with ExitStack() as stack:
        if riverpy_session_makers:
            from riverpy.testing.async_fixtures import refusing_sessions

            stack.enter_context(refusing_sessions(riverpy_session_makers))
        yield


@pytest.fixture
def riverpy_clock() -> FixedClock:
    """The clock of the clients of a test that uses `riverpy_clock` or `riverpy_time`. It shows the
    time of the start of the test until the test moves it."""
    from riverpy.testing import FixedClock

    return FixedClock()


@pytest.fixture
def _riverpy_settings(
    request: pytest.FixtureRequest, riverpy_config: riverpy.Config
) -> riverpy.Config:
    if "riverpy_clock" not in request.fixturenames:
        return riverpy_config
    import msgspec

    return msgspec.structs.replace(riverpy_config, clock=request.getfixturevalue("riverpy_clock"))
