"""Services, their groups, scopes and signals."""

from __future__ import annotations
