"""The public names of riverpy. The package `riverpy` imports this module when a program first uses
a public name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._current_client import current_client
from riverpy._fleet.subscription import FleetSubscription
from riverpy._fleet.watch import JobWatch
from riverpy._leading.subscriptions import LeadershipSubscription
from riverpy._leading.term_fence import LeaderTerm
from riverpy._lifecycle import StopCause
from riverpy._postgres.sessions.protocols import CallerTransaction as Transaction
from riverpy._work.stop import StopReport
from riverpy._work.subscriptions import Subscription
from riverpy.attempt_log import AttemptLog
from riverpy.client import Client
from riverpy.config import Config, JobRetention, QueueConfig
from riverpy.context import current_job
from riverpy.errors import (
    ArgsError,
    AttemptLostError,
    ClientIdInUseError,
    ClientStateError,
    ConfigError,
    DatabaseError,
    DomainConflictError,
    FencedOutError,
    InsertError,
    JobCancel,
    JobDamagedError,
    JobRunningError,
    JobSnooze,
    LeaseLostError,
    MigrationError,
    NotFoundError,
    QueueAlreadyAddedError,
    QueueNotFoundError,
    ReturnedValueError,
    RiverError,
    SchemaMissingError,
    ServerVersionError,
    StepError,
    TransactionError,
    UniqueConflictError,
    UnknownJobKindError,
)
from riverpy.events import (
    Event,
    EventKind,
    FleetEventKind,
    JobChange,
    JobChangeKind,
    JobStatistics,
    LeadershipChange,
    LeaseChange,
    LeaseEventKind,
    LeaseUse,
)
from riverpy.executions import Claim, Execution, ExecutionState
from riverpy.hooks import (
    Hook,
    HookInsertBegin,
    HookInsertBeginFunc,
    HookMetricEmit,
    HookMetricEmitFunc,
    HookPeriodicJobsStart,
    HookPeriodicJobsStartFunc,
    HookWorkBegin,
    HookWorkBeginFunc,
    HookWorkEnd,
    HookWorkEndFunc,
    JobGetAvailableCount,
    JobGetAvailableDuration,
    Metric,
)
from riverpy.insert_opts import (
    InsertManyParams,
    InsertOpts,
    InsertResult,
    JobInsertParams,
    ReplaceOpts,
    Unique,
    UniqueOpts,
)
from riverpy.job import AttemptError, CancelFlag, Job, JobArgs, JobRow, JobState, RawArgs
from riverpy.job_list import JobChanges, JobFilters, JobOrder, JobPage
from riverpy.job_output import JobOutput
from riverpy.job_result import JobNotCompletedError, OutputError, WaitTimeoutError, result
from riverpy.middleware import (
    InsertInner,
    JobInsertMiddleware,
    JobInsertMiddlewareFunc,
    Middleware,
    Plugin,
    WorkerMiddleware,
    WorkerMiddlewareFunc,
    WorkInner,
)
from riverpy.periodic import PeriodicJob, PeriodicJobs, PeriodicJobsStart, PeriodicJobState
from riverpy.progress import JobProgress
from riverpy.queue import Queue
from riverpy.queues import ClientQueues, QueueRemoval
from riverpy.retry import DefaultRetryPolicy, ErrorHandler, JobStuckHandler, RetryPolicy, StuckJob
from riverpy.schedules import PeriodicSchedule, cron, every, never
from riverpy.stats import (
    ClientStats,
    Histogram,
    KindStats,
    LeaseLag,
    LeaseStats,
    QueueStats,
    SingletonStats,
)
from riverpy.worker import Worker, Workers

if TYPE_CHECKING:
    from riverpy.leases import Lease, LeaseManager, MemoryLeases, MemoryTransaction
    from riverpy.migrate import Migrator
else:

    def __getattr__(name):
        """Import a public name that few programs use, such as `Migrator`, and return its value."""
        if name == "Migrator":
            from riverpy.migrate import Migrator as value
        elif name in {"Lease", "LeaseManager", "MemoryLeases", "MemoryTransaction"}:
            from riverpy import leases

            value = getattr(leases, name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


__all__ = [
    "ArgsError",
    "AttemptError",
    "AttemptLog",
    "AttemptLostError",
    "CancelFlag",
    "Claim",
    "Client",
    "ClientIdInUseError",
    "ClientQueues",
    "ClientStateError",
    "ClientStats",
    "Config",
    "ConfigError",
    "DatabaseError",
    "DefaultRetryPolicy",
    "DomainConflictError",
    "ErrorHandler",
    "Event",
    "EventKind",
    "Execution",
    "ExecutionState",
    "FencedOutError",
    "FleetEventKind",
    "FleetSubscription",
    "Histogram",
    "Hook",
    "HookInsertBegin",
    "HookInsertBeginFunc",
    "HookMetricEmit",
    "HookMetricEmitFunc",
    "HookPeriodicJobsStart",
    "HookPeriodicJobsStartFunc",
    "HookWorkBegin",
    "HookWorkBeginFunc",
    "HookWorkEnd",
    "HookWorkEndFunc",
    "InsertError",
    "InsertInner",
    "InsertManyParams",
    "InsertOpts",
    "InsertResult",
    "Job",
    "JobArgs",
    "JobCancel",
    "JobChange",
    "JobChangeKind",
    "JobChanges",
    "JobDamagedError",
    "JobFilters",
    "JobGetAvailableCount",
    "JobGetAvailableDuration",
    "JobInsertMiddleware",
    "JobInsertMiddlewareFunc",
    "JobInsertParams",
    "JobNotCompletedError",
    "JobOrder",
    "JobOutput",
    "JobPage",
    "JobProgress",
    "JobRetention",
    "JobRow",
    "JobRunningError",
    "JobSnooze",
    "JobState",
    "JobStatistics",
    "JobStuckHandler",
    "JobWatch",
    "KindStats",
    "LeaderTerm",
    "LeadershipChange",
    "LeadershipSubscription",
    "Lease",
    "LeaseChange",
    "LeaseEventKind",
    "LeaseLag",
    "LeaseLostError",
    "LeaseManager",
    "LeaseStats",
    "LeaseUse",
    "MemoryLeases",
    "MemoryTransaction",
    "Metric",
    "Middleware",
    "MigrationError",
    "Migrator",
    "NotFoundError",
    "OutputError",
    "PeriodicJob",
    "PeriodicJobState",
    "PeriodicJobs",
    "PeriodicJobsStart",
    "PeriodicSchedule",
    "Plugin",
    "Queue",
    "QueueAlreadyAddedError",
    "QueueConfig",
    "QueueNotFoundError",
    "QueueRemoval",
    "QueueStats",
    "RawArgs",
    "ReplaceOpts",
    "RetryPolicy",
    "ReturnedValueError",
    "RiverError",
    "SchemaMissingError",
    "ServerVersionError",
    "SingletonStats",
    "StepError",
    "StopCause",
    "StopReport",
    "StuckJob",
    "Subscription",
    "Transaction",
    "TransactionError",
    "Unique",
    "UniqueConflictError",
    "UniqueOpts",
    "UnknownJobKindError",
    "WaitTimeoutError",
    "WorkInner",
    "Worker",
    "WorkerMiddleware",
    "WorkerMiddlewareFunc",
    "Workers",
    "cron",
    "current_client",
    "current_job",
    "every",
    "never",
    "result",
]
