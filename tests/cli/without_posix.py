"""Run as a program: shows the help of every command where nothing exists that only POSIX has."""

from __future__ import annotations

import asyncio  # noqa: F401 (made for the system that it runs on, so before the rest goes)
import os
import signal
import sys

from click.testing import CliRunner

MODULES = ("fcntl", "grp", "pwd", "resource", "syslog", "termios", "uvloop")
OF_OS = ("chown", "fork", "geteuid", "getuid", "killpg", "register_at_fork", "setsid", "uname")
OF_SIGNAL = ("SIGALRM", "SIGHUP", "SIGKILL", "SIGQUIT", "SIGUSR1", "pthread_sigmask", "setitimer")


def main() -> None:
    """Print each command with its exit code."""
    for name in MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    for module, names in ((os, OF_OS), (signal, OF_SIGNAL)):
        for name in names:
            delattr(module, name)

    from riverpy import cli

    for command in sorted(cli._COMMANDS):
        result = CliRunner().invoke(cli.main, [command, "--help"])
        print(command, result.exit_code, result.exception or "")
    print("riverpy", CliRunner().invoke(cli.main, ["--help"]).exit_code)


if __name__ == "__main__":
    main()
