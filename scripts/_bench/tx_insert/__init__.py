"""How long the insert of one job takes in a caller's transaction, for each kind of session."""

from __future__ import annotations
