"""The paths of pages about one queue, worker or other object, and the quoting of names in
sentences.

Names are in the URL query and not in the path, because they may contain any character. Browsers and
proxies change paths that contain `..`, `//` or an escaped slash.
"""

from __future__ import annotations

from urllib.parse import urlencode

from riverpy._tools.text import shorten_line

QUOTED_NAME_LENGTH_MAX = 200
"""The maximum number of characters of a name in an error page."""


def is_same_site_path(path: str) -> bool:
    """Return whether a path cannot lead to another site. The path is relative to the dashboard's
    mount path."""
    return path.startswith("/") and not path.startswith("//") and "\\" not in path


def quote_name_for_sentence(name: str) -> str:
    """Return a name in quotes, for use in a sentence. A long name is shortened, because a request
    may contain a name of any length."""
    return repr(shorten_line(name, QUOTED_NAME_LENGTH_MAX))


def make_queue_path(name: str) -> str:
    """Return the path of the page of a queue, relative to the dashboard's mount path."""
    return "/queue?" + urlencode({"name": name})


def make_worker_path(client_id: str) -> str:
    """Return the path of the page of a worker, relative to the dashboard's mount path."""
    return "/worker?" + urlencode({"id": client_id})


def make_periodic_job_path(job_id: str) -> str:
    """Return the path of the page of a periodic job, relative to the dashboard's mount path."""
    return "/periodic-job?" + urlencode({"id": job_id})


def make_bulk_run_path(run_id: str) -> str:
    """Return the path of the page of a bulk run, i.e. a change of all jobs that match a search. The
    path is relative to the dashboard's mount path."""
    return f"/bulk-change/{run_id}"
