"""The rules for names: queue, kind, tag, schema and client id, the same wherever a name enters.

River's patterns, rewritten so that each matches in linear time, in ASCII only, and up to the very
end of the text.
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
"""63 bytes of a channel name, less the dot and `river_leadership`."""
SCHEMA_TOO_LONG = (
    f"the name of River's schema has at most {SCHEMA_LENGTH_MAX} bytes, so that a notification "
    "channel can carry it"
)
DEFAULT_DOMAIN = "default"
"""The domain of clients that name none, whose lead is River's own row."""
DISTRIBUTION = "riverpy-queue"
"""The name of the package that is installed."""
LEASE_LENGTH_MAX = 100
SCHEMA_LEASE = "@schema"
"""The lease of the work that a schema has one of, where nobody leads `default`."""
USER_PREFIX = "s:"
"""Before a user's name of a lease in the table."""

_QUEUE = re.compile(r"[a-z0-9]+(?:[_|\-][a-z0-9]+)*")
_KIND = re.compile(r"\w[\w\-\[\]<>/.\u00b7:+]+", re.ASCII)
_TAG = re.compile(r"\w[\w\-]+\w", re.ASCII)
_LEASE = re.compile(r"[!-~]+")
_SCHEMA = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


def validate_queue(name: str) -> None:
    """Lower-case letters and digits in groups joined by `_` or `-`, at most 64 characters; else
    ConfigError."""
    _expect_text("a queue name", name)
    if not name:
        raise ConfigError("a queue name may not be empty")
    if len(name) > QUEUE_LENGTH_MAX:
        raise ConfigError(
            f"a queue name has at most {QUEUE_LENGTH_MAX} characters, got {len(name)}: "
            f"{name[:80]!r}"
        )
    if not _QUEUE.fullmatch(name):
        raise ConfigError(
            "a queue name has lower-case letters and digits in groups joined by a single '_' or "
            "'-', "
            f"got {name!r}"
        )


def validate_domain(name: str) -> None:
    """The rule of queue names; else ConfigError."""
    if len(name) > QUEUE_LENGTH_MAX or not _QUEUE.fullmatch(name):
        raise ConfigError(
            f"the name of a domain has 1 to {QUEUE_LENGTH_MAX} characters: lower-case letters and "
            f"digits in groups joined by a single '_' or '-', got {name[:80]!r}"
        )


def validate_lease_name(name: str) -> None:
    """1 to 100 printable ASCII characters, no space; else ConfigError."""
    _expect_text("the name of a lease", name)
    if len(name) > LEASE_LENGTH_MAX or not _LEASE.fullmatch(name):
        raise ConfigError(
            f"the name of a lease has 1 to {LEASE_LENGTH_MAX} characters, printable ASCII without "
            f"a space, got {name[:120]!r}"
        )


def domain_lease(domain: str) -> str:
    """The name of the lease of whoever leads a domain other than `default`."""
    return f"d:{domain}"


def validate_kind(kind: str, noun: str = "a job kind") -> None:
    """River's rule for the kind of a registered worker, which every insert keeps too, and for what
    else `noun` names; else ConfigError."""
    _expect_text(noun, kind)
    if not kind:
        raise ConfigError(f"{noun} may not be empty")
    if len(kind) > KIND_LENGTH_MAX:
        raise ConfigError(
            f"{noun} has at most {KIND_LENGTH_MAX} characters, got {len(kind)}: {kind[:80]!r}"
        )
    if not _KIND.fullmatch(kind):
        raise ConfigError(
            f"{noun} starts with a letter, digit or '_' and goes on with at least one more "
            "of these or "
            f"of '-[]<>/.\u00b7:+', all ASCII but the dot \u00b7, got {kind!r}"
        )


def validate_tag(tag: str) -> None:
    """3 to 255 ASCII letters, digits, `_` and `-`, with no `-` at either end; else ConfigError."""
    if len(tag) > TAG_LENGTH_MAX:
        raise ConfigError(
            f"a tag has at most {TAG_LENGTH_MAX} characters, got {len(tag)}: {tag[:80]!r}"
        )
    if not _TAG.fullmatch(tag):
        raise ConfigError(
            "a tag has 3 or more ASCII letters, digits, '_' and '-', and no '-' at either end, "
            f"got {tag!r}"
        )


def validate_schema(name: str) -> None:
    """Letters, digits and `_`, no digit first, at most 46 characters; else ConfigError."""
    _expect_text("a schema name", name)
    check_schema_length(name)
    if not _SCHEMA.fullmatch(name):
        raise ConfigError(
            "a schema name has ASCII letters, digits and '_' and does not start with a digit, "
            f"got {name!r}"
        )


def check_schema_length(name: str) -> None:
    """At most 46 bytes; else ConfigError. Also for a schema that the search path names."""
    length = len(name.encode("utf-8", "replace"))
    if length > SCHEMA_LENGTH_MAX:
        raise ConfigError(f"{SCHEMA_TOO_LONG}, got {length}: {name[:80]!r}")


def process_id(name: str | None) -> str:
    """`NAME:PID:RANDOM`, which no other process has and `validate_client_id` allows. NAME is the
    host's by default; of a long one the begin."""
    host = socket.gethostname() if name is None else name
    tail = f":{os.getpid()}:{secrets.token_hex(4)}"
    # A host may have any bytes for its name.
    host = host.encode("utf-8", "replace").decode().replace("\0", "")
    return host[: CLIENT_ID_LENGTH_MAX - len(tail)] + tail


def validate_client_id(client_id: str) -> None:
    """1 to 100 characters that PostgreSQL can store; else ConfigError."""
    _expect_text("a client id", client_id)
    is_bad = "\0" in client_id or not _is_storable(client_id)
    if is_bad or not 1 <= len(client_id) <= CLIENT_ID_LENGTH_MAX:
        raise ConfigError(
            f"a client id has 1 to {CLIENT_ID_LENGTH_MAX} characters, no NUL and no half of a "
            f"surrogate pair, got {client_id[:120]!r}"
        )


def validate_execution_key(key: str) -> None:
    """1 to 255 characters that PostgreSQL can store; else ConfigError."""
    _expect_text("a key", key)
    if not 1 <= len(key) <= EXECUTION_KEY_LENGTH_MAX:
        raise ConfigError(
            f"a key has 1 to {EXECUTION_KEY_LENGTH_MAX} characters, got {len(key)}: {key[:80]!r}"
        )
    if "\0" in key or not _is_storable(key):
        raise ConfigError(f"a key has no NUL and no half of a surrogate pair, got {key[:80]!r}")


def expect_one_of(name: str, value: object, choices: object) -> None:
    """Raise ConfigError unless the value is one of a Literal type's."""
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
        raise ConfigError(f"{noun} is a text, got {type(value).__name__}")
