"""Sentences that explain whether the jobs of a queue wait too long, and why."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from riverpy._dashboard.database import open_read_transaction
from riverpy._dashboard.health_summary import has_valid_lease, is_silent
from riverpy._dashboard.rendering import format_capped_count, format_duration
from riverpy._dashboard.sentence import HealthSentence, sort_sentences
from riverpy._names import DEFAULT_DOMAIN
from riverpy._postgres.dashboard_reads import queue_list_kinds_without_worker
from riverpy._postgres.queues import queue_list
from riverpy._postgres.transactions import read_server_time
from riverpy._tools.doctor.snapshot import QUEUE_LAG_MAX_DEFAULT
from riverpy._tools.doctor.waiting_jobs import UNWORKED_QUEUE_FAIL_LAG_FACTOR
from riverpy._tools.text import format_count, format_names
from riverpy._tools.top.statements import read_ended_job_counts, read_queue_job_counts
from riverpy._tools.top.status import (
    ENDED_JOBS_MAX,
    LATE_JOB_AFTER,
    QUEUES_MAX,
    RATE_WINDOW,
    READ_JOBS_MAX,
    queue_statuses,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import datetime

    from riverpy._dashboard.sentence import Health
    from riverpy._postgres.driver import Transaction
    from riverpy._tools.reads import ClientRow
    from riverpy._tools.top.status import DomainStatus, OverallStatus, QueueStatus, WorkerStatus
    from riverpy.client import Client
    from riverpy.queue import Queue

LONG_WAIT_SECONDS = 60.0
"""A queue is behind, i.e. its jobs wait too long, if its oldest due job has waited longer than this
time, in seconds."""
UNWORKED_SECONDS_MAX = QUEUE_LAG_MAX_DEFAULT.total_seconds() * UNWORKED_QUEUE_FAIL_LAG_FACTOR
"""If a queue has no worker and its oldest due job has waited this many seconds, an operator must
act. By default, `riverpy doctor` fails at the same limit."""
USED_WITHIN_SECONDS = 1200.0
"""A client works a queue if the row of the queue was updated within this time, in seconds. Clients
in all languages update the row every 10 minutes."""


SAMPLED_JOBS_MAX = 1_000
"""The maximum number of waiting jobs that the dashboard reads from one queue to find the kinds of
jobs. `SAMPLED_JOBS_TOTAL_MAX` lowers this number if the dashboard reads many queues."""
SAMPLED_JOBS_TOTAL_MAX = 4_000
"""The maximum number of waiting jobs that the dashboard reads from all queues together to find the
kinds of jobs that no worker can run."""
SAMPLED_QUEUES_MAX = 20
"""The maximum number of queues in which the dashboard searches for kinds of jobs that no worker can
run."""
KINDS_WITHOUT_WORKER_MAX = 100
"""The maximum number of kinds without a worker that one read returns for all queues together."""


class WaitReason(NamedTuple):
    """The reason why due jobs wait in a queue, as sentences."""

    health: Health
    cause: str
    advice: str = ""
    """What the operator can do. Empty: nothing is needed."""


class QueueFacts(NamedTuple):
    """The facts about one queue that explain whether its jobs wait too long."""

    status: QueueStatus
    row: Queue | None
    """The row of the queue in River's table. None: no client has worked the queue lately."""
    domain: DomainStatus | None
    """The leader domain that owns the queue. None: the domain `default`."""
    silent_workers: Sequence[WorkerStatus]
    """The workers of the queue whose last heartbeat is too old."""
    kinds_without_worker: Sequence[str]
    """Kinds of waiting jobs that no worker of the queue can run."""
    fleet: OverallStatus
    read_at: datetime

    @property
    def paused_seconds(self) -> float | None:
        """The time since the queue was paused, in seconds. None: the queue is not paused."""
        if self.row is None or self.row.paused_at is None:
            return None
        return (self.read_at - self.row.paused_at).total_seconds()

    @property
    def live_worker_count(self) -> int | None:
        """The number of workers of the queue whose heartbeat is recent. None: not known,
        because riverpy's table of clients does not exist."""
        if self.status.workers is None:
            return None
        return self.status.workers - sum(one.state != "silent" for one in self.silent_workers)

    @property
    def domain_name(self) -> str:
        """The name of the leader domain that owns the queue."""
        return DEFAULT_DOMAIN if self.domain is None else self.domain.name

    @property
    def was_used_lately(self) -> bool:
        """Whether a client in any language has updated the queue's row in the last
        `USED_WITHIN_SECONDS` seconds."""
        if self.row is None:
            return False
        return (self.read_at - self.row.updated_at).total_seconds() < USED_WITHIN_SECONDS


async def read_queue_facts(client: Client, fleet: OverallStatus) -> list[QueueFacts]:
    """Read the facts about each queue that the status `fleet` contains."""
    schema = client.config.schema
    async with open_read_transaction(client) as tx:
        now = await read_server_time(tx)
        rows = {row.name: row for row in await queue_list(tx, schema, QUEUES_MAX)}
        missing = await read_kinds_without_worker(tx, schema, fleet, _choose_slow_queues(fleet))
    return make_queue_facts(fleet, rows, missing, now)


def _choose_slow_queues(fleet: OverallStatus) -> list[str]:
    """Return the names of queues whose jobs wait too long although the queue has workers and is not
    paused. The longest wait comes first. At most `SAMPLED_QUEUES_MAX` names are returned."""
    slow = [
        queue
        for queue in fleet.queues
        if queue.workers and not queue.paused and (queue.due_for or 0) > LONG_WAIT_SECONDS
    ]
    slow.sort(key=lambda queue: -(queue.due_for or 0))
    return [queue.name for queue in slow[:SAMPLED_QUEUES_MAX]]


async def add_queue_to_status(
    tx: Transaction,
    schema: str | None,
    fleet: OverallStatus,
    name: str,
    clients: Sequence[ClientRow] = (),
) -> OverallStatus:
    """Return a status that contains the queue `name`. If `fleet` contains the queue, return
    `fleet`. Otherwise read the counts of the queue, and return a copy of `fleet` that contains only
    this queue. `fleet` may lack the queue, because the number of queues in a status is limited.
    `clients` are the clients that work the queue."""
    if any(queue.name == name for queue in fleet.queues):
        return fleet
    ended = await read_ended_job_counts(
        tx, schema, window=RATE_WINDOW, count_limit=ENDED_JOBS_MAX, damaged_job_ids=fleet.damaged
    )
    counts = await read_queue_job_counts(
        tx,
        schema,
        queue_names=[name],
        window_start=ended[0].window_start,
        late_after=LATE_JOB_AFTER,
        count_limit=fleet.cap,
        read_limit=READ_JOBS_MAX,
        damaged_job_ids=fleet.damaged,
    )
    known_clients = None if fleet.candidates is None else clients
    return msgspec.structs.replace(
        fleet, queues=queue_statuses(fleet.at, counts, ended, known_clients)
    )


async def read_kinds_without_worker(
    tx: Transaction, schema: str | None, fleet: OverallStatus, names: Sequence[str]
) -> dict[str, list[str]]:
    """Return, for each queue in `names`, the kinds of waiting jobs that no live worker of the queue
    can run. Only the first waiting jobs of each queue are read."""
    if fleet.candidates is None or not names:  # the table of clients is missing
        return {}
    jobs_max = min(SAMPLED_JOBS_MAX, SAMPLED_JOBS_TOTAL_MAX // len(names))
    return await queue_list_kinds_without_worker(
        tx, schema, queues=names, jobs_max=jobs_max, kinds_max=KINDS_WITHOUT_WORKER_MAX
    )


def make_queue_facts(
    fleet: OverallStatus,
    rows: Mapping[str, Queue],
    kinds_without_worker: Mapping[str, Sequence[str]],
    read_at: datetime,
) -> list[QueueFacts]:
    """Return the facts about each queue that the status `fleet` contains. `rows` are the rows of
    River's queue table, by queue name."""
    domains = {queue: domain for domain in fleet.domains for queue in domain.queues}
    silent: dict[str, list[WorkerStatus]] = {}
    for worker in fleet.workers:
        if is_silent(worker):
            for name in worker.queues or ():
                silent.setdefault(name, []).append(worker)
    return [
        QueueFacts(
            queue,
            rows.get(queue.name),
            domains.get(queue.name),
            silent.get(queue.name, ()),
            kinds_without_worker.get(queue.name, ()),
            fleet,
            read_at,
        )
        for queue in fleet.queues
    ]


def explain_queue(facts: QueueFacts) -> list[HealthSentence]:
    """Return sentences about a queue: whether its jobs wait too long, and why. The most important
    sentence is first."""
    return sort_sentences(
        [_explain_waits(facts), *_explain_late_jobs(facts), *_explain_silent_workers(facts)]
    )


def _explain_waits(facts: QueueFacts) -> HealthSentence:
    """Return the HealthSentence about the due jobs of a queue: whether jobs wait, how long, and
    why."""
    waits = describe_waiting_jobs(facts)
    if facts.status.paused:
        since = facts.paused_seconds
        paused = "is paused" if since is None else f"has been paused for {format_duration(since)}"
        effect = f"{waits}." if waits else "No job waits."
        return HealthSentence(
            "look", f"The queue {paused}, so no worker takes jobs of it. {effect}"
        )
    if not waits:
        return HealthSentence("ok", "Not behind: no due job waits.")
    reason = find_wait_reason(facts)
    parts = (reason.cause, f"{waits}.", reason.advice)
    return HealthSentence(reason.health, " ".join(part for part in parts if part))


def describe_waiting_jobs(facts: QueueFacts, where: str = "") -> str:
    """Return how many due jobs wait in a queue and how long, in words. Return an empty text if no
    due job waits.

    Args:
        facts: the facts about the queue.
        where: the text after the number of jobs. For example, ` in mail` makes the text
            `2 jobs wait in mail, the oldest for 1h5m`.
    """
    queue = facts.status
    if queue.due_for is None:
        return ""
    number = format_capped_count(queue.available, facts.fleet.cap)
    subject = "1 job waits" if queue.available == 1 else f"{number} jobs wait"
    oldest = "" if queue.available == 1 else "the oldest "
    return f"{subject}{where}, {oldest}for {format_duration(queue.due_for)}"


def find_wait_reason(facts: QueueFacts) -> WaitReason:
    """Return the reason why the due jobs of a queue wait. The queue must not be paused."""
    if facts.live_worker_count == 0:
        return _explain_missing_workers(facts)
    if kinds := facts.kinds_without_worker:
        noun = "kind" if len(kinds) == 1 else "kinds"
        return WaitReason(
            "act",
            f"No worker of this queue can run the {noun} {format_names(kinds)}: such jobs wait "
            "until a worker with this code runs.",
        )
    return _explain_busy_workers(facts)


def _explain_missing_workers(facts: QueueFacts) -> WaitReason:
    if facts.silent_workers:
        names = format_names(one.client_id for one in facts.silent_workers)
        return WaitReason(
            "act",
            f"No worker of this queue sends a heartbeat ({names}): they stopped without a notice, "
            "or cannot reach the database. Start them again.",
        )
    if facts.was_used_lately:
        is_new = (facts.status.due_for or 0) <= LONG_WAIT_SECONDS
        return WaitReason(
            "ok" if is_new and _has_non_riverpy_clients(facts.fleet) else "look",
            "No riverpy worker works this queue. A client in another language may work it.",
        )
    is_failure = (facts.status.due_for or 0) >= UNWORKED_SECONDS_MAX
    return WaitReason(
        "act" if is_failure else "look",
        "No worker works this queue. Start one: `riverpy worker MODULE:ATTR "
        f"-q {quote(facts.status.name)}:50`.",
    )


def _has_non_riverpy_clients(fleet: OverallStatus) -> bool:
    """Return whether a client in another language probably runs: the leader is not a riverpy
    client, or jobs run in a client that is not registered."""
    is_leader_foreign = fleet.leader is not None and bool(fleet.leader.foreign)
    return is_leader_foreign or any(one.state == "unregistered" for one in fleet.workers)


def _explain_busy_workers(facts: QueueFacts) -> WaitReason:
    """Return the reason why due jobs wait although a live worker can run them."""
    queue = facts.status
    is_long = (queue.due_for or 0) > LONG_WAIT_SECONDS
    health: Health = "look" if is_long else "ok"
    if queue.slots is not None and queue.running >= queue.slots:
        slots = format_count(queue.slots, "slot")
        text = (
            f"No slot is free: {format_capped_count(queue.running, facts.fleet.cap)} jobs run in "
        )
        advice = "Start more workers, or give them more slots." if is_long else ""
        return WaitReason(health, f"{text}{slots}.", advice)
    if not is_long:
        return WaitReason(health, "Not behind:")
    advice = "`riverpy doctor` checks the reasons, such as locks and kinds."
    if queue.slots is None:
        return WaitReason(health, "It is not known how many slots are free.", advice)
    free = format_count(queue.slots - queue.running, "slot")
    verb = "is" if queue.slots - queue.running == 1 else "are"
    return WaitReason(health, f"Jobs wait although {free} {verb} free.", advice)


def _explain_late_jobs(facts: QueueFacts) -> Iterator[HealthSentence]:
    """Yield a sentence about scheduled jobs and retries that the leader should have made available,
    if there are any."""
    late = facts.status.late
    if not late:
        return
    number = format_capped_count(late, facts.fleet.cap)
    subject = (
        "1 scheduled job or retry is" if late == 1 else f"{number} scheduled jobs or retries are"
    )
    domain = facts.domain
    leader = facts.fleet.leader if domain is None else domain.leader
    if leader is None or not has_valid_lease(leader):
        where = "" if domain is None else f" of the domain {domain.name}"
        yield HealthSentence(
            "act",
            f"{subject} late, because there is no leader{where}: start a worker that can become "
            "leader.",
        )
    else:
        yield HealthSentence(
            "look", f"{subject} late. Read the log of the leader {leader.leader_id}."
        )


def _explain_silent_workers(facts: QueueFacts) -> Iterator[HealthSentence]:
    """Yield a sentence about workers without a recent heartbeat, if the queue also has live
    workers."""
    if facts.silent_workers and facts.live_worker_count:
        number = format_count(len(facts.silent_workers), "worker")
        verb = "sends" if len(facts.silent_workers) == 1 else "send"
        names = format_names(one.client_id for one in facts.silent_workers)
        running = sum(one.running for one in facts.silent_workers)
        effect = f" The leader rescues their {format_count(running, 'job')}." if running else ""
        yield HealthSentence(
            "look", f"{number} of this queue {verb} no heartbeat: {names}.{effect}"
        )
