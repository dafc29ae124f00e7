"""JobCleaner: deletes jobs that ended longer ago than they are kept."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from riverpy._db.upkeep import (
    JobScope,
    SweepMark,
    job_delete_ended,
    job_delete_ended_scoped,
    job_states_to_clean,
)
from riverpy._maintenance.base import MaintenanceService
from riverpy._maintenance.batches import Batches
from riverpy._maintenance.scope import NOTHING
from riverpy.job import JobState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import timedelta

    from riverpy._lifecycle import StopScope
    from riverpy._maintenance.base import Office
    from riverpy._maintenance.scope import Scope
    from riverpy.config import Config, JobRetention

INTERVAL = 30.0
"""Seconds between two passes."""
SWEEP_INTERVAL = 3600.0
"""Seconds after which jobs are looked at again that were kept or locked."""
_STATES = (JobState.CANCELLED, JobState.COMPLETED, JobState.DISCARDED)
_PURPOSE = "deleting ended jobs"
_LOOK_TIMEOUT = 5.0


class Rule(NamedTuple):
    """One retention of one state, and whose it is."""

    state: JobState
    retention: timedelta
    scope: JobScope | None
    """None: all jobs of the state."""


def rules_of(config: Config, scope: Scope) -> list[Rule]:
    """What to delete in this scope, as a client is configured: a job's kind decides, or else its
    queue, or else its state alone."""
    if scope == NOTHING:
        return []
    return [
        Rule(state, retention, jobs)
        for state in _STATES
        for retention, jobs in _scopes_of(config, scope, state)
    ]


def _scopes_of(
    config: Config, scope: Scope, state: JobState
) -> Iterator[tuple[timedelta, JobScope | None]]:
    kinds = tuple(config.retention_by_kind)
    for retention, names in _grouped(config.retention_by_kind, state).items():
        yield retention, JobScope(*scope.whole(), tuple(names), only_kinds=True)
    for retention, names in _grouped(config.retention_by_queue, state).items():
        if within := tuple(name for name in names if name in scope):
            yield retention, JobScope(within, True, kinds)
    retention, others = _kept(config.retention, state), scope.without(config.retention_by_queue)
    if retention is None or others == NOTHING:
        return
    jobs = JobScope(*others.whole(), kinds)
    yield retention, None if jobs == JobScope() else jobs


def _grouped(retentions: Mapping[str, JobRetention], state: JobState) -> dict[timedelta, list[str]]:
    """The names of each retention, so that those alike share a statement."""
    names: dict[timedelta, list[str]] = defaultdict(list)
    for name, kept in retentions.items():
        if (retention := _kept(kept, state)) is not None:
            names[retention].append(name)
    return names


def _kept(retention: JobRetention, state: JobState) -> timedelta | None:
    return getattr(retention, state.value)


class JobCleaner(MaintenanceService):
    """Deletes by one statement for each state and retention."""

    name = "job cleaner"

    def __init__(self, office: Office) -> None:
        super().__init__(office)
        self._batches = Batches(office.timer, self.log)
        self._marks: dict[Rule, SweepMark | None] = {}
        """How far each rule has come. A rule that another scope makes begins anew: it may mean jobs
        that were passed over."""
        self._swept_at = office.timer.boottime()

    async def run_once(self, scope: StopScope) -> float:
        """Delete all that is kept no longer.

        Raises:
            FencedOutError: the term is over.
            Exception: one of DATABASE_ERRORS.
        """
        now = self.office.timer.boottime()
        if now - self._swept_at >= SWEEP_INTERVAL:
            self._marks.clear()
            self._swept_at = now
        rules = rules_of(self.office.config, await self.office.scope())
        self._marks = {rule: self._marks.get(rule) for rule in rules}
        states = await self._states(rules)
        for rule in rules:
            if rule.state.value in states:
                await self._apply(rule)
        return INTERVAL

    async def _states(self, rules: Sequence[Rule]) -> set[str]:
        """The states that there may be something to delete in: mostly none, and then one look is
        the whole pass."""
        shortest: dict[str, timedelta] = {}
        for rule in rules:
            known = shortest.get(rule.state.value, rule.retention)
            shortest[rule.state.value] = min(known, rule.retention)
        if not shortest:
            return set()
        async with self.office.connection.use(
            "looking for jobs to delete", _LOOK_TIMEOUT
        ) as connection:
            return await job_states_to_clean(connection, self.office.schema, shortest)

    async def _apply(self, rule: Rule) -> None:
        deleted = 0

        async def step(limit: int) -> int:
            nonlocal deleted
            found, count = await delete(rule, limit)
            deleted += count
            return found

        delete = self._delete if rule.scope is None else partial(self._sweep, rule.scope)
        try:
            await self._batches.run(step)
        finally:
            if deleted:
                self.log.info("ended jobs deleted", state=rule.state.value, count=deleted)

    async def _delete(self, rule: Rule, limit: int) -> tuple[int, int]:
        """Returns how many were found, and how many of them are deleted."""
        office = self.office
        async with office.mandate.transaction(office.cleaning, _PURPOSE) as connection:
            deleted = await job_delete_ended(
                connection,
                office.schema,
                state=rule.state,
                retention=rule.retention,
                limit=limit,
            )
        return deleted, deleted

    async def _sweep(self, scope: JobScope, rule: Rule, limit: int) -> tuple[int, int]:
        """The same where some jobs are kept longer than others."""
        office = self.office
        async with office.mandate.transaction(office.cleaning, _PURPOSE) as connection:
            sweep = await job_delete_ended_scoped(
                connection,
                office.schema,
                state=rule.state,
                retention=rule.retention,
                scope=scope,
                after=self._marks[rule],
                limit=limit,
            )
        self._marks[rule] = sweep.mark or self._marks[rule]
        return sweep.found, sweep.deleted
