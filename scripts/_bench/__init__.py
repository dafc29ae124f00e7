"""What `scripts/bench` measures with: a server, the competitors, the measures, the goals."""

from __future__ import annotations
