"""Starts the monitor as nobody's child, and starts it again when something kills it.

Run as a file, ``python guard.py PIDS_FILE COMMAND…``, by a rank that waits for this process
and for no other. It ends as soon as the guard lives, which the kernel then gives to init: a script
that waits for all its children, or kills them, meets neither guard nor monitor. The guard starts
the monitor, waits for it, and is gone with it. A process like it stands behind it, and takes its
place should it be killed. It imports nothing of distdiag, so that it starts within milliseconds and
is too small for what kills large processes when memory runs out.

It holds descriptors of the ranks for the monitor, which may begin after a rank has ended: the
kernel tells how a process ended only to who had hold of it before.
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
MOST_RANKS: Final = 64
"""No node has more accelerators; a launcher with more children has others than ranks."""
HELD: Final = "DISTDIAG_HELD"
"""The variable that tells the monitor what it is given: pid, start and descriptor of each."""


def main(arguments: list[str]) -> int:
    """Leave a guard behind that runs the command, and end."""
    pids_file, *command = arguments
    # What ends the ranks must not end those who tell of it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a rank that ignores it would leave no status
    os.umask(0o077)  # whatever the rank's is: no file of the monitor is for others
    os.environ[HELD] = " ".join(_hold(os.getppid()))
    ready, tell = os.pipe()
    if os.fork():
        os.close(tell)
        os.read(ready, 1)  # returns when the guard has said who it is, or is dead
        os._exit(0)
    os.close(ready)
    return guard(pids_file, command, tell)


def guard(pids_file: str, command: list[str], tell: int = -1, deaths: tuple[str, ...] = ()) -> int:
    """Run the command until it ends by itself; close `tell` once it is known who does.

    `deaths` is what befell those who ran it before, and is told to it.
    """
    while True:
        try:
            monitor = os.posix_spawn(command[0], [*command, *deaths], os.environ)
        except OSError as error:
            sys.stderr.write(f"distdiag: the monitor cannot be started: {error}\n")
            return 1
        began = _start_ticks(monitor)
        lives, done = os.pipe()
        behind = os.fork()
        if behind == 0:
            for descriptor in (done, *((tell,) if tell >= 0 else ())):
                os.close(descriptor)
            os.read(lives, 1)  # returns when the guard is dead
            if len(deaths) == MOST_RESTARTS:
                return 0
            _kill(monitor, began)
            return guard(pids_file, command, deaths=(*deaths, "lost its guard to a signal"))
        os.close(lives)
        _write_pids(pids_file, os.getpid(), monitor, behind)
        if tell >= 0:
            os.close(tell)
            tell = -1
        status = os.waitstatus_to_exitcode(os.waitpid(monitor, 0)[1])
        os.kill(behind, signal.SIGKILL)  # nobody else has waited for it, so the number is still its
        os.waitpid(behind, 0)
        os.close(done)
        if status >= 0 or len(deaths) == MOST_RESTARTS:
            return 0
        deaths = (*deaths, f"was killed by signal {-status}")
        time.sleep(PAUSE_S)


def _kill(pid: int, began: int) -> None:
    """Kill a process, unless its number is that of another one by now."""
    try:
        if _start_ticks(pid) == began:
            os.kill(pid, signal.SIGKILL)
    except OSError:
        return


def _hold(rank: int) -> list[str]:
    """Get hold of a rank and of what else its launcher has started."""
    launcher = _parent_of(rank)
    pids = [rank]
    try:
        for thread in os.listdir(f"/proc/{launcher}/task"):
            with open(f"/proc/{launcher}/task/{thread}/children", encoding="ascii") as file:
                pids += [int(pid) for pid in file.read().split() if int(pid) != rank]
    except OSError:  # a kernel that does not list them, or a launcher of somebody else
        pass
    held = []
    for pid in pids[:MOST_RANKS]:
        try:
            began, descriptor = _start_ticks(pid), os.pidfd_open(pid)
            os.set_inheritable(descriptor, True)
            held.append(f"{pid} {began} {descriptor}")
        except OSError:  # it has just ended, or a kernel without such descriptors
            continue
    return held


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
    return int(_fields(pid)[19])


def _parent_of(pid: int) -> int:
    return int(_fields(pid)[1])


def _fields(pid: int) -> list[str]:
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
