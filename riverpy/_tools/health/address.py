"""Address: the host and port of a health server."""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple

LOOPBACK = "127.0.0.1"
_ADDRESS = re.compile(r"(?:(?P<host>\[[0-9A-Fa-f:.]+\]|[^:\s/\[\]]*):)?(?P<port>[0-9]{1,5})")


class Address(NamedTuple):
    """A host and a port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse `HOST:PORT`, `[IPv6]:PORT`, `:PORT` or `PORT`. The default host is the loopback
        address.

        Raises:
            ValueError: the text is not an address.
        """
        match = _ADDRESS.fullmatch(text.strip())
        if match is None or int(match["port"]) > 65535:
            raise ValueError(f"{text!r} is not HOST:PORT, as in 127.0.0.1:8378 or :8378")
        return cls((match["host"] or LOOPBACK).strip("[]"), int(match["port"]))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect to the address."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
