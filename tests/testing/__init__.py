"""The test kit for users: jobs without a database, assertions, recordings."""

from __future__ import annotations
