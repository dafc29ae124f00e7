"""Hides the package rich from the processes of the tests.

Litestar and import-linter bring rich, and structlog imports it if it is there. This takes a fifth
of the start of `riverpy worker`, and the tests start hundreds of processes.
"""

from __future__ import annotations

raise ImportError("the tests hide rich: tests/hidden/rich.py")
