"""Client: inserts jobs, works jobs, and publishes events."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Final, Self, Unpack

import anyio
import msgspec
from msgspec import UNSET, UnsetType

from riverpy._calls.base import TransactionIsolation, open_savepoint
from riverpy._calls.events import EventMethods
from riverpy._calls.executions import RunOnceMethods
from riverpy._calls.job_batches import JobBatchMethods
from riverpy._calls.job_lists import JobListMethods
from riverpy._calls.jobs import JobMethods
from riverpy._calls.leadership import LeadershipMethods
from riverpy._calls.leases import LeaseMethods
from riverpy._calls.periodic_jobs import PeriodicJobMethods
from riverpy._calls.queues import QueueMethods
from riverpy._calls.waits import WaitMethods
from riverpy._client_arguments import (
    check_client_arguments,
    get_known_kinds,
    make_insert_clock,
    make_insert_settings,
)
from riverpy._clients.process import ProcessAndLoop
from riverpy._dsn import validate_url
from riverpy._insert.errors import translate_notify_channel_error
from riverpy._insert.inserter import NO_CONNECTION_ERROR_TEXT, Inserter, make_shared_statement_setup
from riverpy._insert.retries import ACQUIRE_CONNECTION_TIMEOUT, POOL_STATEMENT_TIMEOUT
from riverpy._lifecycle import unwrap_single_error
from riverpy._log import get_logger
from riverpy._log_events import HELD_POOL_CONNECTIONS_CLOSED
from riverpy._main_import import refuse_client_during_main_import
from riverpy._names import make_unique_id
from riverpy._plugins import PluginLists
from riverpy._postgres.driver import close_pool, create_pool, is_pool
from riverpy._postgres.passwords import make_password_source
from riverpy._work.attempt_store import AttemptStore
from riverpy._work.child_pool import ChildProcessPool
from riverpy._work.release import release_claims
from riverpy._work.run import ClientRun
from riverpy._work.run_context import ClientParts
from riverpy.config import Config, ConfigChanges
from riverpy.context import set_running_client
from riverpy.errors import ClientStateError, ConfigError
from riverpy.periodic import PeriodicJobs
from riverpy.queues import ClientQueues
from riverpy.stats import ClientStats
from riverpy.worker import Workers

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
    from types import TracebackType

    from anyio.abc import TaskStatus

    from riverpy._postgres.driver import Pool, Transaction
    from riverpy._postgres.jobs import ClaimKey
    from riverpy._postgres.passwords import PasswordFunction, PasswordSource
    from riverpy._postgres.sessions.protocols import CallerTransaction
    from riverpy._work.stop import StopReport
    from riverpy.config import QueueConfig
    from riverpy.insert_opts import InsertManyParams, InsertOpts, InsertResult
    from riverpy.job import JobArgs, RawArgs
    from riverpy.periodic import PeriodicJob


class Client(
    JobMethods,
    JobListMethods,
    JobBatchMethods,
    QueueMethods,
    PeriodicJobMethods,
    RunOnceMethods,
    LeadershipMethods,
    LeaseMethods,
    EventMethods,
    WaitMethods,
):
    """A River client. `async with client:` opens its pool of connections. `async with
    client.working():` works jobs until the end of the block.

    A client without queues only inserts jobs and runs singletons (functions that run in only one
    process at a time).
    """

    def __init__(
        self,
        database: str | Pool | None = None,
        *,
        workers: Workers | None = None,
        queues: Mapping[str, QueueConfig] | None = None,
        periodic_jobs: Iterable[PeriodicJob] = (),
        config: Config | None = None,
        password: PasswordFunction | None = None,
    ) -> None:
        """Create a client. This opens no connection.

        Args:
            database: a `postgres://` URL, or an asyncpg pool. A pool is used for inserts and other
                calls, and the client does not close it. A client that works jobs needs a URL.
                Default None: only calls with `tx=` work, until `configure` sets a URL.
            workers: the workers by kind. A client with workers refuses to insert other kinds,
                unless the setting `skip_unknown_job_check` is True.
            queues: the queues to work, by name.
            periodic_jobs: the periodic jobs that this client inserts while it is the leader.
            config: all other settings.
            password: a function, `async` or not, that returns the password. The client calls it for
                each new connection, including the one to `Config.listen_url`. With this function,
                the URLs must not contain a password. A function that is not async runs in a thread.
                Default None: the password is in the URL or the environment.

        Raises:
            ConfigError: a name or a value is not allowed.
        """
        check_client_arguments(workers, config)
        self._workers = workers
        has_workers = workers is not None
        self._queues = ClientQueues(lambda: self._run and self._run.queues, has_workers=has_workers)
        self._config = config or Config()
        self._database: str | Pool | None = None
        self._password: PasswordSource | None = None
        self.password: Final = password
        """The function that returns the password for new connections."""
        self._pool: Pool | None = None
        self._opened_in: ProcessAndLoop | None = None
        self._run: ClientRun | None = None
        self._stop_next_run: Callable[[ClientRun], None] | None = None
        """The method that stops the next run as soon as it starts: `ClientRun.stop` or
        `ClientRun.stop_hard`. None: no stop was requested before the run."""
        self._last_run: ClientRun | None = None
        """The current run. If the client is not running, the last run."""
        self._pid_and_generated_id: tuple[int, str] | None = None
        self._abandoned_claim_keys: frozenset[ClaimKey] = frozenset()
        self._child_processes = ChildProcessPool()
        self._log = get_logger()
        self._periodic_jobs = PeriodicJobs(periodic_jobs, self._insertable_kinds)
        self._set_database_and_queues(database=database, queues={} if queues is None else queues)

    @property
    def config(self) -> Config:
        """The settings of this client."""
        return self._config

    @property
    def database_url(self) -> str | None:
        """The URL of the database. None if the client has a pool or no database."""
        return self._database if isinstance(self._database, str) else None

    @property
    def workers(self) -> Workers | None:
        """The workers by kind."""
        return self._workers

    @property
    def queues(self) -> ClientQueues:
        """The queues that this client works. You can add, remove and resize queues, even while the
        client works."""
        return self._queues

    @property
    def periodic_jobs(self) -> PeriodicJobs:
        """The periodic jobs that this client inserts while it is the leader. You can add and remove
        periodic jobs at any time."""
        return self._periodic_jobs

    @property
    def is_open(self) -> bool:
        """Whether the pool of connections is open."""
        return self._pool is not None

    @property
    def is_running(self) -> bool:
        """Whether `run` or `working` has started and has not ended yet."""
        return self._run is not None

    @property
    def is_leader(self) -> bool:
        """Whether this client is the leader of its domain.

        The leader maintains the queues of its domain. The leader of `default` maintains all queues
        that no domain has claimed. The value is also False if the lease may have expired, for
        example because the database has not answered for a long time.
        """
        return self._run is not None and self._run.is_leader

    @property
    def id(self) -> str:
        """The id of this client. The client stores it in the rows of the jobs that it claims. If
        `Config.id` is not set, an id is generated at the first access, and again after a fork."""
        if self._config.id is not None:
            return self._config.id
        pid = os.getpid()
        if self._pid_and_generated_id is None or self._pid_and_generated_id[0] != pid:
            self._pid_and_generated_id = pid, make_unique_id(self._config.name)
        return self._pid_and_generated_id[1]

    def configure(
        self,
        *,
        database: str | UnsetType = UNSET,
        queues: Mapping[str, QueueConfig] | UnsetType = UNSET,
        **settings: Unpack[ConfigChanges],
    ) -> None:
        """Change settings of a client that is not open yet. UNSET leaves a setting unchanged.

        Args:
            database: the URL of the database. It replaces the current database.
            queues: the queues to work. They replace the current queues.
            settings: the settings of `Config` that are also settings of `riverpy worker`: `schema`,
                `name`, `poll_only`, `known_kinds_only`, `soft_stop_timeout`, `max_processes`,
                `candidate`, `leader_domain`, `domain_queues`, `on_domain_conflict`,
                `elect_interval`, `leader_ttl`, `max_leases`, `spread_leases` and `dead_after`.

        Raises:
            ClientStateError: the client is open or running.
            ConfigError: a name or a value is not allowed.
            TypeError: there is no such setting.
        """
        if self._opened_in is not None or self.is_running:
            raise ClientStateError("configure() comes before the client is opened")
        given = {key: value for key, value in settings.items() if value is not UNSET}
        if given:
            self._config = msgspec.structs.replace(self._config, **given)
        if database is not UNSET:
            self._set_database_and_queues(database=database, queues=self._queues)
        if queues is not UNSET:
            self._set_database_and_queues(database=self._database, queues=queues)
        self._pid_and_generated_id = None
        vars(self).pop("_inserter", None)

    def _set_database_and_queues(
        self, *, database: str | Pool | None, queues: Mapping[str, QueueConfig]
    ) -> None:
        if isinstance(database, str):
            validate_url(database)
        elif database is not None and not is_pool(database):
            raise ConfigError(
                f"the database is a URL or an asyncpg pool, got {type(database).__name__}"
            )
        self._password = make_password_source(self.password, database, self._config.listen_url)
        self._queues.replace_all(queues)
        self._database = database

    # -- opening and closing

    async def __aenter__(self) -> Self:
        """Open the pool of connections.

        Raises:
            ConfigError: the client has no database.
            ClientStateError: the client is already open, here or in another process or event loop.
            Exception: the database cannot be reached, or refuses the connection.
        """
        refuse_client_during_main_import()
        if self._opened_in is not None:
            self._opened_in.require_current("the client")
            raise ClientStateError("the client is open already")
        if self._database is None:
            raise ConfigError('give the client a database: Client("postgres://…")')
        # Set this before the await, so that a second task cannot open the client too.
        self._opened_in = ProcessAndLoop.current()
        try:
            self._pool = await self._make_pool(self._database)
        except BaseException:
            self._opened_in = None
            raise
        return self

    async def _make_pool(self, database: str | Pool) -> Pool:
        if not isinstance(database, str):
            return database
        return await create_pool(
            database,
            max_size=self._config.pool_size,
            through_pooler=self._config.pooler,
            command_timeout=POOL_STATEMENT_TIMEOUT,
            password=self._password,
        )

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """End all leases and subscriptions, and close the pool if the client has created it.
        Connections that are still in use are closed after a short wait, and a warning is logged."""
        pool, self._pool = self._pool, None
        opened_in, self._opened_in = self._opened_in, None
        if opened_in is None or not opened_in.is_current_process:
            return  # a forked child would close the connections of its parent
        try:
            try:
                await self._close_background_tasks()
                await self._stop_fleet_follower()
                await self._close_waiter_and_listener()
            finally:
                await self._lease_engine.close()
        finally:
            if self._run is None:  # a run ends the subscriptions itself
                self._subscription_manager.close()
            try:
                await self._inserter.close()
            finally:
                if pool is not None and pool is not self._database and not await close_pool(pool):
                    self._log.warning(HELD_POOL_CONNECTIONS_CLOSED)

    def _get_open_pool(self) -> Pool:
        if self._pool is None or self._opened_in is None:
            raise ClientStateError(
                "the client is not open: use `async with client:`, or give a transaction with tx="
            )
        self._opened_in.require_current("the client")
        return self._pool

    @asynccontextmanager
    async def _transaction(
        self,
        tx: CallerTransaction | None,
        *,
        isolation: TransactionIsolation | None = "read_committed",
    ) -> AsyncGenerator[Transaction]:
        """Open a savepoint in the caller's transaction `tx`. Without `tx`, open a transaction with
        this `isolation`. With the isolation `autocommit`, open no transaction."""
        if tx is not None:
            async with open_savepoint(tx) as connection:
                yield connection
            return
        pool = self._get_open_pool()
        reason = (
            f"the call took longer than {POOL_STATEMENT_TIMEOUT:g} s: the database is slow, or "
            "another session has locked the rows"
        )
        with anyio.fail_after(POOL_STATEMENT_TIMEOUT, reason=reason):
            with anyio.fail_after(ACQUIRE_CONNECTION_TIMEOUT, reason=NO_CONNECTION_ERROR_TEXT):
                connection = await pool.acquire()
            try:
                with translate_notify_channel_error():
                    if isolation == "autocommit":
                        yield connection
                    else:
                        async with connection.transaction(isolation=isolation):
                            yield connection
            finally:
                await pool.release(connection)

    # -- inserting

    def _insertable_kinds(self) -> Workers | None:
        """Return the kinds that this client may insert. None means all kinds."""
        return get_known_kinds(self._config, self._workers)

    @cached_property
    def _inserter(self) -> Inserter:
        return Inserter(
            # The inserter has its own timeout. With a timeout, `acquire` would start a task for
            # each insert.
            lambda: self._get_open_pool().acquire(),
            schema=self._config.schema,
            insert_settings=make_insert_settings(self._config, self._workers),
            plugins=PluginLists(self._config.plugins, self._config.hooks, self._config.middleware),
            clock=make_insert_clock(self._config),
            shared_insert_setup=make_shared_statement_setup(
                self._database, self._config, self._password, self._get_open_pool
            ),
        )

    async def insert(
        self,
        args: JobArgs | RawArgs,
        opts: InsertOpts | None = None,
        *,
        tx: CallerTransaction | None = None,
    ) -> InsertResult:
        """Insert a job.

        Args:
            args: the args of the job.
            opts: the options of this insert. They override the options of the args class.
            tx: your connection, in a transaction. The job exists after the commit. Default None: a
                connection of the client's pool is used. The job exists when the call returns.

        Raises:
            InsertError: the job is not allowed. Nothing was sent.
            TransactionError: `tx` is closed, aborted or not in a transaction.
            SchemaMissingError: the database has no River tables.
            ClientStateError: there is no `tx`, and the client is not open.
        """
        return await self._inserter.insert(args, opts, tx=tx)

    async def insert_many(
        self, params: Sequence[InsertManyParams], *, tx: CallerTransaction | None = None
    ) -> list[InsertResult]:
        """Insert jobs in one statement: either all of them, or none. The results are in the order
        of `params`. `tx` is the same as for `insert`.

        Raises:
            InsertError: `params` is empty, or a job is not allowed. Nothing was sent.
            TransactionError, SchemaMissingError, ClientStateError: see `insert`.
        """
        return await self._inserter.insert_many(params, tx=tx)

    async def insert_many_fast(
        self, params: Sequence[InsertManyParams], *, tx: CallerTransaction | None = None
    ) -> int:
        """Insert jobs with COPY: either all of them, or none. This is the fastest way. Return the
        number of jobs. `tx` is the same as for `insert`.

        Raises:
            UniqueConflictError: a job with the same unique key exists. No job was inserted, and
                `tx` stays usable.
            InsertError, TransactionError, SchemaMissingError, ClientStateError: see `insert_many`.
        """
        return await self._inserter.insert_many_fast(params, tx=tx)

    # -- statistics

    def stats(self) -> ClientStats:
        """Return the current state of the client and the counts of its current or last run, for
        metrics and health checks. This sends no statement to the database."""
        if self._last_run is None:
            return ClientStats(
                client_id=self.id, domain=self._config.domain, leases=self._lease_engine.stats
            )
        return self._last_run.stats()

    # -- working jobs

    async def run(
        self,
        *,
        drain: bool = False,
        task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> StopReport:
        """Work jobs until `stop` or `stop_and_cancel` is called. Open the client if it is not open.
        Return a report of what was not finished in time: jobs, maintenance, singletons, results.

        Args:
            drain: whether to stop when the queues have no more jobs to work.
            task_status: for anyio's `await tasks.start(client.run)`, which returns when the client
                has started to work.

        Raises:
            ConfigError: there are no queues and no singletons, or there are queues but no workers.
            UnknownJobKindError: a periodic job has a kind that this client cannot insert.
            ClientStateError: the client is already running.
            Exception: the client could not start, or failed because of a bug in riverpy.
        """
        refuse_client_during_main_import()
        if self._opened_in is not None:
            self._opened_in.require_current("the client")
        if self._run is not None:
            raise ClientStateError("the client runs already")
        run = self._run = self._last_run = self._make_client_run()
        if self._stop_next_run is not None:
            self._stop_next_run(run)
        try:
            async with AsyncExitStack() as opened:
                opened.enter_context(set_running_client(self))
                if not self.is_open:
                    with run.cancelling_at_stop_request():
                        await opened.enter_async_context(self)
                return await run.run(drain=drain, task_status=task_status)
        finally:
            self._abandoned_claim_keys |= run.running_attempts.collect_claim_keys()
            self._run = None
            self._subscription_manager.close()
            self._leadership_publisher.close()

    def _make_client_run(self) -> ClientRun:
        """Return the object that works the client's jobs. Raise ConfigError if it has no work."""
        if not self._queues and not self._singleton_registry.singletons_by_name:
            raise ConfigError(
                'there is no queue to work: Client(…, queues={"default": QueueConfig()})'
            )
        workers = self._workers or Workers()
        if self._queues and not len(workers):
            raise ConfigError("there is no worker: register one with Workers.add or @workers.job")
        if self._config.candidate:
            self._periodic_jobs.check_kinds()
        parts = self._make_client_parts(self._get_url_for_run(), workers)
        with set_running_client(self):  # the run copies the context variables for its jobs
            return ClientRun(parts, abandoned_claim_keys=self._abandoned_claim_keys)

    def _make_client_parts(self, url: str | None, workers: Workers) -> ClientParts:
        """Return the settings and objects of this client that each of its runs uses."""
        return ClientParts(
            id=self.id,
            url=url,
            password=self._password,
            config=self._config,
            workers=workers,
            queues=self._queues.configs,
            singletons=self._singleton_registry,
            leases=self._lease_engine,
            subscriptions=self._subscription_manager,
            listener=self._listener,
            leadership=self._leadership_publisher,
            periodic_jobs=self._periodic_jobs,
            inserter=self._inserter,
            child_processes=self._child_processes,
            attempt_store=AttemptStore(
                self._transaction, self._config.schema, self._subscription_manager, self.id
            ),
        )

    @asynccontextmanager
    async def working(self) -> AsyncGenerator[Self]:
        """Work jobs during the `async with` block. At its end, stop the client, and wait for
        running jobs up to `Config.soft_stop_timeout`. If the run fails, the block is cancelled too.

        In a web application, use `riverpy.web.lifespan(client, work=True)` instead.

        Raises:
            Exception: see `run`.
        """
        ended = anyio.Event()

        async def run_and_signal_end(*, task_status: TaskStatus[None]) -> None:
            try:
                await self.run(task_status=task_status)
            finally:
                ended.set()

        error: Exception | None = None
        try:
            async with anyio.create_task_group() as tasks:
                await tasks.start(run_and_signal_end)
                try:
                    yield self
                except (
                    Exception
                ) as raised:  # an error of the caller's block is raised unchanged after the stop
                    error = raised
                finally:
                    self.stop()
                    with anyio.CancelScope(shield=True):
                        await ended.wait()
        except BaseExceptionGroup as group:
            raise unwrap_single_error(group) from error
        if error is not None:
            raise error

    def stop(self) -> None:
        """Stop claiming jobs, and let the running jobs end. If the client is not running, this
        stops a task of `run` that already exists as soon as it starts, but no later run."""
        self._request_stop(ClientRun.stop)

    def stop_and_cancel(self) -> None:
        """Stop claiming jobs, and cancel the running jobs at once. See also `stop`."""
        self._request_stop(ClientRun.stop_hard)

    def _request_stop(self, stop_method: Callable[[ClientRun], None]) -> None:
        if self._run is not None:
            stop_method(self._run)
            return
        with suppress(RuntimeError):  # without an event loop, no task of `run` exists
            # Existing tasks of `run` start before this reset. Later runs must not stop.
            asyncio.get_running_loop().call_soon(setattr, self, "_stop_next_run", None)
            self._stop_next_run = stop_method

    def running_claims(self) -> list[ClaimKey]:
        """Return the claim keys (id, attempt, attempted_at) of the running attempts. Any thread may
        call this."""
        return (
            sorted(self._run.running_attempts.collect_claim_keys()) if self._run is not None else []
        )

    async def release_claims(self, claim_keys: Sequence[ClaimKey]) -> int:
        """Make the jobs of these attempts available again, over a separate connection. The attempts
        do not count towards `max_attempts`. Return how many jobs were released.

        Call this only when the process is about to end: the code of the attempts must not run after
        it. This takes at most 2.5 seconds and kills the child processes of the attempts. If a child
        process does not end, its job is not released.
        """
        working = await self._child_processes.kill_children(claim_keys)
        ended = [claim_key for claim_key in claim_keys if claim_key not in working]
        return await release_claims(
            self._get_url_for_run(),
            self._config.schema,
            ended,
            pooled=self._config.pooler,
            password=self._password,
        )

    def _get_url_for_run(self) -> str | None:
        if self._database is not None and not isinstance(self._database, str):
            raise ConfigError(
                "a client that works jobs needs the database's URL, a pool is not enough"
            )
        return self._database
