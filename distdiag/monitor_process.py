"""Starts the monitor of a node, and tells whether it still lives."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from distdiag.config import Config
from distdiag.run_dir import Launch, LaunchFile, RunDir, write_atomically

# What belongs to the rank alone: the monitor must neither report errors for it nor profile.
_NOT_INHERITED: Final = frozenset(
    {"TORCHELASTIC_ERROR_FILE", "PYTHONSTARTUP", "PYTHONINSPECT", "PYTHONPROFILEIMPORTTIME"}
)

_PR_SET_PTRACER: Final = 0x59616D61


class MonitorProcess:
    """The monitor of this node, as one of its ranks sees it."""

    def __init__(self, run_dir: RunDir) -> None:
        """Know of no monitor yet."""
        self._run_dir = run_dir
        self._child: subprocess.Popen[bytes] | None = None
        self._pid: int | None = None

    def start(self, launch: Launch, command: tuple[str, ...], config: Config) -> None:
        """Start it as a child of this rank that outlives it.

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
        # -P: a file of the user named like a module of Python must not get in the way.
        self._child = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "distdiag.monitor"),
                *(str(self._run_dir.root), str(self._run_dir.attempt)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=2,
            stderr=2,
            start_new_session=True,
            env=_environment(os.environ),
        )

    @property
    def pid(self) -> int | None:
        """The process id of the monitor, once it is known."""
        if self._pid is None:
            try:
                self._pid = int(self._run_dir.monitor_pid.read_text(encoding="ascii"))
            except (OSError, ValueError):
                return None
        return self._pid

    @property
    def is_alive(self) -> bool:
        """Whether the monitor runs."""
        if self._child is not None:
            return self._child.poll() is None
        if self.pid is None:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True

    def let_trace_us(self) -> None:
        """Let it read this process's stacks where only ancestors may (Yama)."""
        import ctypes

        try:
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, self.pid, 0, 0, 0)
        except (OSError, AttributeError):
            return

    def let_go(self) -> None:
        """Leave it running; Python would warn about a child that nobody waited for."""
        if self._child is not None and self._child.poll() is None:
            self._child.returncode = 0


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the monitor: it must find this package wherever we found it."""
    result = {name: value for name, value in environ.items() if name not in _NOT_INHERITED}
    home = str(Path(__file__).parents[1])
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if home not in paths and not home.endswith(("site-packages", "dist-packages")):
        result["PYTHONPATH"] = os.pathsep.join([*paths, home])
    return result
