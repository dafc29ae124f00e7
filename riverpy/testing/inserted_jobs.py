"""InsertedJobs: the assertions on inserted jobs, for one session of async code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from riverpy.testing.assertions import (
    inserted,
    require_inserted,
    require_many_inserted,
    require_not_inserted,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from riverpy.job import JobArgs, JobState, RawArgs
    from riverpy.testing.expected_job import ExpectedJob
    from riverpy.testing.job_source import AsyncSource
    from riverpy.testing.made_job import MadeJob

ArgsT = TypeVar("ArgsT", bound="JobArgs | RawArgs")


class InsertedJobs:
    """Assertions on inserted jobs over a connection, session, pool or client. Await each call."""

    def __init__(self, tx: AsyncSource, *, schema: str | None = None) -> None:
        """`tx` and `schema`: as for `riverpy.testing.require_inserted`."""
        self._tx, self._schema = tx, schema

    async def require_inserted(
        self,
        expected: type[ArgsT] | ExpectedJob[ArgsT] | ArgsT,
        *,
        queue: str | None = None,
        priority: int | None = None,
        max_attempts: int | None = None,
        scheduled_at: datetime | None = None,
        state: JobState | str | None = None,
        tags: Sequence[str] | None = None,
        args: Mapping[str, object] | None = None,
        **fields: object,
    ) -> MadeJob[ArgsT]:
        """Check that exactly one inserted job is as expected, and return it; see
        `riverpy.testing.require_inserted`."""
        return await require_inserted(
            expected,
            tx=self._tx,
            schema=self._schema,
            queue=queue,
            priority=priority,
            max_attempts=max_attempts,
            scheduled_at=scheduled_at,
            state=state,
            tags=tags,
            args=args,
            **fields,
        )

    async def require_not_inserted(
        self,
        expected: type[ArgsT] | ExpectedJob[ArgsT] | ArgsT,
        *,
        queue: str | None = None,
        priority: int | None = None,
        max_attempts: int | None = None,
        scheduled_at: datetime | None = None,
        state: JobState | str | None = None,
        tags: Sequence[str] | None = None,
        args: Mapping[str, object] | None = None,
        **fields: object,
    ) -> None:
        """Check that no inserted job is as expected; see `riverpy.testing.require_not_inserted`."""
        await require_not_inserted(
            expected,
            tx=self._tx,
            schema=self._schema,
            queue=queue,
            priority=priority,
            max_attempts=max_attempts,
            scheduled_at=scheduled_at,
            state=state,
            tags=tags,
            args=args,
            **fields,
        )

    async def require_many_inserted(self, expected: Sequence[object]) -> list[MadeJob[Any]]:
        """Check that the inserted jobs of these kinds are the expected ones, in this order; see
        `riverpy.testing.require_many_inserted`."""
        return await require_many_inserted(expected, tx=self._tx, schema=self._schema)

    async def inserted(
        self,
        expected: type[ArgsT] | ExpectedJob[ArgsT] | ArgsT,
        *,
        queue: str | None = None,
        priority: int | None = None,
        max_attempts: int | None = None,
        scheduled_at: datetime | None = None,
        state: JobState | str | None = None,
        tags: Sequence[str] | None = None,
        args: Mapping[str, object] | None = None,
        **fields: object,
    ) -> list[MadeJob[ArgsT]]:
        """Return the inserted jobs that are as expected; see `riverpy.testing.inserted`."""
        return await inserted(
            expected,
            tx=self._tx,
            schema=self._schema,
            queue=queue,
            priority=priority,
            max_attempts=max_attempts,
            scheduled_at=scheduled_at,
            state=state,
            tags=tags,
            args=args,
            **fields,
        )
