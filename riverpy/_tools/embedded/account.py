"""ServerSystemUser: the system user that runs the embedded PostgreSQL server.

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

_NON_ROOT_USER_NAMES = ("postgres", "nobody")


class ServerSystemUser(NamedTuple):
    """The system user that runs the server. `user_id` and `group_id` are None if the server runs as
    the user of this process."""

    name: str
    user_id: int | None
    group_id: int | None

    def run_program(
        self,
        command: Sequence[str | Path],
        *,
        timeout: float,
        environment: Mapping[str, str],
        pass_fds: Sequence[int] = (),
    ) -> subprocess.CompletedProcess[str]:
        """Run a program for at most `timeout` seconds. The program inherits the file descriptors
        `pass_fds`."""
        return subprocess.run(  # noqa: S603 (programs of PostgreSQL and a shell)
            command,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=timeout,
            check=False,
            env=dict(environment),
            cwd="/",
            user=self.user_id,
            group=self.group_id,
            extra_groups=None if self.user_id is None else [],
            pass_fds=pass_fds,
        )

    def can_run_program(self, program: Path) -> bool:
        """Return whether the server's user can run the program. If the server's user is not the
        user of this process, try to run `program --version`, because the permissions of the file
        alone do not show this."""
        if self.user_id is None:
            return True
        try:
            return (
                self.run_program([program, "--version"], timeout=10, environment={}).returncode == 0
            )
        except PermissionError:
            return False

    def set_directory_owner(self, directory: Path) -> None:
        if self.user_id is not None and self.group_id is not None:
            os.chown(directory, self.user_id, self.group_id)


def find_server_system_user(data_directory: Path) -> ServerSystemUser:
    """Return the system user that must run the server of a cluster. The function also works before
    the cluster exists.

    Raises:
        DatabaseError: the current user id has no name, or root finds no other user to run the
            server.
    """
    user = os.geteuid()
    if user == 0:
        return _find_cluster_owner(data_directory) or _find_non_root_user()
    try:
        return ServerSystemUser(pwd.getpwuid(user).pw_name, None, None)
    except KeyError:
        raise DatabaseError(
            f"user id {user} has no name on this system, and PostgreSQL does not start without "
            "one: add it to /etc/passwd, run as another user, or give riverpy a database URL"
        ) from None


def _find_cluster_owner(data_directory: Path) -> ServerSystemUser | None:
    """Return the owner of the cluster, or None if there is no cluster. PostgreSQL only starts as
    the owner of its data directory."""
    try:
        status = data_directory.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return ServerSystemUser(f"user id {status.st_uid}", status.st_uid, status.st_gid)


def _find_non_root_user() -> ServerSystemUser:
    """Return the user `postgres` or `nobody`, as the server cannot run as root."""
    for name in _NON_ROOT_USER_NAMES:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return ServerSystemUser(name, entry.pw_uid, entry.pw_gid)
    raise DatabaseError(
        "PostgreSQL does not run as root, and there is no user `postgres` or `nobody` to run it: "
        "add one, or give riverpy a database URL"
    )
