"""The payloads of the notifications between workers and the clients that follow their events.

A client that wants to receive events sends an announcement on the topic `riverpy_follow`: one JSON
object. A worker sends events on the topic `riverpy_fleet`: a header and the events, one JSON object
per line. All payloads are ASCII, because the database may have any encoding. Any session can send
any text, so payloads that cannot be decoded are ignored.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import msgspec

from riverpy._fleet.filters import FollowFilter
from riverpy._postgres.fleet import PAYLOAD_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable

JOB_IDS_PER_ANNOUNCEMENT_MAX = 300
"""The maximum number of job ids in one announcement. An announcement must fit into one
notification."""
ANNOUNCEMENTS_MAX = 20
"""The maximum number of announcements of one client. Job ids that do not fit into this number of
announcements are left out. The client finds changes of watched jobs by polling, but subscriptions
may receive no events of the jobs that are left out."""
ERROR_LENGTH_MAX = 500
"""The maximum number of characters of an error in an event."""
PROGRESS_TEXT_LENGTH_MAX = 500
"""The maximum number of characters of a job's progress text in an event."""


class WantedEventsAnnouncement(msgspec.Struct, frozen=True, omit_defaults=True):
    """An announcement of the events that a client wants to receive. A worker forgets the
    announcement after 30 seconds (`ANNOUNCEMENT_VALIDITY`), unless the client repeats it."""

    follower: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    """The id of the FleetFollower that sends the announcement."""
    part: int = 0
    """The number of this announcement. A follower sends several if its filters do not fit into
    one."""
    filters: list[FollowFilter] = []
    is_end: bool = False
    """Whether the follower has ended. All its announcements become invalid."""


class MessageHeader(msgspec.Struct, frozen=True, omit_defaults=True):
    """The first line of a payload with events."""

    client: str
    """The id of the client that sends the events."""
    number: int
    """A counter that makes all payloads different. PostgreSQL drops a notification that is equal to
    another one in the same transaction."""
    dropped: int = 0
    """The number of events that this client has dropped since its last payload."""


class EventMessage(msgspec.Struct, omit_defaults=True, kw_only=True):
    """An event of a job, a queue or a lease, as workers send it. `at` and the fields whose names
    end with `_at` contain microseconds since 2000-01-01 UTC."""

    event: str
    at: int = 0
    """The time of the event, by the clock of the client that sent it."""
    job_id: int = 0
    kind: str = ""
    queue: str = ""
    state: str = ""
    priority: int = 0
    attempt: int = 0
    max_attempts: int = 0
    created_at: int = 0
    scheduled_at: int = 0
    attempted_at: int | None = None
    finalized_at: int | None = None
    error: str = ""
    """The error of a failed or cancelled attempt. Passwords in URLs are masked."""
    wait: float | None = None
    """The time in seconds from when the job was due until the attempt started."""
    run: float | None = None
    """The run time of an ended attempt, in seconds."""
    store: float | None = None
    """The time in seconds from the end of the attempt until its result was stored."""
    done: int | float | None = None
    total: int | float | None = None
    text: str = ""
    reported_at: int | None = None
    lease: str = ""
    use: str = ""
    epoch: int = 0
    acquired_at: int = 0
    cause: str = ""
    reason: str = ""

    def matches_any(self, filters: Iterable[FollowFilter]) -> bool:
        """Return whether the event matches at least one of the filters."""
        return any(
            one.matches_event(self.event, self.kind, self.queue, self.job_id) for one in filters
        )


def encode_announcements(follower: str, filters: list[FollowFilter]) -> list[str]:
    """Return the payloads of a follower's announcements. Filters that are too large are replaced by
    filters that match more events. The follower ignores the events that it does not want."""
    plain = [one for one in filters if one.job_ids is None]
    parts = [_widen_filters_to_fit(follower, plain)] if plain else []
    for one in filters:
        ids = sorted(one.job_ids or ())
        for start in range(0, len(ids), JOB_IDS_PER_ANNOUNCEMENT_MAX):
            chunk = frozenset(ids[start : start + JOB_IDS_PER_ANNOUNCEMENT_MAX])
            part = [msgspec.structs.replace(one, job_ids=chunk)]
            if _is_too_long(WantedEventsAnnouncement(follower, filters=part)):
                part = [FollowFilter(events=one.events, job_ids=chunk)]
            parts.append(part)
    return [
        encode_ascii_json(WantedEventsAnnouncement(follower, number, part))
        for number, part in enumerate(parts[:ANNOUNCEMENTS_MAX])
    ]


def _widen_filters_to_fit(follower: str, filters: list[FollowFilter]) -> list[FollowFilter]:
    """Return filters that fit into one announcement and match the same events or more."""
    for wider in (
        filters,
        [FollowFilter(events=one.events, queues=one.queues) for one in filters],
        [FollowFilter(events=one.events) for one in filters],
    ):
        if not _is_too_long(WantedEventsAnnouncement(follower, filters=wider)):
            return wider
    return [FollowFilter()]


def _is_too_long(announcement: WantedEventsAnnouncement) -> bool:
    part_number_bytes = 20
    return len(encode_ascii_json(announcement)) > PAYLOAD_BYTES_MAX - part_number_bytes


def decode_announcement(payload: str) -> WantedEventsAnnouncement | None:
    """Decode the payload of an announcement. Return None if it is not valid."""
    try:
        return msgspec.json.decode(payload, type=WantedEventsAnnouncement)
    except (msgspec.DecodeError, RecursionError):
        return None


def encode_ascii_json(message: msgspec.Struct) -> str:
    """Return a message as JSON text that contains only ASCII characters."""
    text = msgspec.json.encode(message).decode()
    return text if text.isascii() else json.dumps(json.loads(text), separators=(",", ":"))


class EventPayloadBuilder:
    """Makes payloads from events. Each payload contains as many events as fit."""

    def __init__(self, client_id: str) -> None:
        self._client_id = client_id
        self._number = 0

    def build_payloads(self, lines: list[str], dropped: int) -> list[str]:
        """Return payloads that contain all `lines`. Each line is one encoded event of at most
        `line_length_max` bytes. The first payload reports `dropped`, the number of dropped
        events."""
        payloads: list[str] = []
        parts = [self._make_header_line(dropped)]
        size = len(parts[0])
        for line in lines:
            if size + 1 + len(line) > PAYLOAD_BYTES_MAX:
                payloads.append("\n".join(parts))
                parts = [self._make_header_line(0)]
                size = len(parts[0])
            parts.append(line)
            size += 1 + len(line)
        return [*payloads, "\n".join(parts)]

    def _make_header_line(self, dropped: int) -> str:
        self._number += 1
        return encode_ascii_json(MessageHeader(self._client_id, self._number, dropped))

    @property
    def line_length_max(self) -> int:
        """The maximum number of bytes of one encoded event."""
        longest = MessageHeader(self._client_id, 2**63, 2**63)
        return PAYLOAD_BYTES_MAX - len(encode_ascii_json(longest)) - 1


_event_decoder = msgspec.json.Decoder(EventMessage)
_header_decoder = msgspec.json.Decoder(MessageHeader)


def decode_event_payload(payload: str) -> tuple[MessageHeader, list[EventMessage]] | None:
    """Decode a payload with events. Return the header and the events, or None if it is not
    valid."""
    header, *lines = payload.split("\n")
    try:
        return _header_decoder.decode(header), [_event_decoder.decode(line) for line in lines]
    except (msgspec.DecodeError, RecursionError):
        return None
