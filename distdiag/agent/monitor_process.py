"""Starts the monitor of a node, and tells whether it still lives."""

import ctypes
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from distdiag.agent.children import VARIABLE, search_path
from distdiag.config import Config
from distdiag.record.private_file import RESERVE_BYTES, set_aside
from distdiag.record.run_dir import Launch, LaunchFile, RunDir, locked, write_atomically

# What belongs to the rank alone: the monitor must neither report errors for it nor profile.
_NOT_INHERITED: Final = frozenset(
    {"TORCHELASTIC_ERROR_FILE", "PYTHONSTARTUP", "PYTHONINSPECT", "PYTHONPROFILEIMPORTTIME"}
)
_GUARD: Final = Path(__file__).parents[1] / "monitor" / "guard.py"
START_S: Final = 10.0
"""The guard is there within 50 ms; Python on a busy network file system takes seconds."""

_PR_SET_PTRACER: Final = 0x59616D61
_PR_SET_CHILD_SUBREAPER: Final = 36
_PR_GET_CHILD_SUBREAPER: Final = 37


class Pid(NamedTuple):
    """A process, distinguished from later ones that have the same number."""

    number: int
    start_ticks: int

    @property
    def lives(self) -> bool:
        """Whether it has not ended."""
        try:
            text = Path(f"/proc/{self.number}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False
        # The name in parentheses may hold anything, parentheses included.
        fields = text.rpartition(")")[2].split()
        return fields[0] not in "ZX" and int(fields[19]) == self.start_ticks


class MonitorProcess:
    """The monitor of this node and its guards (`distdiag.monitor.guard`), as one rank sees them.

    They are found by what the guard writes down: none of them is a child of a rank.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._tracer = 0

    def start(self, launch: Launch, command: tuple[str, ...], config: Config) -> None:
        """Start it. What it takes a child for is over when this returns: the script meets none.

        Raises:
            OSError: it cannot be started.

        """
        launch_file = LaunchFile(
            launch=launch,
            command=command,
            config=msgspec.json.decode(config.to_json()),
            cwd=os.getcwd(),
        )
        write_atomically(self._run_dir.launch, msgspec.json.encode(launch_file))
        if 0 in launch.local_ranks:
            # Not left to the monitor: the script may fill the disk before that has begun.
            set_aside(self._run_dir.reserve, RESERVE_BYTES)
        self._spawn()

    def start_again(self, reason: str) -> None:
        """Start another one in the place of one that is dead, and tell it so.

        Of ranks that find it dead at the same time one does so.

        Raises:
            OSError: it cannot be started.

        """
        with locked(self._run_dir.root):
            if not self.is_alive:
                self._spawn(reason)

    def _spawn(self, *reason: str) -> None:
        # -P: a file of the user named like a module of Python must not get in the way.
        monitor = (sys.executable, "-P", "-m", "distdiag.monitor")
        told = (str(self._run_dir.root), str(self._run_dir.attempt), *reason)
        with _no_subreaper():
            run_guard((str(self._run_dir.monitor_pids), *monitor, *told), _environment(os.environ))

    def _pids(self) -> tuple[Pid, ...]:
        """Return the guard and the monitor as the guard wrote them down."""
        try:
            lines = self._run_dir.monitor_pids.read_text(encoding="ascii").splitlines()
            return tuple(Pid(*map(int, line.split())) for line in lines)
        except (OSError, ValueError, TypeError):
            return ()

    @property
    def was_killed(self) -> bool:
        """Whether all that watched are dead, and did not end to make way for others."""
        pids = self._pids()
        is_dead = bool(pids) and not any(pid.lives for pid in pids)
        return is_dead and not self._run_dir.gives_way

    @property
    def is_alive(self) -> bool:
        """Whether the monitor runs, or its guard is about to start it again."""
        return any(pid.lives for pid in self._pids())

    def let_trace_us(self) -> None:
        """Let it read this process's stacks where only ancestors may (Yama)."""
        for pid in self._pids():
            # What the guard may do its descendants may: monitors that it starts later, py-spy.
            if pid.lives:
                if pid.number != self._tracer:
                    self._tracer = pid.number
                    _prctl(_PR_SET_PTRACER, self._tracer)
                return


def run_guard(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    """Run `distdiag.monitor.guard` until it has left a guard behind.

    Raises:
        OSError: it cannot be started, or takes too long.

    """
    intermediate = subprocess.Popen(
        # -I -S: the guard needs nothing but Python itself, which is then there twice as fast.
        [sys.executable, "-I", "-S", str(_GUARD), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=2,
        stderr=2,
        start_new_session=True,
        env=environ,
    )
    _wait_for_end(intermediate.pid)
    try:
        intermediate.wait(START_S)
    except subprocess.TimeoutExpired:
        intermediate.kill()
        intermediate.wait()
        raise TimeoutError(f"it has not begun within {START_S:.0f} s") from None


@contextmanager
def _no_subreaper() -> Iterator[None]:
    """Let orphans go to init meanwhile, should this process have asked to be given them.

    A rank that is process 1 of its container is given them nevertheless.
    """
    value = ctypes.c_int(0)
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.addressof(value))
    if not value.value:
        yield
        return
    _prctl(_PR_SET_CHILD_SUBREAPER, 0)
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _wait_for_end(pid: int) -> None:
    """Wait until a child ends, for a bounded time; `Popen.wait` looks every 50 ms only."""
    with suppress(OSError):  # a kernel without pidfds
        descriptor = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll(START_S * 1000)
        finally:
            os.close(descriptor)


def _prctl(option: int, value: int) -> None:
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the monitor: it must find this package wherever we found it."""
    result = {name: value for name, value in environ.items() if name not in _NOT_INHERITED}
    return result | {"PYTHONPATH": search_path(environ.get("PYTHONPATH", "")), VARIABLE: ""}
