"""Account: the user of the operating system that runs the server.

PostgreSQL refuses to run as root, so for root it is `postgres`, or else `nobody`. For everybody
else it is oneself.
"""

from __future__ import annotations

import os
import pwd
import subprocess
from typing import TYPE_CHECKING, NamedTuple

from riverpy.errors import DatabaseError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_STAND_INS_FOR_ROOT = ("postgres", "nobody")


class Account(NamedTuple):
    """Who runs the server. `user` and `group` are None when it is the present user."""

    name: str
    user: int | None
    group: int | None

    def run(
        self,
        command: Sequence[str | Path],
        *,
        limit: float,
        environment: Mapping[str, str],
        keep: Sequence[int] = (),
    ) -> subprocess.CompletedProcess[str]:
        """Run a program for at most `limit` seconds; it inherits the descriptors in `keep`."""
        return subprocess.run(  # noqa: S603 (programs of PostgreSQL and a shell)
            command,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=limit,
            check=False,
            env=dict(environment),
            cwd="/",
            user=self.user,
            group=self.group,
            extra_groups=None if self.user is None else [],
            pass_fds=keep,
        )

    def can_run(self, program: Path) -> bool:
        """Whether this account reaches a program: tried, as modes are only part of the answer."""
        if self.user is None:
            return True
        try:
            return self.run([program, "--version"], limit=10, environment={}).returncode == 0
        except PermissionError:
            return False

    def can_enter(self, directory: Path) -> bool:
        """Whether this account reaches a directory."""
        if self.user is None:
            return True
        shell = ["/bin/sh", "-c", 'cd "$0"', directory]
        return self.run(shell, limit=10, environment={}).returncode == 0

    def own(self, directory: Path) -> None:
        """Make this account the owner of a directory of ours."""
        if self.user is not None and self.group is not None:
            os.chown(directory, self.user, self.group)


def server_account(data: Path) -> Account:
    """The account that can run a server on this cluster, which need not exist yet.

    Raises:
        DatabaseError: the present user has no name, or it is root and nobody can stand in.
    """
    user = os.geteuid()
    if user == 0:
        return _owner(data) or _stand_in_for_root()
    try:
        return Account(pwd.getpwuid(user).pw_name, None, None)
    except KeyError:
        raise DatabaseError(
            f"user id {user} has no name on this system, and PostgreSQL does not start without: "
            "add it to /etc/passwd, run as a user that is there, or give riverpy a database URL"
        ) from None


def _owner(data: Path) -> Account | None:
    """Who owns an existing cluster: nobody else can run a server on it."""
    try:
        status = data.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Account(f"user id {status.st_uid}", status.st_uid, status.st_gid)


def _stand_in_for_root() -> Account:
    for name in _STAND_INS_FOR_ROOT:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(name, entry.pw_uid, entry.pw_gid)
    raise DatabaseError(
        "PostgreSQL does not run as root, and there is no user `postgres` or `nobody` to run it: "
        "add one, or give riverpy a database URL"
    )
