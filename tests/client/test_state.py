"""How a client is created, opened, configured and closed, and its errors."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import asyncpg
import msgspec
import pytest

import riverpy
from riverpy import (
    Client,
    ClientStateError,
    Config,
    ConfigError,
    EventKind,
    HookPeriodicJobsStartFunc,
    Job,
    JobRetention,
    JobRow,
    QueueConfig,
    Worker,
    Workers,
)
from riverpy._postgres.driver import close_pool
from riverpy.errors import SchemaMissingError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests._database import Schema

URL = "postgres://nobody@127.0.0.1:1/nowhere"


class Task(msgspec.Struct):
    """Args of the jobs here."""

    kind: ClassVar[str] = "task"
    n: int = 0


def make_workers() -> Workers:
    """Workers with one kind."""
    workers = Workers()

    @workers.job
    async def work(job: Job[Task]) -> None:
        del job

    return workers


QUEUES = {"default": QueueConfig()}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Client("mysql://localhost/x"), "postgres://"),
        (lambda: Client("postgres://u:secret@localhost:port/x"), "port"),
        (lambda: Client(object()), "asyncpg pool"),  # type: ignore[arg-type]
        (lambda: Client(URL, queues=QUEUES), "workers"),
        (lambda: Client(URL, workers=Workers(), queues={"Bad Queue": QueueConfig()}), "queue name"),
        (lambda: Client(URL, workers=Workers(), queues={"q": 5}), "QueueConfig"),  # type: ignore[dict-item]
        (lambda: QueueConfig(max_workers=0), "between 1 and 10000"),
        (lambda: QueueConfig(max_workers=10_001), "between 1 and 10000"),
        (lambda: QueueConfig(max_workers="5"), "must be int"),  # type: ignore[arg-type]
        (lambda: QueueConfig(fetch_poll_interval=timedelta(0)), "one millisecond"),
        (lambda: Config(schema="a" * 47), "46 bytes"),
        (lambda: Config(schema="no-dash"), "schema name"),
        (lambda: Config(schema="newline\n"), "schema name"),
        (lambda: Config(id="x" * 101), "100"),
        (lambda: Config(max_attempts=0), "32767"),
        (lambda: Config(job_timeout=30), "timedelta"),  # type: ignore[arg-type]
        (lambda: Config(job_timeout=timedelta(seconds=-1)), "job_timeout"),
        (lambda: Config(soft_stop_timeout=timedelta(seconds=-1)), "zero or more"),
        (lambda: Config(hard_stop_timeout=timedelta(0)), "one millisecond"),
        (lambda: Config(pool_size=0), "pool_size"),
        (lambda: Config(max_leases=0), "max_leases must be 1 or more"),
        (lambda: Config(max_leases=True), "max_leases must be int"),
        (lambda: Config(max_leases=1.5), "max_leases must be int"),  # type: ignore[arg-type]
    ],
    ids=map(str, range(23)),
)
def test_refuses_a_wrong_value(make: Any, words: str) -> None:
    """A wrong setting raises an error that says what is allowed, before any connection is made."""
    with pytest.raises(ConfigError, match=words):
        make()


def test_wrong_url_is_not_in_the_error() -> None:
    """The error says what is wrong with a URL, and does not contain the URL."""
    with pytest.raises(ConfigError) as caught:
        Client("postgres://user:secret@localhost:port/x")
    assert "secret" not in str(caught.value)
    assert "localhost" not in str(caught.value)
    assert "its port must be a number" in str(caught.value)


async def test_error_names_what_is_missing() -> None:
    """A client without queues, workers or a URL cannot work. The error says which one is
    missing."""
    with pytest.raises(ConfigError, match="no queue"):
        await Client(URL, workers=make_workers()).run()
    with pytest.raises(ConfigError, match="no worker"):
        await Client(URL, workers=Workers(), queues=QUEUES).run()
    with pytest.raises(ConfigError, match="give the client a database"):
        await Client(workers=make_workers(), queues=QUEUES).run()


async def test_insert_needs_an_open_client() -> None:
    """An insert without `tx=` needs an open client. The error says how to open it."""
    with pytest.raises(ClientStateError, match="async with client"):
        await Client(URL).insert(Task())


async def test_open_client_cannot_be_opened_or_configured(schema: Schema) -> None:
    """An open client cannot be opened again or configured."""
    client = Client(schema.url, config=Config(schema=schema.name))
    async with client:
        with pytest.raises(ClientStateError, match="open already"):
            await client.__aenter__()
        with pytest.raises(ClientStateError, match="configure"):
            client.configure(poll_only=True)
    client.configure(poll_only=True, schema="other", soft_stop_timeout=None)
    assert client.config.poll_only
    assert client.config.schema == "other"
    assert client.config.soft_stop_timeout is None


async def test_two_tasks_open_a_client(schema: Schema) -> None:
    """If two tasks open a client at the same time, one gets an error and the other's pool is the
    only one. After a failed open, the client can be opened again."""
    pools: list[Any] = []
    client = Client(schema.url, config=Config(schema=schema.name))
    make = client._make_pool

    async def made(database: Any) -> Any:
        if not pools:
            with pytest.raises(ClientStateError, match="open already"):
                await client.__aenter__()
            with pytest.raises(ClientStateError, match="configure"):
                client.configure(poll_only=True)
        pools.append(await make(database))
        return pools[-1]

    async def fails(_database: Any) -> Any:
        raise ConnectionError("not now")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "_make_pool", fails)
        with pytest.raises(ConnectionError):
            await client.__aenter__()
        patch.setattr(client, "_make_pool", made)
        async with client:
            await client.insert(Task())
    assert [pool.is_closing() for pool in pools] == [True]


async def test_pool_is_closed_if_ending_leases_fails(schema: Schema) -> None:
    """The pool is closed even if ending the leases fails or is cancelled."""

    async def fails() -> None:
        raise asyncio.CancelledError

    client = Client(schema.url, config=Config(schema=schema.name))
    await client.__aenter__()
    pool = client._pool
    client._lease_engine.close = fails  # type: ignore[method-assign]
    with pytest.raises(asyncio.CancelledError):
        await client.__aexit__(None, None, None)
    assert pool is not None
    assert pool.is_closing()


async def test_close_while_a_connection_is_lost() -> None:
    """Closing a client raises no error if a connection is lost at that moment."""

    class Lost:
        async def close(self) -> None:
            raise BrokenPipeError

    assert await close_pool(Lost())  # type: ignore[arg-type]


async def test_callers_pool_stays_open(schema: Schema) -> None:
    """A client inserts through the caller's pool, and does not close it (SC-13)."""
    async with asyncpg.create_pool(schema.url, min_size=1, max_size=2) as pool:
        async with Client(pool, config=Config(schema=schema.name)) as client:
            result = await client.insert(Task(n=1))
        assert await pool.fetchval("select 1") == 1
    assert result.job.kind == "task"


async def test_close_terminates_held_connections(schema: Schema) -> None:
    """Closing terminates a connection that other code still holds, and returns (SC-13)."""
    client = Client(schema.url, config=Config(schema=schema.name))
    async with client:
        await client.insert(Task())
        held = await client._get_open_pool().acquire()
    with pytest.raises(asyncpg.InterfaceError):
        await held.fetchval("select 1")


async def test_error_of_missing_tables_has_the_command(fresh_database_url: str) -> None:
    """On a database without River's tables the error contains the command that creates them."""
    client = Client(fresh_database_url, workers=make_workers(), queues=QUEUES)
    with pytest.raises(SchemaMissingError, match="riverpy migrate up"):
        await client.run()
    async with client:
        with pytest.raises(SchemaMissingError, match="riverpy migrate up"):
            await client.insert(Task())


async def test_start_again_after_a_failed_start(schema: Schema) -> None:
    """After a failed start, the client can be started again (LM-06)."""
    client = Client(URL, workers=make_workers(), queues=QUEUES, config=Config(schema=schema.name))
    with pytest.raises(OSError):
        await client.run()
    assert not client.is_running
    client.configure(database=schema.url)
    report = await client.run(drain=True)
    assert report.is_clean


async def test_second_run_is_refused(schema: Schema) -> None:
    """A running client cannot be run again. A stopped one can."""
    client = Client(
        schema.url, workers=make_workers(), queues=QUEUES, config=Config(schema=schema.name)
    )
    for _ in range(2):
        async with client.working():
            assert client.is_running
            with pytest.raises(ClientStateError, match="runs already"):
                await client.run()
        assert not client.is_running


def test_stop_without_a_run_does_nothing() -> None:
    """Stopping a client that does not run raises no error."""
    client = Client(URL)
    client.stop()
    client.stop_and_cancel()
    assert not client.is_running


@pytest.mark.parametrize("stop", [Client.stop, Client.stop_and_cancel])
async def test_stop_before_the_run_begins(schema: Schema, stop: Callable[[Client], None]) -> None:
    """A run that is stopped before its task begins stops at once. The next run works."""
    client = Client(
        schema.url, workers=make_workers(), queues=QUEUES, config=Config(schema=schema.name)
    )
    run = asyncio.create_task(client.run())
    stop(client)
    assert (await run).is_clean
    stop(client)
    await asyncio.sleep(0)
    async with client.working():
        assert client.is_running


def test_wrong_subscriptions_are_refused() -> None:
    """A subscription without kinds, with an unknown kind or with size 0 is refused."""
    client = Client(URL)
    with pytest.raises(ConfigError, match="name the kinds"):
        client.subscribe()
    with pytest.raises(ConfigError, match="job_completed"):
        client.subscribe("job_exploded")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="size"):
        client.subscribe(EventKind.JOB_FAILED, size=0)


def test_default_id() -> None:
    """The default id is NAME:PID:RANDOM with at most 100 characters, and does not change."""
    client = Client(URL, config=Config(name="n" * 100))
    assert client.id == client.id
    assert len(client.id) == 100
    assert Client(URL).id != Client(URL).id
    assert Client(URL, config=Config(id="fixed")).id == "fixed"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"candidate": "no"}, "candidate must be True or False"),
        ({"elect_interval": timedelta(seconds=15)}, "at least 2.4 times elect_interval"),
        ({"leader_ttl": timedelta(seconds=5)}, "at least 2.4 times elect_interval"),
        ({"leader_ttl": timedelta.max}, "leader_ttl must be 365000 days or less"),
        ({"leader_ttl": timedelta(seconds=-1)}, "leader_ttl must be 100 milliseconds or more"),
        (
            {
                "leader_ttl": timedelta(milliseconds=99),
                "elect_interval": timedelta(milliseconds=100),
            },
            "leader_ttl must be 100 milliseconds or more",
        ),
        (
            {"elect_interval": timedelta(milliseconds=99)},
            "elect_interval must be 100 milliseconds or more",
        ),
        ({"dead_after": timedelta(milliseconds=99)}, "dead_after must be 100 milliseconds or more"),
        ({"dead_after": timedelta(0)}, "dead_after must be"),
        ({"dead_after": timedelta.max}, "dead_after must be 365000 days or less"),
        ({"dead_after": 60}, "dead_after must be timedelta"),
        ({"rescue_after": timedelta(seconds=30)}, "at least job_timeout"),
        ({"rescue_after": timedelta.max}, "rescue_after must be 365000 days or less"),
        ({"retention": timedelta(1)}, "retention must be JobRetention"),
        ({"retention_by_queue": ["mail"]}, "retention_by_queue must be Mapping"),
        ({"retention_by_queue": {"Mail!": JobRetention()}}, "queue name"),
        ({"retention_by_kind": {"mail": 3}}, "must be JobRetention"),
        ({"hooks": [HookPeriodicJobsStartFunc(lambda start: None)]}, "must be an `async def`"),
        ({"reindexer_schedule": "0 0 * * *"}, "reindexer_schedule must be a schedule"),
        ({"reindexer_timeout": timedelta(0)}, "reindexer_timeout must be"),
        ({"reindexer_index_names": "river_job_pkey"}, "must be a list"),
        ({"reindexer_index_names": [1]}, "must be a list"),
    ],
    ids=map(str, range(18)),
)
def test_wrong_leader_settings_are_refused(settings: Any, words: str) -> None:
    """A wrong setting for leader election is refused, with the allowed values."""
    with pytest.raises(ConfigError, match=words):
        Config(**settings)


@pytest.mark.parametrize("state", ["cancelled", "completed", "discarded"])
def test_refuses_a_negative_retention(state: str) -> None:
    """A retention may be zero, but not negative."""
    assert JobRetention(**{state: timedelta(0)})
    with pytest.raises(ConfigError, match=f"{state} jobs must be zero or more"):
        JobRetention(**{state: timedelta(seconds=-1)})


def _child_id(client: Client, answer: Any) -> None:
    answer.send(client.id)


def test_id_is_renewed_after_a_fork() -> None:
    """A client has another default id in a forked process."""
    client = Client(URL)
    own = client.id
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_child_id, args=(client, theirs))
    process.start()
    assert ours.poll(60)
    assert ours.recv() != own
    process.join(60)


@pytest.mark.parametrize(
    ("register", "words"),
    [
        (lambda workers: workers.job(_plain), "blocking_job"),
        (lambda workers: workers.blocking_job()(_unannotated), "use job"),
        (lambda workers: workers.blocking_job(_unannotated), "use job"),
        (lambda workers: workers.blocking_job(_generator), "plain function"),
        (lambda workers: workers.job(_unannotated), "annotated Job.*got no annotation"),
        (lambda workers: workers.job(_bare_args), "annotated Job.*got .*Task"),
        (lambda workers: workers.job(_no_parameter), "_no_parameter is called with the job alone"),
        (lambda workers: workers.job(_two_parameters), r"_two_parameters .*'other'.*job: Job\["),
        (lambda workers: workers.job(_returning), "returns set.*no JSON form"),
        (lambda workers: workers.job(_kindless), "has no kind"),
        (lambda workers: workers.job(kind="x y")(_kindless), "job kind"),
        (lambda workers: workers.job(kind=5)(_kindless), "a job kind must be a string, got int"),
        (lambda workers: workers.job(_generator), "without yield"),
        (lambda workers: workers.job("task"), r"takes a function, got 'task'.*\(kind=…\)"),
        (lambda workers: workers.job(_Sync), "takes a function, got <class.*workers.add"),
        (lambda workers: workers.job(next_retry=5, kind="k1")(_kindless), "must be a function"),
        (lambda workers: workers.job(_custom), r"args of _custom.*\$\.path: the type Path cannot"),
        (lambda workers: workers.job(_lost), "args of _lost.*'Nowhere'.*at run time"),
        (lambda workers: workers.job(_aliased), "kind_aliases must be a tuple"),
        (lambda workers: workers.add(_Untyped()), "Worker\\[YourArgs\\]"),
        (lambda workers: workers.add(_Sync()), "async def"),
        (lambda workers: workers.add(_TwoParameters()), r"_TwoParameters\.work .*one parameter"),
        (lambda workers: workers.add(_Returning()), r"_Returning\.work returns .*Iterator"),
        (lambda workers: workers.add(_CustomWorker()), r"args of _CustomWorker.*\$\.path"),
        (lambda workers: workers.add(_Sync), r"the class _Sync: workers\.add\(_Sync\(\)\)"),
        (lambda workers: workers.add(_plain), "got function: register a function with"),
        (lambda workers: workers.job(kind="task")(_kindless), "two workers"),
        (lambda workers: workers.blocking_job(executor="fiber"), "thread"),
        (lambda workers: workers.blocking_job("process"), "takes a function, got 'process'"),
    ],
    ids=map(str, range(29)),
)
def test_refuses_a_wrong_worker(register: Any, words: str) -> None:
    """A worker without a kind, with a kind that is taken, or with a wrong signature is refused
    (TY-04)."""
    workers = make_workers()
    with pytest.raises(ConfigError, match=words):
        register(workers)
    assert list(workers) == ["task"]


def _plain(job: Job[Task]) -> None:
    del job


async def _unannotated(job) -> None:  # type: ignore[no-untyped-def]
    del job


async def _bare_args(job: Task) -> None:
    del job


async def _no_parameter() -> None:
    pass


async def _two_parameters(job: Job[Task], other: int) -> None:
    del job, other


async def _returning(job: Job[Task]) -> set[int] | None:
    return {job.id}


class _Custom(msgspec.Struct):
    kind: ClassVar[str] = "custom"
    path: Path | None = None


async def _custom(job: Job[_Custom]) -> None:
    del job


class _Lost(msgspec.Struct):
    kind: ClassVar[str] = "lost"
    x: Nowhere  # type: ignore[name-defined]  # noqa: F821


async def _lost(job: Job[_Lost]) -> None:
    del job


class _Aliased(msgspec.Struct):
    kind: ClassVar[str] = "aliased"
    kind_aliases: ClassVar[str] = "old"


async def _aliased(job: Job[_Aliased]) -> None:
    del job


async def _kindless(job: Job[dict[str, int]]) -> None:
    del job


async def _generator(job: Job[Task]):  # type: ignore[no-untyped-def]
    yield job


class _Untyped(Worker):  # type: ignore[type-arg]
    async def work(self, job: Job[Any]) -> None:
        del job


class _Sync(Worker[Task]):
    def work(self, job: Job[Task]) -> None:  # type: ignore[override]
        del job


class _TwoParameters(Worker[Task]):
    async def work(self, job: Job[Task], other: int) -> None:  # type: ignore[override]
        del job, other


class _Returning(Worker[Task]):
    async def work(self, job: Job[Task]) -> Iterator[int]:  # type: ignore[override]
        return iter([job.id])


class _CustomWorker(Worker[_Custom]):
    async def work(self, job: Job[_Custom]) -> None:
        del job


def test_decorators_with_and_without_parentheses() -> None:
    """The decorators work with and without parentheses, and return the function unchanged. Optional
    parameters and functools.partial are allowed."""
    workers = Workers()

    async def task(job: Job[Task], twice: bool = False) -> None:
        del job, twice

    def block(job: Job[dict[str, int]]) -> Any:
        del job

    assert workers.job(task) is task
    assert workers.job(kind="again")(task) is task
    assert workers.blocking_job(kind="blocked")(block) is block
    assert workers.blocking_job(_plain_other) is _plain_other
    assert workers.job(kind="partial")(given := partial(task, twice=True)) is given
    with pytest.raises(ConfigError, match=r"_unannotated must be annotated .*got no annotation"):
        workers.job(partial(_unannotated))
    assert list(workers) == ["task", "again", "blocked", "other", "partial"]


def _plain_other(job: Job[_Other]) -> None:
    del job


class _Other(msgspec.Struct):
    kind: ClassVar[str] = "other"


class _AsyncPolicy:
    async def next_retry(self, job: JobRow) -> timedelta:
        return timedelta(seconds=job.attempt)


_loose: Any = riverpy
"""The public names without their types."""
_EVERY_DAY = riverpy.every(timedelta(days=1))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: _loose.Client(queues=["default"]),
            r'queues=\{"default": QueueConfig\(.*, got list',
        ),
        (lambda: _loose.Client(queues="default"), r'queues=\{"default": QueueConfig\(.*, got str'),
        (lambda: _loose.Client(queues=()), r'queues=\{"default": QueueConfig\(.*, got tuple'),
        (
            lambda: _loose.Client(queues={"default": 10}),
            r"must have a QueueConfig, as in .*, got int",
        ),
        (
            lambda: _loose.Client(queues={1: _loose.QueueConfig()}),
            "a queue name must be a string, got int",
        ),
        (lambda: _loose.Client().configure(queues=["default"]), "QueueConfig.*, got list"),
        (lambda: _loose.Client(workers=[_plain]), "must be a Workers registry, got list"),
        (
            lambda: _loose.Client(workers=_CustomWorker()),
            "must be a Workers registry, got _CustomWorker",
        ),
        (lambda: _loose.Client(config={"schema": "x"}), "config must be a Config.*, got dict"),
        (lambda: _loose.Client(periodic_jobs=5), r"periodic_jobs=\[PeriodicJob\(…\)\], got int"),
        (
            lambda: _loose.Client(periodic_jobs=_loose.PeriodicJob(_EVERY_DAY, Task())),
            r"periodic_jobs=\[PeriodicJob\(…\)\], got PeriodicJob",
        ),
        (
            lambda: _loose.PeriodicJob(timedelta(1), Task()),
            r"every\(timedelta\(…\)\).*, got timedelta",
        ),
        (lambda: _loose.PeriodicJob(_EVERY_DAY, Task(), id=5), "must be a string, got int"),
        (lambda: _loose.Config(schema=5), "a schema name must be a string, got int"),
        (lambda: _loose.Config(id=5), "a client id must be a string, got int"),
        (
            lambda: _loose.Config(job_timeout=30),
            r"must be timedelta, got int: timedelta\(seconds=30\)",
        ),
        (lambda: _loose.QueueConfig(fetch_cooldown=1.5), r"got float: timedelta\(seconds=1.5\)"),
        (lambda: _loose.Config(max_attempts="3"), "max_attempts must be int, got str"),
        (lambda: _loose.Config(pool_size=None), "pool_size must be int, got NoneType"),
        (
            lambda: _loose.Config(retry_policy=_plain),
            "object with a method next_retry, got function",
        ),
        (lambda: _loose.Config(retry_policy=_AsyncPolicy), "got the class _AsyncPolicy: call it"),
        (lambda: _loose.Config(retry_policy=_AsyncPolicy()), "next_retry must be a plain function"),
        (lambda: _loose.Config(error_handler=_plain), "a method handle_error, got function"),
        (lambda: _loose.Config(job_stuck_handler=_plain), "a method handle_stuck, got function"),
        (
            lambda: _loose.Config(reindexer_index_names=5),
            "must be a list of index names, got 5",
        ),
        (
            lambda: _loose.Config(retention_by_kind={1: JobRetention()}),
            "a job kind must be a string, got int",
        ),
    ],
    ids=map(str, range(26)),
)
def test_refuses_values_of_wrong_types(make: Callable[[], object], words: str) -> None:
    """A value of a wrong type is refused. The error shows the right form."""
    with pytest.raises(ConfigError, match=words):
        make()


def test_include_and_replace() -> None:
    """A registry includes another one as a whole or not at all. A kind is registered again only
    with `replace=True`, which replaces the worker of this kind with all its aliases."""
    first, second = Workers(), Workers()

    async def old(job: Job[Any]) -> None: ...

    async def new(job: Job[Any]) -> None: ...

    first.job(kind="one")(old)
    second.job(kind="two")(old)
    assert first.include(second) is first
    assert list(first) == ["one", "two"]
    other = Workers()
    other.job(kind="three")(new)
    other.job(kind="two")(new)
    with pytest.raises(ConfigError, match="two workers for job kind 'two'"):
        first.include(other)
    assert list(first) == ["one", "two"]
    first.include(other, replace=True)
    assert {kind: unit.work for kind in first if (unit := first.get(kind))} == {
        "one": old,
        "two": new,
        "three": new,
    }
    with pytest.raises(ConfigError, match="replace=True"):
        first.job(kind="one")(new)
    first.job(kind="one", replace=True)(new)
    assert [unit.work for unit in first.list_registered_workers()] == [new, new, new]
    with pytest.raises(ConfigError, match="include takes"):
        first.include([])  # type: ignore[arg-type]
