"""Waiting for the end of jobs: the waits, the shared listener, and results."""

from __future__ import annotations
