"""drain: works all due jobs in the calling task, without a running client."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, overload

from riverpy._names import validate_queue_name
from riverpy._postgres import jobs
from riverpy.errors import ClientStateError, ConfigError
from riverpy.testing._inline_client import InlineClient, work_job_on_pool
from riverpy.testing._test_transaction import TestTransaction, run_in_transaction

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from riverpy._postgres.sessions.protocols import BlockingTransaction, CallerTransaction
    from riverpy.client import Client
    from riverpy.testing.work_result import WorkResult

ATTEMPTS_MAX_DEFAULT = 1_000
"""The default maximum number of attempts in one call of `drain`."""


@overload
def drain(
    client: Client,
    queues: Sequence[str] | None = None,
    *,
    with_scheduled: bool = False,
    max_jobs: int = ATTEMPTS_MAX_DEFAULT,
    tx: BlockingTransaction,
) -> list[WorkResult]: ...
@overload
def drain(
    client: Client,
    queues: Sequence[str] | None = None,
    *,
    with_scheduled: bool = False,
    max_jobs: int = ATTEMPTS_MAX_DEFAULT,
    tx: CallerTransaction | None = None,
) -> Coroutine[object, None, list[WorkResult]]: ...
def drain(
    client: Client,
    queues: Sequence[str] | None = None,
    *,
    with_scheduled: bool = False,
    max_jobs: int = ATTEMPTS_MAX_DEFAULT,
    tx: BlockingTransaction | CallerTransaction | None = None,
) -> list[WorkResult] | Coroutine[object, None, list[WorkResult]]:
    """Work all due jobs, one after the other, in the calling task. Returns one result for each
    attempt, in the order of the attempts.

    Jobs that these jobs insert are worked too. The order is that of a client: by priority, due time
    and id. Jobs of paused queues are worked too. With a blocking session as `tx` the call needs no
    `await`.

    Args:
        client: the client whose workers and settings are used. It must not run. Without `tx` it
            must be open.
        queues: the queues. Default None: the queues of the client, or all queues if it has none.
        with_scheduled: also work jobs that are due later, in the order of their due times, and
            retry failed jobs up to their `max_attempts`. Default False: a failed or snoozed job is
            worked again only if it is due at once.
        max_jobs: the maximum number of attempts. Default 1,000.
        tx: your connection or session, in a transaction. Nothing is committed. Default None: each
            job is worked on the client's pool, and its result is committed.

    Raises:
        ClientStateError: more than `max_jobs` attempts are needed; or the client runs, or is not
            open and there is no `tx`.
        ConfigError: a queue name or `max_jobs` is not allowed, or the client has no workers.
        TransactionError: `tx` is closed, aborted or not in a transaction, or the code of a job has
            ended or aborted it.
        SchemaMissingError: the database has no River tables.
    """

    async def drain_in(transaction: TestTransaction | None) -> list[WorkResult]:
        names = _check_arguments_and_choose_queues(client, queues, max_jobs)
        return await _drain(client, names, transaction, with_scheduled, max_jobs)

    return drain_in(None) if tx is None else run_in_transaction(tx, drain_in)


async def _drain(
    client: Client,
    queues: list[str] | None,
    transaction: TestTransaction | None,
    with_scheduled: bool,
    max_jobs: int,
) -> list[WorkResult]:
    worker = (
        None if transaction is None else InlineClient(transaction, client.workers, client.config)
    )
    source = client if worker is None else worker
    kinds = list(client.workers or ()) if client.config.known_kinds_only else None
    results: list[WorkResult] = []
    open_transaction = InlineClient.get_transaction_opener(source)
    while True:
        async with open_transaction(isolation="autocommit") as connection:
            job_id = await jobs.job_find_next(
                connection,
                client.config.schema,
                queues=queues,
                kinds=kinds,
                at_any_time=with_scheduled,
            )
        if job_id is None:
            return results
        if len(results) >= max_jobs:
            raise ClientStateError(_describe_endless_jobs(results))
        results.append(
            await (work_job_on_pool(client, job_id) if worker is None else worker.work_job(job_id))
        )


def _check_arguments_and_choose_queues(
    client: Client, queues: Sequence[str] | None, max_jobs: int
) -> list[str] | None:
    """Check the arguments of `drain`, and return the names of the queues whose jobs are worked;
    None: all queues.

    Raises:
        ConfigError: an argument is not allowed, or the client has no workers.
        ClientStateError: the client is running.
    """
    if not client.workers:
        raise ConfigError("drain works jobs, so the client needs workers: Client(…, workers=…)")
    if client.is_running:
        raise ClientStateError(
            "drain works jobs in your task, so it takes a client that is not running"
        )
    if max_jobs < 1:
        raise ConfigError(f"max_jobs is 1 or more, got {max_jobs}")
    if isinstance(queues, str):
        raise ConfigError(f"queues is a list of names, got the text {queues!r}")
    names = list(client.queues if queues is None else queues)
    for name in names:
        validate_queue_name(name)
    return names or None


def _describe_endless_jobs(results: list[WorkResult]) -> str:
    counts = Counter((result.job.kind, result.event.kind.value) for result in results)
    ends = ", ".join(f"{count} × {kind} {end}" for (kind, end), count in counts.most_common(3))
    return (
        f"drain has worked {len(results)} attempts, and more jobs wait: jobs may insert or snooze "
        f"themselves for ever ({ends}). Pass a larger max_jobs if they do end"
    )
