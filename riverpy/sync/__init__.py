"""A client for code that is not async: `riverpy.sync.Client`."""

from __future__ import annotations

from riverpy._postgres.sessions.protocols import BlockingTransaction as Transaction
from riverpy.sync._current_client import current_client
from riverpy.sync.client import Client

__all__ = ["Client", "Transaction", "current_client"]
