"""SupervisorHealthServer: answers health requests for all workers of a supervisor. It combines the
workers' answers."""

from __future__ import annotations

from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import urlencode

import anyio
import msgspec

from riverpy._tools.health.event_stream import parse_requested_event_kinds
from riverpy._tools.health.http import HttpError, Response
from riverpy._tools.health.metrics import METRICS_CONTENT_TYPE
from riverpy._tools.health.probes import CheckResult, ProbeResult
from riverpy._tools.health.server import HttpServer
from riverpy._tools.health.worker_health import (
    EVENTS_CONTENT_TYPE,
    build_probe_response,
    parse_max_lag,
)
from riverpy._tools.processes.merged_events import EventStreamMerger
from riverpy._tools.processes.merged_metrics import merge_metrics

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    from riverpy._tools.health.http import Address, Request
    from riverpy._tools.processes.slot import ProcessSlot

WORKER_ANSWER_TIMEOUT = 3.0
"""Seconds within which a worker must answer a request. Reading the database may take up to one
second of this time."""
WORKER_START_TIMEOUT = 60.0
"""A process that has not answered yet counts as alive for this many seconds after its start,
because it may still load code."""
_NO_ANSWER_REASON = (
    "no answer: the event loop of the worker is blocked, or the process is suspended"
)

_UNCHECKED_RESULT = CheckResult(ok=False, reason="not checked")


class SupervisorHealthServer:
    """Answers /livez, /readyz, /metrics and /events for all workers."""

    def __init__(self, address: Address, slots: Sequence[ProcessSlot]) -> None:
        self._slots = slots
        self._server = HttpServer(
            address,
            {
                "/livez": self._answer_livez,
                "/readyz": self._answer_readyz,
                "/metrics": self._answer_metrics,
                "/events": self._answer_events,
            },
        )
        self._events = EventStreamMerger(slots)

    @asynccontextmanager
    async def serve(self) -> AsyncGenerator[None]:
        """Answer requests during the `async with` block.

        Raises:
            OSError: the server cannot listen on its address.
        """
        async with self._server.serve(), self._events.run_stream_tasks():
            yield

    async def _answer_livez(self, request: Request) -> Response:
        return build_probe_response(await self._check_all_workers(_check_liveness))

    async def _answer_readyz(self, request: Request) -> Response:
        parse_max_lag(request)  # report a wrong value here, not once for each worker
        target = _make_request_target(request)

        async def check_worker_readiness(slot: ProcessSlot) -> CheckResult:
            return await _check_readiness(slot, target)

        return build_probe_response(await self._check_all_workers(check_worker_readiness))

    async def _check_all_workers(
        self, check: Callable[[ProcessSlot], Awaitable[CheckResult]]
    ) -> ProbeResult:
        """Run a check for all workers at the same time. Return the result for each worker."""
        checks = dict.fromkeys(map(_make_check_name, self._slots), _UNCHECKED_RESULT)

        async def check_worker(slot: ProcessSlot) -> None:
            checks[_make_check_name(slot)] = await check(slot)

        async with anyio.create_task_group() as tasks:
            for slot in self._slots:
                tasks.start_soon(check_worker, slot)
        return ProbeResult.from_checks(checks)

    async def _answer_metrics(self, request: Request) -> Response:
        pages: dict[int, str | None] = {slot.number: None for slot in self._slots}

        async def read_worker_metrics(slot: ProcessSlot) -> None:
            pages[slot.number] = await _read_page(slot, "/metrics")

        async with anyio.create_task_group() as tasks:
            for slot in self._slots:
                tasks.start_soon(read_worker_metrics, slot)
        page = merge_metrics(pages, {slot.number: slot.restart_counts for slot in self._slots})
        return Response(HTTPStatus.OK, METRICS_CONTENT_TYPE, page)

    async def _answer_events(self, request: Request) -> Response:
        try:
            parse_requested_event_kinds(request.query_params)
        except ValueError as error:
            raise HttpError(HTTPStatus.BAD_REQUEST, str(error)) from None
        lines = await self._events.open_stream(_make_request_target(request))
        return Response(HTTPStatus.OK, EVENTS_CONTENT_TYPE, lines)


def _make_check_name(slot: ProcessSlot) -> str:
    return f"process {slot.number}"


async def _check_liveness(slot: ProcessSlot) -> CheckResult:
    process = slot.process
    if process is None:  # the supervisor starts it again
        return CheckResult(ok=True, reason=slot.describe_missing_process())
    result = await _read_probe_result(slot, "/livez")
    if result is not None:
        return CheckResult(result.ok, "alive" if result.ok else result.summary)
    is_starting = not process.has_reported_status and process.age < WORKER_START_TIMEOUT
    return CheckResult(is_starting, "starting" if is_starting else _NO_ANSWER_REASON)


async def _check_readiness(slot: ProcessSlot, target: str) -> CheckResult:
    process = slot.process
    if process is None:
        return CheckResult(ok=False, reason=slot.describe_missing_process())
    result = await _read_probe_result(slot, target)
    if result is not None:
        return CheckResult(result.ok, "ready" if result.ok else result.summary)
    return CheckResult(
        ok=False, reason=_NO_ANSWER_REASON if process.has_reported_status else "starting"
    )


async def _read_probe_result(slot: ProcessSlot, target: str) -> ProbeResult | None:
    """Return the result of a worker's probe, or None if the worker does not answer."""
    page = await _read_page(slot, target)
    try:
        return None if page is None else msgspec.json.decode(page, type=ProbeResult)
    except ValueError:  # the page is incomplete
        return None


async def _read_page(slot: ProcessSlot, target: str) -> str | None:
    """Return a page of a worker, or None if the worker does not answer."""
    if slot.process is None:
        return None
    try:
        async with slot.process.health.get(target, WORKER_ANSWER_TIMEOUT) as response:
            return (await response.read_body()).decode()
    except (OSError, ValueError):  # a TimeoutError is an OSError
        return None


def _make_request_target(request: Request) -> str:
    """Return the path and the query of a request."""
    query = urlencode(request.query_params, doseq=True)
    return f"{request.path}?{query}" if query else request.path
