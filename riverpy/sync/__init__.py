"""A client for code that is not async: `riverpy.sync.Client`."""

from __future__ import annotations

from riverpy._postgres.sessions.protocols import BlockingTransaction as Transaction
from riverpy.sync.client import Client

__all__ = ["Client", "Transaction"]
