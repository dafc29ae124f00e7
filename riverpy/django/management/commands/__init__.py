"""The package in which Django finds the commands of the app."""

from __future__ import annotations
