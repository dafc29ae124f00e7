"""The rules for names: queues, kinds, tags, schemas, client ids, leases and keys.

The patterns accept the same names as River's. They match in linear time, in ASCII only, and up to
the end of the text.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
from typing import get_args

from riverpy.errors import ConfigError

QUEUE_LENGTH_MAX = 64
KIND_LENGTH_MAX = 127
TAG_LENGTH_MAX = 255
CLIENT_ID_LENGTH_MAX = 100
EXECUTION_KEY_LENGTH_MAX = 255
SCHEMA_LENGTH_MAX = 46
"""The maximum number of bytes of a schema's name. A channel name has at most 63 bytes, and consists
of the schema, a dot and a topic such as `river_leadership`."""
SCHEMA_TOO_LONG = (
    f"the name of River's schema must have at most {SCHEMA_LENGTH_MAX} bytes, because notification "
    "channels contain it"
)
DEFAULT_DOMAIN = "default"
"""The domain of clients without `leader_domain`. Its lease is the row in River's `river_leader`."""
DISTRIBUTION = "riverpy-queue"
"""The name of the package on PyPI."""
LEASE_LENGTH_MAX = 100
SCHEMA_LEASE = "@schema"
"""The name of the schema lease. If `default` has no riverpy leader, its holder does the maintenance
that is done once for the whole schema."""
USER_PREFIX = "s:"
"""The prefix of the names of leases of user code in the table of leases."""

_QUEUE = re.compile(r"[a-z0-9]+(?:[_|\-][a-z0-9]+)*")
_KIND = re.compile(r"\w[\w\-\[\]<>/.\u00b7:+]+", re.ASCII)
_TAG = re.compile(r"\w[\w\-]+\w", re.ASCII)
_LEASE = re.compile(r"[!-~]+")
_SCHEMA = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


def validate_queue(name: str) -> None:
    """Raise ConfigError unless the name has at most 64 characters: lower-case letters and digits,
    in groups joined by `_` or `-`."""
    _expect_text("a queue name", name)
    if not name:
        raise ConfigError("a queue name must not be empty")
    if len(name) > QUEUE_LENGTH_MAX:
        raise ConfigError(
            f"a queue name must have at most {QUEUE_LENGTH_MAX} characters, got {len(name)}: "
            f"{name[:80]!r}"
        )
    if not _QUEUE.fullmatch(name):
        raise ConfigError(
            "a queue name must have lower-case letters and digits, in groups joined by a single "
            f"'_' or '-', got {name!r}"
        )


def validate_domain(name: str) -> None:
    """Raise ConfigError unless the name follows the rule of queue names."""
    if len(name) > QUEUE_LENGTH_MAX or not _QUEUE.fullmatch(name):
        raise ConfigError(
            f"a domain name must have 1 to {QUEUE_LENGTH_MAX} characters: lower-case letters and "
            f"digits in groups joined by a single '_' or '-', got {name[:80]!r}"
        )


def validate_lease_name(name: str) -> None:
    """Raise ConfigError unless the name has 1 to 100 printable ASCII characters and no space."""
    _expect_text("the name of a lease", name)
    if len(name) > LEASE_LENGTH_MAX or not _LEASE.fullmatch(name):
        raise ConfigError(
            f"the name of a lease must have 1 to {LEASE_LENGTH_MAX} printable ASCII characters and "
            f"no space, got {name[:120]!r}"
        )


def domain_lease(domain: str) -> str:
    """Return the name of the lease of a domain's leader. The domain is not `default`."""
    return f"d:{domain}"


def validate_kind(kind: str, noun: str = "a job kind") -> None:
    """Raise ConfigError unless the kind follows River's rule. `noun` is used in the error text."""
    _expect_text(noun, kind)
    if not kind:
        raise ConfigError(f"{noun} must not be empty")
    if len(kind) > KIND_LENGTH_MAX:
        raise ConfigError(
            f"{noun} must have at most {KIND_LENGTH_MAX} characters, got {len(kind)}: {kind[:80]!r}"
        )
    if not _KIND.fullmatch(kind):
        raise ConfigError(
            f"{noun} must start with an ASCII letter, digit or '_', followed by one or more of "
            f"these or of '-[]<>/.\u00b7:+', got {kind!r}"
        )


def validate_tag(tag: str) -> None:
    """Raise ConfigError unless the tag has 3 to 255 ASCII letters, digits, `_` and `-`, and no `-`
    at either end."""
    if len(tag) > TAG_LENGTH_MAX:
        raise ConfigError(
            f"a tag must have at most {TAG_LENGTH_MAX} characters, got {len(tag)}: {tag[:80]!r}"
        )
    if not _TAG.fullmatch(tag):
        raise ConfigError(
            "a tag must have 3 or more ASCII letters, digits, '_' and '-', and no '-' at either "
            f"end, got {tag!r}"
        )


def validate_schema(name: str) -> None:
    """Raise ConfigError unless the name has at most 46 letters, digits and `_`, and no digit
    first."""
    _expect_text("a schema name", name)
    check_schema_length(name)
    if not _SCHEMA.fullmatch(name):
        raise ConfigError(
            "a schema name must have ASCII letters, digits and '_', and no digit first, got "
            f"{name!r}"
        )


def check_schema_length(name: str) -> None:
    """Raise ConfigError unless the name has at most 46 bytes. Schemas that the search path finds
    are checked too."""
    length = len(name.encode("utf-8", "replace"))
    if length > SCHEMA_LENGTH_MAX:
        raise ConfigError(f"{SCHEMA_TOO_LONG}, got {length}: {name[:80]!r}")


def process_id(name: str | None) -> str:
    """Return a unique id `NAME:PID:RANDOM`. NAME is the host's name by default. It is shortened so
    that the id is a valid client id."""
    host = socket.gethostname() if name is None else name
    tail = f":{os.getpid()}:{secrets.token_hex(4)}"
    # The name of a host may be any bytes.
    host = host.encode("utf-8", "replace").decode().replace("\0", "")
    return host[: CLIENT_ID_LENGTH_MAX - len(tail)] + tail


def validate_client_id(client_id: str) -> None:
    """Raise ConfigError unless the id has 1 to 100 characters that PostgreSQL can store."""
    _expect_text("a client id", client_id)
    is_bad = "\0" in client_id or not _is_storable(client_id)
    if is_bad or not 1 <= len(client_id) <= CLIENT_ID_LENGTH_MAX:
        raise ConfigError(
            f"a client id must have 1 to {CLIENT_ID_LENGTH_MAX} characters, no NUL and no "
            f"lone surrogate, got {client_id[:120]!r}"
        )


def validate_execution_key(key: str) -> None:
    """Raise ConfigError unless the key has 1 to 255 characters that PostgreSQL can store."""
    _expect_text("a key", key)
    if not 1 <= len(key) <= EXECUTION_KEY_LENGTH_MAX:
        raise ConfigError(
            f"a key must have 1 to {EXECUTION_KEY_LENGTH_MAX} characters, got {len(key)}: "
            f"{key[:80]!r}"
        )
    if "\0" in key or not _is_storable(key):
        raise ConfigError(f"a key must have no NUL and no lone surrogate, got {key[:80]!r}")


def expect_one_of(name: str, value: object, choices: object) -> None:
    """Raise ConfigError unless the value is one of the values of a Literal type."""
    if value not in get_args(choices):
        allowed = ", ".join(map(repr, get_args(choices)))
        raise ConfigError(f"{name} must be one of {allowed}, got {value!r}")


def _is_storable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _expect_text(noun: str, value: object) -> None:
    if not isinstance(value, str):
        raise ConfigError(f"{noun} must be a string, got {type(value).__name__}")
