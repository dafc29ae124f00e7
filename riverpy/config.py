"""Settings of a client. Each value is checked when it is given, so a config that exists is a valid
one."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec

from riverpy._dsn import mask_url, validate_url
from riverpy._names import validate_client_id, validate_schema
from riverpy.errors import ConfigError
from riverpy.insert_opts import MAX_ATTEMPTS_DEFAULT
from riverpy.retry import DefaultRetryPolicy, ErrorHandler, RetryPolicy

MAX_WORKERS_MAX = 10_000
JOB_TIMEOUT_DEFAULT = timedelta(minutes=1)
SOFT_STOP_TIMEOUT_DEFAULT = timedelta(seconds=30)
HARD_STOP_TIMEOUT_DEFAULT = timedelta(seconds=10)
FETCH_POLL_INTERVAL_DEFAULT = timedelta(seconds=1)
POOL_SIZE_DEFAULT = 10


class QueueConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How one queue is worked by one client."""

    max_workers: int = 100
    """Slots: how many jobs run at a time, 1 to 10,000."""
    fetch_cooldown: timedelta | None = None
    """The least time between two claims. Default none: claiming adapts to the load by itself."""
    fetch_poll_interval: timedelta | None = None
    """How often an idle queue is looked at without a notification. Default: the client's."""

    def __post_init__(self) -> None:
        _expect_type("max_workers", self.max_workers, int)
        if not 1 <= self.max_workers <= MAX_WORKERS_MAX:
            raise ConfigError(
                f"max_workers must be between 1 and {MAX_WORKERS_MAX}, got {self.max_workers}"
            )
        if self.fetch_cooldown is not None:
            _expect_positive("fetch_cooldown", self.fetch_cooldown, allow_zero=True)
        if self.fetch_poll_interval is not None:
            _expect_positive("fetch_poll_interval", self.fetch_poll_interval)


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a client beyond its database, workers and queues."""

    schema: str | None = None
    """The schema of River's tables. Default: the first one of the connection's search path, as
    River does."""
    id: str | None = None
    """The client's id, at most 100 characters, no two running clients alike. Default
    `NAME:PID:RANDOM`."""
    name: str | None = None
    """NAME in the default id. Default: the name of the host."""
    job_timeout: timedelta | None = JOB_TIMEOUT_DEFAULT
    """How long a job may run. Default one minute; None: for ever. A worker or a job can say
    otherwise."""
    max_attempts: int = MAX_ATTEMPTS_DEFAULT
    """Attempts of an inserted job that does not say otherwise. Default 25."""
    retry_policy: RetryPolicy = msgspec.field(default_factory=DefaultRetryPolicy)
    """When a failed job is tried again. Default: after n^4 seconds and up to 10 % more or less."""
    error_handler: ErrorHandler | None = None
    """Told of each failed attempt; may end the job by returning True. Default none."""
    soft_stop_timeout: timedelta | None = SOFT_STOP_TIMEOUT_DEFAULT
    """How long running jobs may go on after a stop was asked for; then they are cancelled.
    Default 30 s; None: for ever."""
    hard_stop_timeout: timedelta = HARD_STOP_TIMEOUT_DEFAULT
    """How long cancelled jobs may take to end and results to be stored. Default 10 s."""
    fetch_poll_interval: timedelta = FETCH_POLL_INTERVAL_DEFAULT
    """How often an idle queue is looked at without a notification. Default 1 s."""
    poll_only: bool = False
    """Do not LISTEN: find jobs by polling alone. Default False."""
    pooler: bool = False
    """The database URL leads to a pooler in transaction mode, as PgBouncer's. Default False."""
    listen_url: str | None = None
    """A URL for the listening connection that leads past a pooler. Default: the database's."""
    pool_size: int = POOL_SIZE_DEFAULT
    """Connections for inserts and other calls, at most. Default 10."""
    durable_claims: bool = False
    """Wait for the disk at each claim too. Default False: after a crash of the server a job that
    was claimed in the last moment may run twice; its result is stored once."""
    insert_notify: bool = True
    """Let inserts notify the workers. Default True; without it jobs wait for the next poll."""
    skip_unknown_job_check: bool = False
    """Let a client with workers insert kinds that it has no worker for. Default False."""
    skip_job_kind_validation: bool = False
    """Accept kinds that break River's rule for their form. Default False."""

    def __post_init__(self) -> None:
        if self.schema is not None:
            validate_schema(self.schema)
        if self.id is not None:
            validate_client_id(self.id)
        if self.name is not None:
            validate_client_id(self.name)
        if self.listen_url is not None:
            _expect_type("listen_url", self.listen_url, str)
            validate_url(self.listen_url)
        if not 1 <= self.max_attempts <= 32767:
            raise ConfigError(f"max_attempts must be between 1 and 32767, got {self.max_attempts}")
        if not 1 <= self.pool_size <= 1000:
            raise ConfigError(f"pool_size must be between 1 and 1000, got {self.pool_size}")
        _expect_positive("fetch_poll_interval", self.fetch_poll_interval)
        _expect_positive("hard_stop_timeout", self.hard_stop_timeout)
        if self.job_timeout is not None:
            _expect_positive("job_timeout", self.job_timeout)
        if self.soft_stop_timeout is not None:
            _expect_positive("soft_stop_timeout", self.soft_stop_timeout, allow_zero=True)

    def __repr__(self) -> str:
        values = ((name, getattr(self, name)) for name in self.__struct_fields__)
        shown = (
            f"{name}={(mask_url(value) if name == 'listen_url' and value else value)!r}"
            for name, value in values
        )
        return f"{type(self).__name__}({', '.join(shown)})"


def _expect_type(name: str, value: object, expected: type[Any]) -> None:
    if not isinstance(value, expected) or isinstance(value, bool):
        raise ConfigError(f"{name} must be {expected.__name__}, got {type(value).__name__}")


def _expect_positive(name: str, value: timedelta, *, allow_zero: bool = False) -> None:
    _expect_type(name, value, timedelta)
    if value < timedelta(0) or (not allow_zero and value < timedelta(milliseconds=1)):
        least = "zero" if allow_zero else "one millisecond"
        raise ConfigError(f"{name} must be {least} or more, got {value}")
