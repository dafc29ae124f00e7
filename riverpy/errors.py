"""The exceptions of riverpy.

    RiverError
    ├ ConfigError            a setting or a name is wrong (also a ValueError)
    │ ├ ClientIdInUseError   another client runs under this client's id
    │ └ DomainConflictError  a queue to claim belongs to another leader domain
    ├ InsertError            a job is not allowed; nothing was sent (also a ValueError)
    │ ├ ArgsError            its args cannot be stored as JSON; `path` is the position
    │ └ UnknownJobKindError  no worker is registered for its kind
    ├ TransactionError       the caller's transaction cannot be used
    ├ UniqueConflictError    a job with the same unique key exists
    ├ NotFoundError          there is no such job or queue
    ├ JobRunningError        a running job cannot be deleted
    ├ WaitTimeoutError       an awaited job did not end in time (also a TimeoutError)
    ├ ClientStateError       the client's state does not allow the call
    ├ AttemptLostError       the attempt no longer belongs to this client
    ├ StepError              the steps of a job are used in a wrong way
    ├ FencedOutError         leadership was lost: nothing was written
    │ └ LeaseLostError       a lease was lost
    ├ DatabaseError          the database cannot be used
    │ ├ JobDamagedError      the server cannot read a stored job
    │ ├ SchemaMissingError   River's tables are missing or too old
    │ └ ServerVersionError   PostgreSQL is too old
    └ MigrationError         a migration cannot be applied or undone

    JobCancel, JobSnooze     raised by a job to end its attempt; they are not RiverErrors

Each error text says what to do. No error text contains a password.
"""

from __future__ import annotations

from datetime import timedelta


class RiverError(Exception):
    """The base class of riverpy's errors."""


class ConfigError(RiverError, ValueError):
    """A setting or a name (of a queue, kind, tag or schema) is not allowed."""


class ClientIdInUseError(ConfigError):
    """Another running client has this client's id, so this client did not start or was stopped. The
    jobs of the other client are not changed.

    Attributes:
        client_id: the id that both clients use.
        since: when the other client registered, in RFC 3339. None: at an unknown time after this
            client had started, while this client wrote no heartbeats.
    """

    def __init__(self, client_id: str, since: str | None) -> None:
        when = (
            "while this one wrote no heartbeat"
            if since is None
            else f"at {since} and is still alive"
        )
        super().__init__(
            f"the client id {client_id!r} is in use: another client registered with it {when}; "
            "stop that client first, or give each client its own id (the default id is unique)"
        )
        self.client_id, self.since = client_id, since


class DomainConflictError(ConfigError):
    """The client cannot claim a queue for its leader domain, because the queue belongs to another
    leader domain. No queue was claimed. Each leader domain has its own leader, which maintains the
    queues of the domain.

    Attributes:
        queue: the name of the queue.
        owner: the leader domain that owns the queue.
        client_ids: the ids of live clients of `owner`, at most ten.
    """

    def __init__(self, queue: str, *, owner: str, domain: str, client_ids: list[str]) -> None:
        what = f"queue {queue!r} belongs to the leader domain {owner!r}, "
        if client_ids:
            what += (
                f"which has live clients ({', '.join(client_ids)}), so {domain!r} cannot claim it: "
                "set other domain_queues, or set on_domain_conflict='warn' to work the queue "
                "without maintaining it"
            )
        else:
            what += (
                f"which has no live client: to claim it for {domain!r}, set "
                "on_domain_conflict='takeover'"
            )
        command = f"riverpy domain claim {queue} --domain {domain}"
        command += " --force" if client_ids else ""
        super().__init__(f"{what}; an administrator can claim it with `{command}`")
        self.queue, self.owner, self.client_ids = queue, owner, client_ids


class InsertError(RiverError, ValueError):
    """A job cannot be inserted as the caller asked. Nothing was sent to the database."""


class ArgsError(InsertError):
    """Args, metadata or output cannot be stored as JSON.

    Attributes:
        path: the position of the wrong part in the value, such as `$.user.tags[3]`.
    """

    def __init__(self, message: str, *, path: str = "$") -> None:
        super().__init__(message)
        self.path = path


class UnknownJobKindError(InsertError):
    """No worker is registered for this kind of job.

    Attributes:
        kind: the kind that has no worker.
    """

    def __init__(self, kind: str) -> None:
        super().__init__(
            f"no worker is registered for job kind {kind!r}: add one to the client's Workers, "
            "insert from a client without workers, or set Config(skip_unknown_job_check=True)"
        )
        self.kind = kind


class TransactionError(RiverError):
    """A transaction cannot be used for this call. The error text has the reason.

    Examples: The connection given as `tx` is closed, is not in a transaction, or its transaction is
    aborted. A function that the caller passed, such as `fn` of `run_once`, has ended the
    transaction. The connection of a LeaseManager is in a transaction. A fence (a check that a lease
    is still held) was called outside of a transaction or in a savepoint.
    """


class UniqueConflictError(RiverError):
    """A job with the same unique key exists. Nothing was changed. A transaction given as `tx` stays
    usable."""


class NotFoundError(RiverError):
    """The job, queue or periodic job does not exist."""


class QueueAlreadyAddedError(ConfigError):
    """The queue cannot be added, because the client already works it, or is adding or removing it.

    Attributes:
        queue: the name of the queue.
    """

    def __init__(self, queue: str, *, is_changing: bool = False) -> None:
        super().__init__(
            f"queue {queue!r} is being added or removed: wait for that call"
            if is_changing
            else f"the client works queue {queue!r}: change its slots with `client.queues.resize`"
        )
        self.queue = queue


class QueueNotFoundError(NotFoundError):
    """The queue cannot be removed or resized, because the client does not work it.

    Attributes:
        queue: the name of the queue.
    """

    def __init__(self, queue: str) -> None:
        super().__init__(f"the client does not work queue {queue!r}: see `client.queues`")
        self.queue = queue


class JobRunningError(RiverError):
    """A running job cannot be deleted. Cancel it first."""


class ClientStateError(RiverError):
    """The client's state does not allow this call, for instance because the client is not open."""


class AttemptLostError(RiverError):
    """The attempt no longer belongs to this client: the job was rescued, completed, changed or
    deleted. Nothing was written. A transaction given as `tx` is not aborted. Roll it back, so that
    it does not commit the work of a lost attempt."""


class StepError(RiverError):
    """A job uses its steps in a wrong way, or its steps do not match the steps that an earlier
    attempt has stored. The attempt fails."""


class FencedOutError(RiverError):
    """This process is no longer the leader, or it has not renewed its lease in time. Nothing was
    written."""


class LeaseLostError(FencedOutError):
    """This process does not hold the lease any more: another process may hold it, or it was not
    renewed in time. Stop the work that needs the lease, and roll back its transaction."""


class DatabaseError(RiverError):
    """The database cannot be used in its current state."""


class JobDamagedError(DatabaseError):
    """The server cannot read a stored job, for instance after a disk failure. Other jobs are not
    affected."""


class SchemaMissingError(DatabaseError):
    """River's tables are missing or too old. `riverpy migrate up` creates and updates them."""


class ServerVersionError(DatabaseError):
    """The server is older than PostgreSQL 13."""


class MigrationError(RiverError):
    """A migration cannot be applied or undone."""


class ReturnedValueError(RiverError, ValueError):
    """The value that a job returned cannot be stored as its output, so the attempt failed. The
    error text says what to return instead.

    Attributes:
        path: the position of the wrong part in the value, such as `$.users[3]`.
    """

    def __init__(self, message: str, *, path: str = "$") -> None:
        super().__init__(message)
        self.path = path


class JobCancel(Exception):
    """Raised by a job to cancel itself: its state becomes `cancelled` and it is not retried."""


class JobSnooze(Exception):
    """Raised by a job to run again after a delay. The attempt does not count towards
    `max_attempts`.

    Args:
        delay: how long to wait, by the server's clock. Zero: run again at once.

    Raises:
        ValueError: the delay is negative.
        TypeError: the delay is not a timedelta.
    """

    def __init__(self, delay: timedelta) -> None:
        if not isinstance(delay, timedelta):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"JobSnooze takes a timedelta, got {type(delay).__name__}")
        if delay < timedelta(0):
            raise ValueError(f"JobSnooze takes a delay of zero or more, got {delay}")
        super().__init__(f"snoozed for {delay}")
        self.delay = delay

    def __reduce__(self) -> tuple[type[JobSnooze], tuple[timedelta]]:
        return type(self), (self.delay,)  # for pickle: a job in a child process may raise it
