"""The part of HTTP/1.1 that probes and scrapers use: one GET or HEAD a connection, no body."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import AsyncGenerator
from http import HTTPStatus
from typing import TypeAlias
from urllib.parse import parse_qs, urlsplit

import msgspec

HEAD_MAX = 8 * 1024
"""Bytes of a request line and its headers."""
_LINE = re.compile(rb"([A-Z]{1,16}) (/[\x21-\x7e]*) HTTP/1\.[0-9]")
_HOST = re.compile(rb"^host:([^\r\n]*)", re.IGNORECASE | re.MULTILINE)
_HEADERS = "Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n"

Body: TypeAlias = bytes | AsyncGenerator[bytes, None]


class HttpError(Exception):
    """A request that gets no more than a status and a sentence."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.response = Response(status, "text/plain; charset=utf-8", f"{text}\n".encode())


class Request(msgspec.Struct, frozen=True):
    """A request that was understood."""

    method: str
    path: str
    params: dict[str, list[str]]
    host: str
    """As the client calls the server, with or without a port; empty: it does not say."""

    @property
    def is_for_local(self) -> bool:
        """Whether the name is one that only this machine gives itself. A page in a browser that was
        led here by a name of its own says that name."""
        name = self.host.rpartition(":")[0] if re.search(r":\d*$", self.host) else self.host
        if name in {"", "localhost"} or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True


class Response(msgspec.Struct, frozen=True):
    """An answer: all of it, or parts as they come."""

    status: HTTPStatus
    content_type: str
    body: Body

    def head(self) -> bytes:
        """The status line and the headers."""
        line = f"HTTP/1.1 {self.status.value} {self.status.phrase}\r\n"
        length = f"Content-Length: {len(self.body)}\r\n" if isinstance(self.body, bytes) else ""
        allow = "Allow: GET, HEAD\r\n" if self.status == HTTPStatus.METHOD_NOT_ALLOWED else ""
        return f"{line}Content-Type: {self.content_type}\r\n{length}{allow}{_HEADERS}".encode()


def parse(head: bytes) -> Request:
    """What the head of a request says, up to its empty line.

    Raises:
        HttpError: it is no request that is answered here.
    """
    line = head.partition(b"\n")[0].rstrip(b"\r")
    match = _LINE.fullmatch(line)
    if match is None:
        raise HttpError(HTTPStatus.BAD_REQUEST, "this is no HTTP/1.1 request")
    method, target = match[1].decode(), match[2].decode()
    if method not in {"GET", "HEAD"}:
        raise HttpError(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD are answered")
    try:
        url = urlsplit(target)
        params = parse_qs(url.query, max_num_fields=100)
    except ValueError:
        raise HttpError(HTTPStatus.BAD_REQUEST, "the target of the request is wrong") from None
    host = _HOST.search(head)
    return Request(
        method, url.path, params, host[1].strip(b" \t").decode("latin-1").lower() if host else ""
    )
