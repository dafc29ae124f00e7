"""ClientQueues: adds, removes and resizes the queues that a client works, also while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from riverpy.config import QueueConfig, check_queues
from riverpy.errors import ConfigError, QueueAlreadyAddedError, QueueNotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class QueueRemoval(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `ClientQueues.remove`: which jobs of the queue had not ended."""

    queue: str
    """The name of the queue."""
    running_job_ids: tuple[int, ...] = ()
    """The ids of the jobs that still ran at the timeout. They keep running, and their results are
    stored when they end."""
    unstored: int = 0
    """The number of ended jobs whose results were not stored at the timeout. The client still tries
    to store them."""

    @property
    def is_complete(self) -> bool:
        """Whether all jobs of the queue ended and all results were stored before the timeout."""
        return not self.running_job_ids and not self.unstored


class RunningQueueManager(Protocol):
    """Changes the queues of a running client."""

    async def add_queue(self, name: str, config: QueueConfig) -> None:
        """Start to work a queue."""
        ...

    async def remove_queue(
        self, name: str, timeout: timedelta | UnsetType | None
    ) -> tuple[tuple[int, ...], int]:
        """Stop working a queue, and wait until its running jobs have ended.

        Return the ids of the jobs that still run at the timeout, and the number of results that are
        not stored. If `timeout` is UNSET, the default timeout is used."""
        ...

    def resize_queue(self, name: str, config: QueueConfig) -> None:
        """Change the number of slots of a queue to the number in `config`."""
        ...


class ClientQueues(Mapping[str, QueueConfig]):
    """The queues that a client works, as a mapping of queue names to settings. Use it only in the
    client's event loop.

    The methods change a running client at once. If the client does not run, they change the queues
    of its next run.
    """

    def __init__(
        self,
        get_running: Callable[[], RunningQueueManager | None],
        *,
        has_workers: bool,
    ) -> None:
        """Create the mapping without queues.

        Args:
            get_running: returns the object that adds, removes and resizes queues of the running
                client. None: the client does not run.
            has_workers: whether the client has workers. Without workers it can have no queues.
        """
        self._get_running_queues = get_running
        self._has_workers = has_workers
        self.configs: dict[str, QueueConfig] = {}
        """The settings of the queues, by name. If a queue of a running client is added, removed or
        resized, the client changes this dict."""

    def __getitem__(self, name: str) -> QueueConfig:
        return self.configs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self.configs))

    def __len__(self) -> int:
        return len(self.configs)

    def __repr__(self) -> str:
        return f"ClientQueues({self.configs!r})"

    def replace_all(self, queues: Mapping[str, QueueConfig]) -> None:
        """Replace all queues of a client that does not run.

        Raises:
            ConfigError: a name or a value is not allowed, or the client has no workers.
        """
        self._check_queues(queues)
        configs = dict(queues)
        self.configs.clear()
        self.configs.update(configs)

    async def add(self, name: str, config: QueueConfig | None = None) -> None:
        """Add a queue. If the client runs, it has started to claim jobs of the queue when this
        method returns.

        If `Config.leader_domain` names another domain than `default`, the client first assigns the
        queue to this domain. Then the leader of this domain runs maintenance for the queue. If
        `Config.domain_queues` is set, the client assigns only the queues in this setting.

        Args:
            name: the name of the queue.
            config: its settings. Default: `QueueConfig()`, with 100 slots.

        Raises:
            QueueAlreadyAddedError: the client works this queue, or `remove` still waits for its
                running jobs.
            ConfigError: the name or a value is not allowed, or the client has no workers.
            DomainConflictError: the queue belongs to another leader domain, and
                `Config.on_domain_conflict` makes this an error.
            ClientStateError: the client is starting or stopping.
            Exception: the database cannot be reached.
        """
        config = QueueConfig() if config is None else config
        self._check_queues({name: config})
        if name in self.configs:
            raise QueueAlreadyAddedError(name)
        running = self._get_running_queues()
        if running is None:
            self.configs[name] = config
        else:
            await running.add_queue(name, config)

    async def remove(
        self, name: str, *, timeout: timedelta | UnsetType | None = UNSET
    ) -> QueueRemoval:
        """Remove a queue, and wait until its running jobs have ended and their results are stored.

        The client claims no more jobs of this queue. Other clients still work the queue, and its
        row in `river_queue` stays.

        If jobs still run at the timeout, the queue is removed, the jobs keep running, and the
        result contains their ids. If this call is cancelled, the queue is removed and its jobs keep
        running too. A job that removes its own queue does not wait for itself.

        Args:
            name: the name of the queue.
            timeout: how long to wait for running jobs. Default: `Config.soft_stop_timeout`. None:
                no limit. Zero: do not wait.

        Raises:
            QueueNotFoundError: the client does not work this queue.
            ConfigError: the timeout is negative, or is not a timedelta.
            ClientStateError: the client is starting or stopping.
        """
        if timeout is not UNSET and timeout is not None:
            _check_timeout(timeout)
        self._require_queue(name)
        running = self._get_running_queues()
        if running is None:
            del self.configs[name]
            return QueueRemoval(queue=name)
        job_ids, unstored = await running.remove_queue(name, timeout)
        return QueueRemoval(queue=name, running_job_ids=job_ids, unstored=unstored)

    async def resize(self, name: str, max_workers: int) -> None:
        """Change the number of slots of a queue, i.e. how many of its jobs this client runs at the
        same time.

        Running jobs are not cancelled. If there are more running jobs than slots, the client claims
        the next job when enough jobs have ended.

        Args:
            name: the name of the queue.
            max_workers: the number of slots, 1 to 10,000.

        Raises:
            QueueNotFoundError: the client does not work this queue.
            ConfigError: `max_workers` is not allowed.
            ClientStateError: the client is starting or stopping.
        """
        self._require_queue(name)
        config = msgspec.structs.replace(self.configs[name], max_workers=max_workers)
        running = self._get_running_queues()
        if running is None:
            self.configs[name] = config
        else:
            running.resize_queue(name, config)

    def _check_queues(self, queues: Mapping[str, QueueConfig]) -> None:
        check_queues(queues)
        if queues and not self._has_workers:
            raise ConfigError("a client with queues needs workers: Client(…, workers=…)")

    def _require_queue(self, name: str) -> None:
        if name not in self.configs:
            raise QueueNotFoundError(name)


def _check_timeout(timeout: object) -> None:
    if not isinstance(timeout, timedelta) or timeout < timedelta(0):
        raise ConfigError(
            f"timeout must be a timedelta of zero or more, or None for no limit, got {timeout!r}"
        )
