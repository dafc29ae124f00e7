"""The measurements. Each is a coroutine that takes a `Run` and adds to its samples."""

from __future__ import annotations
