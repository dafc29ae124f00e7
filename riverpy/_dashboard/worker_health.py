"""Sentences about the health of a worker, its slots and its leadership. A worker is a client that
runs jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy._dashboard.health_summary import has_valid_lease, is_silent
from riverpy._dashboard.rendering import format_duration
from riverpy._dashboard.sentence import HealthSentence, sort_sentences
from riverpy._maintenance.client_cleaner import DEAD_CLIENT_RETENTION
from riverpy._names import DEFAULT_DOMAIN
from riverpy._tools.text import format_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from riverpy._tools.top.status import OverallStatus, WorkerStatus


def explain_worker(worker: WorkerStatus, fleet: OverallStatus) -> list[HealthSentence]:
    """Return sentences about what a worker does and what is wrong with it. The worst health
    comes first."""
    return sort_sentences([_explain_state(worker, fleet), *_explain_problems(worker)])


def format_worker_state(worker: WorkerStatus) -> str:
    """Return the state of a worker in one or two words."""
    return "no heartbeat" if is_silent(worker) and worker.state != "silent" else worker.state


def describe_leadership(worker: WorkerStatus, led_domains: Sequence[str]) -> str:
    """Describe the leadership of a worker, such as `leader of default` for the domains in
    `led_domains`. If `led_domains` is empty, return whether the worker can become leader, or `–` if
    the worker is silent."""
    if led_domains:
        return f"leader of {', '.join(led_domains)}"
    if is_silent(worker):
        return "–"
    if worker.candidate is None:
        return "not known"
    return "can become leader" if worker.candidate else "cannot become leader"


def describe_slots(workers: Sequence[WorkerStatus]) -> str:
    """Return sentences about how many slots the live workers have and how many are free. Return an
    empty text if no worker reports its slots."""
    live = [one for one in workers if one.state == "alive" and not is_silent(one)]
    counted = [(one.slots, one.running) for one in live if one.slots is not None]
    if not counted:
        return ""
    total = sum(slots for slots, _ in counted)
    used = sum(min(slots, running) for slots, running in counted)
    verb = "takes" if len(counted) == 1 else "take"
    text = f"{format_count(len(counted), 'worker')} {verb} jobs. {used:,} of "
    text += f"{format_count(total, 'slot')} in use, {total - used:,} free."
    unknown = len(live) - len(counted)
    if unknown:
        text += f" The slots of {format_count(unknown, 'other worker')} are not known."
    return text


def _explain_state(worker: WorkerStatus, fleet: OverallStatus) -> HealthSentence:
    if is_silent(worker):
        return _explain_silence(worker, fleet)
    match worker.state:
        case "stopping":
            left = format_count(worker.running, "job")
            return HealthSentence("ok", f"It stops: it takes no new jobs, and waits for {left}.")
        case "unregistered":
            return HealthSentence(
                "look",
                f"It is not registered, but runs {format_count(worker.running, 'job')}. It may be "
                "a client of River in Go, or a worker whose row was deleted.",
            )
        case _:
            return HealthSentence("ok", _describe_slot_use(worker))


def _explain_silence(worker: WorkerStatus, fleet: OverallStatus) -> HealthSentence:
    text = f"No heartbeat for {format_duration(worker.silent_for)}"
    if worker.state != "silent":
        return HealthSentence(
            "look",
            f"{text}: it stopped without a notice, or cannot reach the database. It counts as dead "
            f"after {format_duration(worker.dead_after)}.",
        )
    text += ": probably dead."
    if not worker.running:
        minutes = round(DEAD_CLIENT_RETENTION / 60)
        return HealthSentence(
            "look",
            f"{text} The leader removes it from this list when it has seen no "
            f"heartbeat for {minutes} minutes.",
        )
    jobs = format_count(worker.running, "job")
    if not has_valid_lease(fleet.leader):
        return HealthSentence(
            "act", f"{text} {jobs} of it cannot be rescued, because there is no leader."
        )
    return HealthSentence("look", f"{text} The leader rescues its {jobs} for other workers.")


def _describe_slot_use(worker: WorkerStatus) -> str:
    jobs = format_count(worker.running, "job")
    longest = f", the longest for {format_duration(worker.longest)}" if worker.running else ""
    if worker.slots is None:
        return f"It runs {jobs}{longest}. Its slots are not known."
    slots = format_count(worker.slots, "slot")
    if worker.running >= worker.slots > 0:
        return f"It runs {jobs} in {slots}{longest}: no slot is free."
    return f"It runs {jobs} in {slots}{longest}."


def _explain_problems(worker: WorkerStatus) -> Iterator[HealthSentence]:
    if worker.stuck and worker.state != "silent":
        jobs = format_count(worker.stuck, "job")
        verb, uses = ("runs", "uses a slot") if worker.stuck == 1 else ("run", "use slots")
        is_full = worker.slots is not None and worker.stuck >= worker.slots
        effect = " It can work no other job." if is_full else ""
        yield HealthSentence(
            "act" if is_full else "look",
            f"{jobs} still {verb} after the cancellation, and {uses}.{effect} Restart the worker, "
            "and correct the code of the job: it ignores cancellation.",
        )
    if worker.aside:
        rows = format_count(worker.aside, "row")
        yield HealthSentence(
            "look",
            f"It skips {rows} for a while, because statements for these rows fail. `riverpy "
            "doctor` says what to do.",
        )


def find_led_domains(client_id: str, fleet: OverallStatus) -> list[str]:
    """Return the names of the leader domains whose current leader is the client `client_id`."""
    leaders = {DEFAULT_DOMAIN: fleet.leader, **{one.name: one.leader for one in fleet.domains}}
    return [
        domain
        for domain, leader in leaders.items()
        if leader is not None and has_valid_lease(leader) and leader.leader_id == client_id
    ]
