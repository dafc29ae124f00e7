"""The paths of pages whose addresses contain a name, and such names in sentences.

Names are in the query of the address, because they may contain any character: browsers and proxies
change paths with `..`, `//` or an escaped slash."""

from __future__ import annotations

from urllib.parse import urlencode

from riverpy._tools.text import shorten_line

QUOTED_NAME_LENGTH_MAX = 200
"""The maximum number of characters of a name that an error page shows."""


def is_same_site_path(path: str) -> bool:
    """Return whether a path, below the dashboard's own path, never leads to another site."""
    return path.startswith("/") and not path.startswith("//") and "\\" not in path


def quote_name(name: str) -> str:
    """Return a name that a request contains in quotes, for a sentence. A long name is cut."""
    return repr(shorten_line(name, QUOTED_NAME_LENGTH_MAX))


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
