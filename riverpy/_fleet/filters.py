"""FollowFilter: describes the events that a client wants to receive from workers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import TYPE_CHECKING, TypeVar, cast

import msgspec

from riverpy.errors import ConfigError
from riverpy.events import EventKind, FleetEventKind, LeaseEventKind

if TYPE_CHECKING:
    from collections.abc import Iterable

ValueT = TypeVar("ValueT", str, int)
ALL_EVENT_KINDS = frozenset[str]((*EventKind, *LeaseEventKind, *FleetEventKind))
"""The kinds of events that a client can follow."""
FOLLOW_FILTERS_MAX = 50
"""The maximum number of filters. If there are more, `merge_filters` replaces all of them with
`ALL_EVENTS_FILTER`."""


class FollowFilter(msgspec.Struct, frozen=True, omit_defaults=True):
    """The events that a client wants to receive. An event matches if it matches each field that is
    not None."""

    events: frozenset[str] | None = None
    """The kinds of events."""
    kinds: frozenset[str] | None = None
    """The kinds of jobs."""
    queues: frozenset[str] | None = None
    job_ids: frozenset[int] | None = None

    def matches_event(self, event: str, kind: str, queue: str, job_id: int) -> bool:
        """Return whether an event matches. If the event is about a queue or a lease, `kind` is an
        empty text and `job_id` is 0."""
        return (
            (self.events is None or event in self.events)
            and (self.job_ids is None or job_id in self.job_ids)
            and (self.kinds is None or kind in self.kinds)
            and (self.queues is None or queue in self.queues)
        )


def make_follow_filter(
    kinds: Iterable[str],
    job_kinds: Collection[str] | None,
    queues: Collection[str] | None,
    job_ids: Collection[int] | None,
) -> FollowFilter:
    """Return the filter of a subscription. `kinds` are kinds of events. For the other arguments,
    None means that all values match.

    Raises:
        ConfigError: a value has a wrong type, a kind of events is unknown, or a list is empty.
    """
    events = list(kinds)
    if not events:
        raise ConfigError("name the kinds of events to subscribe to")
    unknown = [one for one in events if not isinstance(one, str) or one not in ALL_EVENT_KINDS]  # pyright: ignore[reportUnnecessaryIsInstance]
    if unknown:
        known = ", ".join(sorted(ALL_EVENT_KINDS))
        raise ConfigError(
            f"{unknown[0]!r} is not a kind of events; the kinds of events are {known}"
        )
    return FollowFilter(
        frozenset(map(str, events)),
        _check_filter_values("job_kinds", job_kinds, str),
        _check_filter_values("queues", queues, str),
        _check_filter_values("job_ids", job_ids, int),
    )


def _check_filter_values(
    name: str, values: Collection[ValueT] | None, expected: type[ValueT]
) -> frozenset[ValueT] | None:
    if values is None:
        return None
    if not _is_nonempty_collection_of(values, expected):
        raise ConfigError(f"{name} is a list of at least one {expected.__name__}, got {values!r}")
    return frozenset(values)


def _is_nonempty_collection_of(values: object, expected: type) -> bool:
    """Return whether `values` is a non-empty list or set whose items have one type. Return False
    for a string, although Python can iterate over it."""
    if isinstance(values, str) or not isinstance(values, Collection):
        return False
    items = cast("Collection[object]", values)
    return bool(items) and all(type(item) is expected for item in items)


ALL_EVENTS_FILTER = FollowFilter()
"""A filter that all events match."""


def merge_filters(filters: Iterable[FollowFilter]) -> list[FollowFilter]:
    """Merge filters into fewer filters that match the same events. Equal filters are merged, and
    also filters that differ only in their job ids. If more than `FOLLOW_FILTERS_MAX` merged filters
    are left, return only `ALL_EVENTS_FILTER`."""
    others: dict[FollowFilter, None] = {}
    ids_by_filter: defaultdict[FollowFilter, set[int]] = defaultdict(set)
    for one in filters:
        if one.job_ids is None:
            others[one] = None
        else:
            ids_by_filter[msgspec.structs.replace(one, job_ids=None)] |= one.job_ids
    merged = [
        *others,
        *(
            msgspec.structs.replace(one, job_ids=frozenset(ids))
            for one, ids in ids_by_filter.items()
        ),
    ]
    return merged if len(merged) <= FOLLOW_FILTERS_MAX else [ALL_EVENTS_FILTER]
