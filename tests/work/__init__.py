"""Working jobs: outcomes, claims, results, cancels, stops."""

from __future__ import annotations
