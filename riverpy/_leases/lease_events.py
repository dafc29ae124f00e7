"""LeaseEventPublisher: sends the events of the leases of one engine to the subscribers of the
client."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from riverpy._names import DOMAIN_LEASE_NAME_PREFIX
from riverpy.errors import FencedOutError
from riverpy.events import Event, LeaseChange, LeaseEventKind, LeaseUse

if TYPE_CHECKING:
    from collections.abc import Callable

    from riverpy._leases.lease import Lease


class _TermWithoutEndEvent(msgspec.Struct):
    """A term whose end has not been published yet."""

    use: LeaseUse
    has_failed: bool = False
    """Whether the event FAILED has been published."""


class LeaseEventPublisher:
    """Publishes the events of each term. A term is the time from the acquisition of a lease to the
    end of the lease.

    The first event is ACQUIRED, and the last one is LOST or RELEASED. FAILED is published between
    them if the work under the lease raises an error. After LOST or RELEASED, an error of the work
    is not published.
    """

    def __init__(self, publish: Callable[[Event], None] | None) -> None:
        """Create the publisher of an engine. `publish` sends an event to the subscribers, without
        waiting for them. If it is None, events are not published."""
        self._publish = publish
        self._terms: dict[Lease, _TermWithoutEndEvent] = {}

    def publish_acquired(self, lease: Lease, use: LeaseUse) -> None:
        """Publish that a term began. If the lease is lost later, the loss is published at once."""
        if self._publish is None:
            return
        self._terms[lease] = _TermWithoutEndEvent(use)
        self._publish_event(LeaseEventKind.ACQUIRED, lease, use)
        lease.call_at_end(lambda: self._publish_end_if_lost(lease))

    def publish_work_failure(self, lease: Lease, error: BaseException) -> None:
        """Publish that the code under a lease raised an error. Do nothing if the end of the term
        was already published, or if the error only reports that the term has ended."""
        term = self._terms.get(lease)
        is_consequence = lease.cause is not None and isinstance(error, FencedOutError)
        if term is None or term.has_failed or is_consequence:
            return
        term.has_failed = True
        self._publish_event(LeaseEventKind.FAILED, lease, term.use, error=error)

    def publish_end(self, lease: Lease, *, is_released: bool, has_work_ended: bool = False) -> None:
        """Publish the end of a term, if that was not done yet. `has_work_ended`: whether the term
        ended only because the code under the lease ended."""
        term = self._terms.pop(lease, None)
        if term is not None:
            kind = LeaseEventKind.RELEASED if is_released else LeaseEventKind.LOST
            self._publish_event(kind, lease, term.use, has_work_ended=has_work_ended)

    def _publish_end_if_lost(self, lease: Lease) -> None:
        if lease.is_lost:  # other ends are published when the work has ended
            self.publish_end(lease, is_released=False)

    def _publish_event(
        self,
        kind: LeaseEventKind,
        lease: Lease,
        use: LeaseUse,
        *,
        error: BaseException | None = None,
        has_work_ended: bool = False,
    ) -> None:
        is_leader = use is LeaseUse.LEADER
        change = LeaseChange(
            name=lease.name.removeprefix(DOMAIN_LEASE_NAME_PREFIX) if is_leader else lease.name,
            use=use,
            epoch=lease.epoch,
            acquired_at=lease.acquired_at,
            cause=None if has_work_ended else lease.cause,
            reason=None if lease.cause is None else lease.end_reason,
            error=error,
        )
        if self._publish is not None:
            self._publish(Event(kind, lease=change))
