"""HealthSummary: a headline with sentences below it, about the health of clients, queues, jobs or
leases. The functions of this module also make the sentences that several pages show: about leaders,
leases, and the checks of `riverpy doctor`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from riverpy._clients.heartbeat import STOP_CLAIMING_AT_SHARE_OF_DEAD_AFTER
from riverpy._dashboard.rendering import format_duration
from riverpy._dashboard.sentence import HealthSentence, sort_sentences
from riverpy._tools.doctor.finding import Level
from riverpy._tools.text import format_count, format_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from riverpy._dashboard.doctor_cache import DoctorReport
    from riverpy._dashboard.sentence import Health
    from riverpy._tools.top.status import DomainStatus, LeaderStatus, OverallStatus, WorkerStatus

HEALTH_BY_LEVEL: dict[Level, Health] = {Level.OK: "ok", Level.WARN: "look", Level.FAIL: "act"}
_HEADLINE_BY_HEALTH: dict[Health, str] = {
    "look": "Something needs a look",
    "act": "Something needs action now",
}


class HealthSummary(NamedTuple):
    """A headline with sentences below it, about the health of clients, queues, jobs or leases. The
    most urgent sentence comes first."""

    health: Health
    headline: str
    sentences: Sequence[HealthSentence]


def make_health_summary(
    sentences: Iterable[HealthSentence], all_well: str = "All is well"
) -> HealthSummary:
    """Return a summary of `sentences`, which must not be empty. The most urgent sentence decides
    the headline. If nothing is wrong, `all_well` is the headline."""
    ordered = sort_sentences(list(sentences))
    health = ordered[0].health
    return HealthSummary(
        health, all_well if health == "ok" else _HEADLINE_BY_HEALTH[health], ordered
    )


def is_silent(worker: WorkerStatus) -> bool:
    """Return whether a worker is silent: it has sent no heartbeat for more than a third of its
    `dead_after`. After this time a worker stops claiming jobs. After `dead_after` it counts as
    dead."""
    if worker.state == "silent":
        return True
    if worker.silent_for is None or worker.dead_after is None:
        return False
    return worker.silent_for > worker.dead_after * STOP_CLAIMING_AT_SHARE_OF_DEAD_AFTER


def describe_leaders(status: OverallStatus) -> Iterator[HealthSentence]:
    """Yield a sentence about the leader of the domain `default`, and one sentence about each other
    domain without a leader."""
    yield _describe_default_leader(status)
    yield from (_describe_domain(one) for one in status.domains if not has_valid_lease(one.leader))


def has_valid_lease(leader: LeaderStatus | None) -> bool:
    """Return whether there is a leader whose lease has not expired."""
    return leader is not None and leader.expires_in >= 0


def _describe_default_leader(status: OverallStatus) -> HealthSentence:
    leader = status.leader
    if leader is None or not has_valid_lease(leader):
        if status.candidates == 0:
            health: Health = "look" if status.domains else "act"
            return HealthSentence(
                health,
                "There is no leader, and no running worker can become leader. Scheduled jobs, "
                "retries and periodic jobs wait until a worker starts.",
            )
        return HealthSentence(
            "look", "There is no leader now. A worker becomes leader within seconds."
        )
    since = format_duration((status.at - leader.elected_at).total_seconds())
    text = f"{leader.leader_id} has been the leader for {since}."
    if leader.foreign:
        return HealthSentence("look", f"{text} It is not a riverpy client.")
    return HealthSentence("ok", text)


def _describe_domain(domain: DomainStatus) -> HealthSentence:
    remedy = (
        "A worker becomes leader within seconds."
        if domain.candidates
        else "Start a worker of this domain."
    )
    health: Health = "act" if domain.workers and not domain.candidates else "look"
    return HealthSentence(health, f"The domain {domain.name} has no leader. {remedy}")


def describe_unheld_leases(status: OverallStatus) -> Iterator[HealthSentence]:
    """Yield a sentence about the leases of user code or singletons that no client holds, if there
    are any. The leases of leaders are not included."""
    expired = [lease for lease in status.leases if lease.state == "expired"]
    if expired:
        health: Health = "look" if all(lease.standbys for lease in expired) else "act"
        names = format_names(one.name for one in expired)
        remedy = "Start a process that uses them, if they are still needed."
        yield HealthSentence(health, f"The leases {names} have no holder. {remedy}")


def describe_failed_checks(report: DoctorReport) -> Iterator[HealthSentence]:
    """Yield a sentence about the failures that the checks of `riverpy doctor` found, if there are
    any."""
    failures = [one for one in report.findings if one.level is Level.FAIL]
    if failures:
        number = format_count(len(failures), "failure")
        names = format_names(dict.fromkeys(one.name for one in failures))
        text = f"The checks found {number} at {report.read_at:%H:%M} UTC: {names}."
        yield HealthSentence("act", text, "/doctor", "What to do")
