"""The peers' objects for inserts, each made once. A peer that is not installed raises
ImportError."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar


@cache
def procrastinate_task(*, is_sync: bool = False) -> Any:
    """Return a task of Procrastinate, whose inserts use a connection of the caller."""
    from procrastinate import App, PsycopgConnector, SyncPsycopgConnector

    connector = SyncPsycopgConnector() if is_sync else PsycopgConnector()

    @App(connector=connector).task(name="noop")
    def noop() -> None: ...

    return noop


@cache
def chancy_app() -> tuple[Any, Any]:
    """Return an app of Chancy, which opens no connection, and a job."""
    from chancy import Chancy, job

    @job(queue="bench")
    def noop() -> None: ...

    return Chancy("postgresql://"), noop


class RiverqueueArgs:
    """Args of riverqueue, River's client for Python."""

    kind: ClassVar[str] = "noop"

    def to_json(self) -> str:
        """Return the args as JSON."""
        return "{}"


@cache
def riverqueue_client(engine: Any, *, is_async: bool) -> Any:
    """Return a client of riverqueue."""
    import riverqueue
    from riverqueue.driver import riversqlalchemy

    if is_async:
        return riverqueue.AsyncClient(riversqlalchemy.AsyncDriver(engine))
    return riverqueue.Client(riversqlalchemy.Driver(engine))
