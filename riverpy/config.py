"""The settings of a client. Their values are checked when a `Config` is created."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypeAlias, TypedDict, cast

import msgspec
from msgspec import UnsetType

from riverpy._dsn import mask_passwords, validate_url
from riverpy._names import (
    DEFAULT_DOMAIN,
    validate_client_id,
    validate_domain_name,
    validate_kind,
    validate_literal_value,
    validate_queue_name,
    validate_schema_name,
)
from riverpy._plugins import PluginLists, is_async_function
from riverpy.errors import ConfigError
from riverpy.hooks import Hook
from riverpy.insert_opts import MAX_ATTEMPTS_DEFAULT, MAX_ATTEMPTS_MAX
from riverpy.middleware import Middleware, Plugin
from riverpy.retry import DefaultRetryPolicy, ErrorHandler, JobStuckHandler, RetryPolicy
from riverpy.schedules import PeriodicSchedule, find_next_due_time

MAX_WORKERS_MAX = 10_000
MAX_PROCESSES_MAX = 1000
_QUEUES_EXAMPLE = 'queues={"default": QueueConfig(max_workers=100)}'
SETTING_DURATION_MAX = timedelta(days=365_000)
"""The maximum value of a setting that is a duration. With a longer duration, a time that is
computed from it could be later than PostgreSQL can store."""
REINDEXER_INDEX_NAMES_DEFAULT = (
    "river_job_args_index",
    "river_job_kind",
    "river_job_metadata_index",
    "river_job_pkey",
    "river_job_prioritized_fetching_index",
    "river_job_state_and_finalized_at_index",
    "river_job_unique_idx",
)
"""The indexes of the table `river_job` that River rebuilds by default."""
DomainConflictPolicy: TypeAlias = Literal["error", "warn", "takeover"]
JOB_TIMEOUT_DEFAULT = timedelta(minutes=1)
SOFT_STOP_TIMEOUT_DEFAULT = timedelta(seconds=30)
HARD_STOP_TIMEOUT_DEFAULT = timedelta(seconds=10)
LEASE_TTL_MAX = timedelta(days=1)
"""The maximum time for which a lease in riverpy's own table lasts without a renewal."""
LEASE_DURATION_MIN = timedelta(milliseconds=100)
"""The minimum value of a duration for leases and heartbeats. If it were shorter, a slow round trip
or a busy event loop would make a leader lose its lease."""
_ZERO_MINIMUM = (timedelta(0), "zero")  # a minimum, and its text in errors
_MILLISECOND_MINIMUM = (timedelta(milliseconds=1), "one millisecond")
_LEADER_MINIMUM = (LEASE_DURATION_MIN, "100 milliseconds")
_MINIMUM_BY_SETTING = {
    "fetch_cooldown": _ZERO_MINIMUM,
    "soft_stop_timeout": _ZERO_MINIMUM,
    "elect_interval": _LEADER_MINIMUM,
    "leader_ttl": _LEADER_MINIMUM,
    "dead_after": _LEADER_MINIMUM,
}
"""The minimum values of some durations. The minimum of all other durations is
`_MILLISECOND_MINIMUM`."""
_MAXIMUM_BY_SETTING = {
    "max_workers": MAX_WORKERS_MAX,
    "max_attempts": MAX_ATTEMPTS_MAX,
    "pool_size": 1000,
    "max_processes": MAX_PROCESSES_MAX,
}
"""The maximum values of settings that are numbers. Their minimum is 1."""
ELECT_JITTER_FRACTION = 0.2
"""A client repeats its attempt to become leader after at most `elect_interval` plus a random time.
This is the maximum of the random time, as a fraction of `elect_interval`."""
RESCUE_AFTER_DEFAULT = timedelta(hours=1)
JOB_RETENTION_DEFAULT = timedelta(hours=24)


class QueueConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings for one queue of a client."""

    max_workers: int = 100
    """The number of slots, i.e. how many jobs of the queue run at the same time: 1 to 10,000.
    Default 100."""
    fetch_cooldown: timedelta | None = None
    """The minimum time between two claims. Default None: there is no minimum."""
    fetch_poll_interval: timedelta | None = None
    """How often the client polls the queue while it is idle. Default None: the value of
    `fetch_poll_interval` in `Config`."""
    prefetch: bool = False
    """Claim a few jobs before slots are free. This is only done if jobs are so short that slots
    would otherwise wait for the database. Default False. A claimed job that waits for a slot is
    already `running` in the database, so more than `max_workers` jobs can be `running`. It waits at
    most 50 ms. After that, or at a stop or pause, the job becomes available again, and the attempt
    does not count towards `max_attempts`. `attempted_at` is the time of the claim. The job's
    timeout starts when its code starts."""

    def __post_init__(self) -> None:
        _check_types_and_limits(self)


class JobRetention(msgspec.Struct, frozen=True, kw_only=True):
    """How long jobs are kept after they have ended. None: forever."""

    cancelled: timedelta | None = JOB_RETENTION_DEFAULT
    """How long a cancelled job is kept. Default 24 hours."""
    completed: timedelta | None = JOB_RETENTION_DEFAULT
    """How long a completed job is kept. Default 24 hours."""
    discarded: timedelta | None = timedelta(days=7)
    """How long a discarded job is kept. Default 7 days."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value: timedelta | None = getattr(self, name)
            if value is not None:
                _check_duration(f"the retention of {name} jobs", value, _ZERO_MINIMUM)


class ConfigChanges(TypedDict, total=False):
    """The settings of `Config` that `Client.configure` can change. UNSET leaves a setting
    unchanged."""

    schema: str | UnsetType | None
    name: str | UnsetType | None
    poll_only: bool | UnsetType
    known_kinds_only: bool | UnsetType
    soft_stop_timeout: timedelta | UnsetType | None
    max_processes: int | UnsetType | None
    candidate: bool | UnsetType
    leader_domain: str | UnsetType | None
    domain_queues: Sequence[str] | UnsetType | None
    on_domain_conflict: DomainConflictPolicy | UnsetType
    elect_interval: timedelta | UnsetType
    leader_ttl: timedelta | UnsetType
    max_leases: int | UnsetType | None
    spread_leases: bool | UnsetType
    dead_after: timedelta | UnsetType


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a client, except for its database, workers and queues."""

    schema: str | None = None
    """The schema of River's tables. Default None: the first schema in the search path that has
    these tables."""
    id: str | None = None
    """The id of the client, at most 100 characters. Each running client needs its own id. Default
    None: the generated id `NAME:PID:RANDOM`."""
    name: str | None = None
    """The NAME part of the generated id. Default None: the host name."""
    job_timeout: timedelta | None = JOB_TIMEOUT_DEFAULT
    """How long an attempt may run. A worker or a job can override this. Default 1 minute. None: no
    limit."""
    max_attempts: int = MAX_ATTEMPTS_DEFAULT
    """The maximum number of attempts of an inserted job, 1 to 32,767. The args class or the options
    of an insert can override it. Default 25."""
    clock: Callable[[], datetime] | None = None
    """A function that returns the current time, with a time zone. It is called at an insert to
    choose the period of a job with `UniqueOpts(by_period=...)`. Tests can set it, for example to
    `riverpy.testing.FixedClock()`. For all other times, the clock of the server is used. Default
    None: the system clock of this process."""
    retry_policy: RetryPolicy = msgspec.field(default_factory=DefaultRetryPolicy)
    """Decides when a failed job is retried. Default: n^4 seconds after failure number n, with 10 %
    jitter."""
    error_handler: ErrorHandler | None = None
    """Is called after each failed attempt. It can cancel the job. Default None: no handler."""
    job_stuck_threshold: timedelta = timedelta(seconds=10)
    """How long a job may keep running after it was cancelled. If it is still running after this
    time, it is stuck, and this is logged. Default 10 seconds."""
    job_stuck_handler: JobStuckHandler | None = None
    """Is called for each stuck job. It can free the slot of the job. Default None: a stuck job
    keeps its slot."""
    soft_stop_timeout: timedelta | None = SOFT_STOP_TIMEOUT_DEFAULT
    """How long running jobs may continue after a stop request. Then they are cancelled. Default 30
    seconds. None: no limit."""
    hard_stop_timeout: timedelta = HARD_STOP_TIMEOUT_DEFAULT
    """How long a stop waits until cancelled jobs have ended and results are stored. Default 10
    seconds."""
    max_processes: int | None = None
    """How many jobs with `executor="process"` run at the same time in this client, 1 to 1,000. More
    such jobs wait for a process. Their timeout does not run while they wait. Default None: the
    number of CPU cores that this process may use."""
    fetch_poll_interval: timedelta = timedelta(seconds=1)
    """How often the client polls an idle queue. Default 1 second."""
    quiet_interval: timedelta | None = None
    """The minimum time between two checks for lost notifications while the client is idle. Set this
    for a database server that stops when it is not used, because the checks would keep it running.
    The client may then take this long to detect that it no longer receives notifications. Default
    None: the client checks every 10 seconds whether notifications arrive, and reads what it may
    have missed every 30 seconds."""
    poll_only: bool = False
    """Find jobs only by polling, without LISTEN. Default False."""
    pooler: bool = False
    """Whether the database URL is the address of a connection pooler in transaction mode, such as
    PgBouncer. Default False."""
    listen_url: str | None = None
    """The URL for the connection that receives notifications. It must not lead through a pooler.
    Default None: the database URL."""
    pool_size: int = 10
    """The maximum number of connections in the pool for inserts and other calls, 1 to 1,000.
    Default 10."""
    durable_claims: bool = False
    """Wait until each claim is on the disk of the server. Default False: if the server crashes, a
    job that was claimed just before the crash may run twice, but only one result is stored."""
    insert_notify: bool = True
    """Whether inserts notify workers of new jobs. If False, workers find new jobs at their next
    poll. Default True."""
    known_kinds_only: bool = True
    """Claim only jobs whose kind had a worker when the client started; the aliases of a kind count
    too. Jobs of other kinds stay in the queue for other clients. Default True. If False, jobs of
    all kinds are claimed, as in River, and attempts of unknown kinds fail."""
    skip_unknown_job_check: bool = False
    """Whether a client with workers may insert jobs of kinds for which it has no worker. Default
    False."""
    skip_job_kind_validation: bool = False
    """Whether kinds are allowed that do not match River's pattern for names of kinds. Default
    False."""
    trace_internal: bool = False
    """Whether OpenTelemetry's instrumentation of asyncpg creates spans for riverpy's own
    statements, such as claims, results, heartbeats and maintenance. Default False. Statements of
    jobs, inserts and other calls always have spans."""
    candidate: bool = True
    """Whether this client takes part in leader election. One client is the leader and runs
    maintenance for all. If False, this client never inserts its periodic jobs, and logs a warning
    if it has any. Default True."""
    elect_interval: timedelta = timedelta(seconds=5)
    """How often the leader renews its lease, and how often other clients try to acquire it. At
    least 100 ms. Default 5 seconds."""
    leader_ttl: timedelta = timedelta(seconds=15)
    """How long a lease lasts without a renewal. At least 2.4 times `elect_interval`. At most one
    day if the client uses a `leader_domain`, leases or singletons. Default 15 seconds."""
    max_leases: int | None = None
    """The maximum number of leases that this client holds at the same time, including the leases of
    singletons (functions that run in only one process at a time). At the limit, the client acquires
    no further lease, and `client.lease` waits. Use this to spread leases over processes. Default
    None: no limit."""
    spread_leases: bool = False
    """Hand singletons over to clients that run fewer of them, for example because they have started
    later. Default False: a client keeps its singletons. Needs version 8 of the migration line
    `riverpy`.

    The share of each client is the number of running singletons, divided by the number of clients
    that run a singleton or wait for one, rounded up. For example, the share is 3 with 5 singletons
    and 2 clients. A client that runs more singletons than its share hands one of them over to a
    client that waits for it and runs at least two singletons fewer. For this, the first client
    cancels the function of the singleton, and then the other client runs it. A client hands over at
    most one singleton in each `leader_ttl`.
    """
    leader_domain: str | None = None
    """The leader domain of this client, i.e. a group of clients and queues with its own leader. The
    leader maintains the queues that its domain has claimed. Default None: the domain `default`,
    which also has all clients of River in Go. Most deployments need no other domain."""
    domain_queues: Sequence[str] | None = None
    """The queues that this client claims for its `leader_domain`. Default None: all queues that it
    works."""
    on_domain_conflict: DomainConflictPolicy = "error"
    """What the client does at its start if a queue belongs to another domain. "error": refuse to
    start. "warn": work the queue, but leave its maintenance to the other domain. "takeover": claim
    the queue, but refuse to start if the other domain has a live client. Default "error"."""
    dead_after: timedelta = timedelta(minutes=1)
    """The time without a heartbeat after which this client counts as dead and its running jobs are
    rescued. A client sends six heartbeats in this time. At least 100 ms. Default 1 minute."""
    rescue_after: timedelta | None = None
    """The run time after which a job is rescued if its client sends no heartbeats. Clients in Go
    send none, and neither do Python clients if the migration line `riverpy` (riverpy's own tables)
    is not applied to the database. At least `job_timeout`. Default None: 1 hour, plus `job_timeout`
    if that is set to a value other than its default."""
    retention: JobRetention = msgspec.field(default_factory=JobRetention)
    """How long jobs are kept after they have ended. Default: cancelled and completed jobs 24 hours,
    discarded jobs 7 days."""
    retention_by_queue: Mapping[str, JobRetention] = msgspec.field(
        default_factory=dict[str, JobRetention]
    )
    """The retention of the jobs of single queues, by the name of the queue. It overrides
    `retention`. Default empty."""
    retention_by_kind: Mapping[str, JobRetention] = msgspec.field(
        default_factory=dict[str, JobRetention]
    )
    """The retention of the jobs of single kinds, by the kind. It overrides `retention` and
    `retention_by_queue`. Default empty."""
    hooks: Sequence[Hook] = ()
    """The hooks for all jobs. They are called in this order. Default empty."""
    middleware: Sequence[Middleware] = ()
    """The middleware for all inserts and attempts. The first one is the outermost. Default
    empty."""
    plugins: Sequence[Plugin] = ()
    """Objects that have methods of hooks, of middleware or of both. Their methods are called before
    those of `hooks` and `middleware`. Default empty."""
    reindexer_schedule: PeriodicSchedule | None = None
    """When the leader rebuilds the indexes. Default None: every day at midnight UTC."""
    reindexer_timeout: timedelta | None = timedelta(minutes=1)
    """How long rebuilding one index may take. Default 1 minute. None: no limit."""
    reindexer_index_names: Sequence[str] = REINDEXER_INDEX_NAMES_DEFAULT
    """The names of the indexes that are rebuilt. If it is empty, none is rebuilt. Default: the
    indexes that River rebuilds. To add an index: `[*Config().reindexer_index_names,
    "my_index"]`."""

    @property
    def domain(self) -> str:
        """The name of the leader domain: the value of `leader_domain`, or `default` if that is
        None."""
        return DEFAULT_DOMAIN if self.leader_domain is None else self.leader_domain

    @property
    def rescue_age(self) -> timedelta:
        """The run time after which a job is rescued if its client sends no heartbeats. It is
        `rescue_after` if that is set, otherwise 1 hour. If `job_timeout` is set to a value other
        than its default, it is added to the hour."""
        if self.rescue_after is not None:
            return self.rescue_after
        if self.job_timeout is None or self.job_timeout == JOB_TIMEOUT_DEFAULT:
            return RESCUE_AFTER_DEFAULT
        return min(RESCUE_AFTER_DEFAULT + self.job_timeout, SETTING_DURATION_MAX)

    def __post_init__(self) -> None:
        _check_types_and_limits(self)
        if self.schema is not None:
            validate_schema_name(self.schema)
        if self.id is not None:
            validate_client_id(self.id)
        if self.name is not None:
            validate_client_id(self.name)
        if self.listen_url is not None:
            _check_type("listen_url", self.listen_url, str)
            validate_url(self.listen_url)
        if self.clock is not None and not callable(self.clock):
            raise ConfigError(
                f"clock must be a function that returns a time, got {type(self.clock).__name__}"
            )
        _check_method("retry_policy", self.retry_policy, "next_retry")
        if is_async_function(self.retry_policy.next_retry):
            raise ConfigError(
                "retry_policy: next_retry must be a plain function, not an `async def`"
            )
        if self.error_handler is not None:
            _check_method("error_handler", self.error_handler, "handle_error")
        if self.job_stuck_handler is not None:
            _check_method("job_stuck_handler", self.job_stuck_handler, "handle_stuck")
        PluginLists(self.plugins, self.hooks, self.middleware)  # the constructor checks the objects
        if self.max_leases is not None and self.max_leases < 1:
            raise ConfigError(f"max_leases must be 1 or more, or None, got {self.max_leases}")
        self._check_leader_settings()
        self._check_maintenance_settings()

    def _check_leader_settings(self) -> None:
        _check_type("leader_domain", self.domain, str)
        validate_domain_name(self.domain)
        queues = self.domain_queues
        if queues is not None and not _is_list_of_names(queues):
            raise ConfigError(f"domain_queues must be a list of queue names, got {queues!r}")
        for queue in queues or ():
            validate_queue_name(queue)
        validate_literal_value("on_domain_conflict", self.on_domain_conflict, DomainConflictPolicy)
        faults = find_leader_setting_faults(msgspec.structs.asdict(self))
        if faults:
            raise ConfigError("; ".join(faults))

    def _check_maintenance_settings(self) -> None:
        rescue_after, job_timeout = self.rescue_after, self.job_timeout
        if rescue_after is not None and job_timeout is not None and rescue_after < job_timeout:
            raise ConfigError(
                f"rescue_after must be at least job_timeout ({job_timeout}), got {rescue_after}"
            )
        _check_type("retention", self.retention, JobRetention)
        _check_retentions("retention_by_queue", self.retention_by_queue, validate_queue_name)
        _check_retentions("retention_by_kind", self.retention_by_kind, validate_kind)
        names = self.reindexer_index_names
        if not _is_list_of_names(names):
            raise ConfigError(f"reindexer_index_names must be a list of index names, got {names!r}")
        if self.reindexer_schedule is not None:
            _check_reindexer_schedule(self.reindexer_schedule)

    def __repr__(self) -> str:
        text = super().__repr__()
        if self.listen_url is None:
            return text
        return text.replace(repr(self.listen_url), repr(mask_passwords(self.listen_url)))


def find_leader_setting_faults(
    settings: Mapping[str, Any],
    name_setting: Callable[[str], str] = str,
    format_time: Callable[[timedelta], str] = str,
) -> list[str]:
    """Return a text for each rule that a combination of these values breaks. Each single value must
    already be valid.

    Args:
        settings: the values of `elect_interval`, `leader_ttl`, `leader_domain` and `domain_queues`,
            or of some of them. A rule is checked only if all values that it needs are present.
        name_setting: returns the name of a setting for the text.
        format_time: returns the text of a duration.
    """
    faults: list[str] = []
    interval, ttl = settings.get("elect_interval"), settings.get("leader_ttl")
    if interval is not None and ttl is not None:
        minimum = 2 * (1 + ELECT_JITTER_FRACTION) * interval
        if ttl < minimum:
            faults.append(
                f"{name_setting('leader_ttl')} must be at least 2.4 times "
                f"{name_setting('elect_interval')}, so one renewal may fail: at least "
                f"{format_time(minimum)} with {format_time(interval)}, got {format_time(ttl)}"
            )
    if "leader_domain" not in settings:
        return faults
    is_default_domain = settings["leader_domain"] in {None, DEFAULT_DOMAIN}
    if is_default_domain and settings.get("domain_queues"):
        faults.append(
            f"{name_setting('domain_queues')} requires {name_setting('leader_domain')}: set it, or "
            "remove the queues. The domain `default` has every queue that no other domain has "
            "claimed"
        )
    if not is_default_domain and ttl is not None and ttl > LEASE_TTL_MAX:
        faults.append(
            f"{name_setting('leader_ttl')} must be {format_time(LEASE_TTL_MAX)} or less with "
            f"{name_setting('leader_domain')}, got {format_time(ttl)}"
        )
    return faults


def check_queues(queues: Mapping[str, QueueConfig]) -> None:
    """Check that `queues` maps names of queues to QueueConfigs. Raise ConfigError if not."""
    if not isinstance(queues, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"queues must map names to QueueConfigs, as in {_QUEUES_EXAMPLE}, got "
            f"{type(queues).__name__}"
        )
    for queue, config in queues.items():
        validate_queue_name(queue)
        if not isinstance(config, QueueConfig):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"queue {queue!r} must have a QueueConfig, as in {_QUEUES_EXAMPLE}, got "
                f"{type(config).__name__}"
            )


def _check_retentions(
    setting: str, retentions: Mapping[str, JobRetention], validate_name: Callable[[str], None]
) -> None:
    _check_type(setting, retentions, Mapping)
    for name, retention in retentions.items():
        validate_name(name)
        _check_type(f"{setting}[{name!r}]", retention, JobRetention)


def _check_reindexer_schedule(schedule: PeriodicSchedule) -> None:
    try:
        first = find_next_due_time(schedule, datetime.now(UTC))
    except Exception as error:
        raise ConfigError(
            f"reindexer_schedule must be a schedule, such as cron(…) or every(…): {error}"
        ) from error
    if first is None:
        raise ConfigError(
            "reindexer_schedule has no time in the future; to rebuild nothing, set "
            "reindexer_index_names=[]"
        )


def _is_list_of_names(values: object) -> bool:
    if isinstance(values, str) or not isinstance(values, Iterable):
        return False
    names = cast("Iterable[object]", values)
    return all(isinstance(name, str) and name != "" and "\0" not in name for name in names)


def _check_type(name: str, value: object, expected: type[Any]) -> None:
    if not isinstance(value, expected) or isinstance(value, bool):
        is_seconds = expected is timedelta and type(value) in {int, float}
        hint = f": timedelta(seconds={value})" if is_seconds else ""
        raise ConfigError(f"{name} must be {expected.__name__}, got {type(value).__name__}{hint}")


def _check_method(name: str, value: object, method_name: str) -> None:
    if isinstance(value, type):
        raise ConfigError(f"{name} takes an object, got the class {value.__name__}: call it")
    if not callable(getattr(value, method_name, None)):
        raise ConfigError(
            f"{name} must be an object with a method {method_name}, got {type(value).__name__}"
        )


def _check_duration(name: str, value: timedelta, minimum: tuple[timedelta, str]) -> None:
    _check_type(name, value, timedelta)
    shortest, text = minimum
    if value < shortest:
        raise ConfigError(f"{name} must be {text} or more, got {value}")
    if value > SETTING_DURATION_MAX:
        raise ConfigError(f"{name} must be {SETTING_DURATION_MAX.days} days or less, got {value}")


def _check_types_and_limits(settings: QueueConfig | Config) -> None:
    """Check all fields whose annotation is a bool, a number or a duration. Raise ConfigError if a
    value is not allowed."""
    for name, annotation in type(settings).__annotations__.items():
        type_name = annotation.removesuffix(" | None")
        if type_name != annotation and getattr(settings, name) is None:
            continue
        value: Any = getattr(settings, name)
        if type_name == "timedelta":
            _check_duration(name, value, _MINIMUM_BY_SETTING.get(name, _MILLISECOND_MINIMUM))
        elif type_name == "int":
            _check_type(name, value, int)
            maximum = _MAXIMUM_BY_SETTING.get(name)
            if maximum is not None and not 1 <= value <= maximum:
                raise ConfigError(f"{name} must be between 1 and {maximum}, got {value}")
        elif type_name == "bool" and not isinstance(value, bool):
            raise ConfigError(f"{name} must be True or False, got {value!r}")
