"""Hooks and middleware: where each language calls them, and the effects of their errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from riverpy import (
    Hook,
    InsertInner,
    InsertOpts,
    Job,
    JobInsertParams,
    Worker,
    WorkerMiddleware,
    WorkInner,
)
from tests.interop.conform import error_text

if TYPE_CHECKING:
    from tests.interop.river_go import RiverGo, Row
    from tests.work.rig import Rig

NAMES = ("1", "2", "job's")
PLACES = (
    *(f"{place} {name}" for place in ("insert before", "insert after") for name in NAMES[:2]),
    *(
        f"{place} {name}"
        for place in ("insert_begin", "work before", "work_begin", "work_end", "work after")
        for name in NAMES
    ),
    "code",
)
UNDOES_NOTHING = ("insert after 1", "insert after 2")
"""Places at which an error comes too late for riverpy's insert: the job is stored."""
called: list[str] = []
fail_at: list[str] = []


def at(place: str) -> None:
    """Record a place, and fail there if the test says so."""
    called.append(place)
    if place in fail_at:
        raise RuntimeError(f"{place} fails")


class NotingHook:
    """A hook that records where it is called."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def insert_begin(self, params: JobInsertParams, /) -> None:
        at(f"insert_begin {self._name}")

    async def work_begin(self, job: Job[Any], /) -> None:
        at(f"work_begin {self._name}")

    async def work_end(self, job: Job[Any], error: BaseException | None, /) -> None:
        at(f"work_end {self._name}")


class NotingMiddleware:
    """A middleware that records where it is called."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def insert_many(
        self, params: Sequence[JobInsertParams], do_inner: InsertInner, /
    ) -> None:
        at(f"insert before {self._name}")
        await do_inner()
        at(f"insert after {self._name}")

    async def work(self, job: Job[Any], do_inner: WorkInner, /) -> None:
        at(f"work before {self._name}")
        await do_inner()
        at(f"work after {self._name}")


class Extended(msgspec.Struct, frozen=True):
    """Args with a hook of their own."""

    kind: ClassVar[str] = "extended"
    hooks: ClassVar[Sequence[Hook]] = (NotingHook("job's"),)


class ExtendedWorker(Worker[Extended]):
    """A worker with middleware of its own."""

    async def work(self, job: Job[Extended]) -> None:
        at("code")

    def middleware(self, job: Job[Any]) -> Sequence[WorkerMiddleware]:
        return [NotingMiddleware("job's")]


async def in_python(rig: Rig) -> list[Row]:
    """Return riverpy's places in the form of `go/extensions.go`."""
    rig.workers.add(ExtendedWorker())
    lines: list[Row] = []
    async with rig.working(
        hooks=[NotingHook("1"), NotingHook("2")],
        middleware=[NotingMiddleware("1"), NotingMiddleware("2")],
    ) as client:
        for place in ("", *PLACES):
            called.clear()
            fail_at[:] = [place]
            try:
                await client.insert(Extended(), InsertOpts(max_attempts=1))
            except RuntimeError as error:
                if place in UNDOES_NOTHING:
                    await rig.event()
                lines.append({"called": [*called], "refused": str(error)})
                continue
            job = (await rig.event()).job
            assert job is not None
            failures = [error.error for error in job.errors]
            lines.append({"called": [*called], "state": job.state.value, "errors": failures})
    return lines


def inserting(line: Row) -> list[str]:
    """Return the places around the insert, for which the attempt does not wait."""
    return [place for place in line["called"] if place.startswith("insert")]


def working(line: Row) -> list[str]:
    """Return the places around the attempt."""
    return [place for place in line["called"] if not place.startswith("insert")]


async def test_extensions(rig: Rig, go: RiverGo) -> None:
    """Both languages call the same hooks and middleware in the same order, from the outside to the
    inside and back. An error of each has the same effect: it refuses the insert, or fails the
    attempt. A middleware that raises after the insert undoes it in Go, and not in riverpy (CF-050,
    extension_hook_middleware_order)."""
    requests = [{"fail": place} for place in ("", *PLACES)]
    go_lines = await go.run("extensions", requests=requests)
    in_go = len(await rig.schema.jobs())
    lines = await in_python(rig)
    assert len(await rig.schema.jobs()) - in_go == in_go + len(UNDOES_NOTHING)
    for place, line, go_line in zip(("", *PLACES), lines, go_lines, strict=True):
        assert inserting(line) == inserting(go_line), place
        assert line.get("refused") == go_line.get("refused"), place
        assert line.get("state") == go_line.get("state"), place
        assert line.get("errors", []) == [
            error_text("python", error) for error in go_line.get("errors", [])
        ]
        if place not in UNDOES_NOTHING:
            assert working(line) == working(go_line), place
    assert [line.get("state", "refused") for line in go_lines] == [
        "completed",
        *("refused" if place.startswith("insert") else "discarded" for place in PLACES),
    ]
