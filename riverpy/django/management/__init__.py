"""The package that Django requires for the commands of an app."""

from __future__ import annotations
