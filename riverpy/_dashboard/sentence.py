"""Sentence: one line on a page about the health of clients, queues or jobs."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

Health: TypeAlias = Literal["ok", "look", "act"]
"""`ok`: there is no problem. `look`: something is unusual. `act`: jobs do not run, so act now."""


class HealthSentence(NamedTuple):
    """One line on a page about the health of clients, queues or jobs."""

    health: Health
    text: str
    link: str | None = None
    """The path of the page with details, relative to the dashboard's mount path."""
    link_text: str = ""


def rank_health(health: Health) -> int:
    """Return a number that is higher for worse health."""
    return ("ok", "look", "act").index(health)


def sort_sentences(sentences: list[HealthSentence]) -> list[HealthSentence]:
    """Return the sentences sorted by their field `health`, the worst health first."""
    return sorted(sentences, key=lambda one: -rank_health(one.health))
