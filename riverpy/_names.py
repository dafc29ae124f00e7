"""The rules for names: queues, kinds, tags, schemas, client ids, leases and keys.

The patterns for River's names, such as queues, kinds and tags, accept the same names as River does.
Each pattern must match the whole name. The time of a match is linear in the length of the name.
Except in client ids and keys, all letters and digits must be ASCII.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
from typing import get_args

from riverpy.errors import ConfigError

QUEUE_NAME_LENGTH_MAX = 64
KIND_LENGTH_MAX = 127
TAG_LENGTH_MAX = 255
CLIENT_ID_LENGTH_MAX = 100
EXECUTION_KEY_LENGTH_MAX = 255
SCHEMA_NAME_LENGTH_MAX = 46
"""The maximum number of bytes of a schema's name. A channel name has at most 63 bytes, and consists
of the schema, a dot and a topic such as `river_leadership`."""
SCHEMA_NAME_TOO_LONG_TEXT = (
    f"the name of River's schema must have at most {SCHEMA_NAME_LENGTH_MAX} bytes, because "
    "notification channels contain it"
)
DEFAULT_DOMAIN = "default"
"""The leader domain of clients that set no `leader_domain`. The lease of this domain is the row in
River's table `river_leader`."""
LEASE_NAME_LENGTH_MAX = 100
STEP_METADATA_KEY = "river:resumable_step"
"""The metadata key under which a job stores the name of its last completed step."""
CURSORS_METADATA_KEY = "river:resumable_cursor"
"""The metadata key under which a job stores the cursors of its steps. The value is a JSON object
with step names as keys, and any JSON as values."""
KEPT_RESULTS_METADATA_KEY = "riverpy:steps"
"""The metadata key under which a job stores the results of its steps with `keep=True`. The value is
a JSON object with step names as keys, and any JSON as values. River does not store results."""
QUOTED_STEP_METADATA_KEY_PREFIX = '"river:resumable_'
"""The common start of STEP_METADATA_KEY and CURSORS_METADATA_KEY, with JSON's quotation mark. If
the JSON text of a job's metadata does not contain this string, the job has stored no step and no
cursor. A search for this string is faster than decoding the JSON text."""
EXPIRES_AT_METADATA_KEY = "riverpy:expires_at"
"""The metadata key of the time at which a job expires, by the server's clock. From this time on, no
attempt of the job starts. The value is a text such as `2026-01-31T18:00:00.000000Z`."""
PERIODIC_RUN_METADATA_KEY = "riverpy:periodic_run"
"""The metadata key for the reason why the leader inserted a job for a periodic job. The value is a
`PeriodicInsertReason` as JSON: the cause, and the time of the schedule or of the request. River
does not store this key."""
SCHEMA_LEASE_NAME = "@schema"
"""The name of the schema lease. If domain `default` has no riverpy leader, the holder of this lease
does the maintenance that is done once for the whole schema."""
USER_LEASE_NAME_PREFIX = "s:"
"""In the table of leases, the names of users' leases start with this prefix. Users' leases are the
leases of singletons, and the leases that the user's code acquires."""
DOMAIN_LEASE_NAME_PREFIX = "d:"
"""In the table of leases, the names of domains' leases start with this prefix. The holder of a
domain's lease is the leader of the domain."""

_QUEUE_PATTERN = re.compile(r"[a-z0-9]+(?:[_|\-][a-z0-9]+)*")
_QUEUE_RULE = "must have lower-case letters and digits, in groups joined by a single '_' or '-'"
_KIND_PATTERN = re.compile(r"\w[\w\-\[\]<>/.\u00b7:+]+", re.ASCII)
_TAG_PATTERN = re.compile(r"\w[\w\-]+\w", re.ASCII)
_LEASE_PATTERN = re.compile(r"[!-~]+")
_SCHEMA_PATTERN = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_STORABLE_TEXT_PATTERN = re.compile(r"[^\0\ud800-\udfff]+")
"""Matches text that PostgreSQL can store."""
_STORABLE_TEXT_RULE = "must have no NUL and no lone surrogate"


def validate_queue_name(name: str) -> None:
    """Raise ConfigError unless the name has at most 64 characters: lower-case letters and digits,
    in groups joined by `_` or `-`."""
    _validate_text("a queue name", name, QUEUE_NAME_LENGTH_MAX, _QUEUE_PATTERN, _QUEUE_RULE)


def validate_domain_name(name: str) -> None:
    """Raise ConfigError unless the name follows the rule of queue names."""
    _validate_text("a domain name", name, QUEUE_NAME_LENGTH_MAX, _QUEUE_PATTERN, _QUEUE_RULE)


def validate_lease_name(name: str) -> None:
    """Raise ConfigError unless the name has 1 to 100 printable ASCII characters and no space."""
    rule = "must have printable ASCII characters and no space"
    _validate_text("the name of a lease", name, LEASE_NAME_LENGTH_MAX, _LEASE_PATTERN, rule)


def domain_lease_name(domain: str) -> str:
    """Return the name of the lease that the leader of a domain holds. `domain` must not be
    `default`."""
    return f"{DOMAIN_LEASE_NAME_PREFIX}{domain}"


def validate_kind(kind: str, subject: str = "a job kind") -> None:
    """Raise ConfigError unless the kind follows River's rule: 2 to 127 characters, which are ASCII
    letters, digits, the middle dot, or one of `_-[]<>/.:+`. The first one must be a letter, digit
    or `_`. The error text begins with `subject`."""
    rule = (
        "must start with an ASCII letter, digit or '_', followed by one or more of these or of "
        "'-[]<>/.\u00b7:+'"
    )
    _validate_text(subject, kind, KIND_LENGTH_MAX, _KIND_PATTERN, rule)


def validate_tag(tag: str) -> None:
    """Raise ConfigError unless the tag has 3 to 255 ASCII letters, digits, `_` and `-`, and no `-`
    at either end."""
    rule = "must have 3 or more ASCII letters, digits, '_' and '-', and no '-' at either end"
    _validate_text("a tag", tag, TAG_LENGTH_MAX, _TAG_PATTERN, rule)


def validate_schema_name(name: str) -> None:
    """Raise ConfigError unless the name has at most 46 ASCII letters, digits and `_`, and does not
    start with a digit."""
    if isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        validate_schema_name_length(name)
    rule = "must have ASCII letters, digits and '_', and no digit first"
    _validate_text("a schema name", name, SCHEMA_NAME_LENGTH_MAX, _SCHEMA_PATTERN, rule)


def validate_schema_name_length(name: str) -> None:
    """Raise ConfigError unless the schema's name has at most 46 bytes. If the user passes no name,
    the name is that of the schema that the search path selects."""
    length = len(name.encode("utf-8", "replace"))
    if length > SCHEMA_NAME_LENGTH_MAX:
        raise ConfigError(f"{SCHEMA_NAME_TOO_LONG_TEXT}, got {length}: {name[:80]!r}")


def make_unique_id(prefix: str | None) -> str:
    """Return a unique id of the form `NAME:PID:RANDOM`. NAME is `prefix`, or the host's name if
    `prefix` is None. A long NAME is shortened, so that the id is a valid client id."""
    host = socket.gethostname() if prefix is None else prefix
    tail = f":{os.getpid()}:{secrets.token_hex(4)}"
    # A host name may contain bytes that are not text.
    host = host.encode("utf-8", "replace").decode().replace("\0", "")
    return host[: CLIENT_ID_LENGTH_MAX - len(tail)] + tail


def validate_client_id(client_id: str, subject: str = "a client id") -> None:
    """Raise ConfigError unless the id has 1 to 100 characters that PostgreSQL can store. The error
    text begins with `subject`."""
    _validate_text(
        subject, client_id, CLIENT_ID_LENGTH_MAX, _STORABLE_TEXT_PATTERN, _STORABLE_TEXT_RULE
    )


def validate_run_once_key(key: str) -> None:
    """Raise ConfigError unless the key has 1 to 255 characters that PostgreSQL can store."""
    _validate_text(
        "a key", key, EXECUTION_KEY_LENGTH_MAX, _STORABLE_TEXT_PATTERN, _STORABLE_TEXT_RULE
    )


def validate_literal_value(argument_name: str, value: object, literal_type: object) -> None:
    """Raise ConfigError unless the value is one of the values of a Literal type."""
    if value not in get_args(literal_type):
        allowed = ", ".join(map(repr, get_args(literal_type)))
        raise ConfigError(f"{argument_name} must be one of {allowed}, got {value!r}")


def _validate_text(
    subject: str, value: object, length_max: int, pattern: re.Pattern[str], rule_text: str
) -> None:
    """Raise ConfigError unless the value is a text of 1 to `length_max` characters that matches the
    pattern. The error texts begin with `subject`. `rule_text` describes the pattern for the error
    text."""
    if not isinstance(value, str):
        raise ConfigError(f"{subject} must be a string, got {type(value).__name__}")
    if not value:
        raise ConfigError(f"{subject} must not be empty")
    if len(value) > length_max:
        raise ConfigError(
            f"{subject} must have at most {length_max} characters, got {len(value)}: {value[:80]!r}"
        )
    if not pattern.fullmatch(value):
        raise ConfigError(f"{subject} {rule_text}, got {value!r}")
