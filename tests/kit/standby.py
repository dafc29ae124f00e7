"""A primary and its streaming standby, which can switch their roles cleanly."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from urllib.parse import parse_qs, urlsplit, urlunsplit

from riverpy.embedded import EmbeddedPostgres
from tests.kit.fleet import Server, Shutdown, with_user
from tests.kit.proxy import Proxy

LIMIT = 60.0
"""Timeout in seconds for a promotion, and for a standby to stream."""


class Member(Server):
    """One of the two servers. It follows the other whenever it starts with its signal file."""

    def __init__(self, directory: Path, name: str, other: str) -> None:
        peer = f"host={socket_directory(directory, other)} port=5432 user=postgres"
        super().__init__(directory, name, primary_conninfo=peer, wal_keep_size="512MB")

    @property
    def data(self) -> Path:
        """Its data directory."""
        return self._postgres.directory / "data"

    def copy_to(self, other: Member) -> None:
        """Copy the data of this server, which must not run, to the other."""
        other.data.parent.mkdir(mode=0o755)
        shutil.copytree(self.data, other.data)
        owner = self.data.stat()
        for path in (other.data, *other.data.rglob("*")):
            os.chown(path, owner.st_uid, owner.st_gid)

    async def follow(self) -> None:
        """Start as the standby of the other, and return when it streams."""
        signal_file = self.data / "standby.signal"
        signal_file.touch()
        owner = self.data.stat()
        os.chown(signal_file, owner.st_uid, owner.st_gid)
        await self.come_back()
        async with asyncio.timeout(LIMIT), self.connected() as connection:
            while not await connection.fetchval(
                "SELECT EXISTS (SELECT FROM pg_stat_wal_receiver WHERE status = 'streaming')"
            ):
                await asyncio.sleep(0.02)

    async def promote(self) -> None:
        """Make it the primary."""
        async with self.connected() as connection:
            assert await connection.fetchval(f"SELECT pg_promote(true, {LIMIT:.0f})", timeout=LIMIT)


class PairProxy(Proxy):
    """The proxies of one client to both servers, with a URL of two hosts that finds the primary."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)
        self._second = Proxy(second)
        self.ways = (self, self._second)
        """The proxies to the first and to the second server."""

    async def start(self) -> None:
        """Listen. `url` is set from then on."""
        await super().start()
        await self._second.start()
        parts = urlsplit(self.url)
        place = parts.netloc + "," + self._second.url.rpartition("@")[2].partition("/")[0]
        query = parts.query + "&target_session_attrs=primary"
        self.url = urlunsplit(parts._replace(netloc=place, query=query))

    async def close(self) -> None:
        """Cut every connection and stop listening."""
        await self._second.close()
        await super().close()


class Pair(Server):
    """Two servers, one of which is the primary."""

    def __init__(self, directory: Path) -> None:
        self.primary = Member(directory, "first", "second")
        self.standby = Member(directory, "second", "first")
        self._members = (self.primary, self.standby)

    @property
    def url(self) -> str:
        """The URL without proxies, to the current primary."""
        places = [urlsplit(member.url) for member in self._members]
        hosts = ",".join(parse_qs(place.query)["host"][0] for place in places)
        query = f"host={hosts}&port=5432,5432&target_session_attrs=primary"
        return urlunsplit(places[0]._replace(query=query))

    def proxy(self, user: str | None) -> Proxy:
        """Return a proxy to both servers."""
        first, second = (
            member.url if user is None else with_user(member.url, user) for member in self._members
        )
        return PairProxy(first, second)

    @property
    def is_second_primary(self) -> bool:
        """The index of the proxy to the primary."""
        return self.primary is self._members[1]

    async def start(self) -> None:
        """Start the primary with its tables, and the standby that follows it."""
        await self.primary.start()
        await self.primary.shut_down(Shutdown.FAST)
        self.primary.copy_to(self.standby)
        await self.primary.come_back()
        await self.standby.follow()

    async def switch_over(self) -> None:
        """Stop the primary after the standby has all its writes, promote the standby, and let the
        former primary follow it."""
        await self.primary.shut_down(Shutdown.FAST)
        await self.standby.promote()
        self.primary, self.standby = self.standby, self.primary
        await self.standby.follow()

    async def remove(self) -> None:
        """Stop both and delete their data."""
        for member in self._members:
            await member.remove()


def socket_directory(directory: Path, name: str) -> Path:
    """Return the socket directory of the server with this name."""
    url = EmbeddedPostgres(name, base_dir=directory).url
    return Path(parse_qs(urlsplit(url).query)["host"][0])
