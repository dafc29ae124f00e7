"""DoctorCache: runs the checks of `riverpy doctor` and keeps their findings. All pages and users
share the findings."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

import anyio

from riverpy._postgres.passwords import make_password_source
from riverpy._server_events import SERVER_STOP_POLL_INTERVAL, is_uvicorn_stopping
from riverpy._tools.doctor.check_runner import CheckRunner
from riverpy._tools.doctor.finding import Finding, Level
from riverpy._tools.doctor.snapshot import DoctorOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from riverpy.client import Client

RUN_TIMEOUT = 120.0
"""The timeout of one run of all checks, in seconds. After that, the run ends with the findings so
far."""
RUN_PAUSE_FACTOR = 20.0
"""The minimum pause after a run of the checks, as a multiple of the run's duration. So the checks
run for at most a twentieth of the time."""


class DoctorReport(NamedTuple):
    """The findings of one run of the checks of `riverpy doctor`."""

    findings: Sequence[Finding]
    """The findings, the most severe first."""
    read_at: datetime
    """The time at which the run ended, by this machine's clock."""
    took: float
    """The duration of the run in seconds."""
    is_complete: bool
    """Whether all checks ran. False: the run reached its timeout."""

    def get_pause_until_next_run(self, seconds: float) -> float:
        """Return the minimum pause in seconds between this run and the next one: `seconds`, or
        `RUN_PAUSE_FACTOR` times the duration of this run if that is longer."""
        return max(seconds, RUN_PAUSE_FACTOR * self.took)


class DoctorCache:
    """Runs the checks of `riverpy doctor`, at most one run at a time, and keeps the findings. A
    request starts a run if the findings are too old. If this request is cancelled, its run is
    cancelled too. All other requests use the last findings."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.last: DoctorReport | None = None
        """The last findings. None: the checks have not run yet."""
        self.is_running = False
        self._ended_at = 0.0
        """The time of the monotonic clock at which the last run ended, in seconds."""

    @property
    def can_run(self) -> bool:
        """Whether the checks can run. They need the database URL, and a client may have only a
        pool."""
        return self._client.database_url is not None

    async def run_checks_if_older(self, seconds: float) -> None:
        """Run the checks if the last findings are older than `seconds`. After a slow run, the
        findings are kept longer. Do nothing while another run is active. Database errors become
        findings. If the web server stops, the run ends."""
        if self.is_running or not self.can_run or not self._client.is_open:
            return
        pause = 0.0 if self.last is None else self.last.get_pause_until_next_run(seconds)
        if self.last is not None and time.monotonic() < self._ended_at + pause:
            return
        self.is_running = True
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_cancel_when_server_stops, tasks.cancel_scope)
                await self._run_checks()
                tasks.cancel_scope.cancel()
        finally:
            self.is_running = False

    async def keep_findings_fresh(self, seconds: float) -> None:
        """Run the checks each time the last findings are older than `seconds`, until this task is
        cancelled."""
        while True:
            await self.run_checks_if_older(seconds)
            await anyio.sleep(SERVER_STOP_POLL_INTERVAL)

    async def _run_checks(self) -> None:
        began = time.monotonic()
        findings: list[Finding] = []
        runner = CheckRunner(self._make_options(), findings.append, _ignore_error)
        with anyio.move_on_after(RUN_TIMEOUT) as timeout:
            await runner.run()
        levels = list(Level)
        findings.sort(key=lambda one: levels.index(one.level), reverse=True)
        self._ended_at = time.monotonic()
        took = self._ended_at - began
        is_complete = not timeout.cancelled_caught
        self.last = DoctorReport(findings, datetime.now(UTC), took, is_complete)

    def _make_options(self) -> DoctorOptions:
        config, url = self._client.config, self._client.database_url
        password = make_password_source(self._client.password, url, config.listen_url)
        return DoctorOptions(url or "", config.schema, config.listen_url, password=password)


def _ignore_error(_error: BaseException) -> None:
    """Ignore an error of a check, because the check also reports the error as a finding."""


async def _cancel_when_server_stops(scope: anyio.CancelScope) -> None:
    while not is_uvicorn_stopping():  # noqa: ASYNC110 (uvicorn has no event for it)
        await anyio.sleep(SERVER_STOP_POLL_INTERVAL)
    scope.cancel()
