"""Starts the monitor as nobody's child, and starts it again when something kills it.

Run as a file, ``python guard.py PIDS_FILE COMMAND…``, by a rank that waits for this process
and for no other. It ends as soon as the guard lives, which the kernel then gives to init: a script
that waits for all its children, or kills them, meets neither guard nor monitor. The guard starts
the monitor, waits for it, and is gone with it. It imports nothing of distdiag, so that it starts
within milliseconds and is too small for what kills large processes when memory runs out.
"""

from __future__ import annotations

import os
import signal
import sys
import time

TYPE_CHECKING = False  # importing `typing` would take a third of the time until the guard is there
if TYPE_CHECKING:
    from typing import Final

MOST_RESTARTS: Final = 3
"""What kills the monitor again and again will not stop doing so."""
PAUSE_S: Final = 0.5
"""Between two starts: whoever ran out of memory frees some."""


def main(arguments: list[str]) -> int:
    """Leave a guard behind that runs the command, and end."""
    pids_file, *command = arguments
    # What ends the ranks must not end those who tell of it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a rank that ignores it would leave no status
    os.umask(0o077)  # whatever the rank's is: no file of the monitor is for others
    ready, tell = os.pipe()
    if os.fork():
        os.close(tell)
        os.read(ready, 1)  # returns when the guard has said who it is, or is dead
        os._exit(0)
    os.close(ready)
    return guard(pids_file, command, tell)


def guard(pids_file: str, command: list[str], tell: int = -1) -> int:
    """Run the command until it ends by itself; close `tell` once it is known who does."""
    deaths: list[str] = []
    while True:
        try:
            pid = os.posix_spawn(command[0], [*command, *deaths], os.environ)
        except OSError as error:
            sys.stderr.write(f"distdiag: the monitor cannot be started: {error}\n")
            return 1
        _write_pids(pids_file, os.getpid(), pid)
        if tell >= 0:
            os.close(tell)
            tell = -1
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status >= 0 or len(deaths) == MOST_RESTARTS:
            return 0
        deaths.append(f"was killed by signal {-status}")
        time.sleep(PAUSE_S)


def _write_pids(path: str, *pids: int) -> None:
    """Write the pids and when these processes began: numbers are used again."""
    lines = "".join(f"{pid} {_start_ticks(pid)}\n" for pid in pids)
    partial = f"{path}.{os.getpid()}"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        descriptor = os.open(partial, flags, 0o600)
        os.write(descriptor, lines.encode())
        os.close(descriptor)
        os.replace(partial, path)
    except OSError:  # a full disk: nobody knows of the monitor then, but it watches
        return


def _start_ticks(pid: int) -> int:
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return int(file.read().rpartition(")")[2].split()[19])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
