"""Every exception that riverpy raises on purpose.

    RiverError
    ├ ConfigError            a setting or a name is wrong (also a ValueError)
    │ ├ ClientIdInUseError   another client runs under this client's id
    │ └ DomainConflictError  a queue to claim belongs to another leader domain
    ├ InsertError            a job was refused before anything was sent (also a ValueError)
    │ ├ ArgsError            its args cannot be stored as JSON; `path` says where
    │ └ UnknownJobKindError  no worker is registered for its kind
    ├ TransactionError       the caller's connection is closed, or in no usable transaction
    ├ UniqueConflictError    insert_many_fast met a job that exists already
    ├ NotFoundError          no such job or queue
    ├ JobRunningError        a running job cannot be deleted
    ├ ClientStateError       a call that the client's state does not allow
    ├ FencedOutError         leadership is lost: nothing was written
    │ └ LeaseLostError       a lease is used after it was lost
    ├ DatabaseError          the database cannot be used as it is
    │ ├ JobDamagedError      the server cannot read a stored job
    │ ├ SchemaMissingError   River's tables are not there, or too old
    │ └ ServerVersionError   PostgreSQL is too old
    └ MigrationError         a migration cannot be applied or undone

    JobCancel, JobSnooze     raised by a job to end its attempt (no RiverError: they are no
    failures)

The text of each error tells its reader what to do. No text ever holds a password.
"""

from __future__ import annotations

from datetime import timedelta

__all__ = [
    "ArgsError",
    "ClientIdInUseError",
    "ClientStateError",
    "ConfigError",
    "DatabaseError",
    "DomainConflictError",
    "FencedOutError",
    "InsertError",
    "JobCancel",
    "JobDamagedError",
    "JobRunningError",
    "JobSnooze",
    "LeaseLostError",
    "MigrationError",
    "NotFoundError",
    "RiverError",
    "SchemaMissingError",
    "ServerVersionError",
    "TransactionError",
    "UniqueConflictError",
    "UnknownJobKindError",
]


class RiverError(Exception):
    """The root of riverpy's errors."""


class ConfigError(RiverError, ValueError):
    """A setting, or the name of a queue, kind, tag or schema, is not allowed."""


class ClientIdInUseError(ConfigError):
    """Another client runs under this client's id. Its jobs were not touched; nothing was started,
    or what ran was stopped. `client_id` is the id, and `since` when the other was registered, in
    RFC 3339; None: while this one ran, but wrote no heartbeat."""

    def __init__(self, client_id: str, since: str | None) -> None:
        when = (
            "while this one wrote no heartbeat"
            if since is None
            else f"at {since} and is still alive"
        )
        super().__init__(
            f"the client id {client_id!r} is in use: another client registered under it {when}; "
            "stop that one first, or give each client its own id (without `id` it gets one)"
        )
        self.client_id, self.since = client_id, since


class DomainConflictError(ConfigError):
    """A queue that a client would claim for its leader domain belongs to another; nothing was
    claimed. `queue` is the queue, `owner` the domain that has it, and `client_ids` are clients of
    that domain that live, ten at most."""

    def __init__(self, queue: str, *, owner: str, domain: str, client_ids: list[str]) -> None:
        what = f"queue {queue!r} belongs to the leader domain {owner!r}, "
        if client_ids:
            what += (
                f"whose clients live ({', '.join(client_ids)}), so {domain!r} cannot claim it: "
                "name other domain_queues, or set on_domain_conflict='warn' to work the queue "
                "without maintaining it"
            )
        else:
            what += (
                f"none of whose clients lives: to claim it for {domain!r} set "
                "on_domain_conflict='takeover'"
            )
        command = f"riverpy domain claim {queue} --domain {domain}"
        command += " --force" if client_ids else ""
        super().__init__(f"{what}; an administrator can take it: `{command}`")
        self.queue, self.owner, self.client_ids = queue, owner, client_ids


class InsertError(RiverError, ValueError):
    """A job was refused before anything was sent to the database."""


class ArgsError(InsertError):
    """Args, metadata or output cannot be stored as JSON. `path` names the place, as in
    `$.user.tags[3]`."""

    def __init__(self, message: str, *, path: str = "$") -> None:
        super().__init__(message)
        self.path = path


class UnknownJobKindError(InsertError):
    """No worker is registered for this kind."""

    def __init__(self, kind: str) -> None:
        super().__init__(
            f"no worker is registered for job kind {kind!r}: add one to the client's Workers, or "
            "insert "
            "from a client without workers, or set Config(skip_unknown_job_check=True)"
        )
        self.kind = kind


class TransactionError(RiverError):
    """The connection given as `tx` is closed, in no transaction, or in an aborted one: nothing was
    done. Or the function of a call has ended the transaction. Or a fence, or what leases do, may
    not stand in the transaction, or without one."""


class UniqueConflictError(RiverError):
    """A job with the same unique key exists. Nothing was changed; a transaction given as `tx` is
    usable."""


class NotFoundError(RiverError):
    """There is no such job or queue."""


class JobRunningError(RiverError):
    """The job is running, so it cannot be deleted. Cancel it first."""


class ClientStateError(RiverError):
    """The client cannot do this in its present state."""


class FencedOutError(RiverError):
    """This process does not lead any more, or cannot know that it does: nothing was written."""


class LeaseLostError(FencedOutError):
    """The lease is over, or it is not known that it is held: stop what was done under it, and roll
    back."""


class DatabaseError(RiverError):
    """The database cannot be used as it is."""


class JobDamagedError(DatabaseError):
    """The server cannot read a job that it has stored, as after damage to its disk. Other jobs are
    not affected."""


class SchemaMissingError(DatabaseError):
    """River's tables are missing or too old. `riverpy migrate up` makes them."""


class ServerVersionError(DatabaseError):
    """The server is older than PostgreSQL 13."""


class MigrationError(RiverError):
    """A migration cannot be applied or undone."""


class JobCancel(Exception):
    """Raised by a job to end it for good: its state becomes `cancelled` and it is not tried
    again."""


class JobSnooze(Exception):
    """Raised by a job to be run again after a delay. It uses up no attempt.

    Args:
        delay: how long to wait, from now on the server's clock. Zero means at once.

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
        return type(self), (self.delay,)  # a job in a process of its own may raise it
