"""`riverpy.sync`: the client for code that is not async."""

from __future__ import annotations
