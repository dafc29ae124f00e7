"""riverpy under load while something is broken: no job is lost or finished twice, no worker has to
be started anew, and the logs say what happened in plain words."""

from __future__ import annotations
