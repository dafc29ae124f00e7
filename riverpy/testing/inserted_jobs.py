"""InsertedJobs: the functions of `riverpy.testing.assertions` as methods, for one async session."""

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
    """Checks the jobs that a connection, session, pool or client can read. All methods are
    async."""

    def __init__(self, tx: AsyncSource, *, schema: str | None = None) -> None:
        """Create the object. Its methods pass `tx` and `schema` to the functions of
        `riverpy.testing`, such as `require_inserted`."""
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
        """Check that exactly one inserted job matches `expected`, and return it; see
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
        """Check that no inserted job matches `expected`; see
        `riverpy.testing.require_not_inserted`."""
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
        """Check that exactly the expected jobs were inserted, in the order of the list; see
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
        """Return the inserted jobs that match `expected`; see `riverpy.testing.inserted`."""
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
