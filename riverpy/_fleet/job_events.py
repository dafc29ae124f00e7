"""Makes the events of a subscription from the messages that workers have sent."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from riverpy._attempt_errors import format_json_time
from riverpy._lifecycle import StopCause
from riverpy._timestamps import PG_EPOCH, decode_timestamp
from riverpy.errors import ClientStateError
from riverpy.events import (
    Event,
    EventKind,
    FleetEventKind,
    JobStatistics,
    LeaseChange,
    LeaseEventKind,
    LeaseUse,
)
from riverpy.job import JobColumn, JobRow
from riverpy.progress import JobProgress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from riverpy._fleet.messages import EventMessage

_KIND_BY_VALUE = {kind.value: kind for kind in (*EventKind, *LeaseEventKind, *FleetEventKind)}
_CAUSE_BY_VALUE = {cause.value: cause for cause in StopCause}


class FleetJobRow(JobRow):
    """The job of an event that another client sent. Workers do not send the args, metadata (with
    output and progress), tags, `attempted_by`, unique key, unique states and number of errors:
    access to them raises ClientStateError. `errors` has at most one entry: the newest error."""

    __slots__ = ()

    def __init__(self, message: EventMessage) -> None:
        row: list[Any] = [None] * (JobColumn.UNIQUE_STATES + 1)
        row[JobColumn.ID], row[JobColumn.KIND] = message.job_id, message.kind
        row[JobColumn.QUEUE], row[JobColumn.STATE] = message.queue, message.state
        row[JobColumn.PRIORITY], row[JobColumn.ATTEMPT] = message.priority, message.attempt
        row[JobColumn.MAX_ATTEMPTS] = message.max_attempts
        row[JobColumn.CREATED_AT] = message.created_at
        row[JobColumn.SCHEDULED_AT] = message.scheduled_at
        row[JobColumn.ATTEMPTED_AT] = message.attempted_at
        row[JobColumn.FINALIZED_AT] = message.finalized_at
        row[JobColumn.ERRORS] = [_encode_error(message)] if message.error else []
        super().__init__(row)

    def _raise_attribute_not_sent(self, name: str) -> NoReturn:
        raise ClientStateError(
            f"the job of an event of the fleet has no {name}: read the job with "
            "`await client.job_get(event.job.id)`"
        )

    def get_encoded_values(self) -> Sequence[Any]:
        self._raise_attribute_not_sent("get_encoded_values()")

    @property
    def encoded_args(self) -> str:
        self._raise_attribute_not_sent("encoded_args")

    @property
    def attempted_by(self) -> list[str]:
        self._raise_attribute_not_sent("attempted_by")

    @property
    def error_count(self) -> int:
        self._raise_attribute_not_sent("error_count")

    @property
    def metadata(self) -> dict[str, Any]:
        self._raise_attribute_not_sent("metadata")

    @property
    def output(self) -> Any:
        self._raise_attribute_not_sent("output")

    @property
    def last_progress(self) -> JobProgress | None:
        self._raise_attribute_not_sent("last_progress")

    @property
    def tags(self) -> list[str]:
        self._raise_attribute_not_sent("tags")

    @property
    def unique_key(self) -> bytes | None:
        self._raise_attribute_not_sent("unique_key")

    @property
    def unique_states(self) -> list[Any] | None:
        self._raise_attribute_not_sent("unique_states")


def _encode_error(message: EventMessage) -> str:
    """Return the error of an event as JSON, in the format of the column `errors`. The time of the
    error is the end of the attempt."""
    started_at = decode_timestamp(message.attempted_at) or PG_EPOCH
    ended_at = started_at + timedelta(seconds=message.run or 0.0)
    entry = {
        "at": format_json_time(ended_at),
        "attempt": message.attempt,
        "error": message.error,
        "trace": "",
    }
    return msgspec.json.encode(entry).decode()


def make_event(message: EventMessage, client_id: str) -> Event | None:
    """Convert a message to an event. Return None if the kind of event is unknown, because a newer
    riverpy sent it."""
    kind = _KIND_BY_VALUE.get(message.event)
    if kind is None:
        return None
    at = decode_timestamp(message.at)
    if message.lease:
        return Event(kind, lease=_make_lease_change(message), client_id=client_id, at=at)
    if not message.job_id:
        return Event(kind, queue=message.queue, client_id=client_id, at=at)
    statistics = None
    if message.run is not None:
        statistics = JobStatistics(
            queue_wait=timedelta(seconds=message.wait or 0.0),
            run=timedelta(seconds=message.run),
            complete=timedelta(seconds=message.store or 0.0),
        )
    progress = None
    if message.done is not None:
        progress = JobProgress(
            done=message.done,
            total=message.total,
            text=message.text or None,
            at=decode_timestamp(message.reported_at),
        )
    return Event(
        kind,
        job=FleetJobRow(message),
        statistics=statistics,
        client_id=client_id,
        progress=progress,
        at=at,
    )


def _make_lease_change(message: EventMessage) -> LeaseChange:
    return LeaseChange(
        name=message.lease,
        use=LeaseUse(message.use),
        epoch=message.epoch,
        acquired_at=decode_timestamp(message.acquired_at) or PG_EPOCH,
        cause=_CAUSE_BY_VALUE.get(message.cause),
        reason=message.reason or None,
    )
