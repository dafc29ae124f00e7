"""The error of the tools."""

from __future__ import annotations

from riverpy.errors import RiverError


class ToolError(RiverError):
    """A tool cannot do its work. The text says why and what to do."""
