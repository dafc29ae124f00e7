"""SessionJobs: checks and works the jobs of a test. The fixture `riverpy_jobs` returns it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from riverpy.client import Client
from riverpy.errors import ConfigError
from riverpy.testing.drain import ATTEMPTS_MAX_DEFAULT, drain
from riverpy.testing.inserted_jobs import InsertedJobs
from riverpy.testing.test_worker import TestWorker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from riverpy._postgres.sessions.protocols import CallerTransaction
    from riverpy.insert_opts import InsertOpts
    from riverpy.job import JobArgs, JobRow, RawArgs
    from riverpy.testing.work_result import WorkResult
    from riverpy.worker import Workers


class SessionJobs(InsertedJobs):
    """Checks and works the jobs of a test. In a test with a session, these are the jobs that the
    session can read, and they are worked in the session's transaction. In a test with a client
    instead of a session, they are the committed jobs."""

    def __init__(self, tx: CallerTransaction | Client, client: Client) -> None:
        """Create the object.

        Args:
            tx: the test's session, or an open client.
            client: the client with the workers and settings. It need not be open if `tx` is a
                session.
        """
        super().__init__(tx, schema=client.config.schema)
        self._session = None if isinstance(tx, Client) else tx
        self._client = client

    async def work(
        self, args: JobArgs | RawArgs, opts: InsertOpts | None = None, *, unique: bool = False
    ) -> WorkResult:
        """Insert a job and work it at once, in the transaction of the test's session; see
        `riverpy.testing.TestWorker.work`.

        Raises:
            ConfigError: the client has no workers, or the test has no session.
        """
        worker, tx = self._make_worker()
        return await worker.work(args, opts, unique=unique, tx=tx)

    async def work_job(self, job: JobRow | int) -> WorkResult:
        """Work an existing job at once, in the transaction of the test's session; see
        `riverpy.testing.TestWorker.work_job`.

        Raises:
            ConfigError: as `work`.
        """
        worker, tx = self._make_worker()
        return await worker.work_job(job, tx=tx)

    async def drain(
        self,
        queues: Sequence[str] | None = None,
        *,
        with_scheduled: bool = False,
        max_jobs: int = ATTEMPTS_MAX_DEFAULT,
    ) -> list[WorkResult]:
        """Work all due jobs, one after the other; see `riverpy.testing.drain`.

        Raises:
            ConfigError: the client has no workers.
        """
        self._get_workers()
        return await drain(
            self._client,
            queues,
            with_scheduled=with_scheduled,
            max_jobs=max_jobs,
            tx=self._session,
        )

    def _make_worker(self) -> tuple[TestWorker, CallerTransaction]:
        if self._session is None:
            raise ConfigError(
                "the jobs of riverpy_client are committed, and this method works a job in a "
                "transaction: use riverpy_jobs.drain(); or add riverpy_session or "
                "riverpy_connection to the arguments of the test"
            )
        return TestWorker(self._get_workers(), self._client.config), self._session

    def _get_workers(self) -> Workers:
        if self._client.workers is None:
            raise ConfigError(
                "there are no workers: override the fixture riverpy_workers, so that it returns "
                "the workers of your application"
            )
        return self._client.workers
