"""The address of a health server, and the part of HTTP/1.1 that probes and scrapers use: one GET or
HEAD per connection, no body."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import AsyncGenerator
from http import HTTPStatus
from typing import NamedTuple, TypeAlias
from urllib.parse import parse_qs, urlsplit

import msgspec

LOOPBACK_HOST = "127.0.0.1"
REQUEST_HEAD_BYTES_MAX = 8 * 1024
"""The maximum number of bytes of the request line and the headers."""
_ADDRESS_PATTERN = re.compile(
    r"(?:(?P<host>\[[0-9A-Fa-f:.]+\]|[^:\s/\[\]]*):)?(?P<port>[0-9]{1,5})"
)
_REQUEST_LINE_PATTERN = re.compile(rb"([A-Z]{1,16}) (/[\x21-\x7e]*) HTTP/1\.[0-9]")
_HOST_HEADER_PATTERN = re.compile(rb"^host:([^\r\n]*)", re.IGNORECASE | re.MULTILINE)
_COMMON_HEADERS = (
    "Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n"
)

ResponseBody: TypeAlias = bytes | AsyncGenerator[bytes, None]


class Address(NamedTuple):
    """The host and port of a server."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse `HOST:PORT`, `[IPv6]:PORT`, `:PORT` or `PORT`. The default host is the loopback
        address. Raises ValueError if the text is not an address."""
        match = _ADDRESS_PATTERN.fullmatch(text.strip())
        if match is None or int(match["port"]) > 65535:
            raise ValueError(f"{text!r} is not HOST:PORT, as in 127.0.0.1:8378 or :8378")
        return cls((match["host"] or LOOPBACK_HOST).strip("[]"), int(match["port"]))

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


class HttpError(Exception):
    """A request that the server cannot answer. `response` is the response to send, with the status
    and the text of the error."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.response = Response(status, "text/plain; charset=utf-8", f"{text}\n".encode())


class Request(msgspec.Struct, frozen=True):
    """A valid HTTP request."""

    method: str
    path: str
    query_params: dict[str, list[str]]
    host: str
    """The `Host` header, with or without a port; empty: the request has no such header."""

    @property
    def is_host_safe_from_rebinding(self) -> bool:
        """Whether the `Host` header is missing, or names `localhost` or an IP address. This
        protects against DNS rebinding: an attacker lets the DNS name of a web page lead to this
        server, so that the page can send requests to it. Such requests have the attacker's DNS name
        in the `Host` header."""
        name = self.host.rpartition(":")[0] if re.search(r":\d*$", self.host) else self.host
        if name in {"", "localhost"} or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True


class Response(msgspec.Struct, frozen=True):
    """An HTTP response. The body is either bytes or a generator of its parts."""

    status: HTTPStatus
    content_type: str
    body: ResponseBody

    def encode_status_and_headers(self) -> bytes:
        """Return the status line and the headers."""
        line = f"HTTP/1.1 {self.status.value} {self.status.phrase}\r\n"
        length = f"Content-Length: {len(self.body)}\r\n" if isinstance(self.body, bytes) else ""
        allow = "Allow: GET, HEAD\r\n" if self.status == HTTPStatus.METHOD_NOT_ALLOWED else ""
        return (
            f"{line}Content-Type: {self.content_type}\r\n{length}{allow}{_COMMON_HEADERS}".encode()
        )


def parse_request(head: bytes) -> Request:
    """Parse the request line and the headers, up to the empty line.

    Raises:
        HttpError: the request is invalid or not supported.
    """
    line = head.partition(b"\n")[0].rstrip(b"\r")
    match = _REQUEST_LINE_PATTERN.fullmatch(line)
    if match is None:
        raise HttpError(HTTPStatus.BAD_REQUEST, "this is not an HTTP/1.1 request")
    method, target = match[1].decode(), match[2].decode()
    if method not in {"GET", "HEAD"}:
        raise HttpError(HTTPStatus.METHOD_NOT_ALLOWED, "use GET or HEAD")
    try:
        url = urlsplit(target)
        params = parse_qs(url.query, max_num_fields=100)
    except ValueError:
        raise HttpError(HTTPStatus.BAD_REQUEST, "the target of the request is invalid") from None
    host = _HOST_HEADER_PATTERN.search(head)
    return Request(
        method, url.path, params, host[1].strip(b" \t").decode("latin-1").lower() if host else ""
    )
