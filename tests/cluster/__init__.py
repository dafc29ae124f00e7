"""Leading: the election, the lease, and what they survive."""

from __future__ import annotations
