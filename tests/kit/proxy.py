"""A TCP proxy before PostgreSQL that holds back, loses, cuts or refuses: some connections, by their
name, or the whole path as a broken network does."""

from __future__ import annotations

import asyncio
import struct
from contextlib import asynccontextmanager, suppress
from enum import Enum
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, quote, urlsplit

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

EVERY = ""
"""Stands for the connections of every name."""
_CHUNK = 65536


class Partition(Enum):
    """What a broken network does to both old and new connections. Nobody is told: a peer that ends
    meanwhile seems to live on."""

    REQUESTS_LOST = "requests lost"
    """What the client sends never arrives; answers that are under way do."""
    ANSWERS_LOST = "answers lost"
    """The server does what it is asked, and nobody hears of it."""
    HELD = "held"
    """Nothing passes either way until the network heals; then all of it does, late."""


class _Link:
    """One proxied connection."""

    def __init__(self, client: asyncio.StreamWriter) -> None:
        self.name = ""
        self.answers = 0
        self.has_lost = False
        """Whether bytes of it were lost, so that it is of no use any more."""
        self.client = client
        self.server: asyncio.StreamWriter | None = None

    def cut(self) -> None:
        self.client.transport.abort()
        if self.server is not None:
            self.server.transport.abort()


class Proxy:
    """Passes bytes on until it is told otherwise."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        options = {key: values[0] for key, values in parse_qs(parts.query).items()}
        self._host = parts.hostname or options.get("host", "127.0.0.1")
        self._port = parts.port or int(options.get("port", 5432))
        self._user = parts.netloc.rpartition("@")[0] or "postgres"
        self._database = parts.path
        self._links: set[_Link] = set()
        self._holds: dict[str, int] = {}
        self._changed = asyncio.Condition()
        self._idle = asyncio.Event()
        self._idle.set()
        self.url = ""
        self.accepted = 0
        """Connections that were tried to be made."""
        self.most = 0
        """The most connections that there were at once."""
        self.refusing = False
        """Whether new connections are cut at once."""
        self.held = asyncio.Event()
        """Set when an answer was held back."""
        self.lost_next_answer: str | None = None
        """Cut the connection of this name instead of passing on its next answer; then None."""
        self.partition: Partition | None = None
        """How the network is broken now: set it to break it, `heal` mends it."""

    async def start(self) -> None:
        """Listen; `url` is known then."""
        self._listening = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._listening.sockets[0].getsockname()[1]
        user = quote(self._user, safe=":%")
        self.url = f"postgresql://{user}@127.0.0.1:{port}{self._database}?sslmode=disable"

    @property
    def connections(self) -> int:
        """How many there are now."""
        return len(self._links)

    async def close(self) -> None:
        """Cut every connection and listen no more."""
        self._listening.close()
        await self.release()
        await self.heal()
        self.cut()
        with suppress(TimeoutError):
            async with asyncio.timeout(5):
                await self._idle.wait()

    def hold(self, name: str = EVERY, *, after: int = 0) -> None:
        """Keep back the server's answers on these connections, from the `after`-th chunk on."""
        self._holds[name] = after
        self.held.clear()

    async def release(self) -> None:
        """Pass on what is held, and all that comes."""
        self._holds.clear()
        async with self._changed:
            self._changed.notify_all()

    async def heal(self) -> None:
        """Mend the network: what was held passes, and connections that lost bytes are reset."""
        self.partition = None
        for link in self._links:
            if link.has_lost:
                link.cut()
        async with self._changed:
            self._changed.notify_all()

    def cut(self, name: str = EVERY) -> int:
        """Reset these connections; returns how many."""
        links = [link for link in self._links if name in {EVERY, link.name}]
        for link in links:
            link.cut()
        return len(links)

    def _is_held(self, link: _Link) -> bool:
        limits = [self._holds[name] for name in (EVERY, link.name) if name in self._holds]
        return any(link.answers >= limit for limit in limits)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        link = _Link(writer)
        self._links.add(link)
        self.most = max(self.most, len(self._links))
        self._idle.clear()
        try:
            if not self.refusing:
                await self._pass(link, reader)
        except* (OSError, EOFError):
            pass
        finally:
            link.cut()
            self._links.discard(link)
            if not self._links:
                self._idle.set()

    async def _pass(self, link: _Link, reader: asyncio.StreamReader) -> None:
        head = await reader.readexactly(4)
        startup = await reader.readexactly(struct.unpack("!I", head)[0] - 4)
        words = startup[4:].split(b"\0")
        link.name = (
            dict(zip(words[::2], words[1::2], strict=False)).get(b"application_name", b"").decode()
        )
        await self._until_passing(link, Partition.REQUESTS_LOST)
        if self._host.startswith("/"):
            opened = await asyncio.open_unix_connection(f"{self._host}/.s.PGSQL.{self._port}")
        else:
            opened = await asyncio.open_connection(self._host, self._port)
        answers, link.server = opened
        link.server.write(head + startup)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pump_questions(link, reader))
            tasks.create_task(self._pump_answers(link, answers))

    async def _pump_questions(self, link: _Link, reader: asyncio.StreamReader) -> None:
        assert link.server is not None
        while True:
            data = await reader.read(_CHUNK)
            await self._until_passing(link, Partition.REQUESTS_LOST)
            if not data:
                raise EOFError
            link.server.write(data)
            await link.server.drain()

    async def _pump_answers(self, link: _Link, reader: asyncio.StreamReader) -> None:
        while True:
            data = await reader.read(_CHUNK)
            await self._until_passing(link, Partition.ANSWERS_LOST)
            if not data:
                raise EOFError
            if self.lost_next_answer == link.name:
                self.lost_next_answer = None
                raise EOFError
            if self._is_held(link):
                self.held.set()
                async with self._changed:
                    await self._changed.wait_for(lambda: not self._is_held(link))
            if link.client.is_closing():  # uvloop would raise what is no OSError
                raise EOFError
            link.answers += 1
            link.client.write(data)
            await link.client.drain()

    async def _until_passing(self, link: _Link, losing: Partition) -> None:
        """Return when bytes of this direction pass. One that lost bytes is cut by then."""
        while self.partition in {losing, Partition.HELD}:
            link.has_lost |= self.partition is losing
            async with self._changed:
                await self._changed.wait()
        if link.has_lost and self.partition is None:
            raise EOFError


@asynccontextmanager
async def proxied(url: str) -> AsyncGenerator[Proxy]:
    """A proxy before the server of this URL."""
    proxy = Proxy(url)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.close()
