"""Settings of a client. Each value is checked when it is given, so a config that exists is a valid
one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec

from riverpy._dsn import mask_url, validate_url
from riverpy._names import (
    DEFAULT_DOMAIN,
    validate_client_id,
    validate_domain,
    validate_kind,
    validate_queue,
    validate_schema,
)
from riverpy._plugins import Plugins, is_async
from riverpy.errors import ConfigError
from riverpy.insert_opts import MAX_ATTEMPTS_DEFAULT, MAX_ATTEMPTS_MAX
from riverpy.retry import DefaultRetryPolicy, ErrorHandler, RetryPolicy
from riverpy.schedules import next_time

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from riverpy.hooks import Hook
    from riverpy.middleware import Middleware, Plugin
    from riverpy.schedules import PeriodicSchedule
    from riverpy.stuck import JobStuckHandler

MAX_WORKERS_MAX = 10_000
_QUEUES_FORM = 'queues={"default": QueueConfig(max_workers=100)}'
DURATION_MAX = timedelta(days=365_000)
"""About what can be taken from the present without leaving PostgreSQL's times."""
_SWITCHES = (
    "candidate",
    "durable_claims",
    "insert_notify",
    "known_kinds_only",
    "pooler",
    "poll_only",
    "skip_job_kind_validation",
    "skip_unknown_job_check",
    "trace_internal",
)
_CONFLICT_POLICIES = ("error", "warn", "takeover")
JOB_TIMEOUT_DEFAULT = timedelta(minutes=1)
JOB_STUCK_THRESHOLD_DEFAULT = timedelta(seconds=10)
SOFT_STOP_TIMEOUT_DEFAULT = timedelta(seconds=30)
HARD_STOP_TIMEOUT_DEFAULT = timedelta(seconds=10)
FETCH_POLL_INTERVAL_DEFAULT = timedelta(seconds=1)
POOL_SIZE_DEFAULT = 10
ELECT_INTERVAL_DEFAULT = timedelta(seconds=5)
LEADER_TTL_DEFAULT = timedelta(seconds=15)
LEASE_TTL_MAX = timedelta(days=1)
"""How long a lease in our table lasts at most, if it is not renewed."""
LEADING_LEAST = timedelta(milliseconds=100)
"""Below this the way to the server and back, or a busy event loop, ends terms and runs."""
ELECT_JITTER_SHARE = 0.2
"""A follower bids after its interval and up to this share of it more."""
DEAD_AFTER_DEFAULT = timedelta(minutes=1)
RESCUE_AFTER_DEFAULT = timedelta(hours=1)
RETENTION_DEFAULT = timedelta(hours=24)
DISCARDED_RETENTION_DEFAULT = timedelta(days=7)
REINDEXER_TIMEOUT_DEFAULT = timedelta(minutes=1)


class QueueConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How one queue is worked by one client."""

    max_workers: int = 100
    """Slots: how many jobs run at a time, 1 to 10,000."""
    fetch_cooldown: timedelta | None = None
    """The least time between two claims. Default none: claiming adapts to the load by itself."""
    fetch_poll_interval: timedelta | None = None
    """How often an idle queue is looked at without a notification. Default: the client's."""
    prefetch: bool = False
    """Claim a few jobs ahead of free slots, while jobs are so short that the way to the database
    and back would leave slots empty. Default False. A job claimed ahead is `running` in the
    database, beyond `max_workers`, while it waits here, for 50 ms at most; then, and at a stop or
    pause, it is given back and the attempt does not count. `attempted_at` is the time of the
    claim; the timeout counts from the start."""

    def __post_init__(self) -> None:
        _expect_type("max_workers", self.max_workers, int)
        _expect_switch("prefetch", self.prefetch)
        if not 1 <= self.max_workers <= MAX_WORKERS_MAX:
            raise ConfigError(
                f"max_workers must be between 1 and {MAX_WORKERS_MAX}, got {self.max_workers}"
            )
        if self.fetch_cooldown is not None:
            _expect_positive("fetch_cooldown", self.fetch_cooldown, allow_zero=True)
        if self.fetch_poll_interval is not None:
            _expect_positive("fetch_poll_interval", self.fetch_poll_interval)


class JobRetention(msgspec.Struct, frozen=True, kw_only=True):
    """How long jobs that ended are kept. None: for ever."""

    cancelled: timedelta | None = RETENTION_DEFAULT
    """Default 24 hours."""
    completed: timedelta | None = RETENTION_DEFAULT
    """Default 24 hours."""
    discarded: timedelta | None = DISCARDED_RETENTION_DEFAULT
    """Default 7 days."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value: timedelta | None = getattr(self, name)
            if value is not None:
                _expect_positive(f"the retention of {name} jobs", value, allow_zero=True)


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a client beyond its database, workers and queues."""

    schema: str | None = None
    """The schema of River's tables. Default: where the connection's search path finds them, as
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
    job_stuck_threshold: timedelta = JOB_STUCK_THRESHOLD_DEFAULT
    """How long a job may go on after it was cancelled, by its timeout or by somebody, until it
    counts as stuck, which is logged. Default 10 s."""
    job_stuck_handler: JobStuckHandler | None = None
    """Told of each stuck job; may give its slot to another by returning True. Default none: it
    keeps its slot."""
    soft_stop_timeout: timedelta | None = SOFT_STOP_TIMEOUT_DEFAULT
    """How long running jobs may go on after a stop was asked for; then they are cancelled.
    Default 30 s; None: for ever."""
    hard_stop_timeout: timedelta = HARD_STOP_TIMEOUT_DEFAULT
    """How long cancelled jobs may take to end and results to be stored. Default 10 s."""
    fetch_poll_interval: timedelta = FETCH_POLL_INTERVAL_DEFAULT
    """How often an idle queue is looked at without a notification. Default 1 s."""
    quiet_interval: timedelta | None = None
    """For a database that should sleep: the least time between two looks of an idle client at
    whether notifications arrive and at what it may have missed of them. Default none: it looks
    each 10 s and 30 s. A listener that falls silent without an end is noticed that much later."""
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
    known_kinds_only: bool = True
    """Claim only jobs of the kinds, and their aliases, that have a worker when the client starts.
    Jobs of other kinds wait unchanged for a client that works them. Default True. False, River's
    default: jobs of every kind are claimed, and an attempt at an unknown kind fails."""
    skip_unknown_job_check: bool = False
    """Let a client with workers insert kinds that it has no worker for. Default False."""
    skip_job_kind_validation: bool = False
    """Accept kinds that break River's rule for their form. Default False."""
    trace_internal: bool = False
    """Let OpenTelemetry's instrumentation of the driver make spans of riverpy's own statements:
    claims, results, heartbeats, leases, maintenance. Default False. Statements of jobs, and of
    inserts and other calls of the program's, have spans in any case."""
    candidate: bool = True
    """Take part in leader election: one client of all that run is the leader and runs maintenance
    for the others. With False this client never inserts its periodic jobs, and warns if it has any.
    Default True."""
    elect_interval: timedelta = ELECT_INTERVAL_DEFAULT
    """How often a leader renews its lease and a follower bids for it. Default 5 s, at least
    100 ms."""
    leader_ttl: timedelta = LEADER_TTL_DEFAULT
    """How long a lease lasts that is not renewed. Default 15 s; at least 2.4 times
    `elect_interval`, and a day at most in a `leader_domain` and of a client that has leases or
    singletons."""
    max_leases: int | None = None
    """How many leases this client holds at once, at most, those of its singletons included: it does
    not bid for more, and `client.lease` stands by. So the processes of a fleet share what each of
    them could hold alone. Default None: any number."""
    leader_domain: str | None = None
    """Which fleet of those that share the tables this client belongs to: each has a leader of its
    own, for the queues that its clients claim. Most need none. Default None: `default`, which all
    belong to that say nothing, and River's clients in Go."""
    domain_queues: Sequence[str] | None = None
    """The queues that this client claims for its `leader_domain`. Default None, or none: those that
    it works."""
    on_domain_conflict: Literal["error", "warn", "takeover"] = "error"
    """What a client does at its start about a queue that another domain has: `error` refuses to
    start, `warn` works it and leaves its maintenance to that domain, `takeover` claims it, and
    refuses to start if the other domain has a client that lives. Default `error`."""
    dead_after: timedelta = DEAD_AFTER_DEFAULT
    """How long a client may give no sign of life until its running jobs are given to others.
    Default one minute, at least 100 ms. A client beats six times as often."""
    rescue_after: timedelta | None = None
    """How old a running job of a client that gives no signs of life (River's in Go, or one that
    works without the line `riverpy`) must be to be rescued. Default None: one hour, longer by
    `job_timeout` where that is set. At least `job_timeout`."""
    retention: JobRetention = msgspec.field(default_factory=JobRetention)
    """How long jobs that ended are kept. Default: completed and cancelled ones 24 hours, discarded
    ones 7 days."""
    retention_by_queue: Mapping[str, JobRetention] = msgspec.field(
        default_factory=dict[str, JobRetention]
    )
    """Another retention for the jobs of these queues. Default none."""
    retention_by_kind: Mapping[str, JobRetention] = msgspec.field(
        default_factory=dict[str, JobRetention]
    )
    """Another retention for the jobs of these kinds, whatever their queue. Default none."""
    hooks: Sequence[Hook] = ()
    """What is called at fixed points in the life of each job and of the client, in this order.
    Default none."""
    middleware: Sequence[Middleware] = ()
    """What is called around inserts and around attempts, the first outermost. Default none."""
    plugins: Sequence[Plugin] = ()
    """Each is used as every hook and middleware whose methods it has, before those of `hooks` and
    `middleware`. Default none."""
    reindexer_schedule: PeriodicSchedule | None = None
    """When the indexes are rebuilt. Default None: daily at midnight, UTC."""
    reindexer_timeout: timedelta | None = REINDEXER_TIMEOUT_DEFAULT
    """How long the rebuild of one index may take. Default one minute; None: for ever."""
    reindexer_index_names: Sequence[str] | None = None
    """Which indexes are rebuilt; empty: none. Default None: River's list."""

    @property
    def domain(self) -> str:
        """The value of `leader_domain`, or `default`."""
        return DEFAULT_DOMAIN if self.leader_domain is None else self.leader_domain

    @property
    def rescue_age(self) -> timedelta:
        """How old a running job must be, since its attempt began, to be rescued by age: the value
        of `rescue_after`; without it one hour, and `job_timeout` more if that is a time other than
        the default."""
        if self.rescue_after is not None:
            return self.rescue_after
        if self.job_timeout is None or self.job_timeout == JOB_TIMEOUT_DEFAULT:
            return RESCUE_AFTER_DEFAULT
        return min(RESCUE_AFTER_DEFAULT + self.job_timeout, DURATION_MAX)

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
        _expect_type("max_attempts", self.max_attempts, int)
        if not 1 <= self.max_attempts <= MAX_ATTEMPTS_MAX:
            raise ConfigError(
                f"max_attempts must be between 1 and {MAX_ATTEMPTS_MAX}, got {self.max_attempts}"
            )
        _expect_type("pool_size", self.pool_size, int)
        if not 1 <= self.pool_size <= 1000:
            raise ConfigError(f"pool_size must be between 1 and 1000, got {self.pool_size}")
        _expect_method("retry_policy", self.retry_policy, "next_retry")
        if is_async(self.retry_policy.next_retry):
            raise ConfigError("retry_policy: next_retry must be a plain function, no `async def`")
        if self.error_handler is not None:
            _expect_method("error_handler", self.error_handler, "handle_error")
        if self.job_stuck_handler is not None:
            _expect_method("job_stuck_handler", self.job_stuck_handler, "handle_stuck")
        _expect_positive("fetch_poll_interval", self.fetch_poll_interval)
        _expect_positive("hard_stop_timeout", self.hard_stop_timeout)
        _expect_positive("job_stuck_threshold", self.job_stuck_threshold)
        if self.job_timeout is not None:
            _expect_positive("job_timeout", self.job_timeout)
        if self.quiet_interval is not None:
            _expect_positive("quiet_interval", self.quiet_interval)
        if self.soft_stop_timeout is not None:
            _expect_positive("soft_stop_timeout", self.soft_stop_timeout, allow_zero=True)
        for name in _SWITCHES:
            _expect_switch(name, getattr(self, name))
        Plugins(self.plugins, self.hooks, self.middleware)  # it checks them
        if self.max_leases is not None:
            _expect_type("max_leases", self.max_leases, int)
            if self.max_leases < 1:
                raise ConfigError(f"max_leases must be 1 or more, or None, got {self.max_leases}")
        self._check_leading()
        self._check_domain()
        self._check_maintenance()

    def _check_leading(self) -> None:
        for name in ("elect_interval", "leader_ttl", "dead_after"):
            value: timedelta = getattr(self, name)
            _expect_type(name, value, timedelta)
            if value < LEADING_LEAST:
                raise ConfigError(f"{name} must be 100 milliseconds or more, got {value}")
            _expect_positive(name, value)
        least = 2 * (1 + ELECT_JITTER_SHARE) * self.elect_interval
        if self.leader_ttl < least:
            raise ConfigError(
                f"leader_ttl must be at least 2.4 times elect_interval, so that a renewal may fail "
                f"once: with elect_interval {self.elect_interval} at least {least}, got "
                f"{self.leader_ttl}"
            )

    def _check_domain(self) -> None:
        _expect_type("leader_domain", self.domain, str)
        validate_domain(self.domain)
        queues = self.domain_queues
        if queues is not None and not _are_names(queues):
            raise ConfigError(f"domain_queues must be a list of names of queues, got {queues!r}")
        for queue in queues or ():
            validate_queue(queue)
        if queues and self.domain == DEFAULT_DOMAIN:
            raise ConfigError(
                "domain_queues are claimed for a leader_domain: set it, or leave them out; the "
                "domain `default` has every queue that no other has claimed"
            )
        if self.domain != DEFAULT_DOMAIN and self.leader_ttl > LEASE_TTL_MAX:
            raise ConfigError(
                f"leader_ttl must be {LEASE_TTL_MAX} or less in a leader_domain, got "
                f"{self.leader_ttl}"
            )
        if self.on_domain_conflict not in _CONFLICT_POLICIES:
            raise ConfigError(
                "on_domain_conflict must be 'error', 'warn' or 'takeover', got "
                f"{self.on_domain_conflict!r}"
            )

    def _check_maintenance(self) -> None:
        if self.rescue_after is not None:
            _expect_positive("rescue_after", self.rescue_after)
            if self.job_timeout is not None and self.rescue_after < self.job_timeout:
                raise ConfigError(
                    f"rescue_after must be at least job_timeout ({self.job_timeout}), got "
                    f"{self.rescue_after}"
                )
        if self.reindexer_timeout is not None:
            _expect_positive("reindexer_timeout", self.reindexer_timeout)
        _expect_type("retention", self.retention, JobRetention)
        _check_retentions("retention_by_queue", self.retention_by_queue, validate_queue)
        _check_retentions("retention_by_kind", self.retention_by_kind, validate_kind)
        names = self.reindexer_index_names
        if names is not None and not _are_names(names):
            raise ConfigError(
                f"reindexer_index_names must be a list of names of indexes, got {names!r}"
            )
        if self.reindexer_schedule is not None:
            _check_schedule(self.reindexer_schedule)

    def __repr__(self) -> str:
        values = ((name, getattr(self, name)) for name in self.__struct_fields__)
        shown = (
            f"{name}={(mask_url(value) if name == 'listen_url' and value else value)!r}"
            for name, value in values
        )
        return f"{type(self).__name__}({', '.join(shown)})"


def check_queues(queues: Mapping[str, QueueConfig]) -> None:
    """Raise ConfigError unless these are settings of queues by their names."""
    if not isinstance(queues, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"queues must map names to settings, as in {_QUEUES_FORM}, got {type(queues).__name__}"
        )
    for queue, config in queues.items():
        validate_queue(queue)
        if not isinstance(config, QueueConfig):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"queue {queue!r} takes a QueueConfig, as in {_QUEUES_FORM}, got "
                f"{type(config).__name__}"
            )


def _check_retentions(
    field: str, values: Mapping[str, JobRetention], validate: Callable[[str], None]
) -> None:
    _expect_type(field, values, Mapping)
    for name, retention in values.items():
        validate(name)
        _expect_type(f"{field}[{name!r}]", retention, JobRetention)


def _check_schedule(schedule: PeriodicSchedule) -> None:
    try:
        first = next_time(schedule, datetime.now(UTC))
    except Exception as error:
        raise ConfigError(
            f"reindexer_schedule must be a schedule, as cron(…) and every(…) make: {error}"
        ) from error
    if first is None:
        raise ConfigError(
            "reindexer_schedule never comes; to rebuild nothing, let reindexer_index_names be empty"
        )


def _are_names(values: object) -> bool:
    if isinstance(values, str) or not isinstance(values, Iterable):
        return False
    return all(map(_is_name, cast("Iterable[object]", values)))


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value != "" and "\0" not in value


def _expect_type(name: str, value: object, expected: type[Any]) -> None:
    if not isinstance(value, expected) or isinstance(value, bool):
        hint = f": timedelta(seconds={value})" if _is_seconds(value, expected) else ""
        raise ConfigError(f"{name} must be {expected.__name__}, got {type(value).__name__}{hint}")


def _is_seconds(value: object, expected: type[Any]) -> bool:
    return expected is timedelta and type(value) in {int, float}


def _expect_method(name: str, value: object, method: str) -> None:
    if isinstance(value, type):
        raise ConfigError(f"{name} takes an object, got the class {value.__name__}: call it")
    if not callable(getattr(value, method, None)):
        raise ConfigError(
            f"{name} must be an object with a method {method}, got {type(value).__name__}"
        )


def _expect_switch(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, got {value!r}")


def _expect_positive(name: str, value: timedelta, *, allow_zero: bool = False) -> None:
    _expect_type(name, value, timedelta)
    if value < timedelta(0) or (not allow_zero and value < timedelta(milliseconds=1)):
        least = "zero" if allow_zero else "one millisecond"
        raise ConfigError(f"{name} must be {least} or more, got {value}")
    if value > DURATION_MAX:
        raise ConfigError(f"{name} must be {DURATION_MAX.days} days or less, got {value}")
