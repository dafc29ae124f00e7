"""Announcements: what a notification on a topic of leads tells an elector."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._postgres.notifier import decode_message

if TYPE_CHECKING:
    from riverpy._leading.elector import Elector

ASKED = "somebody asked it to resign"


def hear_leader(elector: Elector, payload: str) -> None:
    """A notification on River's topic `river_leadership`, which is about the domain `default`."""
    message = decode_message(payload)
    if message is None:
        return
    match message.action:
        case "resigned":
            elector.vacated(message.leader_id)
        case "request_resign":
            elector.give_way(ASKED)
        case _:
            pass


def hear_lease(elector: Elector, name: str, payload: str) -> None:
    """A notification on our topic `riverpy_lease`, which is about any lease; the elector's is
    `name`."""
    message = decode_message(payload)
    if message is None or message.lease != name:
        return
    match message.action:
        case "released":
            elector.vacated(message.holder)
        case "resign_requested":
            elector.give_way(ASKED, epoch=message.epoch)
        case _:
            pass
