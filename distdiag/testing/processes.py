"""The processes of one test: started together, watched, and ended within a bounded time."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psutil

from distdiag.dumps.gpu.nvml import gpu_names
from distdiag.dumps.process.proc import wait_for_pid_file
from distdiag.record.run_dir import RunDir
from distdiag.record.status_page import start_ticks
from distdiag.testing.plan import Folder
from distdiag.testing.reuse import ForkedRank, RankServer

# A port for the ranks of a test that nobody else can take before they do.

HOST: Final = "127.0.0.1"


def listening_socket() -> socket.socket:
    """Return a socket that listens on a port of the system's choice; rank 0 takes it over."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((HOST, 0))
    listener.listen(128)
    return listener


def num_gpus() -> int:
    """Return how many GPUs a test may use, without loading torch."""
    num = len(gpu_names())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return num
    return min(num, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))


# The processes of one test.

POLL_S: Final = 0.05
PEERS_S: Final = 6.0
"""When one rank has failed, the others may go on for so long."""
KILL_S: Final = 1.0

_OF_LAUNCHERS: Final = (
    *("GROUP_RANK", "ROLE_RANK", "NODE_RANK", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_MAX_RESTARTS", "PYTEST_ADDOPTS"),
)


class Ranks:
    """The processes of one test. Leaving the context kills what is left of them."""

    def __init__(self, folder: Folder, world_size: int, server: RankServer | None = None) -> None:
        """Prepare; nothing is started. Ranks are forked from the server, if there is one."""
        self._server = server
        self._folder = folder
        self._world_size = world_size
        self._processes: dict[int, subprocess.Popen[bytes] | ForkedRank] = {}
        self.stopped: set[int] = set()
        """Ranks that did not end by themselves."""

    def __enter__(self) -> Self:
        try:
            with listening_socket() as listener:
                for rank in range(self._world_size):
                    self._processes[rank] = self._start(rank, listener)
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        """Leave no process behind, the monitor included."""
        self.kill_monitor()
        self.kill()

    @property
    def pids(self) -> dict[int, int]:
        """The process ids of the ranks that run, by rank."""
        return {rank: p.pid for rank, p in self._processes.items() if p.poll() is None}

    @property
    def statuses(self) -> dict[int, int]:
        """How ranks ended: the exit status, or minus the number of the signal."""
        ends = {rank: process.poll() for rank, process in self._processes.items()}
        return {rank: status for rank, status in ends.items() if status is not None}

    def wait(
        self,
        timeout_s: float,
        *,
        has_failed: Callable[[int], bool],
        until: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Wait until all have ended, or until one failed and the others had a moment to follow.

        Return whether the time sufficed for that, or for what `until` tells.
        """
        deadline = time.monotonic() + timeout_s
        failed_s = 0.0
        while self.pids and not until():
            now_s = time.monotonic()
            if failed_s and now_s - failed_s > PEERS_S:
                return True
            if now_s > deadline:
                return bool(failed_s)
            if not failed_s and any(has_failed(rank) for rank in self._processes):
                failed_s = now_s
            time.sleep(POLL_S)
        return True

    def wait_for_report(self, timeout_s: float) -> None:
        """Wait until the monitor has written what it saw; the ranks must have ended."""
        wait_for_pid_file(RunDir(self._folder.run, 0).monitor_pid, timeout_s)

    def kill_monitor(self) -> None:
        """End the monitor, with what looks at ranks on its behalf: that would hold them back."""
        _kill_families(_pids_in(RunDir(self._folder.run, 0).monitor_pids))

    def kill(self) -> None:
        """End the ranks and all that they started."""
        running = self.pids
        self.stopped |= running.keys()
        _kill_families(running.values())
        deadline = time.monotonic() + KILL_S
        for process in self._processes.values():
            # One that stays in the kernel is not waited for.
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.01))
        for process in self._processes.values():
            _kill_families(_session(process.pid))

    def _start(self, rank: int, listener: socket.socket) -> subprocess.Popen[bytes] | ForkedRank:
        environ = _environment(rank, self._world_size, listener.getsockname()[1])
        if self._server is not None:
            passed = listener.fileno() if rank == 0 else None
            with self._folder.log(rank).open("wb") as log:
                return self._server.start(self._folder.root, environ, log, passed)
        descriptors: tuple[int, ...] = ()
        if rank == 0:
            descriptors = (listener.fileno(),)
            environ["DISTDIAG_LISTENER"] = str(listener.fileno())
        with self._folder.log(rank).open("wb") as log:
            return subprocess.Popen(
                [*(sys.executable, "-P", "-m", "distdiag.testing.rank"), str(self._folder.root)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environ,
                pass_fds=descriptors,
                start_new_session=True,
            )


def server_environment() -> dict[str, str]:
    """Return the environment of a process that is no rank itself, and that ranks are forked from.

    /proc shows it of the ranks as well, so it holds no numbers of a rank.
    """
    environ = _without_launcher()
    numbers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    scheduled = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
    return {name: value for name, value in environ.items() if name not in (*numbers, *scheduled)}


def _without_launcher() -> dict[str, str]:
    environ = {name: value for name, value in os.environ.items() if name not in _OF_LAUNCHERS}
    home = str(Path(__file__).parents[2])
    paths = [home, *(path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path)]
    own = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PYTHONUNBUFFERED": "1"}
    return environ | own


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return what torchrun would set, so that ``init_process_group`` needs no arguments."""
    environ = _without_launcher()
    own: Mapping[str, object] = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": HOST,
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_RUN_ID": f"pytest-{os.getpid()}-{port}",
        # Rank 0 keeps the store on the socket that it was given; all ranks are its clients.
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    environ.setdefault("OMP_NUM_THREADS", "1")
    return environ | {name: str(value) for name, value in own.items()}


def _kill_families(pids: Iterable[int]) -> None:
    """Kill processes with all that they started, as far as that is still known."""
    victims: list[psutil.Process] = []
    for pid in pids:
        victims += _family(pid)
    for victim in victims:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            victim.kill()


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        return []


def _session(leader: int) -> list[int]:
    """Return the processes of a session: a rank's workers stay in it when the rank has gone."""
    members = []
    for pid in psutil.pids():
        try:
            if pid != leader and os.getsid(pid) == leader:
                members.append(pid)
        except OSError:
            continue
    return members


def _pids_in(path: Path) -> list[int]:
    """Return the guard and the monitor that a file names, as far as they still live."""
    pids = []
    with suppress(OSError, ValueError):
        for line in path.read_text(encoding="ascii").splitlines():
            number, ticks = map(int, line.split())
            if start_ticks(number) == ticks:
                pids.append(number)
    return pids
