"""The paths of pages whose addresses contain a name.

Names are in the query of the address, because they may contain any character: browsers and proxies
change paths with `..`, `//` or an escaped slash."""

from __future__ import annotations

from urllib.parse import urlencode


def make_queue_path(name: str) -> str:
    """Return the path of the page of a queue, below the dashboard's own path."""
    return "/queue?" + urlencode({"name": name})


def make_worker_path(client_id: str) -> str:
    """Return the path of the page of a worker, below the dashboard's own path."""
    return "/worker?" + urlencode({"id": client_id})


def make_periodic_job_path(job_id: str) -> str:
    """Return the path of the page of a periodic job, below the dashboard's own path."""
    return "/periodic-job?" + urlencode({"id": job_id})


def make_bulk_run_path(run_id: str) -> str:
    """Return the path of the page of a change of all jobs that match, below the dashboard's own
    path."""
    return f"/bulk-change/{run_id}"
