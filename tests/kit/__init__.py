"""Tools for tests and scripts: a fleet of worker processes, faults for its servers and networks,
and checkers of its history."""

from __future__ import annotations
