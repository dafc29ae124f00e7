"""Insert requests for both languages, and the clients that execute them."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from riverpy import InsertManyParams, InsertOpts, JobState, RawArgs, UniqueOpts
from tests.insert.vector_args import STRUCTS

if TYPE_CHECKING:
    from riverpy import Client
    from tests.interop.river_go import GoProcess, RiverGo

SILENT_CANCEL = {"silent_cancel": True}
"""Metadata that the fixture `mark_silently` replaces by a cancel mark without a notification."""

Request = dict[str, Any]
"""In the form of `go/insert.go`; `args` is JSON text. With `of_kind` the options are the kind's."""


def request(
    args: str, *, kind: str = "vec_kind", struct: str | None = None, **opts: Any
) -> Request:
    """Return a request with these options. A `struct` stands for args of that class, "any" for a
    map."""
    return {"kind": kind, "args": msgspec.Raw(args.encode()), "struct": struct, "opts": opts}


class MapArgs(dict[str, Any]):
    """Args like a Go map."""

    kind = "vec_kind"


class ArgsWithOpts(RawArgs, frozen=True):
    """Args whose kind has its own options."""

    opts: InsertOpts

    def insert_opts(self) -> InsertOpts:
        return self.opts


def args_of(request: Request) -> Any:
    """Return the Python args of a request."""
    text, struct = bytes(request["args"]).decode(), request["struct"]
    if struct is None:
        return RawArgs(request["kind"], text)
    if struct == "any":
        return MapArgs(json.loads(text, parse_int=float))
    return msgspec.json.decode(text, type=STRUCTS[struct])


def unique_opts_of(unique: dict[str, Any]) -> UniqueOpts:
    """Return the unique options of a request."""
    options = dict(unique)
    period, states = options.pop("by_period_s", None), options.pop("by_state", None)
    return UniqueOpts(
        by_period=None if period is None else timedelta(seconds=period),
        by_state=None if states is None else [JobState(state) for state in states],
        **options,
    )


def params_of(request: Request) -> InsertManyParams:
    """Return a request in riverpy's form."""
    opts = dict(request["opts"])
    unique = opts.pop("unique", {})
    at = opts.pop("scheduled_at", None)
    given = InsertOpts(
        scheduled_at=None if at is None else datetime.fromisoformat(at),
        unique_opts=unique_opts_of(unique),
        **opts,
    )
    args = args_of(request)
    if request.get("of_kind"):
        return InsertManyParams(ArgsWithOpts(args.kind, args.json, given))
    return InsertManyParams(args, given)


class Side(Protocol):
    """A client of one language that inserts and controls jobs."""

    async def insert(self, request: Request) -> int: ...
    async def insert_fast(self, request: Request) -> None: ...
    async def cancel(self, job_id: int) -> None: ...
    async def retry(self, job_id: int) -> None: ...


class PythonSide:
    """riverpy with a client of its own."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def insert(self, request: Request) -> int:
        params = params_of(request)
        return (await self._client.insert(params.args, params.opts)).job.id

    async def insert_fast(self, request: Request) -> None:
        await self._client.insert_many_fast([params_of(request)])

    async def cancel(self, job_id: int) -> None:
        await self._client.job_cancel(job_id)

    async def retry(self, job_id: int) -> None:
        await self._client.job_retry(job_id)


class GoSide:
    """River in Go, with a process that inserts and one for each other verb."""

    def __init__(self, go: RiverGo, inserter: GoProcess) -> None:
        self._go = go
        self._inserter = inserter

    async def insert(self, request: Request) -> int:
        (row,) = await self._inserter.insert(request)
        assert "error" not in row, row["error"]
        return row["id"]

    async def insert_fast(self, request: Request) -> None:
        await self._go.run("insert", "--fast", requests=[request])

    async def cancel(self, job_id: int) -> None:
        await self._go.run("cancel", job_id)

    async def retry(self, job_id: int) -> None:
        await self._go.run("retry", job_id)
