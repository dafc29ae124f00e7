"""Site: the objects that all pages of one dashboard share."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec

from riverpy._dashboard.bulk_runs import BulkChangeManager
from riverpy._dashboard.doctor_cache import DoctorCache
from riverpy._dashboard.job_count_cache import JobCountCache
from riverpy._dashboard.live import LiveRegions
from riverpy._dashboard.rendering import Templates
from riverpy._dashboard.status_cache import StatusCache
from riverpy._error_text import format_error_with_type
from riverpy._log import get_logger
from riverpy._log_events import DASHBOARD_MASK_FAILED

if TYPE_CHECKING:
    from collections.abc import Callable

    from riverpy._dashboard.access import AuthorizeFunction
    from riverpy.client import Client
    from riverpy.job import JobRow

MaskFunction: TypeAlias = "Callable[[str, Any], object]"


class DashboardOptions(NamedTuple):
    """The arguments of `riverpy.web.dashboard`."""

    authorize: AuthorizeFunction | None
    read_only: bool
    hide_args: bool
    mask: MaskFunction | None


class VisibleArgs(NamedTuple):
    """The args of a job as the user may see them."""

    json_text: str | None
    """The args as JSON text. None: the user may not see them."""
    note: str = ""
    """Why the args are hidden or changed. Empty: the args are shown unchanged."""


class Site:
    """The objects that all pages of one dashboard share, such as the client, the options and the
    caches."""

    def __init__(self, client: Client, options: DashboardOptions) -> None:
        self.client = client
        self.options = options
        self.templates = Templates()
        self.statuses = StatusCache(client)
        self.doctor = DoctorCache(client)
        self.job_counts = JobCountCache(client)
        self.regions = LiveRegions()
        self.bulk_runs = BulkChangeManager(client)
        self._log = get_logger()

    def invalidate_caches(self, seconds_ago: float = 0.0) -> None:
        """Stop using a cached status and cached live regions that were read before a change in the
        database. This process or another process made the change `seconds_ago` seconds ago."""
        changed_at = time.monotonic() - seconds_ago
        self.statuses.invalidate_before(changed_at)
        self.regions.invalidate_before(changed_at)

    def get_visible_args(self, job: JobRow) -> VisibleArgs:
        """Return the args of a job as the user may see them. The option `hide_args` hides all args,
        and the function `mask` changes them. If `mask` fails, the args are hidden too."""
        if self.options.hide_args:
            return VisibleArgs(None, "The args are hidden here (hide_args).")
        if self.options.mask is None:
            return VisibleArgs(job.encoded_args)
        try:
            args = msgspec.json.decode(job.encoded_args)
            masked = self.options.mask(job.kind, args)
            return VisibleArgs(
                msgspec.json.encode(masked).decode(), "The function `mask` has changed these args."
            )
        except Exception as error:  # the error of user code could contain the args
            self._log.warning(
                DASHBOARD_MASK_FAILED,
                kind=job.kind,
                job_id=job.id,
                error=format_error_with_type(error),
            )
            return VisibleArgs(None, "The args are hidden, because the function `mask` failed.")
