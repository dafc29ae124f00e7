"""riverpy: the River job queue for asyncio Python on PostgreSQL."""

from __future__ import annotations

from riverpy._cluster.leadership import LeadershipSubscription
from riverpy._lifecycle import StopCause
from riverpy._work.run import StopReport
from riverpy._work.subscriptions import Subscription
from riverpy.client import Client
from riverpy.config import Config, JobRetention, QueueConfig
from riverpy.context import current_job
from riverpy.errors import (
    ArgsError,
    ClientStateError,
    ConfigError,
    DatabaseError,
    FencedOutError,
    InsertError,
    JobCancel,
    JobSnooze,
    MigrationError,
    NotFoundError,
    RiverError,
    SchemaMissingError,
    ServerVersionError,
    TransactionError,
    UniqueConflictError,
    UnknownJobKindError,
)
from riverpy.events import Event, EventKind, JobStatistics, LeadershipChange
from riverpy.insert_opts import InsertManyParams, InsertOpts, InsertResult, Unique, UniqueOpts
from riverpy.job import AttemptError, Job, JobArgs, JobRow, JobState, RawArgs
from riverpy.migrate import Migrator
from riverpy.periodic import (
    PeriodicJob,
    PeriodicJobs,
    PeriodicJobsStart,
    PeriodicJobState,
    PeriodicSchedule,
    cron,
    every,
)
from riverpy.queue import Queue
from riverpy.retry import DefaultRetryPolicy, ErrorHandler, RetryPolicy
from riverpy.stats import ClientStats, Histogram, KindStats, QueueStats
from riverpy.stuck import JobStuckHandler, StuckJob
from riverpy.worker import Worker, Workers

__all__ = [
    "ArgsError",
    "AttemptError",
    "Client",
    "ClientStateError",
    "ClientStats",
    "Config",
    "ConfigError",
    "DatabaseError",
    "DefaultRetryPolicy",
    "ErrorHandler",
    "Event",
    "EventKind",
    "FencedOutError",
    "Histogram",
    "InsertError",
    "InsertManyParams",
    "InsertOpts",
    "InsertResult",
    "Job",
    "JobArgs",
    "JobCancel",
    "JobRetention",
    "JobRow",
    "JobSnooze",
    "JobState",
    "JobStatistics",
    "JobStuckHandler",
    "KindStats",
    "LeadershipChange",
    "LeadershipSubscription",
    "MigrationError",
    "Migrator",
    "NotFoundError",
    "PeriodicJob",
    "PeriodicJobState",
    "PeriodicJobs",
    "PeriodicJobsStart",
    "PeriodicSchedule",
    "Queue",
    "QueueConfig",
    "QueueStats",
    "RawArgs",
    "RetryPolicy",
    "RiverError",
    "SchemaMissingError",
    "ServerVersionError",
    "StopCause",
    "StopReport",
    "StuckJob",
    "Subscription",
    "TransactionError",
    "Unique",
    "UniqueConflictError",
    "UniqueOpts",
    "UnknownJobKindError",
    "Worker",
    "Workers",
    "cron",
    "current_job",
    "every",
]
