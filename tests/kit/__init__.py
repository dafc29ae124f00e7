"""Breaking things: a fleet of worker processes, a fault proxy before PostgreSQL, a pooler, and a
checker of what a fleet did. For tests and for scripts."""

from __future__ import annotations
