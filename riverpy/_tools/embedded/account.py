"""Account: the system user that runs the server.

PostgreSQL refuses to run as root. So root runs the server as the user `postgres` or, if there is no
such user, as `nobody`. Any other user runs the server under its own account.
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

_USERS_FOR_ROOT = ("postgres", "nobody")


class Account(NamedTuple):
    """The user that runs the server. `user` and `group` are None for the current user."""

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
        """Run a program for at most `limit` seconds. The program inherits the file descriptors in
        `keep`."""
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
        """Return whether this account can run the program. Run it to find out, because not only
        file modes can forbid it."""
        if self.user is None:
            return True
        try:
            return self.run([program, "--version"], limit=10, environment={}).returncode == 0
        except PermissionError:
            return False

    def set_owner_of(self, directory: Path) -> None:
        """Make this account the owner of a directory."""
        if self.user is not None and self.group is not None:
            os.chown(directory, self.user, self.group)


def server_account(data: Path) -> Account:
    """Return the account that can run a server on this cluster. The cluster may not exist yet."""
    user = os.geteuid()
    if user == 0:
        return _cluster_owner(data) or _user_for_root()
    try:
        return Account(pwd.getpwuid(user).pw_name, None, None)
    except KeyError:
        raise DatabaseError(
            f"user id {user} has no name on this system, and PostgreSQL does not start without "
            "one: add it to /etc/passwd, run as another user, or give riverpy a database URL"
        ) from None


def _cluster_owner(data: Path) -> Account | None:
    """Return the owner of the cluster: PostgreSQL accepts no other user. None: there is no
    cluster."""
    try:
        status = data.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Account(f"user id {status.st_uid}", status.st_uid, status.st_gid)


def _user_for_root() -> Account:
    for name in _USERS_FOR_ROOT:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(name, entry.pw_uid, entry.pw_gid)
    raise DatabaseError(
        "PostgreSQL does not run as root, and there is no user `postgres` or `nobody` to run it: "
        "add one, or give riverpy a database URL"
    )
