"""ToolError: the error that the tools raise."""

from __future__ import annotations

from riverpy.errors import RiverError


class ToolError(RiverError):
    """A tool, such as the demo or the benchmark, cannot continue. The text has the reason and the
    remedy."""
