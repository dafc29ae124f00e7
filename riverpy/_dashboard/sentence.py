"""Sentence: one line of a page about the state of the system."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

Health: TypeAlias = Literal["ok", "look", "act"]
"""`ok`: all is well. `look`: something is unusual. `act`: jobs do not run, so act now."""


class Sentence(NamedTuple):
    """One line about the state of the system."""

    health: Health
    text: str
    link: str | None = None
    """The path of the page that explains the text, below the dashboard's own path."""
    link_text: str = ""


def rank_health(health: Health) -> int:
    """Return a number that is higher for a worse state."""
    return ("ok", "look", "act").index(health)


def sort_sentences(sentences: list[Sentence]) -> list[Sentence]:
    """Return the sentences, the worst first."""
    return sorted(sentences, key=lambda one: -rank_health(one.health))
