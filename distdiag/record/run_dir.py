"""Where the files of a run lie, and whose run it is.

<run dir>/run.json            which launch this is
          join.json           how processes join that the program starts (`agent.joining`)
          report.json         the one report; report.sarif and others are forms of it
          report.reserve      room for it while the run goes on, should the disk fill up
          attempt-0/          one folder for each elastic restart, and each job of the program's own
            job.json          which job of the program's own that is
            launch.json       what the monitor must know
            rank-3.status     the status page of a rank
            rank-3.000000.events
            rank-3.stacks     what faulthandler wrote, when the monitor asked or sent the signal
            rank-3.signal.json  which signal that is, and for which thread
            rank-3.unobserved  why nothing is recorded of this rank, although it runs
            rank-3.wanted-flight  the monitor wants the flight recorder (or the stacks)
            rank-3.flight.json  the answer
            monitor.pid  monitor.log
            monitor.pids      the guard of the monitor and the monitor, and when they began
            monitor.journal   the events that the monitor itself made
            reporter.json     where the reporter listens, if the job has several nodes
            acks/rank-3       the peers of a rank that raised have been dumped
            exit-status.json  the exit status of every script that ended, by rank
            verdict.json      what rank 0 waits for
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from distdiag.events.errors import UNDECODABLE, DamagedFileError, RankError, UsageError
from distdiag.record.private_file import create_private, make_private_folder, open_private
from distdiag.record.regular_file import read_regular
from distdiag.record.runs_folder import KEPT_RUNS, RUNS_FOLDER, name_of_run, tidy

MOST_RANKS: Final = 1 << 20
"""Ten times as many as the largest jobs have: a file that claims more is damaged."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_RANKS)]


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """One launch of a script on this node: what its ranks have in common.

    `is_alone`: nothing in the environment tells of a launcher. `first_attempt` is the first one of
    the ranks, where a process was observed before them.
    """

    rank: _Count
    local_rank: _Count
    world_size: _Count
    local_world_size: _Count
    attempt: int
    max_attempts: int
    parent_pid: int
    identity: str
    started_s: float
    master_addr: str = ""
    first_attempt: int = 0
    is_alone: bool = False

    @property
    def local_ranks(self) -> range:
        """The global ranks of this node."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_world_size)

    @property
    def num_other_ranks(self) -> int:
        """How many ranks run on other nodes."""
        return self.world_size - self.local_world_size


class LaunchFile(msgspec.Struct, frozen=True, kw_only=True):
    """What local rank 0 leaves for the monitor. `config` is the configuration as plain values."""

    launch: Launch
    command: tuple[str, ...]
    config: dict[str, Any]
    cwd: str


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks that a program has started by itself, told from others by where they meet."""

    world_size: _Count
    place: str


class ReporterAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where the reporter listens for the monitors of other nodes, and what it asks of them."""

    host: str
    port: int
    token: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 waits for at its end: the exit status that the findings ask for."""

    exit_status: int
    summary: str = ""


class StackSignal(msgspec.Struct, frozen=True, kw_only=True):
    """How the monitor may make a rank write down its stacks, even while the GIL is held.

    `signal` is for the thread `thread` (the kernel's number) of the process `pid` only. Its handler
    appends to the file that the process has open as `descriptor`. `names` are the names of the
    threads by Python's identifiers.
    """

    pid: int
    thread: int
    signal: int
    descriptor: int
    names: dict[int, str]


class RunDir:
    """The paths of one attempt of a run."""

    def __init__(self, root: Path, attempt: int) -> None:
        """Name the paths; nothing is created."""
        self.root = root
        self.attempt = attempt
        self.folder = root / f"attempt-{attempt}"
        self.report = root / "report.json"
        self.reserve = root / "report.reserve"
        self.launch = self.folder / "launch.json"
        self.job = self.folder / "job.json"
        self.monitor_pid = self.folder / "monitor.pid"
        self.monitor_pids = self.folder / "monitor.pids"
        self.monitor_log = self.folder / "monitor.log"
        self.journal = self.folder / "monitor.journal"
        self.reporter = self.folder / "reporter.json"
        self.exit_status = self.folder / "exit-status.json"
        self.verdict = self.folder / "verdict.json"

    @property
    def gives_way(self) -> bool:
        """Whether the process that was observed here starts ranks, or has become one, since."""
        return not self.job.exists() and RunDir(self.root, self.attempt + 1).job.exists()

    def create(self) -> None:
        """Make its folders, unless they are there.

        Raises:
            OSError: they cannot be made.

        """
        for folder in (self.folder, self.folder / "acks"):
            make_private_folder(folder)

    def status(self, rank: int) -> Path:
        """Return where the status page of a rank lies."""
        return self.folder / f"rank-{rank}.status"

    def statuses(self) -> list[Path]:
        """Return the status pages of the ranks that have begun."""
        return list(self.folder.glob("rank-*.status"))

    def stacks(self, rank: int) -> Path:
        """Return where faulthandler appends the stacks of a rank."""
        return self.folder / f"rank-{rank}.stacks"

    def stack_signal(self, rank: int) -> Path:
        """Return where a rank tells how to make it write its stacks (a `StackSignal`)."""
        return self.folder / f"rank-{rank}.signal.json"

    def unobserved(self, rank: int) -> Path:
        """Return where a rank whose agent could not start says why."""
        return self.folder / f"rank-{rank}.unobserved"

    def wanted(self, rank: int, what: Literal["stacks", "flight"]) -> Path:
        """Exists while the monitor waits for a rank to write its stacks or its flight recorder."""
        return self.folder / f"rank-{rank}.wanted-{what}"

    def flight(self, rank: int) -> Path:
        """Return where a rank writes its flight recorder, as torch's JSON or ``{"error": …}``."""
        return self.folder / f"rank-{rank}.flight.json"

    def second_flight(self, rank: int) -> Path:
        """Return where it writes that of the other backends, if NCCL is not the only one used."""
        return self.folder / f"rank-{rank}.flight-2.json"

    def ack(self, rank: int) -> Path:
        """Exists when the peers of a rank that raised have been dumped."""
        return self.folder / "acks" / f"rank-{rank}"


def open_run_dir(
    root: Path | None, launch: Launch, *, overwrite: bool = False, kept_runs: int = KEPT_RUNS
) -> RunDir:
    """Create the run directory of this launch, or join the one that another rank created.

    Of the runs below the folder for those without a directory of their own so many are kept.

    Raises:
        UsageError: it cannot be written, or it holds another run and `overwrite` is false.

    """
    if root is None:
        root = Path.cwd() / RUNS_FOLDER / name_of_run(launch.started_s, launch.parent_pid)
    run_dir = RunDir(root.absolute(), launch.attempt)
    try:
        make_private_folder(run_dir.root)
        with locked(run_dir.root):
            is_new = _claim(run_dir, launch, overwrite=overwrite)
        if is_new and run_dir.root.parent.name == RUNS_FOLDER:
            tidy(run_dir.root.parent, kept_runs)
        run_dir.create()
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"run directory {run_dir.root} cannot be written: {reason}") from None
    _require_member(run_dir, launch)
    return run_dir


def _require_member(run_dir: RunDir, launch: Launch) -> None:
    """Refuse a rank that the monitor does not follow: what it writes would be read by nobody."""
    try:
        started = msgspec.json.decode(read_regular(run_dir.launch), type=LaunchFile).launch
    except (OSError, *UNDECODABLE):
        return  # the monitor is not there yet
    if launch.rank >= started.world_size:
        ranks = "1 rank" if started.world_size == 1 else f"{started.world_size} ranks"
        raise RankError(
            f"the run in {run_dir.root} began with {ranks}, and this is rank {launch.rank}: "
            "let torchrun start all ranks"
        )


def read_reporter_address(run_dir: RunDir) -> ReporterAddress | None:
    """Return where the reporter listens, or None while that is not known on this node.

    Raises:
        DamagedFileError: the file says something else.

    """
    try:
        text = read_regular(run_dir.reporter)
        return msgspec.json.decode(text, type=ReporterAddress)
    except FileNotFoundError:
        return None
    except UNDECODABLE as error:
        raise DamagedFileError(f"{run_dir.reporter}: {error}") from None


def attempts_of(root: Path) -> list[int]:
    """Return the attempts that there are of a run, in no order."""
    names = (path.name.removeprefix("attempt-") for path in root.glob("attempt-*"))
    return [int(name) for name in names if name.isdecimal()]


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Let one process of a run at a time do something.

    Raises:
        OSError: the run directory is not there, or cannot be written.

    """
    descriptor = open_private(root / ".lock")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _claim(run_dir: RunDir, launch: Launch, *, overwrite: bool) -> bool:
    """Make the directory that of this launch; return whether it was not before."""
    marker = run_dir.root / "run.json"
    identity = launch.identity.encode()
    if marker.exists():
        if read_regular(marker) == identity:
            return False
        if not overwrite:
            raise UsageError(
                f"run directory {run_dir.root} already holds a run; "
                "choose another one or pass --overwrite"
            )
        for path in (*run_dir.root.glob("attempt-*"), *run_dir.root.glob("report.*")):
            is_folder = path.is_dir() and not path.is_symlink()
            shutil.rmtree(path) if is_folder else path.unlink(missing_ok=True)
    write_atomically(marker, identity)
    return True


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file that readers see whole or not at all, readable by the owner only."""
    # One name for each process: two writers cannot mix, and a killed one leaves at most one behind.
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.unlink(missing_ok=True)
        with os.fdopen(create_private(partial, os.O_WRONLY), "wb") as file:
            file.write(data)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
